// What the op definitions register: one function an op and purpose, each in the file of its name.
#ifndef ASCEND_MOE_DISTRIBUTE_CANN_FUNCTIONS_H
#define ASCEND_MOE_DISTRIBUTE_CANN_FUNCTIONS_H

#include "exe_graph/runtime/infer_datatype_context.h"
#include "exe_graph/runtime/infer_shape_context.h"
#include "exe_graph/runtime/tiling_context.h"

namespace moe {

ge::graphStatus TileDispatch(gert::TilingContext* context);
ge::graphStatus TileCombine(gert::TilingContext* context);
ge::graphStatus TileProbe(gert::TilingContext* context);
ge::graphStatus InferShapeDispatch(gert::InferShapeContext* context);
ge::graphStatus InferShapeCombine(gert::InferShapeContext* context);
ge::graphStatus InferShapeProbe(gert::InferShapeContext* context);
ge::graphStatus InferDataTypeDispatch(gert::InferDataTypeContext* context);
ge::graphStatus InferDataTypeCombine(gert::InferDataTypeContext* context);
ge::graphStatus InferDataTypeProbe(gert::InferDataTypeContext* context);

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_CANN_FUNCTIONS_H
