// Stand-in for CANN's header of this name.
#pragma once

#include "exe_graph/runtime/tiling_context.h"

namespace gert {

class InferDataTypeContext : public CallContext {
public:
    using CallContext::CallContext;
    ge::DataType GetInputDataType(size_t index) const { return TypeOf(Present(index)); }
    ge::DataType GetOptionalInputDataType(size_t index) const { return TypeOf(Defined(index)); }
    ge::graphStatus SetOutputDataType(size_t index, ge::DataType type) {
        if (index >= call_.outputTypes.size()) return ge::GRAPH_FAILED;
        call_.outputTypes[index] = type;
        return ge::GRAPH_SUCCESS;
    }

private:
    static ge::DataType TypeOf(const CallData::Input* input) {
        return input == nullptr ? ge::DT_UNDEFINED : input->desc.GetDataType();
    }
};

}  // namespace gert
