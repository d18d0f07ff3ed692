// The vector mask register of a core: a mask of lanes for every repeat (normal mode), or the number of
// elements of the whole instruction (counter mode). Calls with isSetMask = true set it themselves; the calls
// that take a count leave normal mode and a full mask behind.
#pragma once

#include <cstdint>

#include "twin/engine/engine.h"
#include "twin/math/lane_mask.h"

namespace AscendC {

enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };

constexpr uint64_t MASK_PLACEHOLDER = 0;
constexpr uint64_t MASK_PLACEHOLDER_LIST[2] = {0, 0};

namespace detail {

inline void StoreMask(twin::LaneMask mask) {
    twin::Core& core = twin::current_core();
    core.vector_mask[0] = mask.bits[0];
    core.vector_mask[1] = mask.bits[1];
}

}  // namespace detail

inline void SetMaskCount() { twin::current_core().counter_mode = true; }
inline void SetMaskNorm() { twin::current_core().counter_mode = false; }
inline void ResetMask() { detail::StoreMask({{~uint64_t{0}, ~uint64_t{0}}}); }

// What a core begins with.
inline void InitSocState() {
    twin::current_core().atomic_op = 0;
    SetMaskNorm();
    ResetMask();
}

// NORMAL: the bits of lanes 64.. and 0... COUNTER: maskLow is the number of elements.
template <class T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(const uint64_t maskHigh, const uint64_t maskLow) {
    detail::StoreMask({{maskLow, maskHigh}});
}
// NORMAL: the first len lanes. COUNTER: len elements.
template <class T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(int32_t len, TWIN_CALLER) {
    const int32_t most = mode == MaskMode::COUNTER ? INT32_MAX : sizeof(T) < 2 ? 128 : 256 / sizeof(T);
    TWIN_RAISE_IF(len < 0 || len > most, kBadArgument, loc, "SetVectorMask of %d, outside 0..%d", len, most);
    const uint32_t lanes = static_cast<uint32_t>(len);
    detail::StoreMask(mode == MaskMode::COUNTER ? twin::LaneMask{{lanes, 0}} : twin::LaneMask::First(lanes));
}

// The mask forms take the mask as uint64_t (the first so many lanes) or as uint64_t[] (a bit a lane): class
// M.

// ---- Parameter structs of the vector calls: strides in 32-byte blocks, between blocks and between repeats.

struct BinaryRepeatParams {
    uint32_t blockNumber = 8;  // reserved
    uint8_t dstBlkStride = 1;
    uint8_t src0BlkStride = 1;
    uint8_t src1BlkStride = 1;
    uint8_t dstRepStride = 8;
    uint8_t src0RepStride = 8;
    uint8_t src1RepStride = 8;
    bool repeatStrideMode = false;  // reserved
    bool strideSizeMode = false;    // reserved
    BinaryRepeatParams() = default;
    BinaryRepeatParams(const uint8_t dstBlk, const uint8_t src0Blk, const uint8_t src1Blk, const uint8_t dstRep,
                       const uint8_t src0Rep, const uint8_t src1Rep)
        : dstBlkStride(dstBlk),
          src0BlkStride(src0Blk),
          src1BlkStride(src1Blk),
          dstRepStride(dstRep),
          src0RepStride(src0Rep),
          src1RepStride(src1Rep) {}
};

struct UnaryRepeatParams {
    uint32_t blockNumber = 8;  // reserved
    uint16_t dstBlkStride = 1;
    uint16_t srcBlkStride = 1;
    uint8_t dstRepStride = 8;
    uint8_t srcRepStride = 8;
    bool repeatStrideMode = false;  // reserved
    bool strideSizeMode = false;    // reserved
    bool halfBlock = false;
    UnaryRepeatParams() = default;
    UnaryRepeatParams(const uint16_t dstBlk, const uint16_t srcBlk, const uint8_t dstRep, const uint8_t srcRep,
                      const bool half = false)
        : dstBlkStride(dstBlk), srcBlkStride(srcBlk), dstRepStride(dstRep), srcRepStride(srcRep), halfBlock(half) {}
};

struct CopyRepeatParams {
    uint16_t dstStride = 0;
    uint16_t srcStride = 0;
    uint16_t dstRepeatSize = 8;
    uint16_t srcRepeatSize = 8;
    CopyRepeatParams() = default;
    CopyRepeatParams(const uint16_t dstBlk, const uint16_t srcBlk, uint16_t dstRep, uint16_t srcRep)
        : dstStride(dstBlk), srcStride(srcBlk), dstRepeatSize(dstRep), srcRepeatSize(srcRep) {}
};

struct BrcbRepeatParams {
    uint16_t dstRepStride = 8;
    uint16_t dstBlkStride = 1;
    BrcbRepeatParams() = default;
    BrcbRepeatParams(const uint16_t block, const uint16_t repeat) : dstRepStride(repeat), dstBlkStride(block) {}
};

struct GatherRepeatParams {
    uint16_t dstRepStride = 8;
    uint8_t dstBlkStride = 1;
    GatherRepeatParams() = default;
    GatherRepeatParams(const uint8_t block, const uint8_t repeat) : dstRepStride(repeat), dstBlkStride(block) {}
};

enum class GatherMaskMode : uint8_t { VERSION_V1 = 0, VERSION_V2 = 1 };
constexpr GatherMaskMode defaultGatherMaskMode = GatherMaskMode::VERSION_V2;

struct GatherMaskParams {
    uint8_t src0BlockStride = 1;
    uint16_t repeatTimes = 0;
    uint16_t src0RepeatStride = 8;
    uint8_t src1RepeatStride = 8;
    GatherMaskParams() = default;
    GatherMaskParams(const uint8_t block, const uint16_t repeats, const uint16_t source, const uint8_t bits)
        : src0BlockStride(block), repeatTimes(repeats), src0RepeatStride(source), src1RepeatStride(bits) {}
};

}  // namespace AscendC
