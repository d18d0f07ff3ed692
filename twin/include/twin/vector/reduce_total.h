// Reductions to one value (ReduceSum, ReduceMax, ReduceMin), and Sum over rows.
#pragma once

#include "twin/api/copy.h"
#include "twin/vector/reduce_repeats.h"
#include "twin/vector/select.h"

namespace AscendC {

struct SumParams {
    uint32_t outter = 1;  // rows
    uint32_t inner = 0;   // elements of a row, padded to 32 bytes
    uint32_t n = 0;       // of which these are summed
};

namespace detail {

// Elements of scratch that a reduction of `repeats` repeats needs, by the vendor's formula.
template <class T>
inline uint64_t ScratchElements(uint64_t repeats, bool extreme, bool with_index) {
    constexpr uint64_t kBlock = twin::kBlockLanes<T>, kRepeat = twin::kLanes<T>;
    const auto aligned = [](uint64_t n) { return (n + kBlock - 1) / kBlock * kBlock; };
    const auto next = [](uint64_t n) { return (n + kRepeat - 1) / kRepeat * 2; };
    const uint64_t first = extreme ? 2 * repeats : repeats;
    if (!with_index) return aligned(first);
    const uint64_t second = next(first);
    return aligned(first) + aligned(second) + (second > 2 ? aligned(next(second)) : 0);
}
// Checks the scratch tensor. Afterwards its contents are undefined, unless it shares bytes with an operand.
template <class T>
inline twin::Access CheckWorkTensor(const char* name, const LocalTensor<T>& work, uint64_t repeats, bool extreme,
                                    bool with_index, const twin::Access& write, const twin::Access& read,
                                    const twin::Loc& loc) {
    const uint64_t n = ScratchElements<T>(repeats, extreme, with_index);
    const twin::Access garbage = work.Part(n, loc, name);
    const twin::Access source{read.begin, read.bytes * read.count};
    return repeats > 1 && Apart(garbage, write) && Apart(garbage, source) ? garbage : twin::Access{};
}

// One value, or value and index, at the front of dst.
template <bool kMax, class T>
inline void Extreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
                    int32_t count, bool calIndex, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "ReduceMax, ReduceMin: half and float only");
    const uint32_t n = CheckElementCount(name, count, loc), results = calIndex ? 2 : 1;
    SetMaskNorm();
    ResetMask();
    if (n == 0) return;
    const twin::Access write = dst.Part(results, loc, name, results * sizeof(T)), read = src.Part(n, loc, name);
    ListOverlap(name, 0, write, read, loc);  // written when all is read
    const uint64_t repeats = std::max<uint64_t>(n / twin::kLanes<T>, 1);
    const twin::Access garbage =
        CheckWorkTensor("scratch of a reduction", work, repeats, true, calIndex, write, read, loc);
    T* to = UbPointer<T>(write.begin);
    const T* from = UbPointer<T>(read.begin);
    twin::Reduced* const kept = &twin::current_core().reduced_extreme;
    twin::Issue(twin::PartOf({name, loc}, write, read, {}, {}, garbage), [=] {
        twin::RunBest([=] {
            const twin::Extreme best = twin::ReduceExtremeArray<kMax>(to, from, n, calIndex);
            *kept = ReducedOf<T>(best.value);
        });
    });
}

// The mask form: a number of repeats, which may be more than 255.
struct RepeatedTotal {
    twin::LaneMask mask;
    uint32_t repeats;
    uint32_t stride;
    twin::Access read;
};
template <class T, class M>
inline RepeatedTotal CheckTotal(const char* name, const LocalTensor<T>& src, M mask, int32_t repeatTime,
                                int32_t srcRepStride, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "reductions: half and float only");
    TWIN_RAISE_IF(repeatTime < 0, kBadArgument, loc, "repeatTime %d is below 0", repeatTime);
    const Work work = ReduceWork<T, true>(mask, 1, loc);
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "%s over repeats in counter mode", name);
    RepeatedTotal total = {
        work.lanes.mask, static_cast<uint32_t>(repeatTime), CheckStride(name, "srcRepStride", srcRepStride, loc), {}};
    ResetMask();
    if (total.repeats == 0) return total;
    const twin::Operand operand{reinterpret_cast<uintptr_t>(src.data()), sizeof(T), {1, total.stride}};
    const twin::Lanes lanes{total.mask, twin::kLanes<T>, total.repeats};
    src.Span(twin::Extent(operand, twin::FindRuns(lanes, {}), total.repeats) / sizeof(T), loc, name);
    total.read = twin::AccessOf(operand, lanes);
    return total;
}
template <bool kMax, class T, class M>
inline void RepeatedExtreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                            const LocalTensor<T>& work, M mask, int32_t repeatTime, int32_t srcRepStride, bool calIndex,
                            const twin::Loc& loc) {
    const RepeatedTotal total = CheckTotal(name, src, mask, repeatTime, srcRepStride, loc);
    if (total.repeats == 0) return;
    const uint32_t results = calIndex ? 2 : 1;
    const twin::Access write = dst.Part(results, loc, name, results * sizeof(T));
    const T* from = UbPointer<T>(reinterpret_cast<uintptr_t>(src.data()));
    const twin::Access garbage =
        CheckWorkTensor("scratch of a reduction", work, total.repeats, true, calIndex, write, total.read, loc);
    twin::Reduced* const kept = &twin::current_core().reduced_extreme;
    twin::Issue(twin::PartOf({name, loc}, write, total.read, {}, {}, garbage), [=] {
        const auto best = twin::ReduceExtremeRepeats<kMax>(UbPointer<T>(write.begin), from, total.mask, total.repeats,
                                                           total.stride, calIndex);
        *kept = ReducedOf<T>(best.value);
    });
}

}  // namespace detail

