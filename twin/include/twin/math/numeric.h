// half and bfloat16_t as AscendC kernels see them, and the bit-exact conversions beneath them.
//
// Every conversion is branch-free integer and float32 code, so that a loop over an array vectorises. They
// need the default rounding mode and denormals on. half arithmetic computes in float32 and rounds once, which
// equals IEEE binary16 for + - * / and sqrt. bfloat16_t is storage: AscendC gives it no arithmetic.
// (Do not include <arm_neon.h> beside this header: it claims the name bfloat16_t too.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// For loops whose iterations read nothing that an earlier one wrote: GCC then vectorises operands that share
// an address too. clang tests for overlap at run time instead.
#if defined(__clang__)
#define TWIN_ELEMENTWISE
#else
#define TWIN_ELEMENTWISE _Pragma("GCC ivdep")
#endif

namespace twin {

constexpr uint32_t FloatBits(float x) { return __builtin_bit_cast(uint32_t, x); }
constexpr float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// condition ? a : b without a branch: GCC sinks float code into branches, and then the loop stays scalar.
template <class Int>
constexpr Int Select(bool condition, Int a, Int b) {
    return b ^ ((a ^ b) & (Int{0} - static_cast<Int>(condition)));
}

// Reads and writes element i of UB bytes that other code sees as another type: a plain T* access would let
// the optimiser assume that the two never meet. Compiles to one load or store.
template <class T>
inline T LoadAt(const T* p, size_t i) {
    T value;
    std::memcpy(&value, p + i, sizeof(T));
    return value;
}
template <class T>
inline void StoreAt(T* p, size_t i, T value) {
    std::memcpy(p + i, &value, sizeof(T));
}

// float32 to bfloat16: nearest even; overflow gives infinity; a NaN stays a NaN, made quiet.
constexpr uint16_t FloatToBf16Bits(float x) {
    const uint32_t u = FloatBits(x);
    const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const uint32_t quiet = (u >> 16) | 0x40u;
    return static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);  // a blend where there are vectors
}
constexpr float Bf16BitsToFloat(uint16_t bits) { return FloatOf(static_cast<uint32_t>(bits) << 16); }

