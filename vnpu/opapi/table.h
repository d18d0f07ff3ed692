// VNPU_OP(aclnnXxx, types...): exports aclnnXxxGetWorkspaceSize(types..., uint64_t*, aclOpExecutor**) and
// aclnnXxx.
//
// The types are those that torch_npu passes, in its order: an integer and a float travel in different
// registers, so a wrong letter here is a wrong value there. What an operator does stands in
// ascend_moe/vnpu/operators/*.py.
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

// Numbered parameters for up to 24 types.
#define VNPU_COUNT_(a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, \
                    a20, a21, a22, a23, a24, count, ...)                                                  \
    count
#define VNPU_COUNT(...)                                                                                    \
    VNPU_COUNT_(__VA_ARGS__, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, \
                3, 2, 1, 0)
#define VNPU_JOIN_(a, b) a##b
#define VNPU_JOIN(a, b) VNPU_JOIN_(a, b)

#define VNPU_P1(t) t a1
#define VNPU_P2(t, ...) t a2, VNPU_P1(__VA_ARGS__)
#define VNPU_P3(t, ...) t a3, VNPU_P2(__VA_ARGS__)
#define VNPU_P4(t, ...) t a4, VNPU_P3(__VA_ARGS__)
#define VNPU_P5(t, ...) t a5, VNPU_P4(__VA_ARGS__)
#define VNPU_P6(t, ...) t a6, VNPU_P5(__VA_ARGS__)
#define VNPU_P7(t, ...) t a7, VNPU_P6(__VA_ARGS__)
#define VNPU_P8(t, ...) t a8, VNPU_P7(__VA_ARGS__)
#define VNPU_P9(t, ...) t a9, VNPU_P8(__VA_ARGS__)
#define VNPU_P10(t, ...) t a10, VNPU_P9(__VA_ARGS__)
#define VNPU_P11(t, ...) t a11, VNPU_P10(__VA_ARGS__)
#define VNPU_P12(t, ...) t a12, VNPU_P11(__VA_ARGS__)
#define VNPU_P13(t, ...) t a13, VNPU_P12(__VA_ARGS__)
#define VNPU_P14(t, ...) t a14, VNPU_P13(__VA_ARGS__)
#define VNPU_P15(t, ...) t a15, VNPU_P14(__VA_ARGS__)
#define VNPU_P16(t, ...) t a16, VNPU_P15(__VA_ARGS__)
#define VNPU_P17(t, ...) t a17, VNPU_P16(__VA_ARGS__)
#define VNPU_P18(t, ...) t a18, VNPU_P17(__VA_ARGS__)
#define VNPU_P19(t, ...) t a19, VNPU_P18(__VA_ARGS__)
#define VNPU_P20(t, ...) t a20, VNPU_P19(__VA_ARGS__)
#define VNPU_P21(t, ...) t a21, VNPU_P20(__VA_ARGS__)
#define VNPU_P22(t, ...) t a22, VNPU_P21(__VA_ARGS__)
#define VNPU_P23(t, ...) t a23, VNPU_P22(__VA_ARGS__)
#define VNPU_P24(t, ...) t a24, VNPU_P23(__VA_ARGS__)

#define VNPU_A1 a1
#define VNPU_A2 a2, VNPU_A1
#define VNPU_A3 a3, VNPU_A2
#define VNPU_A4 a4, VNPU_A3
#define VNPU_A5 a5, VNPU_A4
#define VNPU_A6 a6, VNPU_A5
#define VNPU_A7 a7, VNPU_A6
#define VNPU_A8 a8, VNPU_A7
#define VNPU_A9 a9, VNPU_A8
#define VNPU_A10 a10, VNPU_A9
#define VNPU_A11 a11, VNPU_A10
#define VNPU_A12 a12, VNPU_A11
#define VNPU_A13 a13, VNPU_A12
#define VNPU_A14 a14, VNPU_A13
#define VNPU_A15 a15, VNPU_A14
#define VNPU_A16 a16, VNPU_A15
#define VNPU_A17 a17, VNPU_A16
#define VNPU_A18 a18, VNPU_A17
#define VNPU_A19 a19, VNPU_A18
#define VNPU_A20 a20, VNPU_A19
#define VNPU_A21 a21, VNPU_A20
#define VNPU_A22 a22, VNPU_A21
#define VNPU_A23 a23, VNPU_A22
#define VNPU_A24 a24, VNPU_A23

#define VNPU_OP(name, ...)                                                                                 \
    VNPU_EXPORT int name##GetWorkspaceSize(VNPU_JOIN(VNPU_P, VNPU_COUNT(__VA_ARGS__))(__VA_ARGS__),        \
                                           uint64_t* workspace_size, aclOpExecutor** executor) {           \
        return vnpu::capture(#name, workspace_size, executor, VNPU_JOIN(VNPU_A, VNPU_COUNT(__VA_ARGS__))); \
    }                                                                                                      \
    VNPU_EXPORT int name(void*, uint64_t, aclOpExecutor* executor, void* stream) {                         \
        return vnpu::execute(executor, stream);                                                            \
    }
