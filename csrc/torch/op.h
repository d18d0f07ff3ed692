// Tensors by torch's stable C interface, without the cost of torch::stable::Tensor's shared pointers; the
// four ops by their schemas, and the arguments of one call.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rules/args.h"

namespace ascend_moe_torch {

// The torch whose conventions this library keeps: the oldest that it runs with (cmake/torch.cmake).
constexpr uint64_t kTorchTarget = TORCH_TARGET_VERSION;

struct DeleteTensor {
    void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Tensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Throws std::runtime_error where torch refuses.
void Check(AOTITorchError code, const char* what);

struct Device {
    int32_t type;
    int32_t index;
    bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};
Device DeviceOf(AtenTensorHandle tensor);
std::string Text(const Device& device);  // as torch prints it
bool IsDense(AtenTensorHandle tensor);
std::string LayoutText(AtenTensorHandle tensor);

int32_t DtypeOf(AtenTensorHandle tensor);
// torch's number of a dtype as op_host's, kTypeOther for those that no kernel knows; and back.
uint32_t TypeCode(int32_t dtype);
int32_t DtypeOfCode(uint32_t code);
std::string DtypeText(int32_t dtype);

int64_t RankOf(AtenTensorHandle tensor);
const int64_t* SizesOf(AtenTensorHandle tensor);
const void* DataOf(AtenTensorHandle tensor);

Tensor Empty(const int64_t* sizes, int64_t rank, int32_t dtype, const Device& device);
// The tensor itself, or `made` with its elements in their order.
AtenTensorHandle Contiguous(AtenTensorHandle tensor, Tensor& made);

// ---- ops ----

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
