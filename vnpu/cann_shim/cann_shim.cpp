#include "cann_shim.h"

#include <cstdarg>
#include <cstdio>

namespace {

thread_local std::string last_error;

// The definition that a call is for; null, and the reason in last_error, when the call does not fit it.
const ops::OpDef* DefinitionOf(cann_shim::Call& call) {
    last_error.clear();
    const ops::OpDef* definition = cann_shim::Definition(call.opType);
    if (definition == nullptr) {
        last_error = "op_host defines no op " + call.opType;
        return nullptr;
    }
    call.outputs.resize(definition->outputs.size());
    const size_t inputs = call.inputs.size(), attributes = call.attributes.values.size();
    if (inputs == definition->inputs.size() && attributes == definition->attributes.size()) return definition;
    last_error = call.opType + " has " + std::to_string(definition->inputs.size()) + " inputs and " +
                 std::to_string(definition->attributes.size()) + " attributes, not " + std::to_string(inputs) +
                 " and " + std::to_string(attributes);
    return nullptr;
}

}  // namespace

int32_t ge::ReportUserDefinedErrMsg(const char*, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    last_error = text;
    return 0;
}

std::map<std::string, ops::OpDef>& ops::Registered() {
    static std::map<std::string, OpDef> registered;
    return registered;
}

const ops::OpDef* cann_shim::Definition(const std::string& opType) {
    const auto entry = ops::Registered().find(opType);
    return entry == ops::Registered().end() ? nullptr : &entry->second;
}

cann_shim::Tiling cann_shim::Tile(Call& call) {
    Tiling tiling;
    const ops::OpDef* definition = DefinitionOf(call);
    gert::TilingContext context(call, tiling);
    tiling.ok = definition != nullptr && definition->aiCore.tiling(&context) == ge::GRAPH_SUCCESS;
    tiling.error = last_error;
    return tiling;
}

std::string cann_shim::InferShapes(Call& call) {
    const ops::OpDef* definition = DefinitionOf(call);
    if (definition == nullptr) return last_error;
    gert::InferShapeContext shapes(call);
    gert::InferDataTypeContext types(call);
    const bool ok =
        definition->inferShape(&shapes) == ge::GRAPH_SUCCESS && definition->inferDataType(&types) == ge::GRAPH_SUCCESS;
    return ok ? "" : last_error;
}
