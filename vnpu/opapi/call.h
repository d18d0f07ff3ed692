// Calls of aclnn functions: captured as words that Python reads (vnpu/ascend_vnpu/operators/registry.py), and the
// macros that export the functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "acl/queue.h"
#include "objects.h"

namespace vnpu {

// The first word of every argument. The same numbers stand in operators/registry.py.
enum Kind : int64_t { kNone = 0, kTensor = 1, kInt = 2, kFloat = 3, kText = 4, kList = 7 };

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
    void put(const char* text);  // kText, address, bytes
    void put(double number);     // kFloat, the number's bits
    void put(float number) { put(static_cast<double>(number)); }
    void put(int64_t number);  // kInt, number
    void put(uint64_t number) { put(static_cast<int64_t>(number)); }
    void put(int32_t number) { put(static_cast<int64_t>(number)); }
    void put(int8_t number) { put(static_cast<int64_t>(number)); }
    void put(bool number) { put(static_cast<int64_t>(number)); }
    // Of tensors, scalars or numbers: kList, length, then one argument each.
    template <typename List>
    void put(const List* list) {
        if (list == nullptr) return words.push_back(kNone);
        words.insert(words.end(), {kList, static_cast<int64_t>(list->values.size())});
        for (const auto& value : list->values) put(value);
    }
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

// ---- exports
//
// VNPU_OP(aclnnXxx, types...): exports aclnnXxxGetWorkspaceSize(types..., uint64_t*, aclOpExecutor**) and
// aclnnXxx.
//
// The types are those that torch_npu passes, in its order: an integer and a float travel in different
// registers, so a wrong letter here is a wrong value there. What an operator does stands in
// vnpu/ascend_vnpu/operators/.

namespace vnpu::types {
using T = const aclTensor*;  // a tensor, input or output, or null
using S = const aclScalar*;
using L = const aclTensorList*;
using SL = const aclScalarList*;
using IA = const aclIntArray*;
using I = int64_t;
using I8 = int8_t;
using I32 = int32_t;  // int, aclDataType
using B = bool;
using D = double;
using F = float;
using C = const char*;
}  // namespace vnpu::types

// Applies each(type, name) to every type, with commas between: names are a, a_, a__, ...
#define VNPU_PARENTHESES ()
#define VNPU_AGAIN1(...) VNPU_AGAIN2(VNPU_AGAIN2(VNPU_AGAIN2(VNPU_AGAIN2(__VA_ARGS__))))
#define VNPU_AGAIN2(...) VNPU_AGAIN3(VNPU_AGAIN3(VNPU_AGAIN3(VNPU_AGAIN3(__VA_ARGS__))))
#define VNPU_AGAIN3(...) VNPU_AGAIN4(VNPU_AGAIN4(VNPU_AGAIN4(VNPU_AGAIN4(__VA_ARGS__))))
#define VNPU_AGAIN4(...) __VA_ARGS__
#define VNPU_EACH(each, ...) __VA_OPT__(VNPU_AGAIN1(VNPU_NEXT(each, a, __VA_ARGS__)))
#define VNPU_NEXT(each, name, type, ...) \
    each(type, name) __VA_OPT__(, VNPU_LATER VNPU_PARENTHESES(each, name##_, __VA_ARGS__))
#define VNPU_LATER() VNPU_NEXT
#define VNPU_PARAMETER(type, name) type name
#define VNPU_NAME(type, name) name
#define VNPU_TYPE(type, name) type

#define VNPU_OP(name, ...)                                                                                   \
    VNPU_EXPORT int name##GetWorkspaceSize(VNPU_EACH(VNPU_PARAMETER, __VA_ARGS__), uint64_t* workspace_size, \
                                           aclOpExecutor** executor) {                                       \
        return vnpu::capture(#name, workspace_size, executor, VNPU_EACH(VNPU_NAME, __VA_ARGS__));            \
    }                                                                                                        \
    VNPU_EXPORT int name(void*, uint64_t, aclOpExecutor* executor, void* stream) {                           \
        return vnpu::execute(executor, stream);                                                              \
    }

// aclnnName, and aclnnNameGetMaxWorkspaceSize, which needs no executor.
#define VNPU_SIZED(name, ...)                                                                    \
    VNPU_OP(name, __VA_ARGS__)                                                                   \
    VNPU_EXPORT int name##GetMaxWorkspaceSize(VNPU_EACH(VNPU_TYPE, __VA_ARGS__), uint64_t* size, \
                                              aclOpExecutor** made) {                            \
        *size = 0;                                                                               \
        *made = nullptr;                                                                         \
        return vnpu::kOk;                                                                        \
    }

// VNPU_OPS((types...), names...): aclnnName(types...) for every name.
#define VNPU_OPS(types, ...) VNPU_EVERY(VNPU_ONE, types, __VA_ARGS__)
#define VNPU_ONE(name, types) VNPU_OP(aclnn##name, VNPU_BARE types)
#define VNPU_BARE(...) __VA_ARGS__

// VNPU_BOTH((types...), names...): aclnnName(types..., out) and aclnnInplaceName(types...), which writes to its first
// tensor.
#define VNPU_BOTH(types, ...) VNPU_EVERY(VNPU_TWO, types, __VA_ARGS__)
#define VNPU_TWO(name, types)                \
    VNPU_OP(aclnn##name, VNPU_BARE types, T) \
    VNPU_OP(aclnnInplace##name, VNPU_BARE types)
