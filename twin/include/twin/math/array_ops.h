// The vector unit's arithmetic as plain array loops, for the API wrappers to call.
//
//   Add, Sub, Mul, Div, Max, Min, And, Or       BinaryArray<AddOp>(dst, a, b, n)
//   Adds, Muls, Maxs, Mins, ShiftLeft, ...      ScalarArray<AddOp>(dst, src, scalar, n)
//   Abs, Sqrt, Exp, Ln, Relu, Not, ...          UnaryArray<AbsOp>(dst, src, n)
//   Axpy, MulAddDst, FusedMulAdd                AxpyArray, MulAddDstArray, FusedMulAddArray
//   mask and stride forms                       lane_mask.h
//   reductions                                  reduce_arrays.h
//   Compare, Select, GatherMask, Duplicate,
//   Brcb, CreateVecIndex                        bit_masks.h
//   Sort32, MrgSort, Sort, Extract              sort_arrays.h
//
// Operands may share an address with dst exactly (not in part). Types the instruction lacks do not compile.
#pragma once

#include "twin/math/bit_masks.h"
#include "twin/math/element_ops.h"
#include "twin/math/lane_mask.h"
#include "twin/math/reduce_arrays.h"
#include "twin/math/sort_arrays.h"

namespace twin {

#define TWIN_CHECK_TYPE(Op, T) \
    static_assert(Op::template kLegal<T>, "this instruction does not take this element type on Atlas A2/A3")

template <class Op, class T>
inline void BinaryArray(T* dst, const T* a, const T* b, uint32_t n) {
    TWIN_CHECK_TYPE(Op, T);
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) {
        StoreAt(dst, i, Narrow<T>(Op::Do(Widen(LoadAt(a, i)), Widen(LoadAt(b, i)))));
    }
}

template <class Op, class T>
inline void ScalarArray(T* dst, const T* src, T scalar, uint32_t n) {
    TWIN_CHECK_TYPE(Op, T);
    const Compute<T> s = Widen(scalar);
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) StoreAt(dst, i, Narrow<T>(Op::Do(Widen(LoadAt(src, i)), s)));
}

template <class Op, class T>
inline void UnaryArray(T* dst, const T* src, uint32_t n) {
    TWIN_CHECK_TYPE(Op, T);
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) StoreAt(dst, i, Narrow<T>(Op::Do(Widen(LoadAt(src, i)))));
}

#undef TWIN_CHECK_TYPE

// Axpy and MulAddDst: half to half, float to float, or half sources onto a float dst.
template <class D, class S>
constexpr bool kMultiplyAddLegal = kRealType<S> && (std::is_same_v<D, S> || std::is_same_v<D, float>);

// dst + a·b: the product rounded to D, then the sum.
template <class D>
constexpr D MultiplyAdd(float a, float b, D addend) {
    return Narrow<D>(Widen(Narrow<D>(a * b)) + Widen(addend));
}

// dst[i] += src[i] · scalar
template <class D, class S>
inline void AxpyArray(D* dst, const S* src, S scalar, uint32_t n) {
    static_assert(kMultiplyAddLegal<D, S>, "Axpy: (half, half), (float, float) or float dst with half src");
    const float s = Widen(scalar);
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) {
        StoreAt(dst, i, MultiplyAdd<D>(Widen(LoadAt(src, i)), s, LoadAt(dst, i)));
    }
}

// dst[i] += a[i] · b[i]
template <class D, class S>
inline void MulAddDstArray(D* dst, const S* a, const S* b, uint32_t n) {
    static_assert(kMultiplyAddLegal<D, S>,
                  "MulAddDst: (half, half), (float, float) or float dst with half sources");
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) {
        StoreAt(dst, i, MultiplyAdd<D>(Widen(LoadAt(a, i)), Widen(LoadAt(b, i)), LoadAt(dst, i)));
    }
}

// dst[i] = a[i] · dst[i] + b[i]; with kRelu negative results are 0.
template <bool kRelu, class T>
inline void FusedMulAddArray(T* dst, const T* a, const T* b, uint32_t n) {
    static_assert(kRealType<T>, "FusedMulAdd: half and float");
    TWIN_ELEMENTWISE
    for (uint32_t i = 0; i < n; ++i) {
        const T sum = MultiplyAdd<T>(Widen(LoadAt(a, i)), Widen(LoadAt(dst, i)), LoadAt(b, i));
        StoreAt(dst, i, kRelu ? Narrow<T>(ReluOp::Do(Widen(sum))) : sum);
    }
}

}  // namespace twin
