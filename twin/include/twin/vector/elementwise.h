// Elementwise vector instructions, each in three forms: the first `count` elements; a mask of the first n
// lanes of every repeat; a mask of bits.
//
// repeatTime is wider here than in the vendor's headers, so that 256 is an error and not 0.
#pragma once

#include <type_traits>

#include "twin/api/qualifiers.h"
#include "twin/math/element_ops.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

// ---- what the calls do to a stretch of n elements ----

// The i-th element of a stretch, as the type to compute in. dst may be the address of a source.
template <class T>
inline twin::Compute<T> WideAt(uintptr_t from, uint32_t i) {
    return twin::Widen(twin::LoadAt(UbPointer<T>(from), i));
}

template <class Op, class T>
struct BinaryBody {
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        const uintptr_t a = from[0], b = from[1];
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i)
            twin::StoreAt(UbPointer<T>(to), i, twin::Narrow<T>(Op::Do(WideAt<T>(a, i), WideAt<T>(b, i))));
    }
};
template <class Op, class T>
struct ScalarBody {
    T value;
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        const uintptr_t a = from[0];
        const twin::Compute<T> scalar = twin::Widen(value);
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i)
            twin::StoreAt(UbPointer<T>(to), i, twin::Narrow<T>(Op::Do(WideAt<T>(a, i), scalar)));
    }
};
template <>
struct Forwards<BinaryBody<twin::AddOp, float>> {
    static constexpr bool kBegins = false;
    static bool Do(const BinaryBody<twin::AddOp, float>&, uintptr_t to, const uintptr_t* from, uint32_t n) {
        return twin::ForwardAdd(twin::current_core().forward, to, from[0], from[1], n);
    }
};
template <>
struct Forwards<ScalarBody<twin::MulOp, float>> {
    static constexpr bool kBegins = false;
    static bool Do(const ScalarBody<twin::MulOp, float>& body, uintptr_t to, const uintptr_t* from, uint32_t n) {
        return twin::ForwardScale(twin::current_core().forward, to, from[0], n, body.value);
    }
};
template <class Op, class T>
struct UnaryBody {
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        const uintptr_t a = from[0];
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i) twin::StoreAt(UbPointer<T>(to), i, twin::Narrow<T>(Op::Do(WideAt<T>(a, i))));
    }
};
template <class D, class S>
struct AxpyBody {
    S value;
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        const uintptr_t a = from[0];
        const float scalar = twin::Widen(value);
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i)
            twin::StoreAt(UbPointer<D>(to), i,
                          twin::MultiplyAdd<D>(WideAt<S>(a, i), scalar, twin::LoadAt(UbPointer<D>(to), i)));
    }
};
template <class D, class S>
struct MulAddDstBody {
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        const uintptr_t a = from[0], b = from[1];
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i)
            twin::StoreAt(UbPointer<D>(to), i,
                          twin::MultiplyAdd<D>(WideAt<S>(a, i), WideAt<S>(b, i), twin::LoadAt(UbPointer<D>(to), i)));
    }
};
template <bool kRelu, class T>
struct FusedMulAddBody {
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        const uintptr_t a = from[0], b = from[1];
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i) {
            const T addend = twin::LoadAt(UbPointer<T>(b), i);
            const T sum = twin::MultiplyAdd<T>(WideAt<T>(a, i), WideAt<T>(to, i), addend);
            twin::StoreAt(UbPointer<T>(to), i, kRelu ? twin::Narrow<T>(twin::ReluOp::Do(twin::Widen(sum))) : sum);
        }
    }
};

// ---- the mask forms; M: the mask as uint64_t or as uint64_t* ----

