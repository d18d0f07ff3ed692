#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "twin/engine/host_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace twin {

namespace {

uint64_t CacheBytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) return static_cast<uint64_t>(bytes);
#endif
    return uint64_t{1} << 20;
}
// As if all cores of the machine shared the cache: where there are several of them it is more.
uint64_t CacheShareBytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE), cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (bytes > 0 && cores > 0) return std::max(CacheBytes(), static_cast<uint64_t>(bytes / cores));
#endif
    return CacheBytes();
}

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

const uint64_t g_cache_bytes = CacheBytes(), g_cache_share_bytes = CacheShareBytes();

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
