// Elementwise calls in every form. Numbers: form, mask (or count), its high word, repeatTime, then strides:
// blocks of dst and sources, repeats of dst and sources.
//   form 0: the first n elements   1: the first n lanes   2: a mask of bits   3: the mask register (normal
//   mode) form 4: the mask register (counter mode)   5: counter mode, the number of elements as {n, 0}
#include <string_view>

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

// Mask forms of all calls and types are many instances of one template: only `make nightly` compiles them.
template <class T>
constexpr bool Masked([[maybe_unused]] std::string_view name) {
#ifdef ALL_FORMS
    return true;
#else
    for (const char* one : {"Add", "Mul", "Axpy", "Adds", "Not", "MulAddDst", "Cast", "Duplicate"}) {
        if (name == one) return std::is_same_v<T, float> || std::is_same_v<T, int16_t>;
    }
    return false;
#endif
}

// T: the type that decides about the mask forms.
#define FORMS(T, Name, Params, Template, ...)                                                      \
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};                                  \
    SetRegister(g);                                                                                \
    if (g.p[0] == 0) Name(__VA_ARGS__, g.Int(1));                                                  \
    if constexpr (Masked<T>(#Name)) {                                                              \
        switch (g.p[0]) {                                                                          \
            case 0: break;                                                                         \
            case 1: Name(__VA_ARGS__, g.Mask(), g.Int(3), Params); break;                          \
            case 3:                                                                                \
            case 4: Name<Template, false>(__VA_ARGS__, MASK_PLACEHOLDER, g.Int(3), Params); break; \
            default: Name(__VA_ARGS__, bits, g.Int(3), Params);                                    \
        }                                                                                          \
    }                                                                                              \
    SetMaskNorm();                                                                                 \
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
#define BINARY_FOUR(X) X(Add) X(Sub) X(Mul) X(Max) X(Min)
#define BINARY_REAL(X) X(Div) X(AddRelu) X(SubRelu) X(FusedMulAdd) X(FusedMulAddRelu)
#define BINARY_BITS(X) X(And) X(Or)
#define SCALAR_FOUR(X) X(Adds) X(Muls) X(Maxs) X(Mins)
#define SCALAR_BITS(X) X(ShiftLeft) X(ShiftRight)
#define UNARY_REAL(X) X(Abs) X(Relu) X(Sqrt) X(Rsqrt) X(Reciprocal) X(Exp) X(Ln)
BINARY_FOUR(BINARY_CALL)
BINARY_REAL(BINARY_CALL)
BINARY_BITS(BINARY_CALL)
SCALAR_FOUR(SCALAR_CALL)
SCALAR_CALL(LeakyRelu)
SCALAR_BITS(SCALAR_CALL)
UNARY_REAL(UNARY_CALL)
UNARY_CALL(Not)

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
    FORMS(float, Cast, Unary(g), D COMMA S, g.As<D>(g.out), g.As<S>(g.a), kMode)
}
template <class T>
void CallDuplicate(const Args& g) {
    const T value = g.As<T>(g.b).GetValue(0);
    FORMS(float, Duplicate, g.Short(4) COMMA g.Byte(7), T, g.As<T>(g.out), value)
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
    ByForm(
        g, [&](uint32_t n) { CreateVecIndex(out, first, n); },
        [&](auto mask) { CreateVecIndex(out, first, mask, g.Int(3), g.Short(4), g.Byte(7)); });
}

// ---- overlaps: numbers 10 and 11 are the byte offsets of dst and source 0 within `a` ----

void OverlapAdd(const Args& g) {
    const LocalTensor<float> to = g.InA<float>(10), from = g.InA<float>(11);
    if (g.p[0] == 0) {
        Add(to, from, g.As<float>(g.b), g.Int(1));
    } else if (g.p[0] == 1) {
        Add(to, from, g.As<float>(g.b), g.Mask(), g.Int(3), Binary(g));
    } else {
        Add(to, g.As<float>(g.b), from, g.Mask(), g.Int(3), Binary(g));
    }
    g.AToOut();
}
void OverlapAxpy(const Args& g) {
    Axpy(g.InA<float>(10), g.InA<half>(11), half(2.0f), g.Int(1));
    g.AToOut();
}
template <class D, class S>
void OverlapCast(const Args& g) {
    Cast(g.InA<D>(10), g.InA<S>(11), sizeof(D) > sizeof(S) ? RoundMode::CAST_NONE : RoundMode::CAST_RINT,
         static_cast<uint32_t>(g.p[1]));
    g.AToOut();
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

#define AS(Name, kind, T) {#Name "/" kind, Call##Name<T>},
#define REAL(Name) AS(Name, "f2", half) AS(Name, "f4", float)
#define SIGNED(Name) AS(Name, "i2", int16_t) AS(Name, "i4", int32_t)
#define UNSIGNED(Name) AS(Name, "u2", uint16_t) AS(Name, "u4", uint32_t)
#define SHORT(Name) AS(Name, "i2", int16_t) AS(Name, "u2", uint16_t)
#define FOUR(Name) REAL(Name) SIGNED(Name)
#define SHIFTED(Name) SIGNED(Name) UNSIGNED(Name)
#define SIX(Name) FOUR(Name) UNSIGNED(Name)
// clang-format off
const Entry kEntries[] = {
    BINARY_FOUR(FOUR) BINARY_REAL(REAL) BINARY_BITS(SHORT)
    SCALAR_FOUR(FOUR) REAL(LeakyRelu) SCALAR_BITS(SHIFTED)
    UNARY_REAL(REAL) AS(Relu, "i4", int32_t) SHORT(Not)
    SIX(Duplicate) SIX(Copy) FOUR(Index)
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
// clang-format on

}  // namespace

API_MAIN(kEntries)