template <bool isSetMask, class Body, class D, class S, class M>
inline void BinaryMasked(const twin::VectorCall& call, bool accumulates, const Body& body, const LocalTensor<D>& dst,
                         const LocalTensor<S>& a, const LocalTensor<S>& b, M mask, int32_t repeats,
                         const BinaryRepeatParams& p) {
    const Work work = WorkOf<isSetMask>(mask, repeats, twin::kLanes<D>, call.loc);
    MaskedCall(call, work, {accumulates, false}, body, Strided<D>{dst, p.dstBlkStride, p.dstRepStride},
               Strided<S>{a, p.src0BlkStride, p.src0RepStride}, Strided<S>{b, p.src1BlkStride, p.src1RepStride});
}
template <bool isSetMask, class Body, class D, class S, class M>
inline void UnaryMasked(const twin::VectorCall& call, bool accumulates, const Body& body, const LocalTensor<D>& dst,
                        const LocalTensor<S>& src, M mask, int32_t repeats, const UnaryRepeatParams& p) {
    const Work work = WorkOf<isSetMask>(mask, repeats, twin::kLanes<D>, call.loc);
    MaskedCall(call, work, {accumulates, false}, body, Strided<D>{dst, p.dstBlkStride, p.dstRepStride},
               Strided<S>{src, p.srcBlkStride, p.srcRepStride});
}
// The count form with a scalar is the only one that may leave the mask alone.
template <bool isSetMask, class Body, class T>
inline void ScalarCounted(const char* name, const twin::Loc& loc, const Body& body, const LocalTensor<T>& dst,
                          const LocalTensor<T>& src, int32_t count) {
    if (isSetMask) {
        CountCall(name, loc, count, false, body, dst, src);
        return;
    }
    MaskedCall({name, loc}, RegisterWork(1, twin::kLanes<T>), {}, body, Dense(dst, twin::kLanes<T>),
               Dense(src, twin::kLanes<T>));
}

template <class Op, class T>
inline ScalarBody<Op, T> ScalarOf(T value, [[maybe_unused]] const twin::Loc& loc) {
    if constexpr (std::is_base_of_v<twin::ShiftOp, Op>)
        TWIN_RAISE_IF(value < 0 || static_cast<uint64_t>(value) > 8 * sizeof(T), kBadArgument, loc,
                      "a shift by %lld of %zu-bit elements", static_cast<long long>(value), 8 * sizeof(T));
    return {value};
}

}  // namespace detail

