// Tiling function of AscendMoeDistributeDispatch.
#include "cann/functions.h"
#include "cann/tiling.h"

ge::graphStatus moe::TileDispatch(gert::TilingContext* context) { return TileCall(context, kOpDispatch); }
