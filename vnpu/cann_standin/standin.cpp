#include "standin.h"

#include <cstdarg>
#include <cstdio>

#include "base/err_msg.h"
#include "platform/platform_infos_def.h"

namespace {

constexpr size_t kTilingCapacity = 4096;  // more than op_host needs; CANN's is set by the op's compilation

std::string& LastError() {
    thread_local std::string text;
    return text;
}

gert::CallData Describe(const standin::Call& call, const ops::OpDef& definition) {
    std::vector<gert::RuntimeAttrs::Value> attributes;
    for (const standin::Attribute& attribute : call.attributes) {
        attributes.push_back({attribute.isText, attribute.number, attribute.text});
    }
    const size_t outputs = definition.outputs.size();
    gert::CallData data = {{},
                           std::vector<gert::Shape>(outputs),
                           std::vector<ge::DataType>(outputs, ge::DT_UNDEFINED),
                           gert::RuntimeAttrs(std::move(attributes))};
    for (const standin::Tensor& input : call.inputs) {
        data.inputs.push_back({input.given, gert::StorageShape(gert::Shape(input.dims)),
                               gert::CompileTimeTensorDesc(static_cast<ge::DataType>(input.type))});
    }
    return data;
}

// The definition that a call is for; null with a reason when the call does not fit it.
const ops::OpDef* DefinitionOf(const standin::Call& call, std::string& error) {
    const ops::OpDef* definition = standin::Definition(call.opType);
    if (definition == nullptr) {
        error = "op_host defines no op " + call.opType;
    } else if (call.inputs.size() != definition->inputs.size() ||
               call.attributes.size() != definition->attributes.size()) {
        error = call.opType + " has " + std::to_string(definition->inputs.size()) + " inputs and " +
                std::to_string(definition->attributes.size()) + " attributes, not " +
                std::to_string(call.inputs.size()) + " and " + std::to_string(call.attributes.size());
        definition = nullptr;
    }
    return definition;
}

}  // namespace

int32_t ge::ReportUserDefinedErrMsg(const char*, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    LastError() = text;
    return 0;
}

std::map<std::string, ops::OpDef>& ops::Registered() {
    static std::map<std::string, OpDef> registered;
    return registered;
}

const ops::OpDef* standin::Definition(const std::string& opType) {
    const auto entry = ops::Registered().find(opType);
    return entry == ops::Registered().end() ? nullptr : &entry->second;
}

standin::Tiling standin::Tile(const Call& call) {
    Tiling tiling;
    const ops::OpDef* definition = DefinitionOf(call, tiling.error);
    if (definition == nullptr) return tiling;
    LastError().clear();
    gert::CallData data = Describe(call, *definition);
    fe::PlatFormInfos platform(call.soc, call.vectorCores);
    gert::TilingData raw(kTilingCapacity);
    gert::TilingContext context(data, platform, raw);
    tiling.ok = definition->aiCore.tiling(&context) == ge::GRAPH_SUCCESS;
    tiling.error = LastError();
    if (!tiling.ok) return tiling;
    const uint8_t* bytes = static_cast<const uint8_t*>(raw.GetData());
    tiling.bytes.assign(bytes, bytes + raw.GetDataSize());
    tiling.tilingKey = context.GetTilingKey();
    tiling.blockDim = context.GetBlockDim();
    tiling.scheduleMode = context.GetScheduleMode();
    tiling.workspaces = context.workspaces();
    return tiling;
}

standin::Shapes standin::InferShapes(const Call& call) {
    Shapes shapes;
    const ops::OpDef* definition = DefinitionOf(call, shapes.error);
    if (definition == nullptr) return shapes;
    LastError().clear();
    gert::CallData data = Describe(call, *definition);
    gert::InferShapeContext shapeContext(data);
    gert::InferDataTypeContext typeContext(data);
    shapes.ok = definition->inferShape(&shapeContext) == ge::GRAPH_SUCCESS &&
                definition->inferDataType(&typeContext) == ge::GRAPH_SUCCESS;
    shapes.error = LastError();
    for (size_t i = 0; shapes.ok && i < data.outputs.size(); ++i) {
        Tensor output;
        output.given = true;
        output.type = data.outputTypes[i];
        for (size_t d = 0; d < data.outputs[i].GetDimNum(); ++d)
            output.dims.push_back(data.outputs[i].GetDim(d));
        shapes.outputs.push_back(output);
    }
    return shapes;
}
