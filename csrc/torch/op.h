// The four ops by their schemas, and the arguments of one call.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rules/args.h"
#include "tensor.h"

namespace ascend_moe_torch {

struct Parameter {
    enum Kind : uint8_t { kTensor, kInt, kGroupEp, kGroupTp, kCommAlg };
    std::string name;
    Kind kind;
    bool optional;   // "Tensor?", "int?": boxed once more on the stack
    uint32_t index;  // TensorIndex or AttributeIndex of op_host
};

struct Op {
    uint64_t number;
    std::string name;
    uint32_t code;      // kOpDispatch, kOpCombine
    uint32_t contract;  // kContractV1, kContractV2
    std::vector<Parameter> parameters;

    // Throws std::runtime_error for a schema that no op has.
    static Op Parse(uint64_t number, const std::string& name, const std::string& schema);
    uint64_t outputs() const;
};

// What a stack holds, which this owns from its construction on.
class Arguments {
public:
    Arguments(const Op& op, const StableIValue* stack);
    ~Arguments();
    Arguments(const Arguments&) = delete;
    Arguments& operator=(const Arguments&) = delete;

    const int64_t* attributes() const { return attributes_; }
    int64_t attribute(moe::AttributeIndex index) const { return attributes_[index]; }
    // An int that is kNoValue, which would be taken for None; null: there is none.
    const Parameter* lowest() const { return lowest_; }
    AtenTensorHandle tensor(uint32_t index) const { return tensors_[index]; }
    // Null where there is none: the parameter is no tensor, or None.
    AtenTensorHandle tensor(const Parameter& parameter) const {
        return parameter.kind == Parameter::kTensor ? tensors_[parameter.index] : nullptr;
    }
    std::string_view group_ep() const { return group_ep_.view; }
    std::string_view group_tp() const { return group_tp_.view; }
    std::string_view comm_alg() const { return comm_alg_.view; }

private:
    struct String {
        StringHandle handle = nullptr;
        std::string_view view;
        void Take(StableIValue value);
    };

    AtenTensorHandle tensors_[moe::kTensorCount] = {};
    int64_t attributes_[moe::kAttributeCount];
    String group_ep_, group_tp_, comm_alg_;
    const Parameter* lowest_ = nullptr;
};

}  // namespace ascend_moe_torch
