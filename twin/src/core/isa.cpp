#include "twin/vector/isa.h"

#include <cstdlib>
#include <cstring>

namespace twin {

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
