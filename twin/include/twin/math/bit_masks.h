// Comparisons into bits, selection by bits, gathering by bits, broadcasts and index sequences.
// Bit i of a mask is bit i % 8 of byte i / 8.
#pragma once

#include "twin/math/element_ops.h"
#include "twin/math/lane_mask.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "masks and sort entries are laid out little-endian");

namespace AscendC {

enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

}  // namespace AscendC

namespace twin {

using AscendC::CMPMODE;
using AscendC::SELMODE;

// ---- Compare, Compares ----

template <class T>
constexpr bool kCompareLegal = kOneOf<T, half, float, int32_t>;
template <class T>
constexpr bool CompareModeLegal(CMPMODE mode) {
    return std::is_same_v<T, int32_t> ? mode == CMPMODE::EQ : mode <= CMPMODE::NE;
}

// NaN is not equal, and neither less nor greater.
template <CMPMODE kMode, class C>
constexpr bool CompareOne(C a, C b) {
    if constexpr (kMode == CMPMODE::LT) return a < b;
    if constexpr (kMode == CMPMODE::GT) return a > b;
    if constexpr (kMode == CMPMODE::EQ) return a == b;
    if constexpr (kMode == CMPMODE::LE) return a <= b;
    if constexpr (kMode == CMPMODE::GE) return a >= b;
    if constexpr (kMode == CMPMODE::NE) return a != b;
}

// Eight bytes of 0 or 1 as eight bits: the product brings byte i to bit 56 + i.
inline uint8_t PackFlags(const uint8_t* flags) {
    uint64_t bytes;
    std::memcpy(&bytes, flags, sizeof(bytes));
    return static_cast<uint8_t>((bytes * 0x0102040810204080ull) >> 56);
}

// rhs(i) is what element i is compared with. Bits past n in the last byte keep their value.
template <CMPMODE kMode, class T, class Rhs>
inline void CompareLoop(uint8_t* dst, const T* a, uint32_t n, Rhs&& rhs) {
    constexpr uint32_t kChunk = 64;
    uint8_t flags[kChunk];
    uint32_t i = 0;
    for (; i + kChunk <= n; i += kChunk) {
        for (uint32_t j = 0; j < kChunk; ++j) {
            flags[j] = static_cast<uint8_t>(CompareOne<kMode>(Widen(LoadAt(a, i + j)), rhs(i + j)));
        }
        for (uint32_t j = 0; j < kChunk; j += 8) dst[(i + j) / 8] = PackFlags(flags + j);
    }
    for (; i < n; ++i) {
        const uint32_t bit = 1u << (i % 8);
        const uint32_t set = CompareOne<kMode>(Widen(LoadAt(a, i)), rhs(i)) ? bit : 0u;
        dst[i / 8] = static_cast<uint8_t>((dst[i / 8] & ~bit) | set);
    }
}

template <class T, class Rhs>
inline void CompareWith(uint8_t* dst, const T* a, CMPMODE mode, uint32_t n, Rhs&& rhs) {
    switch (mode) {
        case CMPMODE::LT: return CompareLoop<CMPMODE::LT>(dst, a, n, rhs);
        case CMPMODE::GT: return CompareLoop<CMPMODE::GT>(dst, a, n, rhs);
        case CMPMODE::EQ: return CompareLoop<CMPMODE::EQ>(dst, a, n, rhs);
        case CMPMODE::LE: return CompareLoop<CMPMODE::LE>(dst, a, n, rhs);
        case CMPMODE::GE: return CompareLoop<CMPMODE::GE>(dst, a, n, rhs);
        case CMPMODE::NE: return CompareLoop<CMPMODE::NE>(dst, a, n, rhs);
    }
}

// Compare and Compares (CompareScalar): n bits into dst.
template <class T>
inline void CompareArray(uint8_t* dst, const T* a, const T* b, CMPMODE mode, uint32_t n) {
    CompareWith(dst, a, mode, n, [=](uint32_t i) { return Widen(LoadAt(b, i)); });
}
template <class T>
inline void CompareScalarArray(uint8_t* dst, const T* a, T scalar, CMPMODE mode, uint32_t n) {
    const Compute<T> s = Widen(scalar);
    CompareWith(dst, a, mode, n, [=](uint32_t) { return s; });
}

// ---- Select ----

// The unsigned integer that holds a T's bits.
template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
template <class T>
inline BitsOf<T> LoadBits(const T* p, uint64_t i) {
    BitsOf<T> value;
    std::memcpy(&value, p + i, sizeof(T));
    return value;
}
template <class T>
inline void StoreBits(T* p, uint64_t i, BitsOf<T> value) {
    std::memcpy(p + i, &value, sizeof(T));
}

// dst[i] = a[i] where the element's bit is 1, other(i) where it is 0. With `same_bits` (mode 0) every repeat
// uses the first kLanes<T> bits; otherwise repeats use up the mask one after the other (modes 1 and 2).
template <class T, class Other>
inline void SelectWith(T* dst, const uint8_t* mask, const T* a, bool same_bits, uint32_t n, Other&& other) {
    const auto one = [&](uint32_t i, uint32_t bits) {
        StoreBits(dst, i, Select<BitsOf<T>>((bits & (1u << (i % 8))) != 0, LoadBits(a, i), other(i)));
    };
    const auto bits_of = [&](uint32_t i) -> uint32_t { return mask[(same_bits ? i % kLanes<T> : i) / 8]; };
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const uint32_t bits = bits_of(i);
        for (uint32_t j = 0; j < 8; ++j) one(i + j, bits);
    }
    for (; i < n; ++i) one(i, bits_of(i));
}

