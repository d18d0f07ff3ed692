// VNPU_OP(aclnnXxx, types...): exports aclnnXxxGetWorkspaceSize(types..., uint64_t*, aclOpExecutor**) and
// aclnnXxx.
//
// The types are those that torch_npu passes, in its order: an integer and a float travel in different
// registers, so a wrong letter here is a wrong value there. What an operator does stands in
// ascend_moe/vnpu/operators/.
#pragma once

#include "call.h"

namespace vnpu::types {
using T = const aclTensor*;  // a tensor, input or output, or null
using S = const aclScalar*;
using L = const aclTensorList*;
using IA = const aclIntArray*;
using I = int64_t;
using I8 = int8_t;
using I32 = int32_t;  // int, aclDataType
using B = bool;
using D = double;
using F = float;
using C = const char*;
}  // namespace vnpu::types

// Applies each(type, name) to up to 20 types.
#define VNPU_COUNT_(a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20, count, \
                    ...)                                                                                              \
    count
#define VNPU_COUNT(...) \
    VNPU_COUNT_(__VA_ARGS__, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define VNPU_JOIN_(a, b) a##b
#define VNPU_JOIN(a, b) VNPU_JOIN_(a, b)
#define VNPU_1(each, t) each(t, a1)
#define VNPU_2(each, t, ...) each(t, a2), VNPU_1(each, __VA_ARGS__)
#define VNPU_3(each, t, ...) each(t, a3), VNPU_2(each, __VA_ARGS__)
#define VNPU_4(each, t, ...) each(t, a4), VNPU_3(each, __VA_ARGS__)
#define VNPU_5(each, t, ...) each(t, a5), VNPU_4(each, __VA_ARGS__)
#define VNPU_6(each, t, ...) each(t, a6), VNPU_5(each, __VA_ARGS__)
#define VNPU_7(each, t, ...) each(t, a7), VNPU_6(each, __VA_ARGS__)
#define VNPU_8(each, t, ...) each(t, a8), VNPU_7(each, __VA_ARGS__)
#define VNPU_9(each, t, ...) each(t, a9), VNPU_8(each, __VA_ARGS__)
#define VNPU_10(each, t, ...) each(t, a10), VNPU_9(each, __VA_ARGS__)
#define VNPU_11(each, t, ...) each(t, a11), VNPU_10(each, __VA_ARGS__)
#define VNPU_12(each, t, ...) each(t, a12), VNPU_11(each, __VA_ARGS__)
#define VNPU_13(each, t, ...) each(t, a13), VNPU_12(each, __VA_ARGS__)
#define VNPU_14(each, t, ...) each(t, a14), VNPU_13(each, __VA_ARGS__)
#define VNPU_15(each, t, ...) each(t, a15), VNPU_14(each, __VA_ARGS__)
#define VNPU_16(each, t, ...) each(t, a16), VNPU_15(each, __VA_ARGS__)
#define VNPU_17(each, t, ...) each(t, a17), VNPU_16(each, __VA_ARGS__)
#define VNPU_18(each, t, ...) each(t, a18), VNPU_17(each, __VA_ARGS__)
#define VNPU_19(each, t, ...) each(t, a19), VNPU_18(each, __VA_ARGS__)
#define VNPU_20(each, t, ...) each(t, a20), VNPU_19(each, __VA_ARGS__)
#define VNPU_EACH(each, ...) VNPU_JOIN(VNPU_, VNPU_COUNT(__VA_ARGS__))(each, __VA_ARGS__)
#define VNPU_PARAMETER(type, name) type name
#define VNPU_NAME(type, name) name

#define VNPU_OP(name, ...)                                                                                   \
    VNPU_EXPORT int name##GetWorkspaceSize(VNPU_EACH(VNPU_PARAMETER, __VA_ARGS__), uint64_t* workspace_size, \
                                           aclOpExecutor** executor) {                                       \
        return vnpu::capture(#name, workspace_size, executor, VNPU_EACH(VNPU_NAME, __VA_ARGS__));            \
    }                                                                                                        \
    VNPU_EXPORT int name(void*, uint64_t, aclOpExecutor* executor, void* stream) {                           \
        return vnpu::execute(executor, stream);                                                              \
    }

// aclnnName(types..., out) and aclnnInplaceName(types...), which writes to its first tensor.
#define VNPU_BOTH(name, ...)             \
    VNPU_OP(aclnn##name, __VA_ARGS__, T) \
    VNPU_OP(aclnnInplace##name, __VA_ARGS__)

// A comparison with a tensor and with a number.
#define VNPU_COMPARISON(name)     \
    VNPU_BOTH(name##Tensor, T, T) \
    VNPU_BOTH(name##Scalar, T, S)
