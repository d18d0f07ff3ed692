// Tiling of MoeDistributeCombine.
#ifndef ASCEND_MOE_DISTRIBUTE_COMBINE_TILING_H
#define ASCEND_MOE_DISTRIBUTE_COMBINE_TILING_H

#include "tiling.h"

// A macro with a decimal literal: the op compiler reads it as text.
#define ASCEND_MOE_TILING_KEY_COMBINE 1000
#define ASCEND_MOE_TILING_KEY_COMBINE_DIRECT 2000

namespace moe {

constexpr uint32_t kMaxSumGroups = 4;  // direct: groups of rows in flight while summing

struct MoeDistributeCombineTiling {
    MoeDistributeMc2Head mc2;
    MoeDistributeInfo info;
    uint32_t hasSharedExpertX;
    uint32_t sendRows;       // rows of one UB chunk while sending
    uint32_t partsPerToken;  // cores that share a token's H while summing
    uint32_t partElements;   // elements of one part, a multiple of 32
    uint32_t sumRing;        // UB parts of rows in flight while summing
    uint32_t sumGroup;       // direct: so many of them are loaded, waited for and given back together
    uint32_t returnRing;     // direct: chunks of sendRows on their way into the own half
    uint32_t reserved;
};

// Of the copy into the own half: rows are one piece of memory there, and cores share its bytes.
constexpr uint32_t kReturnChunkBytes = 16 * 1024;
MOE_FN uint32_t ReturnChunkBytes(uint32_t rowBytes, uint32_t rows) {
    return Min(rows * rowBytes, kReturnChunkBytes);
}
// Bytes of a group of pieces; a row of all experts' counts fits too.
MOE_FN uint32_t SumGroupBytes(uint32_t experts, uint32_t pieces, uint32_t pieceBytes) {
    return Max(pieces * pieceBytes, PaddedInts(experts) * static_cast<uint32_t>(sizeof(int32_t)));
}
// Rows of a chunk of tokens: its pairs, and one more a token.
MOE_FN uint32_t SumEntries(uint32_t topK) { return kChunkPairs / topK * (topK + 1); }

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_COMBINE_TILING_H
