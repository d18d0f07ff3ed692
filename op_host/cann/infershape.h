// Output shapes and types for CANN, by the shape functions that allocate the outputs everywhere else.
#pragma once

#include "call.h"
#include "../rules/shape.h"

namespace moe {

constexpr size_t kMaxOpOutputs = kDispatchOutputs + 1;

// All outputs of an op, the error record last. Returns how many.
inline size_t OutputsOf(const CallSpec& call, OutputDesc (&out)[kMaxOpOutputs]) {
    size_t count = 0;
    if (call.op == kOpDispatch) {
        OutputDesc tensors[kDispatchOutputs];
        DispatchShapes(call, tensors);
        for (const OutputDesc& tensor : tensors) out[count++] = tensor;
    } else {
        out[count++] = CombineShape(call);
    }
    out[count++] = {kTypeInt32, 1, {kErrorRecordWords, 0}};
    return count;
}

// Sizes that a graph does not know yet are negative in it, and so is all that depends on them.
inline bool IsKnown(const TensorDesc& tensor) {
    for (int32_t i = 0; i < tensor.rank && i < 3; ++i) {
        if (tensor.dims[i] < 0) return false;
    }
    return true;
}

inline bool WriteShapes(gert::InferShapeContext& context, uint32_t code) {
    CallSpec call;
    CannAttributes others;
    if (!ReadCall(context, code, call, others)) return false;
    const OpInterface op = InterfaceOf(code);
    const TensorDesc& rows = code == kOpDispatch ? MOE_TENSOR(call, x) : MOE_TENSOR(call, expand_x);
    const bool known = IsKnown(rows) && IsKnown(MOE_TENSOR(call, expert_ids));
    OutputDesc outputs[kMaxOpOutputs];
    const size_t count = OutputsOf(call, outputs);
    for (size_t i = 0; i < count; ++i) {
        gert::Shape* shape = context.GetOutputShape(i);
        if (shape == nullptr) return ReportMissing(op, "the shape of output", op.outputs[i].name);
        const bool fixed = i + 1 == count;  // the error record
        shape->SetDimNum(static_cast<size_t>(outputs[i].rank));
        for (int32_t d = 0; d < outputs[i].rank; ++d) {
            shape->SetDim(static_cast<size_t>(d), known || fixed ? outputs[i].dims[d] : -1);
        }
    }
    return true;
}

inline ge::graphStatus InferShapes(gert::InferShapeContext* context, uint32_t code) {
    return context != nullptr && WriteShapes(*context, code) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

inline ge::graphStatus InferDataTypes(gert::InferDataTypeContext* context, uint32_t code) {
    CallSpec call;
    CannAttributes others;
    if (context == nullptr || !ReadCall(*context, code, call, others)) return ge::GRAPH_FAILED;
    OutputDesc outputs[kMaxOpOutputs];
    const size_t count = OutputsOf(call, outputs);
    for (size_t i = 0; i < count; ++i) {
        if (context->SetOutputDataType(i, CannTypeOf(outputs[i].dtype)) != ge::GRAPH_SUCCESS)
            return ge::GRAPH_FAILED;
    }
    return ge::GRAPH_SUCCESS;
}

}  // namespace moe
