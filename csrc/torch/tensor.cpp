#include "tensor.h"

#include <stdexcept>

#include "rules/args.h"

namespace ascend_moe_torch {

namespace {

struct DtypeName {
    int32_t (*number)();
    uint32_t code;
    const char* name;
};
// The first ones are those of outputs and of rows, looked for most.
const DtypeName kDtypes[] = {
    {aoti_torch_dtype_bfloat16, moe::kTypeBf16, "bfloat16"},
    {aoti_torch_dtype_int32, moe::kTypeInt32, "int32"},
    {aoti_torch_dtype_float32, moe::kTypeFp32, "float32"},
    {aoti_torch_dtype_float16, moe::kTypeFp16, "float16"},
    {aoti_torch_dtype_int8, moe::kTypeInt8, "int8"},
    {aoti_torch_dtype_int64, moe::kTypeInt64, "int64"},
    {aoti_torch_dtype_bool, moe::kTypeBool, "bool"},
    {aoti_torch_dtype_float64, moe::kTypeOther, "float64"},
    {aoti_torch_dtype_int16, moe::kTypeOther, "int16"},
    {aoti_torch_dtype_uint8, moe::kTypeOther, "uint8"},
    {aoti_torch_dtype_uint16, moe::kTypeOther, "uint16"},
    {aoti_torch_dtype_uint32, moe::kTypeOther, "uint32"},
    {aoti_torch_dtype_uint64, moe::kTypeOther, "uint64"},
    {aoti_torch_dtype_complex32, moe::kTypeOther, "complex32"},
    {aoti_torch_dtype_complex64, moe::kTypeOther, "complex64"},
    {aoti_torch_dtype_complex128, moe::kTypeOther, "complex128"},
    {aoti_torch_dtype_float8_e5m2, moe::kTypeOther, "float8_e5m2"},
    {aoti_torch_dtype_float8_e4m3fn, moe::kTypeOther, "float8_e4m3fn"},
    {aoti_torch_dtype_float8_e5m2fnuz, moe::kTypeOther, "float8_e5m2fnuz"},
    {aoti_torch_dtype_float8_e4m3fnuz, moe::kTypeOther, "float8_e4m3fnuz"},
};

struct LayoutName {
    int32_t (*number)();
    const char* name;
};
const LayoutName kLayouts[] = {
    {aoti_torch_layout_sparse_coo, "torch.sparse_coo"}, {aoti_torch_layout_sparse_csr, "torch.sparse_csr"},
    {aoti_torch_layout_sparse_csc, "torch.sparse_csc"}, {aoti_torch_layout_sparse_bsr, "torch.sparse_bsr"},
    {aoti_torch_layout_sparse_bsc, "torch.sparse_bsc"}, {aoti_torch_layout__mkldnn, "torch._mkldnn"},
    {aoti_torch_layout_jagged, "torch.jagged"},
};

int32_t LayoutOf(AtenTensorHandle tensor) {
    int32_t layout = 0;
    Check(aoti_torch_get_layout(tensor, &layout), "a tensor's layout");
    return layout;
}

}  // namespace

void Check(AOTITorchError code, const char* what) {
    if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("torch reports an error for ") + what);
}

Device DeviceOf(AtenTensorHandle tensor) {
    Device device;
    Check(aoti_torch_get_device_type(tensor, &device.type), "a tensor's device");
    Check(aoti_torch_get_device_index(tensor, &device.index), "a tensor's device");
    return device;
}

std::string Text(const Device& device) {
    if (device.type == aoti_torch_device_type_cpu()) return "cpu";
    if (device.type == aoti_torch_device_type_meta()) return "meta";
    const char* name = device.type == aoti_torch_device_type_privateuse1() ? "npu"
                       : device.type == aoti_torch_device_type_cuda()      ? "cuda"
                       : device.type == aoti_torch_device_type_xpu()       ? "xpu"
                                                                           : "another device";
    return std::string(name) + ":" + std::to_string(device.index);
}

bool IsDense(AtenTensorHandle tensor) { return LayoutOf(tensor) == aoti_torch_layout_strided(); }

std::string LayoutText(AtenTensorHandle tensor) {
    const int32_t layout = LayoutOf(tensor);
    for (const LayoutName& entry : kLayouts) {
        if (entry.number() == layout) return entry.name;
    }
    return "torch.strided";
}

int32_t DtypeOf(AtenTensorHandle tensor) {
    int32_t dtype = 0;
    Check(aoti_torch_get_dtype(tensor, &dtype), "a tensor's dtype");
    return dtype;
}

uint32_t TypeCode(int32_t dtype) {
    for (const DtypeName& entry : kDtypes) {
        if (entry.number() == dtype) return entry.code;
    }
    return moe::kTypeOther;
}

int32_t DtypeOfCode(uint32_t code) {
    for (const DtypeName& entry : kDtypes) {
        if (entry.code == code) return entry.number();
    }
    throw std::runtime_error("an output has no dtype");
}

std::string DtypeText(int32_t dtype) {
    for (const DtypeName& entry : kDtypes) {
        if (entry.number() == dtype) return entry.name;
    }
    return moe::TypeName(moe::kTypeOther);
}

int64_t RankOf(AtenTensorHandle tensor) {
    int64_t rank = 0;
    Check(aoti_torch_get_dim(tensor, &rank), "a tensor's rank");
    return rank;
}

const int64_t* SizesOf(AtenTensorHandle tensor) {
    int64_t* sizes = nullptr;
    Check(aoti_torch_get_sizes(tensor, &sizes), "a tensor's sizes");
    return sizes;
}

const void* DataOf(AtenTensorHandle tensor) {
    const void* data = nullptr;
    Check(torch_get_const_data_ptr(tensor, &data), "a tensor's data");
    return data;
}

Tensor Empty(const int64_t* sizes, int64_t rank, int32_t dtype, const Device& device) {
    const int64_t strides[2] = {rank == 2 ? sizes[1] : 1, 1};
    AtenTensorHandle made = nullptr;
    Check(aoti_torch_empty_strided(rank, sizes, strides, dtype, device.type, device.index, &made),
          "memory for an output");
    return Tensor(made);
}

AtenTensorHandle Contiguous(AtenTensorHandle tensor, Tensor& made) {
    bool contiguous = false;
    Check(aoti_torch_is_contiguous(tensor, &contiguous), "a tensor's strides");
    if (contiguous) return tensor;
    AtenTensorHandle own = nullptr;
    Check(aoti_torch_new_tensor_handle(tensor, &own), "a tensor");
    const int32_t format = aoti_torch_memory_format_contiguous_format();
    StableIValue stack[2] = {reinterpret_cast<StableIValue>(own), static_cast<StableIValue>(format)};
    Check(torch_call_dispatcher("aten::contiguous", "", stack, kTorchTarget), "a contiguous copy");
    made.reset(reinterpret_cast<AtenTensorHandle>(stack[0]));
    return made.get();
}

}  // namespace ascend_moe_torch
