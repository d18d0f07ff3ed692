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

// VNPU_OPS((types...), names...): aclnnName(types...) for every name.
#define VNPU_OPS(types, ...) VNPU_NAMES1(VNPU_NEXT_NAME(VNPU_ONE, types, __VA_ARGS__))
// VNPU_BOTH((types...), names...): aclnnName(types..., out) and aclnnInplaceName(types...), which writes to its first
// tensor.
#define VNPU_BOTH(types, ...) VNPU_NAMES1(VNPU_NEXT_NAME(VNPU_TWO, types, __VA_ARGS__))
#define VNPU_ONE(name, types) VNPU_OP(aclnn##name, VNPU_BARE types)
#define VNPU_TWO(name, types)                \
    VNPU_OP(aclnn##name, VNPU_BARE types, T) \
    VNPU_OP(aclnnInplace##name, VNPU_BARE types)
#define VNPU_BARE(...) __VA_ARGS__
#define VNPU_NEXT_NAME(form, types, name, ...) \
    form(name, types) __VA_OPT__(VNPU_LATER_NAME VNPU_PARENTHESES(form, types, __VA_ARGS__))
#define VNPU_LATER_NAME() VNPU_NEXT_NAME
#define VNPU_NAMES1(...) VNPU_NAMES2(VNPU_NAMES2(VNPU_NAMES2(VNPU_NAMES2(__VA_ARGS__))))
#define VNPU_NAMES2(...) VNPU_NAMES3(VNPU_NAMES3(VNPU_NAMES3(VNPU_NAMES3(__VA_ARGS__))))
#define VNPU_NAMES3(...) VNPU_NAMES4(VNPU_NAMES4(VNPU_NAMES4(VNPU_NAMES4(__VA_ARGS__))))
#define VNPU_NAMES4(...) __VA_ARGS__
