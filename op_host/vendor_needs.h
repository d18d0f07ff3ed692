// How much window CANN's own MoeDistribute operators ask for, and which calls they take: for comparison, and
// for whoever goes from those operators to these. Nothing here decides anything about our kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include "protocol/window.h"

namespace moe {

// One collective call, the same on all ranks.
struct CannCall {
    int64_t world;         // W, EP ranks
    int64_t experts;       // E
    int64_t maxBatch;      // maxBS, tokens of the rank that has most
    int64_t hidden;        // H, elements
    int64_t topK;          // K
    int64_t sharedNum;     // N, shared experts on ranks of their own; 0 here
    int64_t floatRows;     // 1: x is fp32
    int64_t equalBatches;  // 0: global_bs says that batches differ
};
MOE_FN int64_t CannLocalExperts(const CannCall& call) {
    return call.world > 0 ? call.experts / call.world : 0;
}
MOE_FN int64_t CannRound(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
// In MiB, as it is exported. CANN's error texts print bytes / MiB + 1, which is one more where it divides.
MOE_FN int64_t CannMiB(int64_t bytes) { return CannRound(bytes, kMiB) / static_cast<int64_t>(kMiB); }

// A3, V1 operators: the expression that dispatch's and combine's tiling compare with HCCL_BUFFSIZE.
MOE_FN int64_t CannA3V1Checked(const CannCall& c) {
    return c.world * c.maxBatch * c.hidden * 2 * 2 * CannLocalExperts(c);
}
// A3, V1 operators: the documented rule, (HCCL_BUFFSIZE - 2) / 2 MiB >= BS * 2 * (H + 128) * (W * L + K + 1).
MOE_FN int64_t CannA3V1Documented(const CannCall& c) {
    return 2 * c.maxBatch * 2 * (c.hidden + 128) * (c.world * CannLocalExperts(c) + c.topK + 1) +
           2 * static_cast<int64_t>(kMiB);
}
MOE_FN int64_t CannA3V1(const CannCall& c) { return std::max(CannA3V1Checked(c), CannA3V1Documented(c)); }

// A3, V2 operators. Two halves, each with a slot of maxBS rows for every (source, local expert) of dispatch,
// and one row for every (token, k) and shared expert of combine. Rows count 2 bytes an element, quantised
// too; 44 bytes are the scale's block and the triple.
MOE_FN int64_t CannA3Halves(const CannCall& c, int64_t dispatchRow) {
    return 2 * (c.maxBatch * c.world * CannLocalExperts(c) * dispatchRow +
                c.maxBatch * (c.topK + c.sharedNum) * CannRound(2 * c.hidden, 512));
}
MOE_FN int64_t CannA3FullmeshV1(const CannCall& c) {
    return CannA3Halves(c, CannRound(CannRound(2 * c.hidden, 32) + 44, 512));
}
// comm_alg "fullmesh_v2": a row travels in 512-byte packets of 480 bytes and a flag. Combine asks for the
// space of fullmesh_v1 all the same.
MOE_FN int64_t CannA3FullmeshV2(const CannCall& c) {
    const int64_t packets = CannRound(CannRound(2 * c.hidden, 32) + 44, 480) / 480;
    return std::max(CannA3Halves(c, packets * 512), CannA3FullmeshV1(c));
}

// A2, full mesh: documented as 2 * (BS * W * min(L, K) * H * 2 + 2 MiB); no tiling checks it.
MOE_FN int64_t CannA2Fullmesh(const CannCall& c) {
    return c.maxBatch * c.world * std::min(CannLocalExperts(c), c.topK) * c.hidden * 4 +
           4 * static_cast<int64_t>(kMiB);
}
// A2, hierarchy: documented for its first versions, and for later ones; no tiling checks either.
MOE_FN int64_t CannA2HierarchyRow(const CannCall& c) { return 2 * c.hidden + 16 * CannRound(c.topK, 8); }
MOE_FN int64_t CannA2Hierarchy(const CannCall& c) {
    return c.experts * c.maxBatch * CannA2HierarchyRow(c) + 104 * static_cast<int64_t>(kMiB);
}
MOE_FN int64_t CannA2HierarchyLater(const CannCall& c) {
    return (c.experts + c.world / 4) * CannRound(c.maxBatch * CannA2HierarchyRow(c), 512) +
           8 * static_cast<int64_t>(kMiB);
}

// The published example, an A3 user's: 512 tokens of H 2048 on 2 ranks need 608 MiB, and the error says 609.
static_assert(CannA3FullmeshV1({2, 128, 512, 2048, 8, 0, 0, 1}) == 608 * static_cast<int64_t>(kMiB),
              "the published example");

struct CannVersion {
    const char* name;
    int64_t (*bytes)(const CannCall&);
};
constexpr CannVersion kCannVersions[] = {{"A3 V1", &CannA3V1},
                                         {"A3 V2", &CannA3FullmeshV1},
                                         {"A3 V2 fullmesh_v2", &CannA3FullmeshV2},
                                         {"A2 fullmesh", &CannA2Fullmesh},
                                         {"A2 hierarchy", &CannA2Hierarchy},
                                         {"A2 hierarchy, later", &CannA2HierarchyLater}};
enum CannVersionIndex : uint32_t {
    kCannA3V1,
    kCannA3V2,
    kCannA3FullmeshV2,
    kCannA2Fullmesh,
    kCannA2Hierarchy,
    kCannA2HierarchyLater,
    kCannVersionCount
};
static_assert(sizeof(kCannVersions) / sizeof(kCannVersions[0]) == kCannVersionCount, "one entry a version");

// ---- which calls those operators refuse, by version: the ranges that their tiling checks, or where it
// checks nothing, that their documents state ----

// Collects what a call breaks, one line a rule: name, value, rule.
class CannLimits {
public:
    CannLimits(CannVersionIndex version, const CannCall& call) : call_(call) {
        if (call.floatRows != 0) Add("dtype", "is fp32", "must be bf16 or fp16");
        switch (version) {
            case kCannA3V1: A3V1(); break;
            case kCannA3V2:
            case kCannA3FullmeshV2: A3V2(version == kCannA3FullmeshV2); break;
            default: A2(version == kCannA2Fullmesh);
        }
        if (call.world > 0 && call.experts % call.world != 0)
            Number("E", call.experts, "must be a multiple of W = %lld", call.world);
    }
    const std::string& text() const { return text_; }

private:
    void A3V1() {
        // 256 % W == 0 or W % 144 == 0, a multiple of 8, up to 288.
        const int64_t w = call_.world;
        if (w < 8 || w > 288 || w % 8 != 0 || (256 % w != 0 && w % 144 != 0))
            Number("W", w, "must be 8, 16, 32, 64, 128, 144, 256 or 288");
        Range("E", call_.experts, 1, 512);
        if (call_.hidden != 7168) Number("H", call_.hidden, "must be 7168");
        Range("BS", call_.maxBatch, 1, 512);
        Range("K", call_.topK, 1, std::min<int64_t>(8, call_.experts));
    }
    void A3V2(bool packets) {
        Range("W", call_.world, 2, 768);
        Range("E", call_.experts, 1, 1024);
        Range("H", call_.hidden, 1024, 8192);
        Range("BS", call_.maxBatch, 1, 512);
        Range("K", call_.topK, 1, std::min<int64_t>(16, call_.experts));
        // Status blocks of 32 bytes in 64 KiB; documented, and unchecked.
        Range("W*L", call_.world * CannLocalExperts(call_), 1, 2048);
        if (packets && call_.equalBatches == 0)
            Add("global_bs", "allows unequal batches", "comm_alg fullmesh_v2 needs equal ones");
    }
    void A2(bool fullmesh) {
        const int64_t w = call_.world;
        if (fullmesh) {
            if (w < 2 || w > 256 || (w > 8 && w % 8 != 0))
                Number("W", w, "must be 2..8, or 16..256 and a multiple of 8");
            Range("L", CannLocalExperts(call_), 1, 24);
        } else if (w != 16 && w != 32 && w != 64) {
            Number("W", w, "must be 16, 32 or 64");
        }
        Range("E", call_.experts, 1, 512);
        Range("H", call_.hidden, 1, fullmesh ? 7168 : 10240);
        if (call_.hidden % 32 != 0) Number("H", call_.hidden, "must be a multiple of 32");
        Range("BS", call_.maxBatch, 1, fullmesh ? 256 : 512);
        Range("K", call_.topK, 1, std::min<int64_t>(16, call_.experts));
    }

    void Range(const char* name, int64_t value, int64_t low, int64_t high) {
        if (value >= low && value <= high) return;
        Number(name, value, "must be in %lld..%lld", low, high);
    }
    void Number(const char* name, int64_t value, const char* rule, int64_t a = 0, int64_t b = 0) {
        char is[32], must[64];
        snprintf(is, sizeof(is), "is %lld", static_cast<long long>(value));
        snprintf(must, sizeof(must), rule, static_cast<long long>(a), static_cast<long long>(b));
        Add(name, is, must);
    }
    void Add(const char* name, const char* is, const char* must) {
        if (!text_.empty()) text_ += "; ";
        text_ += std::string(name) + " " + is + ", " + must;
    }

    const CannCall& call_;
    std::string text_;
};

}  // namespace moe
