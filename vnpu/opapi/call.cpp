// Captured calls: from the caller's argument objects to words, and from an executor to a stream.
#include "call.h"

#include "twin/math/numeric.h"

namespace vnpu {
namespace {

template <typename T>
T read(const aclScalar& scalar) {
    T value;
    std::memcpy(&value, scalar.bytes, sizeof value);
    return value;
}

}  // namespace

void Call::put(int64_t number) { words.insert(words.end(), {kInt, number}); }

void Call::put(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    words.insert(words.end(), {kFloat, bits});
}

void Call::put(const char* text) {
    if (text == nullptr) return words.push_back(kNone);
    // A copy: the caller's text need not outlive the first half of the call.
    texts.push_back(std::make_shared<std::string>(text));
    words.insert(words.end(), {kText, reinterpret_cast<int64_t>(texts.back()->data()),
                               static_cast<int64_t>(texts.back()->size())});
}

void Call::put(const aclTensor* tensor) {
    if (tensor == nullptr) return words.push_back(kNone);
    const TensorValue& value = *tensor->value;
    tensors.push_back(tensor->value);
    words.insert(words.end(),
                 {kTensor, value.dtype, value.format, reinterpret_cast<int64_t>(value.data), value.offset,
                  reinterpret_cast<int64_t>(value.dims.data()), static_cast<int64_t>(value.dims.size())});
    words.insert(words.end(), value.dims.begin(), value.dims.end());
    words.insert(words.end(), value.strides.begin(), value.strides.end());
}

void Call::put(const aclScalar* scalar) {
    if (scalar == nullptr) return words.push_back(kNone);
    switch (scalar->dtype) {
        case 0: put(read<float>(*scalar)); break;
        case 1: put(static_cast<float>(read<half>(*scalar))); break;
        case 2: put(read<int8_t>(*scalar)); break;
        case 3: put(read<int32_t>(*scalar)); break;
        case 4: put(static_cast<int64_t>(read<uint8_t>(*scalar))); break;
        case 6: put(static_cast<int64_t>(read<int16_t>(*scalar))); break;
        case 7: put(static_cast<int64_t>(read<uint16_t>(*scalar))); break;
        case 8: put(static_cast<int64_t>(read<uint32_t>(*scalar))); break;
        case 9:
        case 10: put(read<int64_t>(*scalar)); break;
        case 11: put(read<double>(*scalar)); break;
        case 12: put(read<bool>(*scalar)); break;
        case 27: put(static_cast<float>(read<bfloat16_t>(*scalar))); break;
        default: put("a complex scalar"); break;  // no operator here takes text for a number: it says so
    }
}

void Call::put(const aclIntArray* array) {
    if (array == nullptr) return words.push_back(kNone);
    words.insert(words.end(), {kInts, static_cast<int64_t>(array->values.size())});
    words.insert(words.end(), array->values.begin(), array->values.end());
}

void Call::put(const aclFloatArray* array) {
    if (array == nullptr) return words.push_back(kNone);
    words.insert(words.end(), {kList, static_cast<int64_t>(array->values.size())});
    for (float value : array->values) put(value);
}

void Call::put(const aclTensorList* list) {
    if (list == nullptr) return words.push_back(kNone);
    words.insert(words.end(), {kList, static_cast<int64_t>(list->values.size())});
    for (const aclTensor* tensor : list->values) put(tensor);
}

int finish_capture(std::shared_ptr<Call> call, uint64_t* workspace_size, aclOpExecutor** executor) {
    if (workspace_size == nullptr || executor == nullptr) {
        vnpu_error("%sGetWorkspaceSize: workspaceSize and executor must not be null", call->name);
        return kNullArgument;
    }
    *workspace_size = 0;
    *executor = new aclOpExecutor{std::move(call)};
    return kOk;
}

int execute(aclOpExecutor* executor, void* stream) {
    if (executor == nullptr) {
        vnpu_error("an aclnn function was called without the executor that its GetWorkspaceSize gives");
        return kNullArgument;
    }
    // The graph of a capture keeps its own reference, so that it can be replayed when the executor is gone.
    const std::shared_ptr<Call> call = executor->call;
    if (!executor->repeatable) delete executor;
    return vnpu_enqueue_call(stream, [call] {
        const std::string problem = run_in_python(*call);
        if (problem.empty()) return;
        vnpu_error("%s", problem.c_str());
        vnpu_fault();
    });
}

}  // namespace vnpu

VNPU_EXPORT int aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
    if (executor == nullptr) return vnpu::kNullArgument;
    executor->repeatable = true;
    return vnpu::kOk;
}

VNPU_EXPORT int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    delete executor;
    return vnpu::kOk;
}
