// What CANN asks of an op: output shapes and types, by the shape functions used everywhere else, and the op's
// definition, from the tables of rules/op_tables.h.
#pragma once

#include <vector>

#include "register/op_def_registry.h"
#include "tiling.h"
#include "../rules/shape.h"

namespace moe {

// All outputs of an op, the error record last. Returns how many.
inline size_t OutputsWithRecord(const CallSpec& call, OutputDesc (&out)[kMostOutputs + 1]) {
    const size_t count = OutputsOf(call, out);
    out[count] = {kTypeInt32, 1, {kErrorRecordWords, 0}};
    return count + 1;
}

// Sizes unknown to a graph are negative, and so is everything that depends on them.
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
    const OpInterface& op = InterfaceOf(code);
    const TensorDesc& rows = code == kOpDispatch ? MOE_TENSOR(call, x) : MOE_TENSOR(call, expand_x);
    const bool known = IsKnown(rows) && IsKnown(MOE_TENSOR(call, expert_ids));
    OutputDesc outputs[kMostOutputs + 1];
    const size_t count = OutputsWithRecord(call, outputs);
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

template <uint32_t kCode>
ge::graphStatus InferShapes(gert::InferShapeContext* context) {
    return context != nullptr && WriteShapes(*context, kCode) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

template <uint32_t kCode>
ge::graphStatus InferDataTypes(gert::InferDataTypeContext* context) {
    CallSpec call;
    CannAttributes others;
    if (context == nullptr || !ReadCall(*context, kCode, call, others)) return ge::GRAPH_FAILED;
    OutputDesc outputs[kMostOutputs + 1];
    const size_t count = OutputsWithRecord(call, outputs);
    for (size_t i = 0; i < count; ++i) {
        if (context->SetOutputDataType(i, CannTypeOf(outputs[i].dtype)) != ge::GRAPH_SUCCESS) return ge::GRAPH_FAILED;
    }
    return ge::GRAPH_SUCCESS;
}

// Of an op whose one output has a block of 32 bytes per core that a launch may have.
inline ge::graphStatus InferShapeOfBlocks(gert::InferShapeContext* context) {
    gert::Shape* shape = context == nullptr ? nullptr : context->GetOutputShape(0);
    if (shape == nullptr) return ge::GRAPH_FAILED;
    shape->SetDimNum(2);
    shape->SetDim(0, kMaxCores);
    shape->SetDim(1, kBlockWords);
    return ge::GRAPH_SUCCESS;
}
inline ge::graphStatus InferDataTypeOfBlocks(gert::InferDataTypeContext* context) {
    return context == nullptr ? ge::GRAPH_FAILED : context->SetOutputDataType(0, ge::DT_INT32);
}

// ---- the definition ----

inline ge::DataType ColumnType(uint32_t type, const RowTypes& column) {
    return CannTypeOf(type == kRows ? column.rows : type == kWireRows ? column.wire : type);
}

inline ops::OpParamDef& DescribeTensor(const OpTensor& tensor, size_t columns, ops::OpParamDef& parameter) {
    std::vector<ge::DataType> types;
    for (size_t i = 0; i < columns; ++i) types.push_back(ColumnType(tensor.type, kRowTypes[i]));
    const std::vector<ge::Format> formats(columns, ge::FORMAT_ND);
    return parameter.ParamType(tensor.required ? ops::REQUIRED : ops::OPTIONAL)
        .DataType(types)
        .Format(formats)
        .UnknownShapeFormat(formats);
}

inline void DescribeAttribute(const OpAttribute& attribute, ops::OpAttrDef& definition) {
    definition.AttrType(attribute.required ? ops::REQUIRED : ops::OPTIONAL);
    if (attribute.text != nullptr) {
        attribute.required ? definition.String() : definition.String(attribute.text);
    } else {
        attribute.required ? definition.Int() : definition.Int(attribute.value);
    }
}

// Called when a GE graph is compiled, never for aclnn calls. A graph would run the kernels without their communicator:
// there is no task generation for it, and CANN's is not a public interface.
inline ge::graphStatus RefuseGraph(const ge::Operator&, ge::AscendString& result) {
    result = ge::AscendString(
        "{\"ret_code\": \"0\", \"reason\": \"AscendMoe ops cannot be part of a GE graph "
        "(torchair): "
        "call them eagerly, or capture them in an ACL graph (torch.npu.graph)\"}");
    return ge::GRAPH_FAILED;
}

// jitCompile: as in CANN's own operators of this kind, static binaries on A3, not on A2.
inline void DescribeSoc(const char* soc, const char* jitCompile, ops::OpDef& definition) {
    ops::OpAICoreConfig config;
    config.DynamicCompileStaticFlag(true)
        .DynamicFormatFlag(true)
        .DynamicRankSupportFlag(true)
        .DynamicShapeSupportFlag(true)
        .NeedCheckSupportFlag(true)
        .PrecisionReduceFlag(true)
        .ExtendCfgInfo("aclnnSupport.value", "support_aclnn")
        .ExtendCfgInfo("jitCompile.flag", jitCompile)
        .ExtendCfgInfo("multiKernelSupportDynamicGraph.value", "multi_kernel")
        .ExtendCfgInfo("prebuildPattern.value", "Opaque");
    definition.AICore().AddConfig(soc, config);
}

// The functions of an op that CANN calls.
struct OpFunctions {
    decltype(&InferShapes<kOpDispatch>) inferShape;
    decltype(&InferDataTypes<kOpDispatch>) inferDataType;
    decltype(&Tile<kOpDispatch>) tile;
};
template <uint32_t kCode>
constexpr OpFunctions kFunctionsOf = {InferShapes<kCode>, InferDataTypes<kCode>, Tile<kCode>};

inline void DescribeOp(uint32_t code, const OpFunctions& functions, ops::OpDef& definition) {
    const OpInterface& op = InterfaceOf(code);
    for (const OpTensor& tensor : op.inputs) {
        DescribeTensor(tensor, op.columns, definition.Input(tensor.name)).AutoContiguous();
    }
    for (const OpTensor& tensor : op.outputs) DescribeTensor(tensor, op.columns, definition.Output(tensor.name));
    for (const OpAttribute& attribute : op.attributes) {
        DescribeAttribute(attribute, definition.Attr(attribute.name));
    }
    definition.SetInferShape(functions.inferShape).SetInferDataType(functions.inferDataType);
    definition.AICore().SetTiling(functions.tile).SetCheckSupport(RefuseGraph);
    DescribeSoc("ascend910b", "static_false", definition);
    DescribeSoc("ascend910_93", "static_true", definition);
    // group_tp joins it with the TP domain. On one card there is no group.
    if (code != kOpOneCard) definition.MC2().HcclGroup("group_ep");
}

}  // namespace moe
