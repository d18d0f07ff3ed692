// Scalar helpers of the API: rounding up, bit scans. ToFloat and ToBfloat16 are in numeric.h.
#pragma once

#include "twin/sync.h"

namespace AscendC {

template <class T, class U>
constexpr T AlignUp(T value, U unit) {
    return unit == 0 ? value : static_cast<T>((value + unit - 1) / unit * unit);
}
template <class T, class U>
constexpr T DivCeil(T a, U b) {
    return b == 0 ? a : static_cast<T>((a + b - 1) / b);
}

// Lowest bit of `value` that equals countValue (0 or 1), or -1.
template <int countValue>
inline int64_t ScalarGetSFFValue(uint64_t value) {
    static_assert(countValue == 0 || countValue == 1, "ScalarGetSFFValue looks for 0 or 1");
    const uint64_t bits = countValue == 1 ? value : ~value;
    return bits == 0 ? -1 : __builtin_ctzll(bits);
}

}  // namespace AscendC
