// Vector instructions in their count form. Operands are checked views of UB; the loops are in vector_math.h.
#pragma once

#include "twin/cast.h"
#include "twin/pipe.h"
#include "twin/vector_math.h"

namespace AscendC {

namespace detail {

template <class T>
inline twin::Access UbAccess(const T* first, uint64_t count) {
    return {reinterpret_cast<uintptr_t>(first), count * sizeof(T)};
}

template <class T>
inline void CheckShift(T bits, const twin::Loc& loc) {
    if (static_cast<uint64_t>(bits) > 8 * sizeof(T)) {
        twin::Raise(twin::Finding::kBadArgument, loc, "a shift by %lld of %zu-bit elements",
                    static_cast<long long>(bits), 8 * sizeof(T));
    }
}
template <class Op, class T>
inline void Scalar(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, T value,
                   int32_t count, const twin::Loc& loc) {
    const uint32_t n = static_cast<uint32_t>(count);
    T* to = dst.Span(n, loc, name);
    const T* from = src.Span(n, loc, name);
    twin::Issue({name, twin::Pipe::kV, loc, {0, n}, UbAccess(to, n), {UbAccess(from, n)}},
                [=] { twin::ScalarArray<Op>(to, from, value, n); });
}

}  // namespace detail

template <class D, class S>
inline void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode,
                 const uint32_t count, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kCastLegal<D, S>, "Cast: no such conversion on A2/A3");
    if (!twin::CastModeLegal<D, S>(mode)) {
        twin::Raise(twin::Finding::kBadArgument, loc,
                    "Cast: round mode %d is not allowed for this conversion", static_cast<int>(mode));
    }
    D* to = dst.Span(count, loc, "Cast destination");
    const S* from = src.Span(count, loc, "Cast source");
    const float scale = twin::current_core().deq_scale;
    const RoundMode kind = mode;
    twin::Issue({"Cast",
                 twin::Pipe::kV,
                 loc,
                 {0, count},
                 detail::UbAccess(to, count),
                 {detail::UbAccess(from, count)}},
                [=] { twin::CastArray(to, from, kind, count, scale); });
}

inline void SetDeqScale(half scale) { twin::current_core().deq_scale = static_cast<float>(scale); }

template <class T>
inline void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t count,
                      twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kDuplicateType<T>, "Duplicate: 16- and 32-bit types only");
    T* to = dst.Span(static_cast<uint32_t>(count), loc, "Duplicate destination");
    const T filler = value;
    twin::Issue({"Duplicate",
                 twin::Pipe::kV,
                 loc,
                 {0, static_cast<uint64_t>(count)},
                 detail::UbAccess(to, count),
                 {}},
                [=] {
                    for (int32_t i = 0; i < count; ++i) to[i] = filler;
                });
}

