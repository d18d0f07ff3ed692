// Elementwise calls in every form. Numbers: form, mask (or count), its high word, repeatTime, then strides:
// blocks of dst and sources, repeats of dst and sources.
//   form 0: the first n elements   1: the first n lanes   2: a mask of bits   3: the mask register (normal
//   mode) form 4: the mask register (counter mode)   5: counter mode, the number of elements as {n, 0}
#include "api_harness.h"

namespace {

using namespace api;

void SetRegister(const Args& g) {
    if (g.p[0] == 3) {
        SetMaskNorm();
        SetVectorMask<half, MaskMode::NORMAL>(static_cast<uint64_t>(g.p[2]), g.Mask());
    } else if (g.p[0] == 4) {
        SetMaskCount();
        SetVectorMask<half, MaskMode::COUNTER>(0, g.Mask());
    } else if (g.p[0] == 5) {
        SetMaskCount();
    }
}
BinaryRepeatParams Binary(const Args& g) {
    return {g.Byte(4), g.Byte(5), g.Byte(6), g.Byte(7), g.Byte(8), g.Byte(9)};
}
UnaryRepeatParams Unary(const Args& g) { return {g.Short(4), g.Short(5), g.Byte(7), g.Byte(8)}; }

#define FORMS(T, Name, Params, Template, ...)                                                  \
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};                              \
    SetRegister(g);                                                                            \
    switch (g.p[0]) {                                                                          \
        case 0: Name(__VA_ARGS__, g.Int(1)); break;                                            \
        case 1: Name(__VA_ARGS__, g.Mask(), g.Int(3), Params); break;                          \
        case 3:                                                                                \
        case 4: Name<Template, false>(__VA_ARGS__, MASK_PLACEHOLDER, g.Int(3), Params); break; \
        default: Name(__VA_ARGS__, bits, g.Int(3), Params);                                    \
    }                                                                                          \
    SetMaskNorm();                                                                             \
    ResetMask();

#define COMMA ,
#define BINARY_CALL(Name)                                                        \
    template <class T>                                                           \
    void Call##Name(const Args& g) {                                             \
        FORMS(T, Name, Binary(g), T, g.As<T>(g.out), g.As<T>(g.a), g.As<T>(g.b)) \
    }
#define SCALAR_CALL(Name)                                                \
    template <class T>                                                   \
    void Call##Name(const Args& g) {                                     \
        const T value = g.As<T>(g.b).GetValue(0);                        \
        FORMS(T, Name, Unary(g), T, g.As<T>(g.out), g.As<T>(g.a), value) \
    }
#define UNARY_CALL(Name)                                          \
    template <class T>                                            \
    void Call##Name(const Args& g) {                              \
        FORMS(T, Name, Unary(g), T, g.As<T>(g.out), g.As<T>(g.a)) \
    }
BINARY_CALL(Add)
BINARY_CALL(Sub)
BINARY_CALL(Mul)
BINARY_CALL(Div)
BINARY_CALL(Max)
BINARY_CALL(Min)
BINARY_CALL(And)
BINARY_CALL(Or)
BINARY_CALL(AddRelu)
BINARY_CALL(SubRelu)
BINARY_CALL(FusedMulAdd)
BINARY_CALL(FusedMulAddRelu)
SCALAR_CALL(Adds)
SCALAR_CALL(Muls)
SCALAR_CALL(Maxs)
SCALAR_CALL(Mins)
SCALAR_CALL(LeakyRelu)
SCALAR_CALL(ShiftLeft)
SCALAR_CALL(ShiftRight)
UNARY_CALL(Abs)
UNARY_CALL(Relu)
UNARY_CALL(Not)
UNARY_CALL(Sqrt)
UNARY_CALL(Rsqrt)
UNARY_CALL(Reciprocal)
UNARY_CALL(Exp)
UNARY_CALL(Ln)

