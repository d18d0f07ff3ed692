// Captured calls: from the caller's argument objects to words, and from an executor to a stream.
#include "call.h"

namespace vnpu {
namespace {

template <typename T>
T read(const aclScalar& scalar) {
    T value;
    std::memcpy(&value, scalar.bytes, sizeof value);
    return value;
}

float half_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    uint32_t result = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    if (exponent == 0) {  // zero or denormal: mantissa * 2^-24
        const float value = static_cast<float>(mantissa) / 16777216.0f;
        return sign != 0 ? -value : value;
    }
    float value;
    std::memcpy(&value, &result, sizeof value);
    return value;
}

float bfloat_to_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
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
    if (text == nullptr) {
        words.push_back(kNone);
        return;
    }
    // A copy: the caller's text need not outlive the first half of the call.
    texts.push_back(std::make_shared<std::string>(text));
    words.insert(words.end(), {kText, reinterpret_cast<int64_t>(texts.back()->data()),
                               static_cast<int64_t>(texts.back()->size())});
}

void Call::put(const aclTensor* tensor) {
    if (tensor == nullptr) {
        words.push_back(kNone);
        return;
    }
    const TensorValue& value = *tensor->value;
    tensors.push_back(tensor->value);
    words.insert(words.end(),
                 {kTensor, value.dtype, value.format, reinterpret_cast<int64_t>(value.data), value.offset,
                  reinterpret_cast<int64_t>(value.dims.data()), static_cast<int64_t>(value.dims.size())});
    words.insert(words.end(), value.dims.begin(), value.dims.end());
    words.insert(words.end(), value.strides.begin(), value.strides.end());
}

void Call::put(const aclScalar* scalar) {
    if (scalar == nullptr) {
        words.push_back(kNone);
        return;
    }
    switch (scalar->dtype) {
        case 0: put(read<float>(*scalar)); break;
        case 1: put(half_to_float(read<uint16_t>(*scalar))); break;
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
        case 27: put(bfloat_to_float(read<uint16_t>(*scalar))); break;
        default: put("a complex scalar"); break;  // no operator here takes text for a number: it says so
    }
}

void Call::put(const aclIntArray* array) {
    if (array == nullptr) {
        words.push_back(kNone);
        return;
    }
    words.insert(words.end(), {kInts, static_cast<int64_t>(array->values.size())});
    words.insert(words.end(), array->values.begin(), array->values.end());
}

void Call::put(const aclBoolArray* array) {
    if (array == nullptr) {
        words.push_back(kNone);
        return;
    }
    words.insert(words.end(), {kInts, static_cast<int64_t>(array->values.size())});
    words.insert(words.end(), array->values.begin(), array->values.end());
}

void Call::put(const aclFloatArray* array) {
    if (array == nullptr) {
        words.push_back(kNone);
        return;
    }
    words.insert(words.end(), {kList, static_cast<int64_t>(array->values.size())});
    for (float value : array->values) put(value);
}

void Call::put(const aclTensorList* list) {
    if (list == nullptr) {
        words.push_back(kNone);
        return;
    }
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
    auto* kept = new std::shared_ptr<Call>(executor->call);
    if (!executor->repeatable) delete executor;
    return vnpu_enqueue(
        stream,
        [](void* arg) {
            const std::string problem = run_in_python(**static_cast<std::shared_ptr<Call>*>(arg));
            if (problem.empty()) return;
            vnpu_error("%s", problem.c_str());
            vnpu_fault();
        },
        kept, [](void* arg) { delete static_cast<std::shared_ptr<Call>*>(arg); });
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