#define TWIN_BINARY(Name)                                                                                 \
    template <class T>                                                                                    \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b,         \
                     const int32_t count, twin::Loc loc = twin::Loc::Here()) {                            \
        static_assert(twin::Name##Op::template kLegal<T>, #Name ": element type not supported on A2/A3"); \
        T* to = dst.Span(static_cast<uint32_t>(count), loc, #Name " destination");                        \
        const T* x = a.Span(static_cast<uint32_t>(count), loc, #Name " source 0");                        \
        const T* y = b.Span(static_cast<uint32_t>(count), loc, #Name " source 1");                        \
        twin::Issue({#Name,                                                                               \
                     twin::Pipe::kV,                                                                      \
                     loc,                                                                                 \
                     {0, static_cast<uint64_t>(count)},                                                   \
                     detail::UbAccess(to, count),                                                         \
                     {detail::UbAccess(x, count), detail::UbAccess(y, count)}},                           \
                    [=] { twin::BinaryArray<twin::Name##Op>(to, x, y, static_cast<uint32_t>(count)); });  \
    }
TWIN_BINARY(Add)
TWIN_BINARY(Sub)
TWIN_BINARY(Mul)
TWIN_BINARY(Div)
TWIN_BINARY(Max)
TWIN_BINARY(Min)
TWIN_BINARY(And)
TWIN_BINARY(Or)
#undef TWIN_BINARY

#define TWIN_SCALAR(Name, Op)                                                                             \
    template <class T>                                                                                    \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar,               \
                     const int32_t count, twin::Loc loc = twin::Loc::Here()) {                            \
        static_assert(twin::Op::template kLegal<T>, #Name ": element type not supported on A2/A3");       \
        T* to = dst.Span(static_cast<uint32_t>(count), loc, #Name " destination");                        \
        const T* from = src.Span(static_cast<uint32_t>(count), loc, #Name " source");                     \
        const T value = scalar;                                                                           \
        twin::Issue({#Name,                                                                               \
                     twin::Pipe::kV,                                                                      \
                     loc,                                                                                 \
                     {0, static_cast<uint64_t>(count)},                                                   \
                     detail::UbAccess(to, count),                                                         \
                     {detail::UbAccess(from, count)}},                                                    \
                    [=] { twin::ScalarArray<twin::Op>(to, from, value, static_cast<uint32_t>(count)); }); \
    }
TWIN_SCALAR(Adds, AddOp)
TWIN_SCALAR(Muls, MulOp)
TWIN_SCALAR(Maxs, MaxOp)
TWIN_SCALAR(Mins, MinOp)
TWIN_SCALAR(LeakyRelu, LeakyReluOp)
#undef TWIN_SCALAR

#define TWIN_UNARY(Name)                                                                                  \
    template <class T>                                                                                    \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t count,           \
                     twin::Loc loc = twin::Loc::Here()) {                                                 \
        static_assert(twin::Name##Op::template kLegal<T>, #Name ": element type not supported on A2/A3"); \
        T* to = dst.Span(static_cast<uint32_t>(count), loc, #Name " destination");                        \
        const T* from = src.Span(static_cast<uint32_t>(count), loc, #Name " source");                     \
        twin::Issue({#Name,                                                                               \
                     twin::Pipe::kV,                                                                      \
                     loc,                                                                                 \
                     {0, static_cast<uint64_t>(count)},                                                   \
                     detail::UbAccess(to, count),                                                         \
                     {detail::UbAccess(from, count)}},                                                    \
                    [=] { twin::UnaryArray<twin::Name##Op>(to, from, static_cast<uint32_t>(count)); });   \
    }
TWIN_UNARY(Abs)
TWIN_UNARY(Relu)
TWIN_UNARY(Not)
TWIN_UNARY(Sqrt)
TWIN_UNARY(Rsqrt)
TWIN_UNARY(Reciprocal)
TWIN_UNARY(Exp)
TWIN_UNARY(Ln)
#undef TWIN_UNARY

template <class T>
inline void ShiftLeft(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& bits,
                      const int32_t count, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::ShiftLeftOp::template kLegal<T>, "ShiftLeft: element type not supported on A2/A3");
    detail::CheckShift<T>(bits, loc);
    detail::Scalar<twin::ShiftLeftOp>("ShiftLeft", dst, src, bits, count, loc);
}
template <class T>
inline void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& bits,
                       const int32_t count, bool roundEn = false, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::ShiftRightOp::template kLegal<T>, "ShiftRight: element type not supported on A2/A3");
    detail::CheckShift<T>(bits, loc);
    if (roundEn) {
        detail::Scalar<twin::ShiftRightRoundOp>("ShiftRight", dst, src, bits, count, loc);
    } else {
        detail::Scalar<twin::ShiftRightOp>("ShiftRight", dst, src, bits, count, loc);
    }
}

// dst += src * scalar; the product is rounded before the sum.
template <class D, class S>
inline void Axpy(const LocalTensor<D>& dst, const LocalTensor<S>& src, const S& scalar, const int32_t count,
                 twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kMultiplyAddLegal<D, S>, "Axpy: (half, half), (float, float) or (float, half)");
    const uint32_t n = static_cast<uint32_t>(count);
    D* to = dst.Span(n, loc, "Axpy destination");
    const S* from = src.Span(n, loc, "Axpy source");
    const S value = scalar;
    twin::Issue({"Axpy",
                 twin::Pipe::kV,
                 loc,
                 {0, n},
                 detail::UbAccess(to, n),
                 {detail::UbAccess(from, n), detail::UbAccess(to, n)}},
                [=] { twin::AxpyArray(to, from, value, n); });
}
// dst += a * b; the product is rounded before the sum.
template <class D, class S>
inline void MulAddDst(const LocalTensor<D>& dst, const LocalTensor<S>& a, const LocalTensor<S>& b,
                      const int32_t count, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kMultiplyAddLegal<D, S>, "MulAddDst: (half, half), (float, float) or (float, half)");
    const uint32_t n = static_cast<uint32_t>(count);
    D* to = dst.Span(n, loc, "MulAddDst destination");
    const S* x = a.Span(n, loc, "MulAddDst source 0");
    const S* y = b.Span(n, loc, "MulAddDst source 1");
    twin::Issue({"MulAddDst",
                 twin::Pipe::kV,
                 loc,
                 {0, n},
                 detail::UbAccess(to, n),
                 {detail::UbAccess(x, n), detail::UbAccess(y, n), detail::UbAccess(to, n)}},
                [=] { twin::MulAddDstArray(to, x, y, n); });
}

template <class A, class B>
struct IsSameType {
    static constexpr bool value = std::is_same<A, B>::value;
};

}  // namespace AscendC
