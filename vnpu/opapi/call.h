// One captured call of an aclnn function: its arguments as words that Python reads
// (ascend_moe/vnpu/operators_memory.py).
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "values.h"

struct aclOpExecutor;

namespace vnpu {

// The first word of every argument. The same numbers stand in operators_memory.py.
enum Kind : int64_t {
    kNone = 0,
    kTensor = 1,
    kInt = 2,
    kFloat = 3,
    kText = 4,
    kInts = 5,
    kFloats = 6,
    kList = 7
};

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
    void put(const aclBoolArray* array);
    void put(const aclFloatArray* array);
    void put(const aclTensorList* list);  // kList, length, then one argument each
    void put(const char* text);           // kText, address, bytes
    void put(double number);              // kFloat, the number's bits
    void put(float number) { put(static_cast<double>(number)); }
    void put(int64_t number);  // kInt, number
    void put(uint64_t number) { put(static_cast<int64_t>(number)); }
    void put(int32_t number) { put(static_cast<int64_t>(number)); }
    void put(int8_t number) { put(static_cast<int64_t>(number)); }
    void put(bool number) { put(static_cast<int64_t>(number)); }
};

// Runs the call in the process's Python. Empty, or one line that says what went wrong, the operator's name
// first.
std::string run_in_python(const Call& call);

// The two halves of an aclnn function: remember the call; put it on a stream.
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

// aclOpExecutor belongs to whoever runs it: execute() frees it, unless the caller asked to run it again.
struct aclOpExecutor {
    std::shared_ptr<vnpu::Call> call;
    bool repeatable = false;
};
