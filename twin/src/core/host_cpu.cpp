#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "twin/engine/host_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace twin {

namespace {

// As if all cores of the machine shared the last cache: where there are several of them it is more. At least the size
// of a core's own.
uint64_t CacheShareBytes() {
    uint64_t share = uint64_t{1} << 20;
#if defined(_SC_LEVEL2_CACHE_SIZE) && defined(_SC_LEVEL3_CACHE_SIZE)
    const long own = sysconf(_SC_LEVEL2_CACHE_SIZE), last = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (own > 0) share = static_cast<uint64_t>(own);
    if (last > 0 && cores > 0) share = std::max(share, static_cast<uint64_t>(last / cores));
#endif
    return share;
}

// A store is timed for every kRowsATiming rows of at least kLeastTimed bytes, and slow below kBytesANano: cores that
// are near copy about 20 bytes a nanosecond, others 2 to 3. Not one slow row decides, which an
// interrupt may have met, but kSlowRows more than fast ones. Then kLaunchesPast launches go past the caches before the
// next look.
constexpr uint64_t kLeastTimed = 4096, kBytesANano = 4;
constexpr uint32_t kRowsATiming = 2, kSlowRows = 3, kLaunchesPast = 64;

#if defined(__x86_64__)
constexpr uint64_t kLine = 64;

void StreamLines(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += kLine) {
        __m128i part[4];
        memcpy(part, from + at, sizeof(part));
        for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, part[i]);
    }
}
__attribute__((target("avx512f"))) void StreamLines512(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
}
#endif

}  // namespace

const uint64_t g_cache_share_bytes = CacheShareBytes();

void StreamCopy(void* to, const void* from, uint64_t bytes) {
#if defined(__x86_64__)
    if (reinterpret_cast<uintptr_t>(to) % kLine == 0 && bytes % kLine == 0) {
        auto* lines = static_cast<uint8_t*>(to);
        const auto* source = static_cast<const uint8_t*>(from);
        return g_isa == Isa::kAvx512 ? StreamLines512(lines, source, bytes) : StreamLines(lines, source, bytes);
    }
#endif
    memcpy(to, from, bytes);
}

void StreamFence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

void RowStores::Copy(void* to, const void* from, uint64_t bytes) {
    if (past_caches()) return StreamCopy(to, from, bytes);
    using Clock = std::chrono::steady_clock;
    const bool timed = bytes >= kLeastTimed && ++rows_ % kRowsATiming == 0;
    const Clock::time_point began = timed ? Clock::now() : Clock::time_point();
    memcpy(to, from, bytes);
    if (timed) Took(bytes, static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - began).count()));
}

void RowStores::Took(uint64_t bytes, uint64_t nanos) {
    if (nanos * kBytesANano <= bytes) {
        slow_ -= slow_ > 0 ? 1 : 0;
    } else if (++slow_ == kSlowRows) {
        slow_ = 0;
        launches_ = kLaunchesPast;
    }
}

namespace {

Isa Widest() {
    const char* wish = std::getenv("ASCEND_MOE_ISA");
    if (wish != nullptr && strcmp(wish, "baseline") == 0) return Isa::kBaseline;
#if defined(__x86_64__)
    const bool small = wish != nullptr && strcmp(wish, "avx2") == 0;
    __builtin_cpu_init();
    const bool bits = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    if (bits && !small && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return Isa::kAvx512;
    if (bits && __builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
    return Isa::kBaseline;
}

}  // namespace

const Isa g_isa = Widest();

}  // namespace twin