template <class D, class S>
void CallAxpy(const Args& g) {
    const S value = g.As<S>(g.b).GetValue(0);
    FORMS(D, Axpy, Unary(g), D COMMA S, g.As<D>(g.out), g.As<S>(g.a), value)
}
template <class D, class S>
void CallMulAddDst(const Args& g) {
    FORMS(D, MulAddDst, Binary(g), D COMMA S, g.As<D>(g.out), g.As<S>(g.a), g.As<S>(g.b))
}
template <class D, class S, RoundMode kMode>
void CallCast(const Args& g) {
    FORMS(D, Cast, Unary(g), D COMMA S, g.As<D>(g.out), g.As<S>(g.a), kMode)
}
template <class T>
void CallDuplicate(const Args& g) {
    const LocalTensor<T> out = g.As<T>(g.out);
    const T value = g.As<T>(g.b).GetValue(0);
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};
    SetRegister(g);
    switch (g.p[0]) {
        case 0: Duplicate(out, value, g.Int(1)); break;
        case 1: Duplicate(out, value, g.Mask(), g.Int(3), g.Short(4), g.Byte(7)); break;
        case 3:
        case 4: Duplicate<T, false>(out, value, MASK_PLACEHOLDER, g.Int(3), g.Short(4), g.Byte(7)); break;
        default: Duplicate(out, value, bits, g.Int(3), g.Short(4), g.Byte(7));
    }
    SetMaskNorm();
    ResetMask();
}
template <class T>
void CallCopy(const Args& g) {
    const LocalTensor<T> out = g.As<T>(g.out), a = g.As<T>(g.a);
    const CopyRepeatParams params(g.Short(4), g.Short(5), g.Short(7), g.Short(8));
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};
    SetRegister(g);
    switch (g.p[0]) {
        case 1: Copy(out, a, g.Mask(), g.Int(3), params); break;
        case 3:
        case 4: Copy<T, false>(out, a, MASK_PLACEHOLDER, g.Int(3), params); break;
        default: Copy(out, a, bits, g.Int(3), params);
    }
    SetMaskNorm();
    ResetMask();
}
template <class T>
void CallIndex(const Args& g) {
    LocalTensor<T> out = g.As<T>(g.out);
    const T first = g.As<T>(g.b).GetValue(0);
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};
    switch (g.p[0]) {
        case 0: CreateVecIndex(out, first, static_cast<uint32_t>(g.p[1])); break;
        case 1: CreateVecIndex(out, first, g.Mask(), g.Int(3), g.Short(4), g.Byte(7)); break;
        default: CreateVecIndex(out, first, bits, g.Int(3), g.Short(4), g.Byte(7));
    }
}

// ---- overlaps: numbers 10 and 11 are the byte offsets of dst and source 0 within `a` ----

