// Calls of aclnn functions, and the objects (aclTensor, aclScalar, lists) that describe their arguments.
// Plain C ABI of CANN's acl_meta.h, declared here so that nothing of CANN is needed to build.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "acl/queue.h"

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

// ---- One captured call of an aclnn function: its arguments as words that Python reads
// (vnpu/ascend_vnpu/operators/registry.py).

struct aclOpExecutor;

namespace vnpu {

// The first word of every argument. The same numbers stand in operators/registry.py.
enum Kind : int64_t { kNone = 0, kTensor = 1, kInt = 2, kFloat = 3, kText = 4, kInts = 5, kList = 7 };

struct Call {
    const char* name = nullptr;
    std::vector<int64_t> words;
    std::vector<std::shared_ptr<TensorValue>> tensors;
    std::vector<std::shared_ptr<std::string>> texts;

    // kTensor, dtype, format, data, offset, address of dims (to be overwritten by data-dependent shapes),
    // rank, dims, strides
    void put(const aclTensor* tensor);
    // A scalar travels as what Python would have passed: an int, a float, or a bool as int. Complex is
    // refused.
    void put(const aclScalar* scalar);
    void put(const aclIntArray* array);
    void put(const aclFloatArray* array);
    void put(const aclTensorList* list);  // kList, length, then one argument each
    void put(const aclScalarList* list);
    void put(const char* text);  // kText, address, bytes
    void put(double number);     // kFloat, the number's bits
    void put(float number) { put(static_cast<double>(number)); }
    void put(int64_t number);  // kInt, number
    void put(uint64_t number) { put(static_cast<int64_t>(number)); }
    void put(int32_t number) { put(static_cast<int64_t>(number)); }
    void put(int8_t number) { put(static_cast<int64_t>(number)); }
    void put(bool number) { put(static_cast<int64_t>(number)); }
};

// Runs the call in the process's Python, whose lock this thread holds. Empty, or one line that says what went wrong,
// the operator's name first.
std::string run_in_python(const Call& call);

// The two phases of an aclnn function: remember the call; put it on a stream.
int finish_capture(std::shared_ptr<Call> call, uint64_t* workspace_size, aclOpExecutor** executor);
int execute(aclOpExecutor* executor, void* stream);

template <typename... Args>
int capture(const char* name, uint64_t* workspace_size, aclOpExecutor** executor, Args... args) {
    auto call = std::make_shared<Call>();
    call->name = name;
    (call->put(args), ...);
    return finish_capture(std::move(call), workspace_size, executor);
}

}  // namespace vnpu

// execute() frees it.
struct aclOpExecutor {
    std::shared_ptr<vnpu::Call> call;
};
