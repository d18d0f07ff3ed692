// Stand-in for CANN's header of this name.
#pragma once

#include "exe_graph/runtime/tiling_context.h"

namespace gert {

class InferShapeContext : public CallContext {
public:
    using CallContext::CallContext;
    const Shape* GetInputShape(size_t index) const {
        const CallData::Input* input = Present(index);
        return input == nullptr ? nullptr : &input->shape.GetOriginShape();
    }
    const Shape* GetOptionalInputShape(size_t index) const {
        const CallData::Input* input = Defined(index);
        return input == nullptr ? nullptr : &input->shape.GetOriginShape();
    }
    Shape* GetOutputShape(size_t index) {
        return index < call_.outputs.size() ? &call_.outputs[index] : nullptr;
    }
};

}  // namespace gert
