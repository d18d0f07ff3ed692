// Scalar helpers of the API: rounding up, bit scans, conversions of one value.
#pragma once

#include "twin/api/pipe.h"
#include "twin/api/sync.h"
#include "twin/math/cast.h"

namespace AscendC {

template <class T, class U>
constexpr T AlignUp(T value, U unit) {
    return unit == 0 ? value : static_cast<T>((value + unit - 1) / unit * unit);
}
template <class T, class U>
constexpr T DivCeil(T a, U b) {
    return b == 0 ? a : static_cast<T>((a + b - 1) / b);
}
template <class T, class U>
constexpr T CeilDivision(T a, U b) {
    return DivCeil(a, b);
}

inline uint32_t Ceil(uint32_t a, uint32_t b) { return DivCeil(a, b); }

// Lowest bit of `valueIn` that equals countValue (0 or 1), or -1.
template <int countValue>
inline int64_t ScalarGetSFFValue(uint64_t valueIn) {
    static_assert(countValue == 0 || countValue == 1, "ScalarGetSFFValue looks for 0 or 1");
    const uint64_t bits = countValue == 1 ? valueIn : ~valueIn;
    return bits == 0 ? -1 : __builtin_ctzll(bits);
}
// How many bits equal countValue (0 or 1).
template <int countValue>
inline int64_t ScalarGetCountOfValue(uint64_t valueIn) {
    static_assert(countValue == 0 || countValue == 1, "ScalarGetCountOfValue counts 0 or 1");
    return __builtin_popcountll(countValue == 1 ? valueIn : ~valueIn);
}
inline int64_t ScalarCountLeadingZero(uint64_t valueIn) { return valueIn == 0 ? 64 : __builtin_clzll(valueIn); }
// Bits below the sign bit that equal it, before the first that does not.
inline int64_t CountBitsCntSameAsSignBit(int64_t valueIn) { return __builtin_clrsbll(valueIn); }

// The names of newer headers.
template <int countValue>
inline int64_t GetSFFValue(uint64_t valueIn) {
    return ScalarGetSFFValue<countValue>(valueIn);
}
template <int countValue>
inline int64_t GetBitCount(uint64_t valueIn) {
    return ScalarGetCountOfValue<countValue>(valueIn);
}
inline int64_t CountLeadingZero(uint64_t valueIn) { return ScalarCountLeadingZero(valueIn); }

template <class T, class U, RoundMode roundMode>
inline U Cast(T valueIn) {
    return ScalarCast<T, U, roundMode>(valueIn);
}
inline float Cast(const bfloat16_t& bVal) { return ToFloat(bVal); }
inline bfloat16_t Cast(const float& fVal) { return ToBfloat16(fVal); }

// ---- State of a core that outlives a call, and what a kernel can ask about its core.

// The value with which DataCopyPad pads when its own parameters give none.
template <class T, TPosition pos = TPosition::MAX>
inline void SetPadValue(T paddingValue) {
    static_assert(pos == TPosition::VECIN || pos == TPosition::VECOUT || pos == TPosition::MAX,
                  "SetPadValue: VECIN, VECOUT or MAX");
    static_assert(sizeof(T) <= sizeof(uint64_t), "SetPadValue: elements of at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &paddingValue, sizeof(T));
    twin::current_core().pad_value = bits;
    twin::current_core().pad_value_set = true;
}

// Control bits: the twin computes in the default mode, in which all of them are 0.
template <int8_t startBit, int8_t endBit>
inline void SetCtrlSpr(int64_t value, TWIN_CALLER) {
    static_assert(startBit >= 0 && startBit <= endBit && endBit <= 63, "SetCtrlSpr: bits 0 to 63");
    TWIN_RAISE_IF(value != 0, kBadArgument, loc, "SetCtrlSpr<%d, %d>(%lld): only 0 is modelled", startBit, endBit,
                  static_cast<long long>(value));
}
template <int8_t startBit, int8_t endBit>
inline int64_t GetCtrlSpr() {
    return 0;
}
template <int8_t startBit, int8_t endBit>
inline void ResetCtrlSpr() {}

// Registers a range for builds that check addresses: the twin's ranges are those of the launch.
template <class T>
inline void OOMCheckAddrRange(__gm__ T*, const uint64_t) {}

inline int64_t GetSubBlockNum() { return 1; }
inline int64_t GetTaskRatio() { return 1; }  // GetTaskRation in newer headers
constexpr int16_t GetDataBlockSizeInBytes() { return 32; }

}  // namespace AscendC

// ---- Functions that the device compiler has built in.

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return AscendC::Std::max<std::common_type_t<A, B>, std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return AscendC::Std::min<std::common_type_t<A, B>, std::common_type_t<A, B>>(a, b);
}
// A constant of up to four parts of 16 bits, the lowest first, which the compiler does not look into. One part is how
// kernels write the address of a byte of UB: it leads there, as GetPhyAddr of a tensor at that byte does.
constexpr uint64_t get_imm(uint64_t bits0, uint64_t bits16, uint64_t bits32 = 0, uint64_t bits48 = 0) {
    return bits0 | bits16 << 16 | bits32 << 32 | bits48 << 48;
}
inline uint64_t get_imm(uint64_t bits0) {
    if (bits0 >= twin::kUbBytes) return bits0;
    twin::UbPointed();
    return reinterpret_cast<uintptr_t>(twin::current_core().ub) + bits0;
}
