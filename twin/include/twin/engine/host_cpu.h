// Runs a loop with the widest vector instructions of this machine, found once when the library is loaded. The
// library itself stays at its baseline: only the instances of these functions hold newer instructions, and
// everything that a loop calls is compiled into them. The arithmetic is the same (no contraction to fma).
#pragma once

#include <cstdint>
#include <type_traits>

namespace twin {

enum class Isa : uint8_t { kBaseline, kAvx2, kAvx512 };
extern const Isa g_isa;  // ASCEND_MOE_ISA=baseline or avx2 keeps it below what the machine has

// A loop that needs the number of bytes of a vector takes it as its argument.
template <uint32_t kBytes>
using VectorBytes = std::integral_constant<uint32_t, kBytes>;
template <class Loop, uint32_t kBytes>
inline __attribute__((always_inline)) void CallLoop(const Loop& loop, VectorBytes<kBytes> bytes) {
    if constexpr (std::is_invocable_v<Loop, VectorBytes<kBytes>>) {
        loop(bytes);
    } else {
        loop();
    }
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
template <class Loop>
__attribute__((target("avx2,bmi,bmi2,lzcnt"), flatten, noinline)) void RunAvx2(Loop loop) {
    CallLoop(loop, VectorBytes<32>());
}
#if defined(__clang__)
#define TWIN_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,lzcnt"
#else
#define TWIN_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,lzcnt,prefer-vector-width=512"
#endif
template <class Loop>
__attribute__((target(TWIN_AVX512), flatten, noinline)) void RunAvx512(Loop loop) {
    CallLoop(loop, VectorBytes<64>());
}
#undef TWIN_AVX512
template <class Loop>
inline void RunBest(Loop loop) {
    if (g_isa == Isa::kAvx512) return RunAvx512(loop);
    if (g_isa == Isa::kAvx2) return RunAvx2(loop);
    CallLoop(loop, VectorBytes<16>());
}
#else
template <class Loop>
inline void RunBest(Loop loop) {
    CallLoop(loop, VectorBytes<16>());
}
#endif

// ---- copies that go past the caches: for bytes that will have left the caches before they are read ----

// A core's share of the last cache. Of a launch that writes more, the first bytes have left that cache again.
extern const uint64_t g_cache_share_bytes;

// Copies like memcpy. Other threads see the bytes after StreamFence.
void StreamCopy(void* to, const void* from, uint64_t bytes);
void StreamFence();

// Stores a rank's rows into windows, past the caches or not. The lines of a window lie in the cache of whoever has read
// the last rows there. Fetching them is next to nothing between cores that are near, as where they share a cache, and
// takes several times the copy between others. A virtual machine does not say which it is, so some stores are timed:
// where they are slow, this and the next launches store past the caches.
class RowStores {
public:
    bool past_caches() const { return launches_ > 0; }
    void Copy(void* to, const void* from, uint64_t bytes);
    void Took(uint64_t bytes, uint64_t nanos);  // a store that did not go past the caches
    void LaunchEnds() {
        if (launches_ > 0) --launches_;
    }

private:
    uint32_t rows_ = 0, slow_ = 0;
    uint32_t launches_ = 0;  // that go past the caches, the running one included
};

}  // namespace twin
