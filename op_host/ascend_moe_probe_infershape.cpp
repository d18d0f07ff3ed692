// Shape and type functions of AscendMoeProbe: a block a core, as many as a launch may have.
#include "cann/call.h"

ge::graphStatus moe::InferShapeProbe(gert::InferShapeContext* context) {
    gert::Shape* shape = context == nullptr ? nullptr : context->GetOutputShape(0);
    if (shape == nullptr) return ge::GRAPH_FAILED;
    shape->SetDimNum(2);
    shape->SetDim(0, kProbeReportBlocks);
    shape->SetDim(1, kBlockWords);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus moe::InferDataTypeProbe(gert::InferDataTypeContext* context) {
    return context == nullptr ? ge::GRAPH_FAILED : context->SetOutputDataType(0, ge::DT_INT32);
}
