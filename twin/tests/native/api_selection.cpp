// Comparisons, selections, gathers, broadcasts. Numbers as in api_elementwise.cpp: form, mask, its high word,
// repeatTime, block strides, repeat strides; then 10: mode or pattern, 11: a byte offset.
#include "api_harness.h"

namespace {

using namespace api;

CMPMODE Mode(const Args& g) { return static_cast<CMPMODE>(g.p[10]); }

template <class T>
void CallCompare(const Args& g) {
    const LocalTensor<T> a = g.As<T>(g.a), b = g.As<T>(g.b);
    ByForm(
        g, [&](uint32_t n) { Compare(g.out, a, b, Mode(g), n); },
        [&](auto mask) { Compare(g.out.ReinterpretCast<int8_t>(), a, b, Mode(g), mask, g.Int(3), Binary(g)); });
}
template <class T>
void CallCompareScalar(const Args& g) {
    const LocalTensor<T> a = g.As<T>(g.a);
    const T value = g.As<T>(g.b).GetValue(0);
    ByForm(
        g, [&](uint32_t n) { CompareScalar(g.out, a, value, Mode(g), n); },
        [&](auto mask) { Compares(g.out, a, value, Mode(g), mask, g.Int(3), Unary(g)); });
}
// Compares a with b into the register; the register's bits go to out, and select between a and b at byte
// 4096.
template <class T>
void CallRegisterCompare(const Args& g) {
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};
    const LocalTensor<T> a = g.As<T>(g.a), b = g.As<T>(g.b);
    if (g.p[0] == 1) {
        Compare(a, b, CMPMODE::LT, g.Mask(), Binary(g));
    } else {
        Compare(a, b, CMPMODE::LT, bits, Binary(g));
    }
    GetCmpMask(g.out);
    ResetMask();
    Select<T, SELMODE::VSEL_CMPMASK_SPR>(g.out[4096].ReinterpretCast<T>(), a, b, 2, {1, 1, 1, 8, 8, 8});
}
// The register from `b`, then Select.
void RegisterSet(const Args& g) {
    SetCmpMask(g.b);
    Select<float, SELMODE::VSEL_CMPMASK_SPR>(g.As<float>(g.out), g.As<float>(g.a), g.a[4096].ReinterpretCast<float>(),
                                             g.Int(3), Binary(g));
}
// The chooser's bits are in b; the second operand is the second half of a, or the scalar 7.
template <class T>
void CallSelect(const Args& g) {
    const LocalTensor<T> out = g.As<T>(g.out), x = g.As<T>(g.a), y = g.a[4096].ReinterpretCast<T>();
    const LocalTensor<uint16_t> choose = g.As<uint16_t>(g.b);
    const SELMODE mode = static_cast<SELMODE>(g.p[10]);
    const auto select = [&](auto second) {
        ByForm(
            g, [&](uint32_t n) { Select(out, choose, x, second, mode, n); },
            [&](auto mask) { Select(out, choose, x, second, mode, mask, g.Int(3), Binary(g)); });
    };
    if (mode == SELMODE::VSEL_TENSOR_SCALAR_MODE) {
        select(T(7));
    } else {
        select(y);
    }
}
// Form 0: a fixed pattern (number 10); 1: the bits in b. Mask 0: normal mode. Overlap: number 11.
template <class T>
void CallGatherMask(const Args& g) {
    using U = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    uint64_t kept = 99;
    const GatherMaskParams params(g.Byte(5), g.Short(3), g.Short(8), g.Byte(9));
    const LocalTensor<T> from = g.As<T>(g.a);
    const LocalTensor<T> to = g.InA<T>(11);
    const uint32_t mask = static_cast<uint32_t>(g.p[1]);
    if (g.p[0] == 0) {
        GatherMask(to, from, g.Byte(10), mask != 0, mask, params, kept);
    } else {
        GatherMask(to, from, g.As<U>(g.b), mask != 0, mask, params, kept);
    }
    PipeBarrier<PIPE_V>();
    if (g.p[11] >= 0) DataCopy(g.out, g.a, kBytes);
    SetFlag<HardEvent::V_S>(EVENT_ID0);
    WaitFlag<HardEvent::V_S>(EVENT_ID0);
    g.out.ReinterpretCast<uint32_t>().SetValue(2046, static_cast<uint32_t>(kept));
    g.out.ReinterpretCast<uint32_t>().SetValue(2047, static_cast<uint32_t>(GetGatherMaskRemainCount()));
}
// Offsets are in b, the base is number 10.
template <class T>
void CallGather(const Args& g) {
    const LocalTensor<T> to = g.As<T>(g.out), from = g.As<T>(g.a);
    const LocalTensor<uint32_t> where = g.As<uint32_t>(g.b);
    const uint32_t base = static_cast<uint32_t>(g.p[10]);
    ByForm(
        g, [&](uint32_t n) { Gather(to, from, where, base, n); },
        [&](auto mask) { Gather(to, from, where, base, mask, g.Int(3), g.Short(7)); });
}
template <class T>
void CallGatherb(const Args& g) {
    Gatherb(g.As<T>(g.out), g.As<T>(g.a), g.As<uint32_t>(g.b), g.Int(3), GatherRepeatParams(g.Byte(4), g.Byte(7)));
}
template <class T>
void CallBrcb(const Args& g) {
    const LocalTensor<T> from = g.p[11] > 0 ? g.out[static_cast<uint32_t>(g.p[11])].ReinterpretCast<T>() : g.As<T>(g.a);
    Brcb(g.As<T>(g.out), from, g.Int(3), BrcbRepeatParams(g.Short(4), g.Short(7)));
}
// From b's first element on, by its second.
template <class T>
void CallArithProgression(const Args& g) {
    const LocalTensor<T> b = g.As<T>(g.b);
    ArithProgression(g.As<T>(g.out), b.GetValue(0), b.GetValue(1), g.Int(1));
}
// Within UB: numbers 0 blockCount, 1 blockLen, 2 and 3 gaps; 4 the byte in `a` that is copied to, below 0 for
// out.
void CopyBlocks(const Args& g) {
    DataCopy(g.InA<float>(4), g.As<float>(g.a), DataCopyParams(g.Short(0), g.Short(1), g.Short(2), g.Short(3)));
    if (g.p[4] >= 0) g.AToOut();
}
// Allocates until `number 1` bytes of UB are taken, then selects with a scalar.
void SelectScratch(const Args& g) {
    TBuf<> rest;
    GetTPipePtr()->InitBuffer(rest, static_cast<uint32_t>(g.p[1]) - 4 * kBytes);
    const LocalTensor<float> a = g.As<float>(g.a);
    if (g.p[10] == 0) {
        Select(g.As<float>(g.out), g.b, a, a, SELMODE::VSEL_CMPMASK_SPR, 64);
    } else {
        Select(g.As<float>(g.out), g.b, a, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
    }
}

#define AS(Name, kind, T) {#Name "/" kind, Call##Name<T>},
// clang-format off
const Entry kEntries[] = {
    AS(Compare, "f4", float) AS(Compare, "f2", half) AS(Compare, "i4", int32_t)
    AS(CompareScalar, "f4", float) AS(CompareScalar, "f2", half) AS(CompareScalar, "i4", int32_t)
    AS(RegisterCompare, "f4", float) AS(RegisterCompare, "f2", half)
    AS(Select, "f4", float) AS(Select, "f2", half)
    AS(GatherMask, "f4", float) AS(GatherMask, "i4", int32_t)
    AS(GatherMask, "u2", uint16_t) AS(GatherMask, "f2", half)
    AS(Gather, "f4", float) AS(Gather, "u2", uint16_t) AS(Gather, "i4", int32_t)
    AS(Gatherb, "u2", uint16_t) AS(Gatherb, "u4", uint32_t)
    AS(Brcb, "f4", float) AS(Brcb, "f2", half) AS(Brcb, "u4", uint32_t)
    AS(ArithProgression, "f2", half) AS(ArithProgression, "f4", float)
    AS(ArithProgression, "i2", int16_t) AS(ArithProgression, "i4", int32_t)
    {"register_set", RegisterSet},
    {"copy_blocks", CopyBlocks},
    {"select_scratch", SelectScratch},
};
// clang-format on

}  // namespace

API_MAIN(kEntries)
