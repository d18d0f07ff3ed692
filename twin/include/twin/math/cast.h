// Cast between element types: which pairs and rounding modes A2/A3 have, and array loops with their results.
// Source of the table: the vendor's Cast documentation for Atlas A2/A3 (int4b_t left out).
#pragma once

#include "twin/math/rounding.h"

namespace twin {

// A set of RoundModes, one bit each.
constexpr uint32_t ModeBit(RoundMode mode) { return 1u << static_cast<uint32_t>(mode); }
constexpr uint32_t kModeNone = ModeBit(RoundMode::CAST_NONE);
constexpr uint32_t kModesRounding = ModeBit(RoundMode::CAST_RINT) | ModeBit(RoundMode::CAST_FLOOR) |
                                    ModeBit(RoundMode::CAST_CEIL) | ModeBit(RoundMode::CAST_ROUND) |
                                    ModeBit(RoundMode::CAST_TRUNC);
constexpr uint32_t kModesAll = kModesRounding | kModeNone | ModeBit(RoundMode::CAST_ODD);

// Modes that Cast<D, S> takes; 0: A2/A3 have no such conversion.
template <class D, class S>
struct Conversion {};
constexpr uint32_t CastModesOf(...) { return 0; }
constexpr uint32_t CastModesOf(Conversion<half, int8_t>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<half, uint8_t>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<half, int16_t>) { return kModesRounding | kModeNone; }
constexpr uint32_t CastModesOf(Conversion<half, int32_t>) { return kModesAll; }  // the mode has no effect
constexpr uint32_t CastModesOf(Conversion<half, float>) { return kModesAll; }
constexpr uint32_t CastModesOf(Conversion<float, half>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<float, bfloat16_t>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<float, int16_t>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<float, int32_t>) { return kModesRounding | kModeNone; }
constexpr uint32_t CastModesOf(Conversion<float, int64_t>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<float, float>) { return kModesRounding; }  // to an integral value
constexpr uint32_t CastModesOf(Conversion<bfloat16_t, float>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int8_t, half>) { return kModesRounding | kModeNone; }
constexpr uint32_t CastModesOf(Conversion<uint8_t, half>) { return kModesRounding | kModeNone; }
constexpr uint32_t CastModesOf(Conversion<int16_t, half>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int32_t, half>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int32_t, bfloat16_t>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int16_t, float>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int32_t, float>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int64_t, float>) { return kModesRounding; }
constexpr uint32_t CastModesOf(Conversion<int16_t, int32_t>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<int64_t, int32_t>) { return kModeNone; }
constexpr uint32_t CastModesOf(Conversion<int32_t, int64_t>) { return kModeNone; }
template <class D, class S>
constexpr uint32_t kCastModes = CastModesOf(Conversion<D, S>());

template <class D, class S>
constexpr bool kCastLegal = kCastModes<D, S> != 0;

template <class D, class S>
constexpr bool CastModeLegal(RoundMode mode) {
    return mode <= RoundMode::CAST_ODD && (kCastModes<D, S> & ModeBit(mode)) != 0;
}

// An integer brought into D's range.
template <class D, class S>
constexpr D Saturate(S x) {
    constexpr S kLow = static_cast<S>(std::numeric_limits<D>::min());
    constexpr S kHigh = static_cast<S>(std::numeric_limits<D>::max());
    const S above = x > kLow ? x : kLow;
    return static_cast<D>(above < kHigh ? above : kHigh);
}

// One element. half and bfloat16_t sources go through float32, which holds them exactly.
template <RoundMode kMode, class D, class S>
inline D CastOne(S x) {
    if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
        if constexpr (sizeof(D) < sizeof(S)) {
            return Saturate<D>(x);
        } else {
            return static_cast<D>(x);
        }
    } else if constexpr (std::is_same_v<D, float> && std::is_integral_v<S>) {
        return RoundToFloat<kMode>(x);
    } else if constexpr (std::is_same_v<D, half>) {
        return half::FromBits(FloatToHalfBits<kMode>(static_cast<float>(x)));
    } else if constexpr (std::is_same_v<D, bfloat16_t>) {
        return bfloat16_t::FromBits(FloatToBf16Bits<kMode>(static_cast<float>(x)));
    } else if constexpr (std::is_same_v<D, int64_t>) {
        return RoundToInt<kMode, int64_t>(static_cast<float>(x));
    } else if constexpr (std::is_integral_v<D>) {
        return Saturate<D>(RoundToInt<kMode, int32_t>(static_cast<float>(x)));
    } else if constexpr (std::is_same_v<S, float>) {
        return RoundToIntegral<kMode>(x);
    } else {
        return static_cast<float>(x);
    }
}

