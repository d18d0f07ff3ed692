// What this machine can do at best, for benchmarks: rows copied, rows summed, flags between two processes. No
// kernel and no window.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
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

// A vector of the machine's width.
template <uint32_t kBytes>
struct Lanes {
    typedef float Floats __attribute__((vector_size(kBytes)));
    static constexpr uint64_t kCount = kBytes / sizeof(float);
};
constexpr uint64_t kMostLanes = 16;
#define AM_ALWAYS inline __attribute__((always_inline))

// An element type by its bits. A loop over a vector's lanes becomes instructions of its width.
template <class Bits, float (*kWiden)(Bits), Bits (*kNarrow)(float)>
struct Element {
    static constexpr uint64_t kSize = sizeof(Bits);
    template <class L>
    static AM_ALWAYS void Load(typename L::Floats& to, const uint8_t* from) {
        Bits bits[L::kCount];
        float wide[L::kCount];
        memcpy(bits, from, sizeof(bits));
        for (uint64_t i = 0; i < L::kCount; ++i) wide[i] = kWiden(bits[i]);
        memcpy(&to, wide, sizeof(to));
    }
    template <class L>
    static AM_ALWAYS void Store(uint8_t* to, const typename L::Floats& from) {
        float wide[L::kCount];
        Bits bits[L::kCount];
        memcpy(wide, &from, sizeof(wide));
        for (uint64_t i = 0; i < L::kCount; ++i) bits[i] = kNarrow(wide[i]);
        memcpy(to, bits, sizeof(bits));
    }
};
constexpr float Same(float value) { return value; }
using Fp32 = Element<float, Same, Same>;
using Fp16 = Element<uint16_t, twin::HalfBitsToFloat, twin::FloatToHalfBits>;
using Bf16 = Element<uint16_t, twin::Bf16BitsToFloat, twin::FloatToBf16Bits>;

// Four vectors of a token's sum stay in registers while its rows pass.
template <class Type>
struct WeightedSum {
    uint8_t* out;
    const uint8_t* const* rows;
    const float* weights;
    uint64_t tokens, top_k, hidden;

    template <class L, uint64_t kVectors>
    AM_ALWAYS void Block(uint64_t token, uint64_t at) const {
        typename L::Floats sum[kVectors] = {};
        for (uint64_t k = 0; k < top_k; ++k) {
            const uint8_t* row = rows[token * top_k + k];
            if (row == nullptr) continue;
            const typename L::Floats weight = weights[token * top_k + k] - typename L::Floats{};
            for (uint64_t v = 0; v < kVectors; ++v) {
                typename L::Floats value;
                Type::template Load<L>(value, row + (at + v * L::kCount) * Type::kSize);
                sum[v] += value * weight;
            }
        }
        for (uint64_t v = 0; v < kVectors; ++v)
            Type::template Store<L>(out + (token * hidden + at + v * L::kCount) * Type::kSize, sum[v]);
    }
    template <uint32_t kBytes>
    AM_ALWAYS void operator()(twin::VectorBytes<kBytes>) const {
        using L = Lanes<kBytes>;
        for (uint64_t token = 0; token < tokens; ++token) {
            uint64_t at = 0;
            for (; at + 4 * L::kCount <= hidden; at += 4 * L::kCount) Block<L, 4>(token, at);
            for (; at < hidden; at += L::kCount) Block<L, 1>(token, at);
        }
    }
};

}  // namespace

int am_bench_copy_rows(void* to, const void* const* from, uint64_t count, uint64_t row_bytes, int method) {
    uint8_t* target = static_cast<uint8_t*>(to);
    const uint8_t* const* rows = reinterpret_cast<const uint8_t* const*>(from);
    if (method < kMemcpy || method > kThroughUb) return 1;
    if (method == kThroughUb) {
        CopyThroughUb(target, rows, count, row_bytes);
        return 0;
    }
    for (uint64_t i = 0; i < count; ++i) {
        if (method == kMemcpy) {
            memcpy(target + i * row_bytes, rows[i], row_bytes);
        } else {
            twin::StreamCopy(target + i * row_bytes, rows[i], row_bytes);
        }
    }
    if (method == kStream) twin::StreamFence();
    return 0;
}

int am_bench_weighted_sum(void* out, const void* const* rows, const float* weights, uint64_t tokens,
                          uint64_t top_k, uint64_t hidden, int type) {
    uint8_t* target = static_cast<uint8_t*>(out);
    const uint8_t* const* from = reinterpret_cast<const uint8_t* const*>(rows);
    if (hidden % kMostLanes != 0) return 1;
    switch (type) {
        case moe::kTypeFp32:
            twin::RunBest(WeightedSum<Fp32>{target, from, weights, tokens, top_k, hidden});
            return 0;
        case moe::kTypeFp16:
            twin::RunBest(WeightedSum<Fp16>{target, from, weights, tokens, top_k, hidden});
            return 0;
        case moe::kTypeBf16:
            twin::RunBest(WeightedSum<Bf16>{target, from, weights, tokens, top_k, hidden});
            return 0;
        default: return 1;
    }
}

// ---- how long a flag takes between two processes: ping-pong over shared words ----

namespace {

constexpr int kSpin = 0, kYield = 1, kFutex = 2;
constexpr int kSpinsBeforeYield = 200;
constexpr int kLookAtClock = 1 << 12;
constexpr uint64_t kApart = 32;  // words between the two flags: two cache lines

int64_t Now() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

inline void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void Sleep(std::atomic<uint32_t>* flag, uint32_t old_value, int64_t ns) {
    const timespec most{ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(flag), FUTEX_WAIT, old_value, &most, nullptr, 0);
}

// False when the deadline passed.
bool Await(std::atomic<uint32_t>* flag, uint32_t value, int how, int64_t deadline) {
    for (int spins = 1;; ++spins) {
        const uint32_t now = flag->load(std::memory_order_acquire);
        if (now == value) return true;
        if (how == kFutex) {
            const int64_t left = deadline - Now();
            if (left <= 0) return false;
            Sleep(flag, now, left);
            continue;
        }
        if (how == kYield && spins > kSpinsBeforeYield) {
            sched_yield();
        } else {
            Pause();
        }
        if (spins % kLookAtClock == 0 && Now() > deadline) return false;
    }
}

void Raise(std::atomic<uint32_t>* flag, uint32_t value, int how) {
    flag->store(value, std::memory_order_release);
    if (how != kFutex) return;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(flag), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

int64_t am_bench_flag(void* cells, int side, uint32_t first, uint32_t rounds, int how, int64_t patience_us) {
    auto* ping = static_cast<std::atomic<uint32_t>*>(cells);
    std::atomic<uint32_t>* pong = ping + kApart;
    if (how < kSpin || how > kFutex || side < 0 || side > 1) return -1;
    const int64_t began = Now(), deadline = began + patience_us * 1000;
    for (uint32_t value = first; value != first + rounds; ++value) {
        if (side == 0) {
            Raise(ping, value, how);
            if (!Await(pong, value, how, deadline)) return -1;
        } else {
            if (!Await(ping, value, how, deadline)) return -1;
            Raise(pong, value, how);
        }
    }
    return Now() - began;
}
