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
#undef TWIN_UNARY

// dst[0] = the extreme; with `calIndex` dst[1] = the bits of the first index that has it.
template <class T>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& scratch,
                      const int32_t count, bool calIndex = false, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kReduceType<T>, "ReduceMax: half and float only");
    const uint32_t n = static_cast<uint32_t>(count);
    T* to = dst.Span(calIndex ? 2 : 1, loc, "ReduceMax destination", sizeof(T));
    const T* from = src.Span(n, loc, "ReduceMax source");
    const uint32_t lanes = 256 / sizeof(T);
    scratch.Span((n + lanes - 1) / lanes, loc, "ReduceMax scratch");
    twin::Issue({"ReduceMax",
                 twin::Pipe::kV,
                 loc,
                 {0, n},
                 detail::UbAccess(to, calIndex ? 2 : 1),
                 {detail::UbAccess(from, n)}},
                [=] { twin::ReduceExtremeArray<true>(to, from, n, calIndex); });
}

template <class A, class B>
struct IsSameType {
    static constexpr bool value = std::is_same<A, B>::value;
};

}  // namespace AscendC
