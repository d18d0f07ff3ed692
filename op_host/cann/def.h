// From the tables of moe_distribute_op.h to an op definition of CANN.
#pragma once

#include <vector>

#include "call.h"
#include "register/op_def_registry.h"

namespace moe {

// Columns of the dtype lists: a binary of the kernel is built for each. Rows are bf16, fp16 or fp32; dispatch
// sends them as they are, or as int8 when it quantises.
struct RowTypes {
    ge::DataType rows;
    ge::DataType wire;
};
constexpr RowTypes kRowTypes[] = {
    {ge::DT_BF16, ge::DT_BF16}, {ge::DT_FLOAT16, ge::DT_FLOAT16}, {ge::DT_FLOAT, ge::DT_FLOAT},
    {ge::DT_BF16, ge::DT_INT8}, {ge::DT_FLOAT16, ge::DT_INT8},    {ge::DT_FLOAT, ge::DT_INT8},
};
constexpr size_t kPlainColumns = 3;  // of them, the first: those of an op that does not quantise

inline ge::DataType ColumnType(OpType type, const RowTypes& column) {
    switch (type) {
        case OpType::kRows: return column.rows;
        case OpType::kWireRows: return column.wire;
        case OpType::kFp32: return ge::DT_FLOAT;
        case OpType::kInt32: return ge::DT_INT32;
        case OpType::kInt64: return ge::DT_INT64;
        default: return ge::DT_BOOL;
    }
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

// Asked when a GE graph is compiled, never for aclnn calls. A graph would run the kernels without their
// communicator: there is no task generation for it, and CANN's is not a public interface.
inline ge::graphStatus RefuseGraph(const ge::Operator&, ge::AscendString& result) {
    result = ge::AscendString(
        "{\"ret_code\": \"0\", \"reason\": \"AscendMoe ops cannot be part of a GE graph "
        "(torchair): "
        "call them eagerly, or capture them in an ACL graph (torch.npu.graph)\"}");
    return ge::GRAPH_FAILED;
}

// jitCompile: as CANN's own operators of this kind have it, static binaries on A3, not on A2.
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

// Of an op: columns of the dtype lists, and what CANN calls.
struct OpFunctions {
    size_t columns;
    decltype(&InferShapeDispatch) inferShape;
    decltype(&InferDataTypeDispatch) inferDataType;
    decltype(&TileDispatch) tile;
};
inline OpFunctions FunctionsOf(uint32_t code) {
    constexpr size_t kAllColumns = sizeof(kRowTypes) / sizeof(kRowTypes[0]);
    if (code == kOpDispatch) return {kAllColumns, InferShapeDispatch, InferDataTypeDispatch, TileDispatch};
    if (code == kOpCombine) return {kPlainColumns, InferShapeCombine, InferDataTypeCombine, TileCombine};
    return {1, InferShapeProbe, InferDataTypeProbe, TileProbe};
}

inline void DescribeOp(uint32_t code, ops::OpDef& definition) {
    const OpInterface op = InterfaceOf(code);
    const OpFunctions functions = FunctionsOf(code);
    const size_t columns = functions.columns;
    for (const OpTensor& tensor : op.inputs) {
        DescribeTensor(tensor, columns, definition.Input(tensor.name)).AutoContiguous();
    }
    for (const OpTensor& tensor : op.outputs) DescribeTensor(tensor, columns, definition.Output(tensor.name));
    for (const OpAttribute& attribute : op.attributes) {
        DescribeAttribute(attribute, definition.Attr(attribute.name));
    }
    definition.SetInferShape(functions.inferShape).SetInferDataType(functions.inferDataType);
    definition.AICore().SetTiling(functions.tile).SetCheckSupport(RefuseGraph);
    DescribeSoc("ascend910b", "static_false", definition);
    DescribeSoc("ascend910_93", "static_true", definition);
    definition.MC2().HcclGroup("group_ep");  // group_tp joins it with the TP domain
}

}  // namespace moe
