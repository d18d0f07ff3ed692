// aclCreate* and aclDestroy*: the arguments of aclnn functions, as libnnopbase.so makes them on a device.
#include "objects.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "twin/math/numeric.h"

namespace {

template <typename T>
aclScalar integer(const void* value) {
    T number;
    std::memcpy(&number, value, sizeof number);
    return {aclScalar::kInteger, static_cast<int64_t>(number), 0};
}
template <typename T>
aclScalar real(const void* value) {
    T number;
    std::memcpy(&number, value, sizeof number);
    if constexpr (std::is_same_v<T, double>) return {aclScalar::kReal, 0, number};
    return {aclScalar::kReal, 0, static_cast<float>(number)};
}
aclScalar complex(const void*) { return {aclScalar::kComplex, 0, 0}; }

// By aclDataType; null where no scalar has that type.
using Read = aclScalar (*)(const void*);
constexpr Read kReadScalar[] = {
    real<float>,      real<half>,        integer<int8_t>,   integer<int32_t>, integer<uint8_t>,  nullptr,
    integer<int16_t>, integer<uint16_t>, integer<uint32_t>, integer<int64_t>, integer<uint64_t>, real<double>,
    integer<bool>,    nullptr,           nullptr,           nullptr,          complex,           complex,
    nullptr,          nullptr,           nullptr,           nullptr,          nullptr,           nullptr,
    nullptr,          nullptr,           nullptr,           real<bfloat16_t>};

std::atomic<int64_t> live_tensors{0};

}  // namespace

VNPU_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides,
                                       int64_t offset, int format, const int64_t*, uint64_t, void* data) {
    auto* tensor = new aclTensor{std::make_shared<vnpu::TensorValue>()};
    ++live_tensors;
    vnpu::TensorValue& value = *tensor->value;
    value.dtype = dtype;
    value.format = format;
    value.offset = offset;
    value.data = data;
    value.dims.assign(dims, dims + rank);
    if (strides != nullptr) {
        value.strides.assign(strides, strides + rank);
        return tensor;
    }
    value.strides.assign(rank, 1);
    for (uint64_t i = rank; i > 1; i--) {
        value.strides[i - 2] = value.strides[i - 1] * std::max<int64_t>(value.dims[i - 1], 1);
    }
    return tensor;
}

VNPU_EXPORT aclScalar* aclCreateScalar(void* value, int dtype) {
    const auto index = static_cast<size_t>(dtype);
    const Read read = index < std::size(kReadScalar) ? kReadScalar[index] : nullptr;
    if (value != nullptr && read != nullptr) return new aclScalar(read(value));
    vnpu_error("aclCreateScalar: %s (aclDataType %d)", value == nullptr ? "no value" : "no such scalar type", dtype);
    return nullptr;
}

VNPU_EXPORT int aclDestroyTensor(const aclTensor* tensor) {
    live_tensors -= tensor != nullptr;
    return delete tensor, vnpu::kOk;
}
VNPU_EXPORT int64_t vnpu_live_tensors() { return live_tensors; }
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

namespace {
template <typename T>
int give(const aclTensor* tensor, T vnpu::TensorValue::* field, T* out) {
    if (tensor == nullptr || out == nullptr) return vnpu::kNullArgument;
    *out = (*tensor->value).*field;
    return vnpu::kOk;
}
// The caller frees the numbers with delete[], as acl_meta.h says.
int copy_out(const aclTensor* tensor, std::vector<int64_t> vnpu::TensorValue::* field, int64_t** out, uint64_t* rank) {
    if (tensor == nullptr || out == nullptr || rank == nullptr) return vnpu::kNullArgument;
    const std::vector<int64_t>& values = (*tensor->value).*field;
    *rank = values.size();
    *out = new int64_t[std::max<size_t>(values.size(), 1)];
    std::copy(values.begin(), values.end(), *out);
    return vnpu::kOk;
}
}  // namespace

VNPU_EXPORT int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank) {
    return copy_out(tensor, &vnpu::TensorValue::dims, dims, rank);
}
VNPU_EXPORT int aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* rank) {
    return copy_out(tensor, &vnpu::TensorValue::strides, strides, rank);
}
VNPU_EXPORT int aclGetViewOffset(const aclTensor* tensor, int64_t* offset) {
    return give(tensor, &vnpu::TensorValue::offset, offset);
}
VNPU_EXPORT int aclGetDataType(const aclTensor* tensor, int32_t* dtype) {
    return give(tensor, &vnpu::TensorValue::dtype, dtype);
}
VNPU_EXPORT int aclGetRawTensorAddr(const aclTensor* tensor, void** address) {
    return give(tensor, &vnpu::TensorValue::data, address);
}
