// Tiling of MoeDistributeCombine.
#ifndef ASCEND_MOE_DISTRIBUTE_COMBINE_TILING_H
#define ASCEND_MOE_DISTRIBUTE_COMBINE_TILING_H

#include "moe_distribute_tiling.h"

// A macro with a decimal literal: the op compiler reads it as text.
#define ASCEND_MOE_TILING_KEY_COMBINE 1000
#define ASCEND_MOE_TILING_KEY_COMBINE_DIRECT 2000

namespace moe {

struct MoeDistributeCombineTiling {
    MoeDistributeMc2Head mc2;
    MoeDistributeInfo info;
    uint32_t hasSharedExpertX;
    uint32_t sendRows;       // rows of one UB chunk while sending
    uint32_t partsPerToken;  // cores that share a token's H while summing
    uint32_t partElements;   // elements of one part, a multiple of 32
    uint32_t sumRing;        // UB parts of rows in flight while summing
    uint32_t reserved;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_COMBINE_TILING_H
