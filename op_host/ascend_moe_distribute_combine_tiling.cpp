// Tiling function of AscendMoeDistributeCombine.
#include "cann/tiling.h"

ge::graphStatus moe::TileCombine(gert::TilingContext* context) { return TileCall(context, kOpCombine); }
