// VNPU_OP(aclnnXxx, types...): exports aclnnXxxGetWorkspaceSize(types..., uint64_t*, aclOpExecutor**) and
// aclnnXxx.
//
// The types are those that torch_npu passes, in its order: an integer and a float travel in different
// registers, so a wrong letter here is a wrong value there. What an operator does stands in
// vnpu/ascend_vnpu/operators/.
#pragma once

#include "call.h"

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

// aclnnName(types..., out) and aclnnInplaceName(types...), which writes to its first tensor.
#define VNPU_BOTH(name, ...)             \
    VNPU_OP(aclnn##name, __VA_ARGS__, T) \
    VNPU_OP(aclnnInplace##name, __VA_ARGS__)

// A comparison with a tensor and with a number.
#define VNPU_COMPARISON(name)     \
    VNPU_BOTH(name##Tensor, T, T) \
    VNPU_BOTH(name##Scalar, T, S)

// On lists of tensors, with a number: one for all, or one for each.
#define VNPU_FOREACH(name)                         \
    VNPU_OP(aclnnForeach##name##ScalarV2, L, S, L) \
    VNPU_OP(aclnnForeach##name##ScalarList, L, SL, L)
