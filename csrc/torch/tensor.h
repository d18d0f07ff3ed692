// Tensors by torch's stable C interface, without the cost of torch::stable::Tensor's shared pointers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <memory>
#include <string>

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

}  // namespace ascend_moe_torch