#define TWIN_CHECK_ELEMENT(Name, Op) \
    static_assert(twin::Op::template kLegal<T>, #Name ": element type not supported on A2/A3")

// Chains: the calls whose result may be source 1 of the next repeat.
#define TWIN_BINARY(Name, Op, kChains)                                                                             \
    template <class T>                                                                                             \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,            \
                     const int32_t& count, TWIN_CALLER) {                                                          \
        TWIN_CHECK_ELEMENT(Name, Op);                                                                              \
        detail::CountCall(#Name, loc, count, false, detail::BinaryBody<twin::Op, T>{}, dst, src0, src1);           \
    }                                                                                                              \
    template <class T, bool isSetMask = true, class M>                                                             \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, M mask,    \
                     const int32_t repeatTime, const BinaryRepeatParams& repeatParams, TWIN_CALLER) {              \
        TWIN_CHECK_ELEMENT(Name, Op);                                                                              \
        constexpr bool kFeeds = kChains && !twin::kOneOf<T, int16_t>;                                              \
        detail::BinaryMasked<isSetMask>({#Name, loc, kFeeds}, false, detail::BinaryBody<twin::Op, T>{}, dst, src0, \
                                        src1, mask, repeatTime, repeatParams);                                     \
    }
TWIN_BINARY(Add, AddOp, true)
TWIN_BINARY(Sub, SubOp, true)
TWIN_BINARY(Mul, MulOp, true)
TWIN_BINARY(Div, DivOp, false)
TWIN_BINARY(Max, MaxOp, true)
TWIN_BINARY(Min, MinOp, true)
TWIN_BINARY(And, AndOp, false)
TWIN_BINARY(Or, OrOp, false)
TWIN_BINARY(AddRelu, AddReluOp, true)
TWIN_BINARY(SubRelu, SubReluOp, true)
#undef TWIN_BINARY

#define TWIN_SCALAR(Name, Op)                                                                                          \
    template <class T, bool isSetMask = true>                                                                          \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count, \
                     TWIN_CALLER) {                                                                                    \
        TWIN_CHECK_ELEMENT(Name, Op);                                                                                  \
        const auto body = detail::ScalarOf<twin::Op, T>(scalarValue, loc);                                             \
        detail::ScalarCounted<isSetMask>(#Name, loc, body, dst, src, count);                                           \
    }                                                                                                                  \
    template <class T, bool isSetMask = true, class M>                                                                 \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, M mask,               \
                     const int32_t repeatTime, const UnaryRepeatParams& repeatParams, TWIN_CALLER) {                   \
        TWIN_CHECK_ELEMENT(Name, Op);                                                                                  \
        const auto body = detail::ScalarOf<twin::Op, T>(scalarValue, loc);                                             \
        detail::UnaryMasked<isSetMask>({#Name, loc}, false, body, dst, src, mask, repeatTime, repeatParams);           \
    }
TWIN_SCALAR(Adds, AddOp)
TWIN_SCALAR(Muls, MulOp)
TWIN_SCALAR(Maxs, MaxOp)
TWIN_SCALAR(Mins, MinOp)
TWIN_SCALAR(LeakyRelu, LeakyReluOp)
// Of unsigned elements logical, of signed ones arithmetic.
TWIN_SCALAR(ShiftLeft, ShiftLeftOp)
TWIN_SCALAR(ShiftRight, ShiftRightOp)
#undef TWIN_SCALAR

#define TWIN_UNARY(Name, Op)                                                                                    \
    template <class T>                                                                                          \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, TWIN_CALLER) { \
        TWIN_CHECK_ELEMENT(Name, Op);                                                                           \
        detail::CountCall(#Name, loc, count, false, detail::UnaryBody<twin::Op, T>{}, dst, src);                \
    }                                                                                                           \
    template <class T, bool isSetMask = true, class M>                                                          \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask, const int32_t repeatTime,    \
                     const UnaryRepeatParams& repeatParams, TWIN_CALLER) {                                      \
        TWIN_CHECK_ELEMENT(Name, Op);                                                                           \
        detail::UnaryMasked<isSetMask>({#Name, loc}, false, detail::UnaryBody<twin::Op, T>{}, dst, src, mask,   \
                                       repeatTime, repeatParams);                                               \
    }
TWIN_UNARY(Abs, AbsOp)
TWIN_UNARY(Relu, ReluOp)
TWIN_UNARY(Not, NotOp)
TWIN_UNARY(Sqrt, SqrtOp)
TWIN_UNARY(Rsqrt, RsqrtOp)
TWIN_UNARY(Reciprocal, ReciprocalOp)
TWIN_UNARY(Exp, ExpOp)
TWIN_UNARY(Ln, LnOp)
#undef TWIN_UNARY

template <class T, bool isSetMask = true, class M>
inline void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, M mask,
                       const int32_t repeatTime, const UnaryRepeatParams& repeatParams, bool roundEn, TWIN_CALLER) {
    if (!roundEn) return ShiftRight<T, isSetMask>(dst, src, scalarValue, mask, repeatTime, repeatParams, loc);
    TWIN_CHECK_ELEMENT(ShiftRight, ShiftRightRoundOp);
    const auto body = detail::ScalarOf<twin::ShiftRightRoundOp, T>(scalarValue, loc);
    detail::UnaryMasked<isSetMask>({"ShiftRight", loc}, false, body, dst, src, mask, repeatTime, repeatParams);
}
#undef TWIN_CHECK_ELEMENT

// ---- Elementwise instructions that read their destination: Axpy, MulAddDst, FusedMulAdd. Products are
// rounded before the sum.

#define TWIN_CHECK_PAIR(Name)                    \
    static_assert(twin::kMultiplyAddLegal<T, U>, \
                  #Name ": (half, half), (float, float), or a float destination with half sources")

// dst += src * scalar
template <class T, class U>
inline void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, const int32_t& count,
                 TWIN_CALLER) {
    TWIN_CHECK_PAIR(Axpy);
    detail::CountCall("Axpy", loc, count, true, detail::AxpyBody<T, U>{scalarValue}, dst, src);
}
// dst += src0 * src1
template <class T, class U>
inline void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1,
                      const int32_t& count, TWIN_CALLER) {
    TWIN_CHECK_PAIR(MulAddDst);
    detail::CountCall("MulAddDst", loc, count, true, detail::MulAddDstBody<T, U>{}, dst, src0, src1);
}
template <class T, class U, bool isSetMask = true, class M>
inline void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, M mask,
                 const int32_t repeatTime, const UnaryRepeatParams& repeatParams, TWIN_CALLER) {
    TWIN_CHECK_PAIR(Axpy);
    detail::UnaryMasked<isSetMask>({"Axpy", loc}, true, detail::AxpyBody<T, U>{scalarValue}, dst, src, mask, repeatTime,
                                   repeatParams);
}
template <class T, class U, bool isSetMask = true, class M>
inline void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, M mask,
                      const int32_t repeatTime, const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    TWIN_CHECK_PAIR(MulAddDst);
    detail::BinaryMasked<isSetMask>({"MulAddDst", loc}, true, detail::MulAddDstBody<T, U>{}, dst, src0, src1, mask,
                                    repeatTime, repeatParams);
}
#undef TWIN_CHECK_PAIR

