// The objects (aclTensor, aclScalar, lists) that describe the arguments of aclnn functions. Plain C ABI of CANN's
// acl_meta.h, declared here so that nothing of CANN is needed to build.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "acl/error.h"

namespace vnpu {

// aclnn status codes; callers only distinguish zero from the rest and print the number.
constexpr int kOk = 0;
constexpr int kNullArgument = 161001;

// A strided view of memory. Counts are in elements of dtype (an aclDataType).
struct TensorValue {
    int32_t dtype = -1;
    int32_t format = -1;
    int64_t offset = 0;
    void* data = nullptr;
    std::vector<int64_t> dims, strides;
};

}  // namespace vnpu

// Executors keep the value, not the aclTensor: torch_npu destroys the aclTensor after the call, and a
// captured graph runs the call again long after that.
struct aclTensor {
    std::shared_ptr<vnpu::TensorValue> value;
};
VNPU_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides,
                                       int64_t offset, int format, const int64_t* storage, uint64_t storage_rank,
                                       void* data);
VNPU_EXPORT int aclDestroyTensor(const aclTensor* tensor);
// Descriptions of tensors that were created and not destroyed.
VNPU_EXPORT int64_t vnpu_live_tensors();

struct aclScalar {
    enum { kInteger, kReal, kComplex } kind;
    int64_t integer;
    double real;
};
struct aclIntArray {
    std::vector<int64_t> values;
};
struct aclFloatArray {
    std::vector<float> values;
};
struct aclBoolArray : aclIntArray {};
// A list owns its elements: destroying it destroys them, as in CANN.
struct aclTensorList {
    std::vector<const aclTensor*> values;
};
struct aclScalarList {
    std::vector<const aclScalar*> values;
};

struct aclOpExecutor;  // a captured call