// dst[0] = the extreme; with `calIndex` dst[1] = the bits of the first index that has it.
#define TWIN_EXTREME(Name, kMax)                                                                                  \
    template <class T>                                                                                            \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer, \
                     const int32_t count, bool calIndex = false, TWIN_CALLER) {                                   \
        detail::Extreme<kMax>(#Name, dst, src, sharedTmpBuffer, count, calIndex, loc);                            \
    }                                                                                                             \
    template <class T, class M>                                                                                   \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer, \
                     M mask, const int32_t repeatTime, const int32_t srcRepStride, bool calIndex = false,         \
                     TWIN_CALLER) {                                                                               \
        detail::RepeatedExtreme<kMax>(#Name, dst, src, sharedTmpBuffer, mask, repeatTime, srcRepStride, calIndex, \
                                      loc);                                                                       \
    }
TWIN_EXTREME(ReduceMax, true)
TWIN_EXTREME(ReduceMin, false)
#undef TWIN_EXTREME

// dst[0] = the sum: a binary tree within each 256 bytes, these in order. The scratch tensor is not used.
template <class T, bool isSetMask = true>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
                      const int32_t count, TWIN_CALLER) {
    static_assert(twin::kReduceType<T>, "ReduceSum: half and float only");
    (void)sharedTmpBuffer;
    uint32_t n = detail::CheckElementCount("ReduceSum", count, loc);
    if (isSetMask) {
        SetMaskNorm();
        ResetMask();
    } else {
        const detail::Work work = detail::RegisterWork(1, twin::kLanes<T>);
        TWIN_RAISE_IF(!work.counted, kBadArgument, loc,
                      "ReduceSum<T, false> of a count outside counter mode: SetMaskCount is missing");
        n = static_cast<uint32_t>(work.elements);
    }
    if (n == 0) return;
    const twin::Access write = dst.Part(1, loc, "ReduceSum destination", sizeof(T));
    const twin::Access read = src.Part(n, loc, "ReduceSum source");
    detail::ListOverlap("ReduceSum", 0, write, read, loc);  // written when all is read
    twin::Reduced* const kept = &twin::current_core().reduced_sum;
    twin::Issue(twin::PartOf({"ReduceSum", loc}, write, read), [=] {
        const T sum = twin::ReduceSumArray(detail::UbPointer<T>(write.begin), detail::UbPointer<T>(read.begin), n);
        *kept = detail::ReducedOf<T>(twin::Widen(sum));
    });
}
// The mask form: a tree over the repeats' sums, which go through the scratch tensor.
template <class T, class M>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
                      M mask, const int32_t repeatTime, const int32_t srcRepStride, TWIN_CALLER) {
    const detail::RepeatedTotal total = detail::CheckTotal("ReduceSum", src, mask, repeatTime, srcRepStride, loc);
    if (total.repeats == 0) return;
    const twin::Access write = dst.Part(1, loc, "ReduceSum destination", sizeof(T));
    const T* from = detail::UbPointer<T>(reinterpret_cast<uintptr_t>(src.data()));
    const twin::Access garbage = detail::CheckWorkTensor("scratch of ReduceSum", sharedTmpBuffer, total.repeats, false,
                                                         false, write, total.read, loc);
    twin::Issue(twin::PartOf({"ReduceSum", loc}, write, total.read, {}, {}, garbage), [=] {
        twin::ReduceSumRepeats(detail::UbPointer<T>(write.begin), from, total.mask, total.repeats, total.stride);
    });
}