// float32 to half: nearest even; from 65520 on infinity; denormal results exact; a NaN stays one, made quiet.
constexpr uint16_t FloatToHalfBits(float x) {
    const uint32_t u = FloatBits(x);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves the float's last bit worth 2^-24, half's smallest denormal: the FPU rounds for us.
    const uint32_t denormal = FloatBits(FloatOf(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t finite = Select(magnitude < 0x38800000u, denormal, normal);
    const uint32_t quiet = 0x7E00u | ((magnitude >> 13) & 0x1FFu);
    const uint32_t beyond = Select(magnitude > 0x7F800000u, quiet, 0x7C00u);
    const uint32_t result = Select(magnitude >= 0x47800000u, beyond, finite);
    return static_cast<uint16_t>(result | ((u >> 16) & 0x8000u));
}

// half to float32, exact; a signalling NaN is made quiet.
constexpr float HalfBitsToFloat(uint16_t bits) {
    const uint32_t shifted = (bits & 0x7FFFu) * (1u << 13);
    const uint32_t normal = shifted + (112u << 23);
    const uint32_t special = (shifted + (224u << 23)) | Select(shifted > (31u << 23), 0x400000u, 0u);
    // 2^-14 plus the denormal, less 2^-14.
    const uint32_t denormal = FloatBits(FloatOf(shifted + (113u << 23)) - 6.103515625e-05f);
    const uint32_t finite = Select(shifted < (1u << 23), denormal, normal);
    const uint32_t magnitude = Select(shifted >= (31u << 23), special, finite);
    return FloatOf(magnitude | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

// float64 to float32, inexact results to the neighbour with an odd last bit: rounding that once more to half
// or bfloat16 gives what one rounding from float64 would have given.
constexpr float DoubleToFloatOdd(double x) {
    const uint32_t bits = FloatBits(static_cast<float>(x));
    // The nearest float32 lies beyond x in magnitude: the neighbours are bits - 1 and bits, else bits and
    // bits + 1. Compared as integers, magnitudes order like their values; a NaN is never inexact here.
    const double back = static_cast<double>(FloatOf(bits));
    const uint64_t wanted = __builtin_bit_cast(uint64_t, x) & 0x7FFFFFFFFFFFFFFFull;
    const uint64_t got = __builtin_bit_cast(uint64_t, back) & 0x7FFFFFFFFFFFFFFFull;
    const uint32_t beyond = static_cast<uint32_t>(got > wanted);
    const uint32_t inexact = static_cast<uint32_t>(got != wanted) & static_cast<uint32_t>(x == x);
    return FloatOf((bits - (beyond & inexact)) | inexact);
}

// Any arithmetic type to half or bfloat16, rounded once (integers of 54 bits and more aside).
template <class T>
constexpr uint16_t HalfBitsOf(T value) {
    if constexpr (std::is_same_v<T, float>) {
        return FloatToHalfBits(value);
    } else {
        return FloatToHalfBits(DoubleToFloatOdd(static_cast<double>(value)));
    }
}
template <class T>
constexpr uint16_t Bf16BitsOf(T value) {
    if constexpr (std::is_same_v<T, float>) {
        return FloatToBf16Bits(value);
    } else {
        return FloatToBf16Bits(DoubleToFloatOdd(static_cast<double>(value)));
    }
}

}  // namespace twin

// IEEE binary16. Converts implicitly from and to the arithmetic types, as bisheng's does.
struct half {
    uint16_t bits;

    half() = default;
    template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
    constexpr half(T value) : bits(twin::HalfBitsOf(value)) {}
    constexpr operator float() const { return twin::HalfBitsToFloat(bits); }

    static constexpr half FromBits(uint16_t raw) {
        half value(0.0f);
        value.bits = raw;
        return value;
    }

#define TWIN_HALF_ASSIGNMENT(op)                \
    template <class T>                          \
    constexpr half& operator op## = (T other) { \
        return *this = half(*this op other);    \
    }
    TWIN_HALF_ASSIGNMENT(+)
    TWIN_HALF_ASSIGNMENT(-)
    TWIN_HALF_ASSIGNMENT(*)
    TWIN_HALF_ASSIGNMENT(/)
#undef TWIN_HALF_ASSIGNMENT
};

// bfloat16: 16 bits of storage. Arithmetic is a compile error, as on A2/A3: use ToFloat and ToBfloat16.
struct bfloat16_t {
    uint16_t bits;

    bfloat16_t() = default;
    template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
    explicit constexpr bfloat16_t(T value) : bits(twin::Bf16BitsOf(value)) {}
    explicit constexpr operator float() const { return twin::Bf16BitsToFloat(bits); }

    static constexpr bfloat16_t FromBits(uint16_t raw) {
        bfloat16_t value(0.0f);
        value.bits = raw;
        return value;
    }
};

static_assert(sizeof(half) == 2 && std::is_trivially_copyable_v<half> && std::is_trivial_v<half>);
static_assert(sizeof(bfloat16_t) == 2 && std::is_trivially_copyable_v<bfloat16_t> && std::is_trivial_v<bfloat16_t>);

constexpr half operator-(half a) { return half::FromBits(static_cast<uint16_t>(a.bits ^ 0x8000u)); }
constexpr half operator+(half a) { return a; }

namespace twin {
// What half op T gives: half with an integer, the wider floating type otherwise.
template <class T>
using HalfMixed = std::conditional_t<std::is_integral_v<T>, half, T>;
template <class T>
using IfArithmetic = std::enable_if_t<std::is_arithmetic_v<T>, int>;
}  // namespace twin

// `Result`: of half with half; `Mixed`: of half with an arithmetic type T.
#define TWIN_HALF_OPERATOR(op, Result, Mixed)                                                                       \
    constexpr Result operator op(half a, half b) { return Result(static_cast<float>(a) op static_cast<float>(b)); } \
    template <class T, twin::IfArithmetic<T> = 0>                                                                   \
    constexpr Mixed operator op(half a, T b) {                                                                      \
        return static_cast<twin::HalfMixed<T>>(a) op static_cast<twin::HalfMixed<T>>(b);                            \
    }                                                                                                               \
    template <class T, twin::IfArithmetic<T> = 0>                                                                   \
    constexpr Mixed operator op(T a, half b) {                                                                      \
        return static_cast<twin::HalfMixed<T>>(a) op static_cast<twin::HalfMixed<T>>(b);                            \
    }
TWIN_HALF_OPERATOR(+, half, twin::HalfMixed<T>)
TWIN_HALF_OPERATOR(-, half, twin::HalfMixed<T>)
TWIN_HALF_OPERATOR(*, half, twin::HalfMixed<T>)
TWIN_HALF_OPERATOR(/, half, twin::HalfMixed<T>)
TWIN_HALF_OPERATOR(==, bool, bool)
TWIN_HALF_OPERATOR(!=, bool, bool)
TWIN_HALF_OPERATOR(<, bool, bool)
TWIN_HALF_OPERATOR(<=, bool, bool)
TWIN_HALF_OPERATOR(>, bool, bool)
TWIN_HALF_OPERATOR(>=, bool, bool)
#undef TWIN_HALF_OPERATOR

namespace AscendC {

// Scalar bfloat16 conversions; to bfloat16 the nearest even. (CANN 9 also calls both of them Cast.)
constexpr float ToFloat(const bfloat16_t& value) { return static_cast<float>(value); }
constexpr bfloat16_t ToBfloat16(const float& value) { return bfloat16_t(value); }

}  // namespace AscendC
