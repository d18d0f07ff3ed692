// What each vector instruction does to one element, and the element types it takes on A2/A3.
//
// An op is a type with `kLegal<T>` and `Do` on the compute type: float for half (each result then rounds once
// to half), T itself otherwise. Integers wrap around. No op fuses a product with a sum.
#pragma once

#include <cmath>

#include "twin/math/numeric.h"

namespace twin {

template <class T, class... Us>
constexpr bool kOneOf = (std::is_same_v<T, Us> || ...);

template <class T>
constexpr bool kRealType = kOneOf<T, half, float>;
template <class T>
constexpr bool kArithmeticType = kOneOf<T, half, float, int16_t, int32_t>;
template <class T>
constexpr bool kBitwiseType = kOneOf<T, int16_t, uint16_t>;
template <class T>
constexpr bool kShiftType = kOneOf<T, int16_t, uint16_t, int32_t, uint32_t>;
template <class T>
constexpr bool kDuplicateType = kOneOf<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>;
template <class T>
constexpr bool kIndexType = kArithmeticType<T>;

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, half>, float, T>;

template <class T>
constexpr Compute<T> Widen(T x) {
    return static_cast<Compute<T>>(x);
}
template <class T>
constexpr T Narrow(Compute<T> x) {
    if constexpr (std::is_same_v<T, half>) {
        return half::FromBits(FloatToHalfBits(x));
    } else {
        return x;
    }
}

// a and b as the type to compute in: integers as uint32_t, whose overflow is defined.
template <class C>
using Modular = std::conditional_t<std::is_integral_v<C>, uint32_t, C>;

// The element types that an op takes.
#define TWIN_TAKES(Name, kTypes)                  \
    struct Name {                                 \
        template <class T>                        \
        static constexpr bool kLegal = kTypes<T>; \
    };
TWIN_TAKES(RealOp, kRealType)
TWIN_TAKES(ArithmeticOp, kArithmeticType)
TWIN_TAKES(BitwiseOp, kBitwiseType)
TWIN_TAKES(ShiftOp, kShiftType)
#undef TWIN_TAKES

// ---- two operands ----

#define TWIN_OPERATOR(Name, Takes, op)                                                       \
    struct Name : Takes {                                                                    \
        template <class C>                                                                   \
        static constexpr C Do(C a, C b) {                                                    \
            return static_cast<C>(static_cast<Modular<C>>(a) op static_cast<Modular<C>>(b)); \
        }                                                                                    \
    };
TWIN_OPERATOR(AddOp, ArithmeticOp, +)
TWIN_OPERATOR(SubOp, ArithmeticOp, -)
TWIN_OPERATOR(MulOp, ArithmeticOp, *)
TWIN_OPERATOR(AndOp, BitwiseOp, &)
TWIN_OPERATOR(OrOp, BitwiseOp, |)
#undef TWIN_OPERATOR
// The sum or difference, negative results set to 0. Types of A2/A3: no int32_t.
template <class Op>
struct ThenReluOp {
    template <class T>
    static constexpr bool kLegal = kOneOf<T, half, float, int16_t>;
    template <class C>
    static constexpr C Do(C a, C b) {
        const C result = Op::Do(a, b);
        return result < C{0} ? C{0} : result;
    }
};
struct AddReluOp : ThenReluOp<AddOp> {};
struct SubReluOp : ThenReluOp<SubOp> {};
struct DivOp : RealOp {
    static constexpr float Do(float a, float b) { return a / b; }
};

// The larger of two; the other one where one is NaN; a where they compare equal.
#define TWIN_EXTREME_OP(Name, op)                                                    \
    struct Name : ArithmeticOp {                                                     \
        template <class C>                                                           \
        static constexpr C Do(C a, C b) {                                            \
            return b op a ? b : a;                                                   \
        }                                                                            \
        static constexpr float Do(float a, float b) {                                \
            return FloatOf(Select((b op a) | (a != a), FloatBits(b), FloatBits(a))); \
        }                                                                            \
    };
TWIN_EXTREME_OP(MaxOp, >)
TWIN_EXTREME_OP(MinOp, <)
#undef TWIN_EXTREME_OP
// Second operand: the slope below zero. NaN times the slope stays NaN.
struct LeakyReluOp : RealOp {
    static constexpr float Do(float a, float slope) {
        return FloatOf(Select(a >= 0.0f, FloatBits(a), FloatBits(a * slope)));
    }
};

// Second operand: the number of bits, 0 to the width. Signed elements keep their sign bit (vendor's rule).
struct ShiftLeftOp : ShiftOp {
    template <class C>
    static constexpr C Do(C a, C count) {
        constexpr uint32_t kWidth = sizeof(C) * 8;
        const uint32_t n = static_cast<uint32_t>(count);
        const uint32_t shifted = n < kWidth ? static_cast<uint32_t>(a) << (n & 31u) : 0u;
        if constexpr (std::is_signed_v<C>) {
            constexpr uint32_t kSign = 1u << (kWidth - 1);
            return static_cast<C>((shifted & (kSign - 1)) | (static_cast<uint32_t>(a) & kSign));
        } else {
            return static_cast<C>(shifted);
        }
    }
};
struct ShiftRightOp : ShiftOp {
    template <class C>
    static constexpr C Do(C a, C count) {
        constexpr uint32_t kWidth = sizeof(C) * 8;
        const uint32_t n = static_cast<uint32_t>(count);
        if constexpr (std::is_signed_v<C>) {
            return static_cast<C>(a >> (n < kWidth ? n : kWidth - 1));
        } else {
            return n < kWidth ? static_cast<C>(a >> (n & 31u)) : C{0};
        }
    }
};
// ShiftRight with roundEn: signed elements gain the last bit shifted out; unsigned ones ignore roundEn.
struct ShiftRightRoundOp : ShiftOp {
    template <class C>
    static constexpr C Do(C a, C count) {
        const C shifted = ShiftRightOp::Do(a, count);
        if constexpr (std::is_signed_v<C>) {
            const C last = ShiftRightOp::Do(a, static_cast<C>(count - 1));
            return static_cast<C>(count == 0 ? shifted : static_cast<C>(shifted + (last & 1)));
        } else {
            return shifted;
        }
    }
};

// ---- one operand ----

struct AbsOp : RealOp {
    static constexpr float Do(float a) { return FloatOf(FloatBits(a) & 0x7FFFFFFFu); }
};
// Negative values to +0; everything else, -0 and NaN included, as it is.
struct ReluOp {
    template <class T>
    static constexpr bool kLegal = kOneOf<T, half, float, int32_t>;
    static constexpr int32_t Do(int32_t a) { return a < 0 ? 0 : a; }
    static constexpr float Do(float a) { return FloatOf(Select(a < 0.0f, 0u, FloatBits(a))); }
};
struct NotOp : BitwiseOp {
    template <class C>
    static constexpr C Do(C a) {
        return static_cast<C>(~a);
    }
};
struct SqrtOp : RealOp {
    static float Do(float a) { return std::sqrt(a); }
};
// Correctly rounded divisions; the hardware's Reciprocal and Rsqrt are approximations.
struct ReciprocalOp : RealOp {
    static constexpr float Do(float a) { return 1.0f / a; }
};
// In float64, so that results do not depend on how the C library approximates float32.
struct RsqrtOp : RealOp {
    static float Do(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
};
struct ExpOp : RealOp {
    static float Do(float a) { return static_cast<float>(std::exp(static_cast<double>(a))); }
};
struct LnOp : RealOp {
    static float Do(float a) { return static_cast<float>(std::log(static_cast<double>(a))); }
};

// ---- products that are added ----

// Axpy and MulAddDst: half to half, float to float, or half sources onto a float dst.
template <class D, class S>
constexpr bool kMultiplyAddLegal = kRealType<S> && (std::is_same_v<D, S> || std::is_same_v<D, float>);

// dst + a·b: the product rounded to D, then the sum.
template <class D>
constexpr D MultiplyAdd(float a, float b, D addend) {
    return Narrow<D>(Widen(Narrow<D>(a * b)) + Widen(addend));
}

}  // namespace twin
