// Included before a kernel: what the op compiler generates for it, and the clock of a core.
#pragma once
#include <cstdint>
#include <cstring>
#include <ctime>

template <class T>
T RealTiling(const uint8_t* gm) {
    T tiling;
    memcpy(&tiling, gm, sizeof(T));
    return tiling;
}
#define GET_TILING_DATA_WITH_STRUCT(type, name, gm) const type name = RealTiling<type>(gm)

// GetSystemCycle of asc-devkit's CPU mode counts nanoseconds of the host's clock.
namespace real {
int Clock(int, struct timespec* time);
}
#ifndef REAL_RUNTIME
#define clock_gettime(clock, time) real::Clock(clock, time)
#endif
