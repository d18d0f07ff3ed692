#include "op.h"

#include <sstream>
#include <stdexcept>

#include "rules/op_tables.h"

namespace ascend_moe_torch {

namespace {

Parameter ParameterOf(const std::string& type, const std::string& name) {
    Parameter made{name, Parameter::kTensor, type.back() == '?', 0};
    if (type == "str") {
        if (name != "group_ep" && name != "group_tp" && name != "comm_alg")
            throw std::runtime_error("no rule knows a str " + name);
        made.kind = name == "group_ep"   ? Parameter::kGroupEp
                    : name == "group_tp" ? Parameter::kGroupTp
                                         : Parameter::kCommAlg;
        return made;
    }
    const bool tensor = type == "Tensor" || type == "Tensor?";
    if (!tensor && type != "int" && type != "int?") throw std::runtime_error("no rule knows a " + type);
    made.kind = tensor ? Parameter::kTensor : Parameter::kInt;
    made.index = tensor ? moe::TensorIndexOf(name.c_str()) : moe::AttributeIndexOf(name.c_str());
    if (made.index == (tensor ? uint32_t{moe::kTensorCount} : uint32_t{moe::kAttributeCount}))
        throw std::runtime_error("no rule knows " + name);
    return made;
}

bool EndsWith(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The value in the box that optional arguments come in; false: None.
bool Unbox(StableIValue& value) {
    if (value == 0) return false;
    auto* box = reinterpret_cast<StableIValue*>(value);
    value = *box;
    delete box;  // as torch/csrc/stable/stableivalue_conversions.h does
    return true;
}

// None for a tensor that is required comes as a tensor without anything.
void DropUndefined(AtenTensorHandle& tensor) {
    bool defined = false;
    Check(aoti_torch_is_defined(tensor, &defined), "a tensor");
    if (defined) return;
    aoti_torch_delete_tensor_object(tensor);
    tensor = nullptr;
}

}  // namespace

// "(Tensor x, str group_ep, *, Tensor? scales=None, int tp_world_size=0) -> Tensor"
Op Op::Parse(uint64_t number, const std::string& name, const std::string& schema) {
    Op op{number,
          name,
          name.find("dispatch") != std::string::npos ? moe::kOpDispatch : moe::kOpCombine,
          EndsWith(name, "_v2") ? moe::kContractV2 : moe::kContractV1,
          {}};
    const size_t end = schema.find(") ->");
    if (schema.empty() || schema[0] != '(' || end == std::string::npos)
        throw std::runtime_error("no schema: " + schema);
    std::istringstream words(schema.substr(1, end - 1));
    std::string type, rest;
    while (words >> type) {
        if (type == "*,") continue;
        words >> rest;
        op.parameters.push_back(ParameterOf(type, rest.substr(0, rest.find_first_of("=,"))));
    }
    return op;
}

uint64_t Op::outputs() const {
    return moe::InterfaceOf(code).outputs.size - 1;
}  // the error record is the kernels' own

void Arguments::String::Take(StableIValue value) {
    handle = reinterpret_cast<StringHandle>(value);
    const char* data = nullptr;
    size_t bytes = 0;
    Check(torch_string_c_str(handle, &data), "a str");
    Check(torch_string_length(handle, &bytes), "a str");
    view = {data, bytes};
}

Arguments::Arguments(const Op& op, const StableIValue* stack) {
    for (int64_t& attribute : attributes_) attribute = moe::kNoValue;
    for (const Parameter& parameter : op.parameters) {
        StableIValue value = *stack++;
        if (parameter.optional && !Unbox(value)) continue;
        switch (parameter.kind) {
            case Parameter::kTensor:
                tensors_[parameter.index] = reinterpret_cast<AtenTensorHandle>(value);
                DropUndefined(tensors_[parameter.index]);
                break;
            case Parameter::kInt:
                attributes_[parameter.index] = static_cast<int64_t>(value);
                if (attributes_[parameter.index] == moe::kNoValue) lowest_ = &parameter;
                break;
            case Parameter::kGroupEp: group_ep_.Take(value); break;
            case Parameter::kGroupTp: group_tp_.Take(value); break;
            case Parameter::kCommAlg: comm_alg_.Take(value); break;
        }
    }
}

Arguments::~Arguments() {
    for (AtenTensorHandle tensor : tensors_) {
        if (tensor != nullptr) aoti_torch_delete_tensor_object(tensor);
    }
    for (const String* text : {&group_ep_, &group_tp_, &comm_alg_}) {
        if (text->handle != nullptr) torch_delete_string(text->handle);
    }
}

}  // namespace ascend_moe_torch
