// Output of kernels: printf, DumpTensor, assert, trap. All of it goes to standard output; a failed assertion
// and a trap end the launch and name the place in the source.
#pragma once

#include <cstdio>

#include "twin/api/pipe.h"

namespace AscendC {

constexpr uint8_t K_MAX_SHAPE_DIM = 8, K_MAX_DIM = 8;  // the name in CANN 8.1 is the latter
struct ShapeInfo {
    uint8_t shapeDim = 0;
    uint32_t shape[K_MAX_SHAPE_DIM] = {};
    uint8_t originalShapeDim = 0;
    uint32_t originalShape[K_MAX_SHAPE_DIM] = {};
    ShapeInfo() = default;
    ShapeInfo(const uint8_t dims, const uint32_t sizes[]) : shapeDim(dims), originalShapeDim(dims) {
        for (uint8_t i = 0; i < dims && i < K_MAX_SHAPE_DIM; ++i) shape[i] = originalShape[i] = sizes[i];
    }
};

namespace detail {

// half and bfloat16_t print as numbers.
template <class T>
inline T Printable(T value) {
    return value;
}
inline double Printable(half value) { return static_cast<float>(value); }
inline double Printable(bfloat16_t value) { return static_cast<float>(value); }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
#pragma GCC diagnostic ignored "-Wformat-security"
template <class... Args>
inline void Print(const char* format, const Args&... args) {
    std::printf(format, Printable(args)...);
    std::fflush(stdout);
}
template <class... Args>
inline void AssertTrue(const char* text, const twin::Loc& loc, bool holds, const char* format = "",
                       const Args&... args) {
    if (holds) return;
    char said[256];
    snprintf(said, sizeof(said), format, Printable(args)...);
    twin::Raise(twin::Finding::kBadArgument, loc, "assert(%s) failed%s%s", text, said[0] == '\0' ? "" : ": ", said);
}
#pragma GCC diagnostic pop

template <class T>
inline void DumpValues(const char* memory, const T* values, uint32_t desc, uint32_t count) {
    std::printf("DumpTensor: desc=%u core=%u %s %u x %zu bytes:", desc, twin::current_core().index, memory, count,
                sizeof(T));
    for (uint32_t i = 0; i < count; ++i) {
        if constexpr (std::is_integral_v<T>) {
            std::printf(" %lld", static_cast<long long>(values[i]));
        } else {
            std::printf(" %g", static_cast<double>(static_cast<float>(values[i])));
        }
    }
    std::printf("\n");
    std::fflush(stdout);
}

}  // namespace detail

template <class... Args>
inline void printf(const char* fmt, Args&&... args) {
    detail::Print(fmt, args...);
}
template <class... Args>
inline void PRINTF(const char* fmt, Args&&... args) {
    detail::Print(fmt, args...);
}

// Prints the first dumpSize elements, after all earlier instructions have run.
template <class T>
inline void DumpTensor(const LocalTensor<T>& tensor, uint32_t desc, uint32_t dumpSize, TWIN_CALLER) {
    PipeBarrier<PIPE_ALL>(loc);
    const T* values = tensor.Span(dumpSize, loc, "DumpTensor", sizeof(T));
    const twin::Access read{reinterpret_cast<uintptr_t>(values), dumpSize * sizeof(T)};
    twin::Issue({"DumpTensor", twin::Pipe::kS, loc, {}, {read}},
                [=] { detail::DumpValues("UB", values, desc, dumpSize); });
}
template <class T>
inline void DumpTensor(const GlobalTensor<T>& tensor, uint32_t desc, uint32_t dumpSize, TWIN_CALLER) {
    PipeBarrier<PIPE_ALL>(loc);
    const T* values = tensor.Span(dumpSize * sizeof(T), loc, "DumpTensor").first;
    const twin::Access read{reinterpret_cast<uintptr_t>(values), dumpSize * sizeof(T), 1, 0, true};
    twin::Issue({"DumpTensor", twin::Pipe::kMte2, loc, {}, {read}},
                [=] { detail::DumpValues("GM", values, desc, dumpSize); });
    PipeBarrier<PIPE_ALL>(loc);
}
template <class Tensor>
inline void DumpTensor(const Tensor& tensor, uint32_t desc, uint32_t dumpSize, const ShapeInfo&, TWIN_CALLER) {
    DumpTensor(tensor, desc, dumpSize, loc);
}
// Prints dumpSize elements, beginning at countOff.
template <class Tensor>
inline void DumpAccChkPoint(const Tensor& tensor, uint32_t index, uint32_t countOff, uint32_t dumpSize, TWIN_CALLER) {
    DumpTensor(tensor[countOff], index, dumpSize, loc);
}

[[noreturn]] inline void Trap(TWIN_CALLER) { twin::Raise(twin::Finding::kBadArgument, loc, "the kernel called trap"); }

}  // namespace AscendC

[[noreturn]] inline void trap(TWIN_CALLER) { AscendC::Trap(loc); }

// assert(condition), or assert(condition, format, arguments...).
#undef assert
#define assert(...) AscendC::detail::AssertTrue(#__VA_ARGS__, twin::Loc::Here(), __VA_ARGS__)
#define ascendc_assert(...) AscendC::detail::AssertTrue(#__VA_ARGS__, twin::Loc::Here(), __VA_ARGS__)
#define ASSERT(condition) AscendC::detail::AssertTrue(#condition, twin::Loc::Here(), condition)
#define ASSERT_MSG(condition, ...) AscendC::detail::AssertTrue(#condition, twin::Loc::Here(), condition, __VA_ARGS__)
// `behavior`: statements that print the reason.
#define ASCENDC_ASSERT(condition, behavior) \
    do {                                    \
        if (!(condition)) {                 \
            behavior;                       \
            ASSERT(condition);              \
        }                                   \
    } while (0)
enum class TwinLogLevel : uint8_t { KERNEL_DEBUG, KERNEL_INFO, KERNEL_WARN, KERNEL_ERROR };
#define KERNEL_LOG(level, ...)                                  \
    do {                                                        \
        if (TwinLogLevel::level >= TwinLogLevel::KERNEL_WARN) { \
            AscendC::detail::Print(__VA_ARGS__);                \
            AscendC::detail::Print("\n");                       \
        }                                                       \
    } while (0)
