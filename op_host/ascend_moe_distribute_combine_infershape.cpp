// Shape and type functions of AscendMoeDistributeCombine.
#include "cann/infershape.h"

ge::graphStatus moe::InferShapeCombine(gert::InferShapeContext* context) {
    return InferShapes(context, kOpCombine);
}

ge::graphStatus moe::InferDataTypeCombine(gert::InferDataTypeContext* context) {
    return InferDataTypes(context, kOpCombine);
}
