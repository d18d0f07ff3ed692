// aclCreate*, aclDestroy* and aclGet*: the arguments of aclnn functions, as libnnopbase.so makes them on a
// device.
#include "call.h"

#include <algorithm>
#include <cstring>

namespace {

// Sizes of scalars' types, by aclDataType; 0 where no scalar has that type.
size_t scalar_bytes(int32_t dtype) {
    switch (dtype) {
        case 2:
        case 4:
        case 12: return 1;  // int8, uint8, bool
        case 1:
        case 6:
        case 7:
        case 27: return 2;  // fp16, int16, uint16, bf16
        case 0:
        case 3:
        case 8: return 4;  // fp32, int32, uint32
        case 9:
        case 10:
        case 11:
        case 16: return 8;   // int64, uint64, fp64, complex64
        case 17: return 16;  // complex128
        default: return 0;
    }
}

// The caller frees these with delete[], as acl_meta.h says.
int copy_out(const aclTensor* tensor, const std::vector<int64_t> vnpu::TensorValue::* field, int64_t** out,
             uint64_t* size) {
    if (tensor == nullptr || out == nullptr || size == nullptr) return vnpu::kNullArgument;
    const std::vector<int64_t>& values = *tensor->value.*field;
    *size = values.size();
    *out = new int64_t[std::max<size_t>(values.size(), 1)];
    std::copy(values.begin(), values.end(), *out);
    return vnpu::kOk;
}

template <typename T>
int give(const aclTensor* tensor, T vnpu::TensorValue::* field, T* out) {
    if (tensor == nullptr || out == nullptr) return vnpu::kNullArgument;
    *out = *tensor->value.*field;
    return vnpu::kOk;
}

void fill(vnpu::TensorValue& value, const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides,
          int64_t offset, int format, const int64_t* storage_dims, uint64_t storage_rank, void* data) {
    value.dtype = dtype;
    value.format = format;
    value.offset = offset;
    value.data = data;
    value.dims.assign(dims, dims + rank);
    value.storage_dims.assign(storage_dims, storage_dims + storage_rank);
    if (strides != nullptr) {
        value.strides.assign(strides, strides + rank);
        return;
    }
    value.strides.assign(rank, 1);
    for (uint64_t i = rank; i > 1; i--) {
        value.strides[i - 2] = value.strides[i - 1] * std::max<int64_t>(value.dims[i - 1], 1);
    }
}

}  // namespace

VNPU_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides,
                                       int64_t offset, int format, const int64_t* storage_dims,
                                       uint64_t storage_rank, void* data) {
    auto* tensor = new aclTensor{std::make_shared<vnpu::TensorValue>()};
    fill(*tensor->value, dims, rank, dtype, strides, offset, format, storage_dims, storage_rank, data);
    return tensor;
}

VNPU_EXPORT int aclInitTensor(aclTensor* tensor, const int64_t* dims, uint64_t rank, int dtype,
                              const int64_t* strides, int64_t offset, int format, const int64_t* storage_dims,
                              uint64_t storage_rank, void* data) {
    if (tensor == nullptr) return vnpu::kNullArgument;
    tensor->value = std::make_shared<vnpu::TensorValue>();
    fill(*tensor->value, dims, rank, dtype, strides, offset, format, storage_dims, storage_rank, data);
    return vnpu::kOk;
}

VNPU_EXPORT aclScalar* aclCreateScalar(void* value, int dtype) {
    if (value == nullptr || scalar_bytes(dtype) == 0) {
        vnpu_error("aclCreateScalar: %s (aclDataType %d)",
                   value == nullptr ? "no value" : "no such scalar type", dtype);
        return nullptr;
    }
    auto* scalar = new aclScalar;
    scalar->dtype = dtype;
    std::memcpy(scalar->bytes, value, scalar_bytes(dtype));
    return scalar;
}

VNPU_EXPORT int aclDestroyTensor(const aclTensor* tensor) { return delete tensor, vnpu::kOk; }
VNPU_EXPORT int aclDestroyScalar(const aclScalar* scalar) { return delete scalar, vnpu::kOk; }

namespace {
// Elements of lists are destroyed with them, numbers need nothing.
void destroy(const aclTensor* tensor) { aclDestroyTensor(tensor); }
void destroy(const aclScalar* scalar) { aclDestroyScalar(scalar); }
void destroy(double) {}
}  // namespace

// aclCreateName, aclDestroyName and aclGetNameSize of an array or list.
#define VNPU_ARRAY(name, element)                                                  \
    VNPU_EXPORT acl##name* aclCreate##name(element const* values, uint64_t size) { \
        auto* array = new acl##name;                                               \
        array->values.assign(values, values + size);                               \
        return array;                                                              \
    }                                                                              \
    VNPU_EXPORT int aclDestroy##name(const acl##name* array) {                     \
        if (array != nullptr) {                                                    \
            for (const auto& value : array->values) destroy(value);                \
        }                                                                          \
        delete array;                                                              \
        return vnpu::kOk;                                                          \
    }                                                                              \
    VNPU_EXPORT int aclGet##name##Size(const acl##name* array, uint64_t* size) {   \
        if (array == nullptr || size == nullptr) return vnpu::kNullArgument;       \
        *size = array->values.size();                                              \
        return vnpu::kOk;                                                          \
    }
VNPU_ARRAY(IntArray, int64_t)
VNPU_ARRAY(FloatArray, float)
VNPU_ARRAY(BoolArray, bool)
VNPU_ARRAY(TensorList, const aclTensor*)
VNPU_ARRAY(ScalarList, const aclScalar*)

VNPU_EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank) {
    return copy_out(tensor, &vnpu::TensorValue::dims, dims, rank);
}
VNPU_EXPORT int aclGetStorageShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank) {
    return copy_out(tensor, &vnpu::TensorValue::storage_dims, dims, rank);
}
VNPU_EXPORT int aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* rank) {
    return copy_out(tensor, &vnpu::TensorValue::strides, strides, rank);
}
VNPU_EXPORT int aclGetViewOffset(const aclTensor* tensor, int64_t* offset) {
    return give(tensor, &vnpu::TensorValue::offset, offset);
}
VNPU_EXPORT int aclGetFormat(const aclTensor* tensor, int32_t* format) {
    return give(tensor, &vnpu::TensorValue::format, format);
}
VNPU_EXPORT int aclGetDataType(const aclTensor* tensor, int32_t* dtype) {
    return give(tensor, &vnpu::TensorValue::dtype, dtype);
}
VNPU_EXPORT int aclGetRawTensorAddr(const aclTensor* tensor, void** address) {
    return give(tensor, &vnpu::TensorValue::data, address);
}
VNPU_EXPORT int aclSetRawTensorAddr(aclTensor* tensor, void* address) {
    if (tensor == nullptr) return vnpu::kNullArgument;
    tensor->value->data = address;
    return vnpu::kOk;
}
