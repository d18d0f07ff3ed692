// Reductions. Numbers: form (0 count, 1 lanes, 2 bits, 3 register), mask or count, its high word, repeatTime,
// then 4 dstRepStride, 5 srcBlkStride, 6 srcRepStride, 7 order or calIndex.
#include "api_harness.h"

namespace {

using namespace api;

#define OVER_REPEATS(T, Name, First, Second, ...)                                          \
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};                          \
    const LocalTensor<T> to = g.As<T>(g.out), from = g.As<T>(g.a);                         \
    if (g.p[0] == 1) {                                                                     \
        const int32_t mask = g.Int(1);                                                     \
        Name(to, from, First, Second, g.Int(4), g.Int(5), g.Int(6) __VA_ARGS__);           \
    } else if (g.p[0] == 2) {                                                              \
        const uint64_t* mask = bits;                                                       \
        Name(to, from, First, Second, g.Int(4), g.Int(5), g.Int(6) __VA_ARGS__);           \
    } else {                                                                               \
        const int32_t mask = MASK_PLACEHOLDER;                                             \
        SetVectorMask<T, MaskMode::NORMAL>(bits[1], bits[0]);                              \
        Name<T, false>(to, from, First, Second, g.Int(4), g.Int(5), g.Int(6) __VA_ARGS__); \
        ResetMask();                                                                       \
    }
#define COMMA_ORDER , static_cast<ReduceOrder>(g.p[7])

#define WHOLE(Short, Name, ...)                            \
    template <class T>                                     \
    void Call##Short(const Args& g) {                      \
        OVER_REPEATS(T, Name, mask, g.Int(3), __VA_ARGS__) \
    }
#define PARTS(Short, Name)                      \
    template <class T>                          \
    void Call##Short(const Args& g) {           \
        OVER_REPEATS(T, Name, g.Int(3), mask, ) \
    }
