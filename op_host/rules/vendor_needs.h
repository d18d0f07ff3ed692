// The window size that CANN's own MoeDistribute operators need, and which calls they take: for comparison and
// migration. Nothing here affects our kernels.
#pragma once

#include <algorithm>
#include <cstdint>
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
    int64_t special;       // zero, copy and const experts
};
MOE_FN int64_t CannLocalExperts(const CannCall& call) { return call.world > 0 ? call.experts / call.world : 0; }
MOE_FN int64_t CannRound(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
// In MiB, as exported. CANN's error texts print bytes / MiB + 1, which is one more for whole MiB.
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

// A3, V2 operators. Two ping-pong buffers, each with a slot of maxBS rows for every (source, local expert) of dispatch,
// and one row for every (token, k) and shared expert of combine. Rows count 2 bytes an element, quantized too; 44 bytes
// are the scale's block and the source index.
MOE_FN int64_t CannA3Buffers(const CannCall& c, int64_t dispatchRow) {
    return 2 * (c.maxBatch * c.world * CannLocalExperts(c) * dispatchRow +
                c.maxBatch * (c.topK + c.sharedNum) * CannRound(2 * c.hidden, 512));
}
MOE_FN int64_t CannA3FullmeshV1(const CannCall& c) {
    return CannA3Buffers(c, CannRound(CannRound(2 * c.hidden, 32) + 44, 512));
}
// comm_alg "fullmesh_v2": a row travels in 512-byte packets of 480 bytes and a flag. Combine needs the space of
// fullmesh_v1 anyway.
MOE_FN int64_t CannA3FullmeshV2(const CannCall& c) {
    const int64_t packets = CannRound(CannRound(2 * c.hidden, 32) + 44, 480) / 480;
    return std::max(CannA3Buffers(c, packets * 512), CannA3FullmeshV1(c));
}

// A2, full mesh: documented as 2 * (BS * W * min(L, K) * H * 2 + 2 MiB); no tiling checks it.
MOE_FN int64_t CannA2Fullmesh(const CannCall& c) {
    return c.maxBatch * c.world * std::min(CannLocalExperts(c), c.topK) * c.hidden * 4 + 4 * static_cast<int64_t>(kMiB);
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

// A3, hierarchy: between super-pods, to which every other comm_alg is limited. Documented.
MOE_FN int64_t CannA3Hierarchy(const CannCall& c) {
    return c.experts * c.maxBatch * (2 * c.hidden + 3 * CannRound(c.topK, 8)) * 4 + 64 +
           404 * static_cast<int64_t>(kMiB);
}

// The published example, an A3 user's: 512 tokens of H 2048 on 2 ranks need 608 MiB, and the error says 609.
static_assert(CannA3FullmeshV1({2, 128, 512, 2048, 8, 0, 0, 1, 0}) == 608 * static_cast<int64_t>(kMiB),
              "the published example");

// One version of those operators, with the calls it refuses: by the ranges its tiling checks or, if it checks nothing,
// its documents state.
struct CannVersion {
    const char* name;
    int64_t (*bytes)(const CannCall&);
    bool (*takes)(int64_t world);
    const char* worlds;
    int64_t experts;  // at most, as are those below; 0: no rule
    int64_t leastHidden, hidden, hiddenUnit;
    int64_t batch, topK, localExperts, slots;
    bool equalBatches, special;
    int64_t stateKiB;  // a rank, by which the state window, which is no part of HCCL_BUFFSIZE, has grown
};
constexpr bool CannTakesA3V1(int64_t w) { return w >= 8 && w <= 288 && w % 8 == 0 && (256 % w == 0 || w % 144 == 0); }
constexpr bool CannTakesA3V2(int64_t w) { return w >= 2 && w <= 768; }
constexpr bool CannTakesSuperPods(int64_t w) { return w >= 16 && w <= 256 && w % 16 == 0; }
constexpr bool CannTakesA2(int64_t w) { return w >= 2 && w <= 256 && (w <= 8 || w % 8 == 0); }
constexpr bool CannTakesServers(int64_t w) { return w == 16 || w == 32 || w == 64; }
// Slots of A3 V2: status blocks of 32 bytes in 64 KiB; documented, and unchecked. A3's hierarchy takes no mask of pairs
// either. The state window of A3's V2 operators has grown in ops-transformer of July 2026 (kCannStateSince).
constexpr const char* kCannStateSince = "ops-transformer of July 2026";
constexpr CannVersion kCannVersions[] = {
    {"A3 V1", &CannA3V1, &CannTakesA3V1, "8, 16, 32, 64, 128, 144, 256 or 288", 512, 7168, 7168, 1, 512, 8, 0, 0, false,
     false, 0},
    {"A3 V2", &CannA3FullmeshV1, &CannTakesA3V2, "in 2..768", 1024, 1024, 8192, 1, 512, 16, 0, 2048, false, true, 1},
    {"A3 V2 fullmesh_v2", &CannA3FullmeshV2, &CannTakesA3V2, "in 2..768", 1024, 1024, 8192, 1, 512, 16, 0, 2048, true,
     true, 1},
    {"A3 V2 hierarchy", &CannA3Hierarchy, &CannTakesSuperPods, "in 16..256 and a multiple of 16", 512, 1024, 7168, 32,
     256, 16, 24, 512, true, false, 1},
    {"A2 fullmesh", &CannA2Fullmesh, &CannTakesA2, "2..8, or 16..256 and a multiple of 8", 512, 1, 7168, 32, 256, 16,
     24, 0, false, true, 0},
    {"A2 hierarchy", &CannA2Hierarchy, &CannTakesServers, "16, 32 or 64", 512, 1, 10240, 32, 512, 16, 0, 0, false, true,
     0},
    {"A2 hierarchy, later", &CannA2HierarchyLater, &CannTakesServers, "16, 32 or 64", 512, 1, 10240, 32, 512, 16, 0, 0,
     false, true, 0}};
enum CannVersionIndex : uint32_t { kCannA3V1, kCannA3V2, kCannA3V2Flagged, kCannA3V2Hierarchy };

// The rules that the call breaks: name, value, rule, separated by "; ".
inline std::string CannRefusal(const CannVersion& version, const CannCall& c) {
    std::string text;
    const auto need = [&](bool holds, const std::string& broken) {
        if (!holds) text += (text.empty() ? "" : "; ") + broken;
    };
    const auto number = [&](bool holds, const char* name, int64_t value, const std::string& rule) {
        need(holds, std::string(name) + " is " + std::to_string(value) + ", must be " + rule);
    };
    const auto range = [&](const char* name, int64_t value, int64_t low, int64_t high) {
        const std::string rule = "in " + std::to_string(low) + ".." + std::to_string(high);
        number(value >= low && value <= high, name, value, low == high ? std::to_string(low) : rule);
    };
    const int64_t local = CannLocalExperts(c);
    need(c.floatRows == 0, "dtype is fp32, must be bf16 or fp16");
    number(version.takes(c.world), "W", c.world, version.worlds);
    if (version.localExperts != 0) range("L", local, 1, version.localExperts);
    range("E", c.experts, 1, version.experts);
    range("H", c.hidden, version.leastHidden, version.hidden);
    number(c.hidden % version.hiddenUnit == 0, "H", c.hidden, "a multiple of " + std::to_string(version.hiddenUnit));
    range("BS", c.maxBatch, 1, version.batch);
    range("K", c.topK, 1, std::min(version.topK, c.experts));
    if (version.slots != 0) range("W*L", c.world * local, 1, version.slots);
    need(!version.equalBatches || c.equalBatches != 0,
         std::string("global_bs allows unequal batches, ") + version.name + " needs equal ones");
    need(version.special || c.special == 0,
         std::to_string(c.special) + " zero, copy and const experts, " + version.name + " has none");
    number(c.world <= 0 || c.experts % c.world == 0, "E", c.experts, "a multiple of W = " + std::to_string(c.world));
    return text;
}

// Why a group on several A3 super-pods is refused, and what to use instead.
inline std::string SuperPodRule() {
    const CannVersion& cann = kCannVersions[kCannA3V2Hierarchy];
    const auto to = [](const char* name, int64_t most) { return std::string(name) + " to " + std::to_string(most); };
    return "nothing here carries rows from one A3 super-pod to another: stores end at the super-pod, and BatchWrite is "
           "A2's transport between servers; CANN's own operators have comm_alg 'hierarchy' there: W " +
           std::string(cann.worlds) + ", H " + std::to_string(cann.leastHidden) + ".." + std::to_string(cann.hidden) +
           " in steps of " + std::to_string(cann.hiddenUnit) + ", " + to("BS", cann.batch) + ", " + to("K", cann.topK) +
           ", " + to("L", cann.localExperts) + ", " + to("E", cann.experts) + ", " + to("W*L", cann.slots) +
           ", equal batches, no mask of pairs, no special experts";
}

}  // namespace moe
