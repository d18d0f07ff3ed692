// The mask and stride forms of the vector instructions: a repeat takes 8 blocks of 32 bytes, blocks and
// repeats lie at strides counted in blocks, and one mask says which lanes take part in every repeat.
#pragma once

#include "twin/math/numeric.h"

namespace twin {

constexpr uint32_t kRepeatBytes = 256;
constexpr uint32_t kVectorBlockBytes = 32;
template <class T>
constexpr uint32_t kLanes = kRepeatBytes / sizeof(T);
template <class T>
constexpr uint32_t kBlockLanes = kVectorBlockBytes / sizeof(T);

// Which of up to 128 lanes take part, lane 0 in the lowest bit of bits[0].
struct LaneMask {
    uint64_t bits[2];

    constexpr bool operator[](uint32_t lane) const { return (bits[lane >> 6] >> (lane & 63u)) & 1u; }
    // The first n lanes: the contiguous mask form.
    static constexpr LaneMask First(uint32_t n) {
        const uint64_t low = n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1u;
        const uint64_t high = n >= 128 ? ~uint64_t{0} : (n <= 64 ? 0 : (uint64_t{1} << (n - 64)) - 1u);
        return {{low, high}};
    }
    // n lanes from `first` on.
    static constexpr LaneMask Range(uint32_t first, uint32_t n) {
        const LaneMask below = First(first), all = First(first + n);
        return {{all.bits[0] & ~below.bits[0], all.bits[1] & ~below.bits[1]}};
    }
};

// Distances between the starts of blocks and of repeats, in 32-byte blocks.
struct Strides {
    uint32_t block;
    uint32_t repeat;
};

// Element index of a lane. With operands of different widths, lanes are numbered by the wider type and the
// narrower operand uses fewer blocks.
template <class T>
constexpr uint64_t LaneOffset(uint32_t repeat, uint32_t lane, Strides strides) {
    const uint64_t block =
        uint64_t{repeat} * strides.repeat + uint64_t{lane / kBlockLanes<T>} * strides.block;
    return block * kBlockLanes<T> + lane % kBlockLanes<T>;
}

// Calls body(repeat, lane) for each of `repeats` and each masked lane below `lanes`, in order. A wrapper of a
// strided form runs the array loop with n = 1 there:
//   ForEachLane(kLanes<T>, mask, repeats, [&](uint32_t r, uint32_t lane) {
//       BinaryArray<AddOp>(dst + LaneOffset<T>(r, lane, d), a + LaneOffset<T>(r, lane, sa), ..., 1);
//   });
template <class Body>
inline void ForEachLane(uint32_t lanes, LaneMask mask, uint32_t repeats, Body&& body) {
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            if (mask[lane]) body(repeat, lane);
        }
    }
}

}  // namespace twin
