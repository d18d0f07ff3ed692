// Tiling function of AscendMoeDistributeDispatch.
#include "moe_distribute_cann_functions.h"
#include "moe_distribute_cann_tiling.h"

ge::graphStatus moe::TileDispatch(gert::TilingContext* context) { return TileCall(context, kOpDispatch); }
