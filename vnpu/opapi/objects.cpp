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

template <typename Array, typename T>
Array* create_array(const T* values, uint64_t size) {
    auto* array = new Array;
    for (uint64_t i = 0; i < size; i++) array->values.push_back(values[i]);
    return array;
}

template <typename T>
int destroy(const T* object) {
    delete object;
    return vnpu::kOk;
}

// The caller frees these with delete[], as acl_meta.h says.
int copy_out(const std::vector<int64_t>& values, int64_t** out, uint64_t* size) {
    if (out == nullptr || size == nullptr) return vnpu::kNullArgument;
    *size = values.size();
    *out = new int64_t[std::max<size_t>(values.size(), 1)];
    std::copy(values.begin(), values.end(), *out);
    return vnpu::kOk;
}

template <typename Array>
int array_size(const Array* array, uint64_t* size) {
    if (array == nullptr || size == nullptr) return vnpu::kNullArgument;
    *size = array->values.size();
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

VNPU_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
    return create_array<aclIntArray>(values, size);
}
VNPU_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
    return create_array<aclFloatArray>(values, size);
}
VNPU_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
    return create_array<aclBoolArray>(values, size);
}
VNPU_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t size) {
    return create_array<aclTensorList>(values, size);
}
VNPU_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t size) {
    return create_array<aclScalarList>(values, size);
}

VNPU_EXPORT int aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }
VNPU_EXPORT int aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }
VNPU_EXPORT int aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }
VNPU_EXPORT int aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }
VNPU_EXPORT int aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }
VNPU_EXPORT int aclDestroyTensorList(const aclTensorList* list) {
    if (list != nullptr) std::for_each(list->values.begin(), list->values.end(), aclDestroyTensor);
    return destroy(list);
}
VNPU_EXPORT int aclDestroyScalarList(const aclScalarList* list) {
    if (list != nullptr) std::for_each(list->values.begin(), list->values.end(), aclDestroyScalar);
    return destroy(list);
}

VNPU_EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank) {
    return tensor == nullptr ? vnpu::kNullArgument : copy_out(tensor->value->dims, dims, rank);
}
VNPU_EXPORT int aclGetStorageShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank) {
    return tensor == nullptr ? vnpu::kNullArgument : copy_out(tensor->value->storage_dims, dims, rank);
}
VNPU_EXPORT int aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* rank) {
    return tensor == nullptr ? vnpu::kNullArgument : copy_out(tensor->value->strides, strides, rank);
}
VNPU_EXPORT int aclGetViewOffset(const aclTensor* tensor, int64_t* offset) {
    if (tensor == nullptr || offset == nullptr) return vnpu::kNullArgument;
    *offset = tensor->value->offset;
    return vnpu::kOk;
}
VNPU_EXPORT int aclGetFormat(const aclTensor* tensor, int32_t* format) {
    if (tensor == nullptr || format == nullptr) return vnpu::kNullArgument;
    *format = tensor->value->format;
    return vnpu::kOk;
}
VNPU_EXPORT int aclGetDataType(const aclTensor* tensor, int32_t* dtype) {
    if (tensor == nullptr || dtype == nullptr) return vnpu::kNullArgument;
    *dtype = tensor->value->dtype;
    return vnpu::kOk;
}
VNPU_EXPORT int aclGetRawTensorAddr(const aclTensor* tensor, void** address) {
    if (tensor == nullptr || address == nullptr) return vnpu::kNullArgument;
    *address = tensor->value->data;
    return vnpu::kOk;
}
VNPU_EXPORT int aclSetRawTensorAddr(aclTensor* tensor, void* address) {
    if (tensor == nullptr) return vnpu::kNullArgument;
    tensor->value->data = address;
    return vnpu::kOk;
}
VNPU_EXPORT int aclGetIntArraySize(const aclIntArray* array, uint64_t* size) {
    return array_size(array, size);
}
VNPU_EXPORT int aclGetFloatArraySize(const aclFloatArray* array, uint64_t* size) {
    return array_size(array, size);
}
VNPU_EXPORT int aclGetBoolArraySize(const aclBoolArray* array, uint64_t* size) {
    return array_size(array, size);
}
VNPU_EXPORT int aclGetTensorListSize(const aclTensorList* list, uint64_t* size) {
    return array_size(list, size);
}
VNPU_EXPORT int aclGetScalarListSize(const aclScalarList* list, uint64_t* size) {
    return array_size(list, size);
}
