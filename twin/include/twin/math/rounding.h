// Rounding in every mode of RoundMode: float to integer, float to half and bfloat16, integer to float.
// Branch-free where arrays go through it. A value that is not a NaN and does not fit saturates in integers;
// in half and bfloat16 it overflows as IEEE says: to infinity, or to the largest finite value where the mode
// rounds the other way (TRUNC, ODD, FLOOR of a positive, CEIL of a negative value).
#pragma once

#include <limits>

#include "twin/math/numeric.h"

namespace AscendC {

// The modes that both CANN 8.1 and 9.1 define for A2/A3, with their values.
enum class RoundMode : uint8_t {
    CAST_NONE = 0,  // RINT where the conversion is lossy
    CAST_RINT,      // to nearest, ties to even
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,  // to nearest, ties away from zero
    CAST_TRUNC,
    CAST_ODD,  // inexact results to the neighbour whose last bit is 1 (von Neumann)
};

}  // namespace AscendC

namespace twin {

using AscendC::RoundMode;

// What to add to the truncated integer, given the dropped fraction d = x - trunc(x), signed as x. Compares
// bits, which order as the fractions do: comparing floats makes a branch of it.
template <RoundMode kMode>
constexpr int32_t RoundingStep(float d) {
    const int32_t positive = static_cast<int32_t>(FloatBits(d));
    const int32_t negative = static_cast<int32_t>(FloatBits(-d));
    constexpr int32_t kHalf = 0x3F000000;  // 0.5f
    if constexpr (kMode == RoundMode::CAST_FLOOR) {
        return -static_cast<int32_t>(negative > 0);
    } else if constexpr (kMode == RoundMode::CAST_CEIL) {
        return static_cast<int32_t>(positive > 0);
    } else if constexpr (kMode == RoundMode::CAST_ROUND) {
        return static_cast<int32_t>(positive >= kHalf) - static_cast<int32_t>(negative >= kHalf);
    } else {
        static_assert(kMode == RoundMode::CAST_TRUNC);
        return 0;
    }
}

// To the nearest integer, ties to even. Adding 2^23 leaves no bits for a fraction: the FPU rounds for us.
constexpr float NearestIntegral(float x) {
    const uint32_t bits = FloatBits(x);
    const float shifter = FloatOf(0x4B000000u | (bits & 0x80000000u));
    const uint32_t rounded = FloatBits((x + shifter) - shifter) | (bits & 0x80000000u);
    // From 2^23 on every float32 is integral.
    return FloatOf(Select((bits & 0x7FFFFFFFu) < 0x4B000000u, rounded, bits));
}

// float32 to int32_t or int64_t: saturating, NaN gives 0.
template <RoundMode kMode, class Int>
constexpr Int RoundToInt(float x) {
    constexpr bool kNearest = kMode == RoundMode::CAST_RINT || kMode == RoundMode::CAST_NONE;
    // The first float32 too large, and the one before it.
    constexpr float kEnd = sizeof(Int) == 4 ? 2147483648.0f : 9223372036854775808.0f;
    constexpr float kLast = sizeof(Int) == 4 ? 2147483520.0f : 9223371487098961920.0f;
    const float source = kNearest ? NearestIntegral(x) : x;
    const uint32_t above = Select(source > -kEnd, FloatBits(source), FloatBits(-kEnd));  // NaN: -kEnd
    const float clamped = FloatOf(Select(FloatOf(above) < kLast, above, FloatBits(kLast)));
    Int rounded = static_cast<Int>(clamped);
    if constexpr (!kNearest) rounded += RoundingStep<kMode>(clamped - static_cast<float>(rounded));
    return Select<Int>(x == x, Select<Int>(x >= kEnd, std::numeric_limits<Int>::max(), rounded), 0);
}

// float32 to an integral float32; keeps the sign of a zero result, infinities and NaN.
template <RoundMode kMode>
constexpr float RoundToIntegral(float x) {
    if constexpr (kMode == RoundMode::CAST_RINT) {
        return NearestIntegral(x);
    } else {
        const uint32_t bits = FloatBits(x);
        const float rounded = static_cast<float>(RoundToInt<kMode, int32_t>(x));
        const uint32_t with_sign = (FloatBits(rounded) & 0x7FFFFFFFu) | (bits & 0x80000000u);
        return FloatOf(Select((bits & 0x7FFFFFFFu) < 0x4B000000u, with_sign, bits));
    }
}

// 1 where a magnitude whose last remaining bit is `lsb` goes up, given the dropped bits and their midpoint.
template <RoundMode kMode, class Bits>
constexpr Bits MagnitudeStep(bool negative, Bits lsb, Bits dropped, Bits half_point) {
    if constexpr (kMode == RoundMode::CAST_FLOOR) {
        return static_cast<Bits>(negative) & static_cast<Bits>(dropped != 0);
    } else if constexpr (kMode == RoundMode::CAST_CEIL) {
        return static_cast<Bits>(!negative) & static_cast<Bits>(dropped != 0);
    } else if constexpr (kMode == RoundMode::CAST_ROUND) {
        return static_cast<Bits>(dropped >= half_point);
    } else if constexpr (kMode == RoundMode::CAST_TRUNC) {
        return 0;
    } else if constexpr (kMode == RoundMode::CAST_ODD) {
        return static_cast<Bits>(dropped != 0) & (lsb ^ 1u);
    } else {
        return static_cast<Bits>(dropped > half_point) | (static_cast<Bits>(dropped == half_point) & lsb);
    }
}

template <RoundMode kMode>
constexpr uint16_t FloatToBf16Bits(float x) {
    if constexpr (kMode == RoundMode::CAST_RINT || kMode == RoundMode::CAST_NONE) {
        return FloatToBf16Bits(x);
    } else {
        const uint32_t u = FloatBits(x);
        const uint32_t kept = u >> 16;
        const uint32_t step = MagnitudeStep<kMode, uint32_t>(u >> 31, kept & 1u, u & 0xFFFFu, 0x8000u);
        return static_cast<uint16_t>(Select((u & 0x7FFFFFFFu) > 0x7F800000u, kept | 0x40u, kept + step));
    }
}

template <RoundMode kMode>
constexpr uint16_t FloatToHalfBits(float x) {
    if constexpr (kMode == RoundMode::CAST_RINT || kMode == RoundMode::CAST_NONE) {
        return FloatToHalfBits(x);
    } else {
        const uint32_t u = FloatBits(x);
        const uint32_t magnitude = u & 0x7FFFFFFFu;
        // Denormal results drop more bits of the significand; 25 are all of them and a zero half point bit.
        const uint32_t exponent = magnitude >> 23;
        const uint32_t deficit = exponent < 113u ? 113u - exponent : 0u;
        const uint32_t shift = 13u + (deficit < 12u ? deficit : 12u);
        const uint32_t implicit = exponent != 0 ? 0x800000u : 0u;
        const uint32_t significand = (magnitude & 0x7FFFFFu) | implicit;
        const bool denormal = deficit != 0;
        uint32_t source = Select(denormal, significand, magnitude - (112u << 23));
        // Too large: as if a whole unit in the last place above 65504 had been dropped but for one bit.
        source = Select(magnitude >= 0x47800000u, (0x7BFFu << 13) | 0x1FFFu, source);
        const uint32_t kept = source >> shift;
        const uint32_t dropped = source & ((1u << shift) - 1u);
        const uint32_t step = MagnitudeStep<kMode, uint32_t>(u >> 31, kept & 1u, dropped, 1u << (shift - 1u));
        const uint32_t quiet = 0x7E00u | ((magnitude >> 13) & 0x1FFu);
        const uint32_t special = Select(magnitude > 0x7F800000u, quiet, 0x7C00u);
        const uint32_t result = Select(magnitude >= 0x7F800000u, special, kept + step);
        return static_cast<uint16_t>(result | ((u >> 16) & 0x8000u));
    }
}

// int32_t or int64_t to float32.
template <RoundMode kMode, class Int>
constexpr float RoundToFloat(Int x) {
    if constexpr (kMode == RoundMode::CAST_RINT || kMode == RoundMode::CAST_NONE) {
        return static_cast<float>(x);
    } else {
        const bool negative = x < 0;
        const uint64_t wide = static_cast<uint64_t>(static_cast<int64_t>(x));
        const uint64_t magnitude = negative ? 0u - wide : wide;
        if (magnitude < (1u << 24)) return static_cast<float>(x);
        const uint32_t width = 64u - static_cast<uint32_t>(__builtin_clzll(magnitude));
        const uint32_t shift = width - 24u;
        const uint64_t kept = magnitude >> shift;
        const uint64_t dropped = magnitude & ((uint64_t{1} << shift) - 1u);
        const uint64_t half_point = shift == 0 ? 1u : uint64_t{1} << (shift - 1u);
        const uint64_t step = MagnitudeStep<kMode, uint64_t>(negative, kept & 1u, dropped, half_point);
        // A carry out of the significand lands in the exponent, as it should.
        const uint32_t bits = ((width - 1u + 127u) << 23) + static_cast<uint32_t>(kept + step - (1u << 23));
        return FloatOf(bits | (static_cast<uint32_t>(negative) << 31));
    }
}

}  // namespace twin
