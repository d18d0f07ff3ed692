// What this machine can do at best, for benchmarks: rows copied, summed and exchanged. No kernel and no window.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <sched.h>
#include <vector>

#include "ascend_moe.h"
#include "protocol/tiling.h"
#include "twin/engine/host_cpu.h"
#include "twin/math/numeric.h"

namespace {

constexpr uint64_t kUbBytes = 192 * 1024;
constexpr int kMemcpy = 0, kStream = 1, kThroughUb = 2;

// As a core with one UB does it: as many rows as fit in, then the same rows out.
void CopyThroughUb(uint8_t* to, const uint8_t* const* from, uint64_t count, uint64_t bytes) {
    const uint64_t fit = std::max<uint64_t>(1, kUbBytes / std::max<uint64_t>(bytes, 1));
    std::vector<uint8_t> ub(std::max(kUbBytes, bytes));
    for (uint64_t at = 0; at < count; at += fit) {
        const uint64_t rows = std::min(fit, count - at);
        for (uint64_t i = 0; i < rows; ++i) memcpy(ub.data() + i * bytes, from[at + i], bytes);
        memcpy(to + at * bytes, ub.data(), rows * bytes);
    }
}

// An element type by its bits.
template <class BitsType, float (*kWiden)(BitsType), BitsType (*kNarrow)(float)>
struct Element {
    using Bits = BitsType;
    static constexpr float Widen(Bits bits) { return kWiden(bits); }
    static constexpr Bits Narrow(float value) { return kNarrow(value); }
};
constexpr float Same(float value) { return value; }
using Fp32 = Element<float, Same, Same>;
using Fp16 = Element<uint16_t, twin::HalfBitsToFloat, twin::FloatToHalfBits>;
using Bf16 = Element<uint16_t, twin::Bf16BitsToFloat, twin::FloatToBf16Bits>;

constexpr uint64_t kLanes = 16;

// A token's sum stays in vector registers while its rows pass.
template <class Type>
struct WeightedSum {
    using Bits = typename Type::Bits;
    Bits* out;
    const Bits* const* rows;
    const float* weights;
    uint64_t tokens, top_k, hidden;

    template <uint64_t kElements>
    inline __attribute__((always_inline)) void Block(uint64_t token, uint64_t at) const {
        float sum[kElements] = {};
        for (uint64_t k = token * top_k; k < (token + 1) * top_k; ++k) {
            if (rows[k] == nullptr) continue;
            for (uint64_t i = 0; i < kElements; ++i) sum[i] += Type::Widen(rows[k][at + i]) * weights[k];
        }
        for (uint64_t i = 0; i < kElements; ++i) out[token * hidden + at + i] = Type::Narrow(sum[i]);
    }
    inline __attribute__((always_inline)) void operator()() const {
        for (uint64_t token = 0; token < tokens; ++token) {
            uint64_t at = 0;
            for (; at + 4 * kLanes <= hidden; at += 4 * kLanes) Block<4 * kLanes>(token, at);
            for (; at < hidden; at += kLanes) Block<kLanes>(token, at);
        }
    }
};

template <class Type>
int Sum(void* out, const void* const* rows, const float* weights, uint64_t tokens, uint64_t top_k, uint64_t hidden) {
    using Bits = typename Type::Bits;
    twin::RunBest(WeightedSum<Type>{static_cast<Bits*>(out), reinterpret_cast<const Bits* const*>(rows), weights,
                                    tokens, top_k, hidden});
    return 0;
}

// ---- flags in memory that the ranks share; flag [to * world + from] is in a pair of cache lines of its own

constexpr uint64_t kFlagWords = 16;
constexpr uint32_t kSpinsBeforeYield = 200, kTurns = 64;

void Raise(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

void Await(const uint64_t* flag, uint64_t value) {
    for (uint32_t spins = 0; __atomic_load_n(flag, __ATOMIC_ACQUIRE) < value; ++spins) {
        if (spins >= kSpinsBeforeYield) sched_yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

void CopyRow(void* to, const void* from, uint64_t bytes, int method) {
    method == kMemcpy ? (void)memcpy(to, from, bytes) : twin::StreamCopy(to, from, bytes);
}

}  // namespace

int am_bench_exchange(void* const* to, const void* const* from, uint64_t count, uint64_t row_bytes, int method,
                      uint64_t* flags, int rank, int world) {
    if (method != kMemcpy && method != kStream) return 1;
    for (uint64_t i = 0; i < count; ++i) CopyRow(to[i], from[i], row_bytes, method);
    if (method == kStream) twin::StreamFence();
    const auto flag = [=](int peer, int source) { return flags + (peer * world + source) * kFlagWords; };
    const uint64_t epoch = *flag(rank, rank) + 1;
    for (int peer = 0; peer < world; ++peer) Raise(flag(peer, rank), epoch);
    for (int source = 0; source < world; ++source) Await(flag(rank, source), epoch);
    return 0;
}

double am_bench_flag_latency(uint64_t* flags, int first) {
    uint64_t *ours = flags + (first ? 0 : kFlagWords), *theirs = flags + (first ? kFlagWords : 0);
    const uint64_t epoch = *ours;
    const auto began = std::chrono::steady_clock::now();
    for (uint64_t turn = 1; turn <= kTurns; ++turn) {
        if (first) Raise(ours, epoch + turn);
        Await(theirs, epoch + turn);
        if (!first) Raise(ours, epoch + turn);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
    return took.count() / (2 * kTurns);
}

int am_bench_copy_rows(void* to, const void* const* from, uint64_t count, uint64_t row_bytes, int method) {
    uint8_t* target = static_cast<uint8_t*>(to);
    const uint8_t* const* rows = reinterpret_cast<const uint8_t* const*>(from);
    if (method == kThroughUb) return CopyThroughUb(target, rows, count, row_bytes), 0;
    if (method != kMemcpy && method != kStream) return 1;
    for (uint64_t i = 0; i < count; ++i) CopyRow(target + i * row_bytes, rows[i], row_bytes, method);
    if (method == kStream) twin::StreamFence();
    return 0;
}

int am_bench_weighted_sum(void* out, const void* const* rows, const float* weights, uint64_t tokens, uint64_t top_k,
                          uint64_t hidden, int type) {
    if (hidden % kLanes != 0) return 1;
    switch (type) {
        case moe::kTypeFp32: return Sum<Fp32>(out, rows, weights, tokens, top_k, hidden);
        case moe::kTypeFp16: return Sum<Fp16>(out, rows, weights, tokens, top_k, hidden);
        case moe::kTypeBf16: return Sum<Bf16>(out, rows, weights, tokens, top_k, hidden);
        default: return 1;
    }
}
