// Shape and type functions of AscendMoeDistributeCombine.
#include "moe_distribute_cann_functions.h"
#include "moe_distribute_cann_infershape.h"

ge::graphStatus moe::InferShapeCombine(gert::InferShapeContext* context) {
    return InferShapes(context, kOpCombine);
}

ge::graphStatus moe::InferDataTypeCombine(gert::InferDataTypeContext* context) {
    return InferDataTypes(context, kOpCombine);
}
