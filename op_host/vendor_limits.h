// Which calls CANN's own MoeDistribute operators refuse, by version: the ranges that their tiling checks, or
// where it checks nothing, that their documents state.
#ifndef ASCEND_MOE_DISTRIBUTE_CANN_LIMITS_H
#define ASCEND_MOE_DISTRIBUTE_CANN_LIMITS_H

#include <cstdarg>
#include <cstdio>
#include <string>

#include "vendor_needs.h"

namespace moe {

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

#endif  // ASCEND_MOE_DISTRIBUTE_CANN_LIMITS_H