// dst = src0 * dst + src1, and the same with negative results set to 0.
#define TWIN_FUSED(Name, kRelu)                                                                                   \
    template <class T>                                                                                            \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,           \
                     const int32_t& count, TWIN_CALLER) {                                                         \
        static_assert(twin::kRealType<T>, #Name ": half and float only");                                         \
        detail::CountCall(#Name, loc, count, true, detail::FusedMulAddBody<kRelu, T>{}, dst, src0, src1);         \
    }                                                                                                             \
    template <class T, bool isSetMask = true, class M>                                                            \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, M mask,   \
                     const int32_t repeatTime, const BinaryRepeatParams& repeatParams, TWIN_CALLER) {             \
        static_assert(twin::kRealType<T>, #Name ": half and float only");                                         \
        detail::BinaryMasked<isSetMask>({#Name, loc}, true, detail::FusedMulAddBody<kRelu, T>{}, dst, src0, src1, \
                                        mask, repeatTime, repeatParams);                                          \
    }
TWIN_FUSED(FusedMulAdd, false)
TWIN_FUSED(FusedMulAddRelu, true)
TWIN_FUSED(MulAddRelu, true)
#undef TWIN_FUSED

// Mins and Maxs under the names of the advanced API; the scratch tensor is not used.
#define TWIN_CLAMP(Name, Call)                                                                                      \
    template <class T, bool isReuseSource = false>                                                                  \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T scalar, const uint32_t calCount, \
                     TWIN_CALLER) {                                                                                 \
        static_assert(twin::kRealType<T>, #Name ": half and float only");                                           \
        Call(dst, src, scalar, static_cast<int32_t>(calCount), loc);                                                \
    }                                                                                                               \
    template <class T, bool isReuseSource = false>                                                                  \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint8_t>&,             \
                     const T scalar, const uint32_t calCount, TWIN_CALLER) {                                        \
        Name(dst, src, scalar, calCount, loc);                                                                      \
    }
TWIN_CLAMP(ClampMax, Mins)
TWIN_CLAMP(ClampMin, Maxs)
#undef TWIN_CLAMP

}  // namespace AscendC
