// Tiling function of AscendMoeDistributeDispatch.
#include "cann/tiling.h"

ge::graphStatus moe::TileDispatch(gert::TilingContext* context) { return TileCall(context, kOpDispatch); }
