// One card: a launch whose cores are divided among several ranks, to run dispatch and combine without a cluster
// (`ascend-moe validate --one-card`). Core b of the launch is core b % cores of rank b / cores. Shared by the kernel
// entry (ascend_moe_one_card.cpp) and the host.
#ifndef ASCEND_MOE_PROTOCOL_ONE_CARD_H
#define ASCEND_MOE_PROTOCOL_ONE_CARD_H

#include "tiling.h"

// Tiling keys: those of dispatch as they are, those of combine from 10000 on. bf16 only, without smooth scales.
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE 11000
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_QUANT 11002
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_INDEXED 11100
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_INDEXED_QUANT 11102
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_DIRECT 12000
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_DIRECT_QUANT 12002
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_HIERARCHY 13000
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_HIERARCHY_QUANT 13002

namespace moe {

constexpr uint32_t kOpOneCard = 4;  // beside kOpProbe; never on the wire
constexpr uint32_t kCardCombineKeys = 10000;

// What a rank of the launch works with, as addresses in GM. `arguments`: of the entry of its op, in their order, with
// its own workspace and tiling.
constexpr uint32_t kCardArguments = 18;
struct OneCardRank {
    uint64_t context;
    uint64_t reserved;
    uint64_t arguments[kCardArguments];
};

struct MoeOneCardTiling {
    uint64_t ranks;  // address of OneCardRank[world]
    uint32_t world;
    uint32_t cores;  // of a rank
};

// The end of UB, which is not planned for: a piece of an item, a block, and the blocks of a barrier.
constexpr uint32_t kCardUbBytes = 20 * 1024;
constexpr uint32_t kCardUbAt = 196352 - kCardUbBytes;  // of what CANN grants
constexpr uint32_t kCardPieceBytes = 16 * 1024;
constexpr uint32_t kCardBlockAt = kCardPieceBytes, kCardBarrierAt = kCardBlockAt + kBlock;
static_assert(kCardBarrierAt + kMaxCores * kBlock <= kCardUbBytes, "the barrier's blocks fit");
// A message, which ends an item, begins at a multiple of kFlaggedBlock in the peer's window. Where it may lie, blocks
// of so many bytes are copied one after another, so that it arrives after the rows.
static_assert(RelayTrailerBytes(2, 1) <= kCardPieceBytes && RelayTrailerBytes(8, 4) <= kCardPieceBytes,
              "the message lies in the last piece of an item");

}  // namespace moe

#endif  // ASCEND_MOE_PROTOCOL_ONE_CARD_H