void OverlapAdd(const Args& g) {
    const LocalTensor<float> to = g.a[static_cast<uint32_t>(g.p[10])].ReinterpretCast<float>();
    const LocalTensor<float> from = g.a[static_cast<uint32_t>(g.p[11])].ReinterpretCast<float>();
    if (g.p[0] == 0) {
        Add(to, from, g.As<float>(g.b), g.Int(1));
    } else if (g.p[0] == 1) {
        Add(to, from, g.As<float>(g.b), g.Mask(), g.Int(3), Binary(g));
    } else {
        Add(to, g.As<float>(g.b), from, g.Mask(), g.Int(3), Binary(g));
    }
    PipeBarrier<PIPE_V>();
    DataCopy(g.out, g.a, kBytes);
}
void OverlapAxpy(const Args& g) {
    const LocalTensor<float> to = g.a[static_cast<uint32_t>(g.p[10])].ReinterpretCast<float>();
    Axpy(to, g.a[static_cast<uint32_t>(g.p[11])].ReinterpretCast<half>(), half(2.0f), g.Int(1));
    PipeBarrier<PIPE_V>();
    DataCopy(g.out, g.a, kBytes);
}
template <class D, class S>
void OverlapCast(const Args& g) {
    const LocalTensor<D> to = g.a[static_cast<uint32_t>(g.p[10])].ReinterpretCast<D>();
    const LocalTensor<S> from = g.a[static_cast<uint32_t>(g.p[11])].ReinterpretCast<S>();
    Cast(to, from, sizeof(D) > sizeof(S) ? RoundMode::CAST_NONE : RoundMode::CAST_RINT,
         static_cast<uint32_t>(g.p[1]));
    PipeBarrier<PIPE_V>();
    DataCopy(g.out, g.a, kBytes);
}
// A count form leaves normal mode and a full mask behind.
void MaskAfterCount(const Args& g) {
    SetMaskCount();
    SetVectorMask<float, MaskMode::COUNTER>(8);
    Adds(g.As<float>(g.tmp), g.As<float>(g.a), 1.0f, 16);
    Adds<float, false>(g.As<float>(g.out), g.As<float>(g.a), 1.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
}
// A mask form leaves its mask behind.
void MaskAfterMask(const Args& g) {
    Adds(g.As<float>(g.tmp), g.As<float>(g.a), 1.0f, 20, 1, {1, 1, 8, 8});
    Adds<float, false>(g.As<float>(g.out), g.As<float>(g.a), 1.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
    ResetMask();
}
// The count form of a call with a scalar may take its number of elements from the register.
void CountFromRegister(const Args& g) {
    SetMaskCount();
    SetVectorMask<float, MaskMode::COUNTER>(100);
    Adds<float, false>(g.As<float>(g.out), g.As<float>(g.a), 1.0f, 1);
    SetMaskNorm();
    ResetMask();
}
void VectorMaskRange(const Args& g) { SetVectorMask<float>(g.Int(1)); }

#define FOUR(Name)                                                                                           \
    {#Name "/f2", Call##Name<half>}, {#Name "/f4", Call##Name<float>}, {#Name "/i2", Call##Name<int16_t>}, { \
        #Name "/i4", Call##Name<int32_t>                                                                     \
    }
#define TWO(Name) \
    {#Name "/f2", Call##Name<half>}, { #Name "/f4", Call##Name<float> }
#define SHORT(Name) \
    {#Name "/i2", Call##Name<int16_t>}, { #Name "/u2", Call##Name<uint16_t> }
#define FIVE(Name)                                                                                         \
    {#Name "/f2", Call##Name<half>}, {#Name "/f4", Call##Name<float>}, {#Name "/i2", Call##Name<int16_t>}, \
        {#Name "/i4", Call##Name<int32_t>}, {#Name "/u2", Call##Name<uint16_t>}, {                         \
        #Name "/u4", Call##Name<uint32_t>                                                                  \
    }
const Entry kEntries[] = {
    FOUR(Add),
    FOUR(Sub),
    FOUR(Mul),
    TWO(Div),
    FOUR(Max),
    FOUR(Min),
    SHORT(And),
    SHORT(Or),
    TWO(AddRelu),
    TWO(SubRelu),
    TWO(FusedMulAdd),
    TWO(FusedMulAddRelu),
    FOUR(Adds),
    FOUR(Muls),
    FOUR(Maxs),
    FOUR(Mins),
    TWO(LeakyRelu),
    SHORT(ShiftLeft),
    SHORT(ShiftRight),
    TWO(Abs),
    TWO(Relu),
    SHORT(Not),
    TWO(Sqrt),
    TWO(Rsqrt),
    TWO(Reciprocal),
    TWO(Exp),
    TWO(Ln),
    FIVE(Duplicate),
    FIVE(Copy),
    FOUR(Index),
    {"Axpy/f4", CallAxpy<float, float>},
    {"Axpy/f2", CallAxpy<half, half>},
    {"Axpy/f2f4", CallAxpy<float, half>},
    {"MulAddDst/f4", CallMulAddDst<float, float>},
    {"MulAddDst/f2", CallMulAddDst<half, half>},
    {"MulAddDst/f2f4", CallMulAddDst<float, half>},
    {"Cast/f4f2", CallCast<half, float, RoundMode::CAST_RINT>},
    {"Cast/f2f4", CallCast<float, half, RoundMode::CAST_NONE>},
    {"Cast/f4i4", CallCast<int32_t, float, RoundMode::CAST_FLOOR>},
    {"Cast/i4f4", CallCast<float, int32_t, RoundMode::CAST_NONE>},
    {"Cast/f2i1", CallCast<int8_t, half, RoundMode::CAST_TRUNC>},
    {"Cast/i1f2", CallCast<half, int8_t, RoundMode::CAST_NONE>},
    {"Cast/f4i8", CallCast<int64_t, float, RoundMode::CAST_RINT>},
    {"Cast/i8i4", CallCast<int32_t, int64_t, RoundMode::CAST_NONE>},
    {"overlap_add", OverlapAdd},
    {"overlap_axpy", OverlapAxpy},
    {"overlap_cast/f2f4", OverlapCast<float, half>},
    {"overlap_cast/f4f2", OverlapCast<half, float>},
    {"mask_after_count", MaskAfterCount},
    {"mask_after_mask", MaskAfterMask},
    {"count_from_register", CountFromRegister},
    {"vector_mask_range", VectorMaskRange},
};

}  // namespace

API_MAIN(kEntries)
