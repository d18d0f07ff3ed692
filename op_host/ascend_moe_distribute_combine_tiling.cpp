// Tiling function of AscendMoeDistributeCombine.
#include "cann/functions.h"
#include "cann/tiling.h"

ge::graphStatus moe::TileCombine(gert::TilingContext* context) { return TileCall(context, kOpCombine); }