// Modes 0 and 2, and mode 1. The mask tensor may be of any unsigned type: only its bits count.
template <class T>
inline void SelectArray(T* dst, const uint8_t* mask, const T* a, const T* b, SELMODE mode, uint32_t n) {
    SelectWith(dst, mask, a, mode == SELMODE::VSEL_CMPMASK_SPR, n, [=](uint32_t i) { return LoadBits(b, i); });
}
template <class T>
inline void SelectScalarArray(T* dst, const uint8_t* mask, const T* a, T scalar, uint32_t n) {
    const BitsOf<T> s = LoadBits(&scalar, 0);
    SelectWith(dst, mask, a, false, n, [=](uint32_t) { return s; });
}

// ---- GatherMask ----

template <class T>
constexpr bool kGatherMaskLegal = kDuplicateType<T>;
// Bits come from uint16_t for 16-bit elements, from uint32_t for 32-bit ones.
template <class T, class U>
constexpr bool kGatherBitsLegal = kGatherMaskLegal<T> && std::is_same_v<U, BitsOf<T>>;

// What GatherMask walks over: `lanes` elements a repeat (kLanes<T> in normal mode, the mask argument in
// counter mode); the source's strides and the distance between two repeats' bits, in blocks.
struct GatherShape {
    uint32_t lanes;
    uint32_t repeats;
    Strides source;
    uint32_t bits_stride;
};

// Copies the elements for which keep(repeat, lane) is true, closely packed; returns how many. dst may be src.
template <class T, class Keep>
inline uint64_t GatherWhere(T* dst, const T* src, const GatherShape& shape, Keep&& keep) {
    uint64_t kept = 0;
    for (uint32_t r = 0; r < shape.repeats; ++r) {
        for (uint32_t lane = 0; lane < shape.lanes; ++lane) {
            if (keep(r, lane)) StoreBits(dst, kept++, LoadBits(src, LaneOffset<T>(r, lane, shape.source)));
        }
    }
    return kept;
}

// Patterns: 1 and 2 even and odd elements, 3 to 6 the first to fourth of every four, 7 all.
template <class T>
inline uint64_t GatherPattern(T* dst, const T* src, uint8_t pattern, const GatherShape& shape) {
    constexpr uint8_t kKeepOfFour[8] = {0b0000, 0b0101, 0b1010, 0b0001, 0b0010, 0b0100, 0b1000, 0b1111};
    const uint32_t keep = kKeepOfFour[pattern & 7u];
    return GatherWhere(dst, src, shape, [=](uint32_t, uint32_t lane) { return ((keep >> (lane % 4)) & 1u) != 0; });
}
template <class T, class U>
inline uint64_t GatherBits(T* dst, const T* src, const U* bits, const GatherShape& shape) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(bits);
    return GatherWhere(dst, src, shape, [=](uint32_t repeat, uint32_t lane) {
        const uint64_t first = uint64_t{repeat} * shape.bits_stride * kVectorBlockBytes;
        return ((bytes[first + lane / 8] >> (lane % 8)) & 1u) != 0;
    });
}

template <class U>
inline uint64_t CountBits(const U* bits, const GatherShape& shape) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(bits);
    uint64_t count = 0;
    for (uint32_t r = 0; r < shape.repeats; ++r) {
        const uint64_t first = uint64_t{r} * shape.bits_stride * kVectorBlockBytes;
        for (uint32_t lane = 0; lane < shape.lanes; ++lane) count += (bytes[first + lane / 8] >> (lane % 8)) & 1u;
    }
    return count;
}

// ---- Duplicate, Brcb, ArithProgression ----

template <class T>
inline void FillArray(T* dst, T value, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) StoreAt(dst, i, value);
}

// Each of 8·repeats elements fills one 32-byte block.
template <class T>
inline void BroadcastBlocks(T* dst, const T* src, uint32_t repeats, Strides strides) {
    for (uint32_t i = 0; i < 8 * repeats; ++i) {
        const uint64_t block = uint64_t{i / 8} * strides.repeat + uint64_t{i % 8} * strides.block;
        FillArray(dst + block * kBlockLanes<T>, LoadAt(src, i), kBlockLanes<T>);
    }
}

// first, first + step, first + 2·step, ...: the product rounded, then the sum.
template <class T>
inline void ProgressionArray(T* dst, T first, T step, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        const T offset = Narrow<T>(MulOp::Do(Widen(step), static_cast<Compute<T>>(i)));
        StoreAt(dst, i, Narrow<T>(AddOp::Do(Widen(first), Widen(offset))));
    }
}

}  // namespace twin
