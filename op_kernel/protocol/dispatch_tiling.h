// Tiling of MoeDistributeDispatch.
#ifndef ASCEND_MOE_DISTRIBUTE_DISPATCH_TILING_H
#define ASCEND_MOE_DISTRIBUTE_DISPATCH_TILING_H

#include "tiling.h"

// 1000, or 2000 for "direct", + quant_mode + 10 when smooth scales are given. Macros with decimal literals:
// the op compiler reads them as text.
#define ASCEND_MOE_TILING_KEY_DISPATCH 1000
#define ASCEND_MOE_TILING_KEY_DISPATCH_QUANT 1002
#define ASCEND_MOE_TILING_KEY_DISPATCH_QUANT_SMOOTH 1012
#define ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT 2000
#define ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT 2002
#define ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT_SMOOTH 2012

namespace moe {

constexpr uint32_t kMostGatherRing = 7;  // chunks on their way while direct gathers

struct MoeDistributeDispatchTiling {
    MoeDistributeMc2Head mc2;
    MoeDistributeInfo info;
    uint32_t tokenNumsType;  // expert_token_nums_type: 0 cumulative, 1 counts
    uint32_t tpWorldSize;    // 0 or 1
    uint32_t sendRing;       // UB rows in flight while sending
    uint32_t copyRows;       // window rows of one UB chunk while copying out
    uint32_t copyRing;       // such chunks in flight
    uint32_t listCores;      // direct: cores that make the lists, the others publish rows; 0: all do both
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_DISPATCH_TILING_H