template <RoundMode kMode, class D, class S>
inline void CastLoop(D* dst, const S* src, uint32_t n) {
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) StoreAt(dst, i, CastOne<kMode, D>(LoadAt(src, i)));
}

// int32_t to half: x · scale, one rounding to nearest even, overflow to infinity.
inline void DequantLoop(half* dst, const int32_t* src, uint32_t n, float scale) {
    if (scale == 1.0f) {
        CastLoop<RoundMode::CAST_RINT>(dst, src, n);
        return;
    }
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) {
        const double product = static_cast<double>(LoadAt(src, i)) * static_cast<double>(scale);
        StoreAt(dst, i, half(product));
    }
}

// dst[i] = Cast<D>(src[i]) for i < n. `mode` must satisfy CastModeLegal<D, S>; any other does nothing.
//   - float to integer saturates and gives 0 for NaN; integer to a narrower integer saturates.
//   - int32_t to half multiplies by deq_scale (SetDeqScale; of type half), whatever the mode.
//   - dst may be the address of src unless D is wider than S.
template <class D, class S>
inline void CastArray(D* dst, const S* src, RoundMode mode, uint32_t n, [[maybe_unused]] float deq_scale = 1.0f) {
    static_assert(kCastLegal<D, S>, "Cast: Atlas A2/A3 have no conversion from this source to this destination type");
    if constexpr (!kCastLegal<D, S>) {
        return;
    } else if constexpr (std::is_same_v<D, half> && std::is_same_v<S, int32_t>) {
        DequantLoop(dst, src, n, deq_scale);
    } else if constexpr (kCastModes<D, S> == kModeNone) {
        if (mode == RoundMode::CAST_NONE) CastLoop<RoundMode::CAST_NONE>(dst, src, n);
    } else {
        if (!CastModeLegal<D, S>(mode)) return;
        switch (mode) {
            case RoundMode::CAST_NONE:
            case RoundMode::CAST_RINT: return CastLoop<RoundMode::CAST_RINT>(dst, src, n);
            case RoundMode::CAST_FLOOR: return CastLoop<RoundMode::CAST_FLOOR>(dst, src, n);
            case RoundMode::CAST_CEIL: return CastLoop<RoundMode::CAST_CEIL>(dst, src, n);
            case RoundMode::CAST_ROUND: return CastLoop<RoundMode::CAST_ROUND>(dst, src, n);
            case RoundMode::CAST_TRUNC: return CastLoop<RoundMode::CAST_TRUNC>(dst, src, n);
            case RoundMode::CAST_ODD:
                if constexpr (CastModeLegal<D, S>(RoundMode::CAST_ODD)) {
                    return CastLoop<RoundMode::CAST_ODD>(dst, src, n);
                }
                return;
        }
    }
}

}  // namespace twin

namespace AscendC {

// Scalar casts of the public API: float to half (ODD) and to int32_t (RINT, FLOOR, CEIL, ROUND).
template <class T, class U, RoundMode kMode>
inline U ScalarCast(T value) {
    static_assert(std::is_same_v<T, float>, "ScalarCast takes a float");
    static_assert((std::is_same_v<U, half> && kMode == RoundMode::CAST_ODD) ||
                      (std::is_same_v<U, int32_t> && kMode != RoundMode::CAST_NONE && kMode != RoundMode::CAST_TRUNC &&
                       kMode != RoundMode::CAST_ODD),
                  "ScalarCast: float to half with CAST_ODD, or to int32_t with CAST_RINT, FLOOR, CEIL or ROUND");
    return twin::CastOne<kMode, U>(value);
}

}  // namespace AscendC
