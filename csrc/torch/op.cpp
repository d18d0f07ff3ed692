#include "op.h"

#include <sstream>
#include <stdexcept>

#include "rules/op.h"
#include "rules/shape.h"

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
    if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("torch refuses ") + what);
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

// ---- ops ----

namespace {

uint32_t TensorIndexOf(const std::string& name) {
#define AM_NAME(tensor) #tensor,
    static const char* const names[] = {ASCEND_MOE_TENSORS(AM_NAME)};
#undef AM_NAME
    uint32_t index = 0;
    while (index < moe::kTensorCount && name != names[index]) ++index;
    return index;
}

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
    made.index = tensor ? TensorIndexOf(name) : moe::AttributeIndexOf(name.c_str());
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

uint64_t Op::outputs() const { return code == moe::kOpDispatch ? moe::kMostOutputs : 1; }

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
