// The objects behind aclTensor and its kin: what a caller of an aclnn function describes its arguments with.
// Plain C ABI of CANN's acl_meta.h, declared here so that nothing of CANN is needed to build.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "acl/vnpu_stream.h"

namespace vnpu {

// aclnn status codes; callers only tell zero from the rest and print the number.
constexpr int kOk = 0;
constexpr int kNullArgument = 161001;

// A strided view of memory. Counts are in elements of dtype (an aclDataType).
struct TensorValue {
    int32_t dtype = -1;
    int32_t format = -1;
    int64_t offset = 0;
    void* data = nullptr;
    std::vector<int64_t> dims, strides, storage_dims;
};

}  // namespace vnpu

// Executors keep the value, not the aclTensor: torch_npu destroys the aclTensor after the call, and a
// captured graph runs the call again long after that.
struct aclTensor {
    std::shared_ptr<vnpu::TensorValue> value;
};
struct aclScalar {
    int32_t dtype = -1;
    alignas(16) unsigned char bytes[16] = {};
};
struct aclIntArray {
    std::vector<int64_t> values;
};
struct aclFloatArray {
    std::vector<float> values;
};
struct aclBoolArray {
    std::vector<int64_t> values;
};
// A list owns its elements: destroying it destroys them, as in CANN.
struct aclTensorList {
    std::vector<const aclTensor*> values;
};
struct aclScalarList {
    std::vector<const aclScalar*> values;
};
