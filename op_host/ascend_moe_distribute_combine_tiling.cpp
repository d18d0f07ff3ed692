// Tiling function of AscendMoeDistributeCombine.
#include "moe_distribute_cann_functions.h"
#include "moe_distribute_cann_tiling.h"

ge::graphStatus moe::TileCombine(gert::TilingContext* context) { return TileCall(context, kOpCombine); }