namespace detail {

template <class T>
inline void SumRows(const LocalTensor<T>& dst, const LocalTensor<T>& src, const SumParams& p,
                    const LocalTensor<uint8_t>* scratch, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "Sum: half and float only");
    TWIN_RAISE_IF(p.n > p.inner || p.n == 0, kBadArgument, loc, "Sum: n %u must be from 1 to inner, %u", p.n, p.inner);
    TWIN_RULE_IF(p.inner * sizeof(T) % twin::kBlockBytes != 0, kSumInner, kBadArgument, loc,
                 "Sum: inner %u must be a multiple of 32 bytes", p.inner);
    SetMaskNorm();
    ResetMask();
    if (p.outter == 0) return;
    const twin::Access write = dst.Part(p.outter, loc, "Sum destination");
    const twin::Access all = src.Part(static_cast<uint64_t>(p.outter) * p.inner, loc, "Sum source");
    twin::Access read = all;
    if (p.n != p.inner) read = {all.begin, p.n * sizeof(T), p.outter, p.inner * sizeof(T)};
    TWIN_RULE_IF(!Apart(write, all), kSumOverlap, kBadArgument, loc, "Sum: destination and source overlap");
    if (scratch != nullptr) {
        const uint64_t repeats = (p.n + twin::kLanes<T> - 1) / twin::kLanes<T>;  // see GetSumMaxMinTmpSize
        const twin::Access tmp = scratch->Part(CeilBlock(repeats * sizeof(T)), loc, "Sum scratch");
        CheckApart("Sum", "scratch", write, tmp, loc);
        CheckApart("Sum", "scratch (of the source)", all, tmp, loc);
    }
    twin::Issue(twin::PartOf({"Sum", loc}, write, read),
                [=] { twin::SumRows(UbPointer<T>(write.begin), UbPointer<T>(all.begin), p.outter, p.inner, p.n); });
}

}  // namespace detail

// dst[row] = the sum of the first n elements of each row.
template <class T, int32_t reduceDim = -1, bool isReuseSource = false, bool isBasicBlock = false>
inline void Sum(const LocalTensor<T>& dstTensor, const LocalTensor<T>& srcTensor,
                const LocalTensor<uint8_t>& sharedTmpBuffer, const SumParams& sumParams, TWIN_CALLER) {
    detail::SumRows(dstTensor, srcTensor, sumParams, &sharedTmpBuffer, loc);
}
// The same with scratch from the end of UB.
template <class T, int32_t reduceDim = -1, bool isReuseSource = false, bool isBasicBlock = false>
inline void Sum(const LocalTensor<T>& dstTensor, const LocalTensor<T>& srcTensor, const SumParams& sumParams,
                TWIN_CALLER) {
    detail::CheckScratch("Sum without a scratch tensor", loc);
    detail::SumRows<T>(dstTensor, srcTensor, sumParams, nullptr, loc);
}

namespace detail {

// A special register, after the vector unit has written it.
template <class T>
inline twin::Reduced ReadReduced(const twin::Reduced& kept, const char* name, const char* after, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "special registers of reductions: half and float only");
    twin::CompletePipe(twin::Pipe::kV);
    TWIN_RULE_IF(kept.bytes != sizeof(T), kOtherReduction, kBadArgument, loc,
                 "%s of %zu-byte elements: it reads the result of %s%s", name, sizeof(T), after,
                 kept.bytes == 0 ? ", and none has run" : " of the same element type");
    return kept;
}
template <class T>
inline T FromBits(uint32_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace detail

// The result of the last ReduceSum over a count.
template <class T>
inline T GetReduceRepeatSumSpr(TWIN_CALLER) {
    const twin::Core& core = twin::current_core();
    return detail::FromBits<T>(
        detail::ReadReduced<T>(core.reduced_sum, "GetReduceRepeatSumSpr", "ReduceSum over a count", loc).value);
}
inline int64_t GetReduceRepeatSumSpr() {
    twin::CompletePipe(twin::Pipe::kV);
    return twin::current_core().reduced_sum.value;
}

// The extreme of all repeats of the last WholeReduceMax or WholeReduceMin, and its index in the bits of T; of ReduceMax
// and ReduceMin the value only. Both as T or in 32 bits.
template <class T>
inline void GetReduceRepeatMaxMinSpr(uint32_t& maxMinValue, uint32_t& maxMinIndex, TWIN_CALLER) {
    const twin::Core& core = twin::current_core();
    const twin::Reduced kept =
        detail::ReadReduced<T>(core.reduced_extreme, "GetReduceRepeatMaxMinSpr", "a maximum or minimum", loc);
    maxMinValue = kept.value;
    maxMinIndex = kept.index;
}
template <class T>
inline void GetReduceRepeatMaxMinSpr(T& maxMinValue, T& maxMinIndex, TWIN_CALLER) {
    uint32_t value = 0, index = 0;
    GetReduceRepeatMaxMinSpr<T>(value, index, loc);
    maxMinValue = detail::FromBits<T>(value);
    maxMinIndex = detail::FromBits<T>(index);
}

// The older names.
template <class T>
inline T GetAccVal(TWIN_CALLER) {
    return GetReduceRepeatSumSpr<T>(loc);
}
inline int64_t GetAccVal() { return GetReduceRepeatSumSpr(); }
template <class T>
inline void GetReduceMaxMinCount(uint32_t& maxMinValue, uint32_t& maxMinIndex, TWIN_CALLER) {
    GetReduceRepeatMaxMinSpr<T>(maxMinValue, maxMinIndex, loc);
}
template <class T>
inline void GetReduceMaxMinCount(T& maxMinValue, T& maxMinIndex, TWIN_CALLER) {
    GetReduceRepeatMaxMinSpr<T>(maxMinValue, maxMinIndex, loc);
}

}  // namespace AscendC