WHOLE(WholeSum, WholeReduceSum, )
WHOLE(WholeMax, WholeReduceMax, COMMA_ORDER)
WHOLE(WholeMin, WholeReduceMin, COMMA_ORDER)
PARTS(BlockSum, BlockReduceSum)
PARTS(BlockMax, BlockReduceMax)
PARTS(BlockMin, BlockReduceMin)
PARTS(PairSum, PairReduceSum)
// The names of newer headers, and RepeatReduceSum.
template <class T>
void CallNewNames(const Args& g) {
    const LocalTensor<T> from = g.As<T>(g.a);
    const auto to = [&](uint32_t part) { return g.out[1024 * part].ReinterpretCast<T>(); };
    ReduceRepeat<ReduceType::SUM>(to(0), from, g.Int(1), g.Int(3), 1, 1, 8);
    ReduceRepeat<ReduceType::MAX>(to(1), from, g.Int(1), g.Int(3), 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    ReduceRepeat<ReduceType::MIN>(to(2), from, g.Int(1), g.Int(3), 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    ReduceDataBlock<ReduceType::SUM>(to(3), from, g.Int(1), g.Int(3), 1, 1, 8);
    ReduceDataBlock<ReduceType::MAX>(to(4), from, g.Int(1), g.Int(3), 1, 1, 8);
    ReduceDataBlock<ReduceType::MIN>(to(5), from, g.Int(1), g.Int(3), 1, 1, 8);
    ReducePairElem<ReduceType::SUM>(to(6), from, g.Int(1), g.Int(3), 1, 1, 8);
    RepeatReduceSum(to(7), from, g.Int(3), g.Int(1), 1, 1, 1, 8);
}

template <class T>
void CallReduceSum(const Args& g) {
    const LocalTensor<T> to = g.As<T>(g.out), from = g.As<T>(g.a), work = g.As<T>(g.tmp);
    if (g.p[0] == 3) {
        SetMaskCount();
        SetVectorMask<T, MaskMode::COUNTER>(0, g.Mask());
    }
    if (g.p[0] >= 3) {  // 4: without counter mode
        ReduceSum<T, false>(to, from, work, 1);
        SetMaskNorm();
        return ResetMask();
    }
    ByForm(
        g, [&](uint32_t n) { ReduceSum(to, from, work, static_cast<int32_t>(n)); },
        [&](auto mask) { ReduceSum(to, from, work, mask, g.Int(3), g.Int(6)); });
}
// Form 3: over a count, with the source as scratch.
#define EXTREME(Name)                                                                          \
    template <class T>                                                                         \
    void Call##Name(const Args& g) {                                                           \
        const LocalTensor<T> to = g.As<T>(g.out), from = g.As<T>(g.a);                         \
        const LocalTensor<T> work = g.tmp[static_cast<uint32_t>(g.p[8])].ReinterpretCast<T>(); \
        if (g.p[0] == 3) return Name(to, from, from, g.Int(1), g.p[7] != 0);                   \
        ByForm(                                                                                \
            g, [&](uint32_t) { Name(to, from, work, g.Int(1), g.p[7] != 0); },                 \
            [&](auto mask) { Name(to, from, work, mask, g.Int(3), g.Int(6), g.p[7] != 0); });  \
    }
EXTREME(ReduceMax)
EXTREME(ReduceMin)

// Number 0: with scratch or without; 1, 2, 3: outter, inner, n; 4: bytes of UB that are taken besides; 5:
// where dst lies within a, below 0 for out.
template <class T>
void CallSum(const Args& g) {
    TBuf<> rest;
    if (g.p[4] > 0) GetTPipePtr()->InitBuffer(rest, static_cast<uint32_t>(g.p[4]));
    const SumParams params{static_cast<uint32_t>(g.p[1]), static_cast<uint32_t>(g.p[2]), static_cast<uint32_t>(g.p[3])};
    const LocalTensor<T> to = g.InA<T>(5);
    if (g.p[0] == 0) {
        Sum(to, g.As<T>(g.a), g.tmp, params);
    } else {
        Sum(to, g.As<T>(g.a), params);
    }
    if (g.p[5] >= 0) g.AToOut();
}
void InPlace(const Args& g) {
    WholeReduceSum(g.InA<float>(8), g.As<float>(g.a), 64, g.Int(3), g.Int(4), 1, g.Int(6));
    g.AToOut();
}

// Number 0: what runs first: 1 ReduceSum of another element type, 2 nothing. out: the sum, then the value and the index
// of an extreme: over repeats of 64 lanes, over a count.
template <class T>
void CallRegisters(const Args& g) {
    const LocalTensor<T> to = g.As<T>(g.out), from = g.As<T>(g.a), work = g.As<T>(g.tmp);
    using Other = std::conditional_t<sizeof(T) == 4, half, float>;
    if (g.p[0] == 0) ReduceSum(work, from, work, g.Int(1));
    if (g.p[0] == 1) ReduceSum(g.As<Other>(g.tmp), g.As<Other>(g.a), g.As<Other>(g.tmp), g.Int(1));
    T found[5], same[2];
    uint32_t bits[2];
    found[0] = GetAccVal<T>();
    WholeReduceMin(work, from, 64, g.Int(3), 1, 1, 8);
    GetReduceRepeatMaxMinSpr<T>(found[1], found[2]);
    GetReduceMaxMinCount<T>(bits[0], bits[1]);
    memcpy(&same[0], &bits[0], sizeof(T));
    memcpy(&same[1], &bits[1], sizeof(T));
    ReduceMax(work, from, work[1024], g.Int(1), true);
    GetReduceMaxMinCount(found[3], found[4]);
    for (uint32_t i = 0; i < 4; ++i) to.SetValue(i, found[i]);
    for (uint32_t i = 0; i < 2; ++i) to.SetValue(4 + i, same[i]);
    const int64_t raw = GetReduceRepeatSumSpr();
    memcpy(&same[0], &raw, sizeof(T));
    to.SetValue(6, same[0]);
}

#define BOTH(Name) \
    {#Name "/f2", Call##Name<half>}, { #Name "/f4", Call##Name<float> }
const Entry kEntries[] = {
    BOTH(WholeSum),  BOTH(WholeMax), BOTH(WholeMin),  BOTH(BlockSum),        BOTH(BlockMax),
    BOTH(BlockMin),  BOTH(PairSum),  BOTH(NewNames),  BOTH(ReduceSum),       BOTH(ReduceMax),
    BOTH(ReduceMin), BOTH(Sum),      BOTH(Registers), {"in_place", InPlace},
};

}  // namespace

API_MAIN(kEntries)
