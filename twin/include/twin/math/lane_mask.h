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
    const uint64_t block = uint64_t{repeat} * strides.repeat + uint64_t{lane / kBlockLanes<T>} * strides.block;
    return block * kBlockLanes<T> + lane % kBlockLanes<T>;
}

// A stretch of lanes.
struct Run {
    uint32_t lane;
    uint32_t count;
};
struct Runs {
    Run run[80];  // 64 where every other lane is off, and the block ends
    uint32_t count = 0;
    // One past the last lane.
    uint32_t end() const { return count == 0 ? 0 : run[count - 1].lane + run[count - 1].count; }
};

// The first lane from `lane` on whose bit is `on`, or `width`.
inline uint32_t NextLane(const LaneMask& mask, uint32_t lane, uint32_t width, bool on) {
    while (lane < width) {
        const uint64_t word = (on ? mask.bits[lane >> 6] : ~mask.bits[lane >> 6]) >> (lane & 63u);
        if (word != 0) {
            lane += static_cast<uint32_t>(__builtin_ctzll(word));
            break;
        }
        lane = (lane | 63u) + 1;
    }
    return lane < width ? lane : width;
}

// The stretches of a mask, of `width` lanes in 8 blocks; unless blocks are joined, they end at a block's end.
inline Runs FindRuns(const LaneMask& mask, uint32_t width, bool joined) {
    Runs runs;
    for (uint32_t lane = NextLane(mask, 0, width, true); lane < width;) {
        uint32_t end = NextLane(mask, lane, width, false);
        const uint32_t block_end = (lane / (width / 8) + 1) * (width / 8);
        if (!joined && block_end < end) end = block_end;
        runs.run[runs.count++] = {lane, end - lane};
        lane = NextLane(mask, end, width, true);
    }
    return runs;
}

}  // namespace twin
