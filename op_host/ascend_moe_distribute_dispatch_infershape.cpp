// Shape and type functions of AscendMoeDistributeDispatch.
#include "cann/infershape.h"

ge::graphStatus moe::InferShapeDispatch(gert::InferShapeContext* context) {
    return InferShapes(context, kOpDispatch);
}

ge::graphStatus moe::InferDataTypeDispatch(gert::InferDataTypeContext* context) {
    return InferDataTypes(context, kOpDispatch);
}
