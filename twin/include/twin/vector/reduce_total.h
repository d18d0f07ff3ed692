// Reductions to one value (ReduceSum, ReduceMax, ReduceMin), and Sum over rows.
#pragma once

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
inline twin::Access CheckWorkTensor(const char* name, const LocalTensor<T>& work, uint64_t repeats,
                                    bool extreme, bool with_index, const twin::Access& write,
                                    const twin::Access& read, const twin::Loc& loc) {
    const uint64_t n = ScratchElements<T>(repeats, extreme, with_index);
    const uintptr_t at = work.SpanAt(n, loc, name);
    const uintptr_t end = at + n * sizeof(T);
    const bool apart = (end <= write.begin || write.begin + write.bytes <= at) &&
                       (end <= read.begin || read.begin + read.bytes * read.count <= at);
    if (repeats <= 1 || !apart) return {};
    return {at, n * sizeof(T)};
}

// One value, or value and index, at the front of dst.
template <bool kMax, class T>
inline void Extreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                    const LocalTensor<T>& work, int32_t count, bool calIndex, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "ReduceMax, ReduceMin: half and float only");
    const uint32_t n = CheckElementCount(name, count, loc), results = calIndex ? 2 : 1;
    SetMaskNorm();
    ResetMask();
    if (n == 0) return;
    T* to = dst.Span(results, loc, name, calIndex ? 2 * sizeof(T) : sizeof(T));
    const T* from = src.Span(n, loc, name);
    const twin::Access write = UbAccess(to, results), read = UbAccess(from, n);
    CheckOverlap(name, 0, write.begin, write.bytes, read.begin, read.bytes, loc);
    const uint64_t repeats = std::max<uint64_t>(n / twin::kLanes<T>, 1);
    const twin::Access garbage =
        CheckWorkTensor("scratch of a reduction", work, repeats, true, calIndex, write, read, loc);
    twin::Issue(twin::PartOf({name, loc}, n, write, read, {}, {}, garbage),
                [=] { twin::RunBest([=] { twin::ReduceExtremeArray<kMax>(to, from, n, calIndex); }); });
}

// The mask form: a number of repeats, which may be more than 255.
struct RepeatedTotal {
    twin::LaneMask mask;
    uint32_t repeats;
    uint32_t stride;
    twin::Access reads[3];
};
template <class T, class M>
inline RepeatedTotal CheckTotal(const char* name, const LocalTensor<T>& src, M mask, int32_t repeatTime,
                                int32_t srcRepStride, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "reductions: half and float only");
    TWIN_RAISE_IF(repeatTime < 0, kBadArgument, loc, "repeatTime %d is below 0", repeatTime);
    const Work work = ReduceWork<T, true>(mask, 1, loc);
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "%s over repeats in counter mode", name);
    RepeatedTotal total = {work.lanes.mask,
                           static_cast<uint32_t>(repeatTime),
                           CheckStride(name, "srcRepStride", srcRepStride, loc),
                           {}};
    ResetMask();
    if (total.repeats == 0) return total;
    const twin::Operand operand{reinterpret_cast<uintptr_t>(src.data()), sizeof(T), {1, total.stride}};
    const twin::Runs runs = twin::FindRuns(work.lanes, {});
    src.Span(((total.repeats - 1) * operand.Step() + twin::RepeatExtent(operand, runs)) / sizeof(T), loc,
             name);
    ReadsOf(operand, runs, total.repeats, total.reads);
    return total;
}
template <bool kMax, class T, class M>
inline void RepeatedExtreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                            const LocalTensor<T>& work, M mask, int32_t repeatTime, int32_t srcRepStride,
                            bool calIndex, const twin::Loc& loc) {
    const RepeatedTotal total = CheckTotal(name, src, mask, repeatTime, srcRepStride, loc);
    if (total.repeats == 0) return;
    const uint32_t results = calIndex ? 2 : 1;
    T* to = dst.Span(results, loc, name, calIndex ? 2 * sizeof(T) : sizeof(T));
    const T* from = UbPointer<T>(reinterpret_cast<uintptr_t>(src.data()));
    const twin::Access write = UbAccess(to, results);
    const twin::Access garbage = CheckWorkTensor("scratch of a reduction", work, total.repeats, true,
                                                 calIndex, write, total.reads[0], loc);
    twin::Issue(twin::PartOf({name, loc}, uint64_t{total.repeats} * twin::kLanes<T>, write, total.reads[0],
                             total.reads[1], total.reads[2], garbage),
                [=] {
                    twin::ReduceExtremeRepeats<kMax>(to, from, total.mask, total.repeats, total.stride,
                                                     calIndex);
                });
}

}  // namespace detail

// dst[0] = the extreme; with `calIndex` dst[1] = the bits of the first index that has it.
#define TWIN_EXTREME(Name, kMax)                                                                        \
    template <class T>                                                                                  \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src,                              \
                     const LocalTensor<T>& sharedTmpBuffer, const int32_t count, bool calIndex = false, \
                     TWIN_CALLER) {                                                                     \
        detail::Extreme<kMax>(#Name, dst, src, sharedTmpBuffer, count, calIndex, loc);                  \
    }                                                                                                   \
    template <class T, class M>                                                                         \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src,                              \
                     const LocalTensor<T>& sharedTmpBuffer, M mask, const int32_t repeatTime,           \
                     const int32_t srcRepStride, bool calIndex = false, TWIN_CALLER) {                  \
        detail::RepeatedExtreme<kMax>(#Name, dst, src, sharedTmpBuffer, mask, repeatTime, srcRepStride, \
                                      calIndex, loc);                                                   \
    }
TWIN_EXTREME(ReduceMax, true)
TWIN_EXTREME(ReduceMin, false)
#undef TWIN_EXTREME

// dst[0] = the sum: a binary tree within each 256 bytes, these in order. The scratch tensor is not used.
template <class T, bool isSetMask = true>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count, TWIN_CALLER) {
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
    T* to = dst.Span(1, loc, "ReduceSum destination", sizeof(T));
    const T* from = src.Span(n, loc, "ReduceSum source");
    detail::CheckOverlap("ReduceSum", 0, reinterpret_cast<uintptr_t>(to), sizeof(T),
                         reinterpret_cast<uintptr_t>(from), n * sizeof(T), loc);
    twin::Issue(twin::PartOf({"ReduceSum", loc}, n, detail::UbAccess(to, 1), detail::UbAccess(from, n)),
                [=] { twin::ReduceSumArray(to, from, n); });
}
// The mask form: a tree over the repeats' sums, which go through the scratch tensor.
template <class T, class M>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, M mask, const int32_t repeatTime,
                      const int32_t srcRepStride, TWIN_CALLER) {
    const detail::RepeatedTotal total =
        detail::CheckTotal("ReduceSum", src, mask, repeatTime, srcRepStride, loc);
    if (total.repeats == 0) return;
    T* to = dst.Span(1, loc, "ReduceSum destination", sizeof(T));
    const T* from = detail::UbPointer<T>(reinterpret_cast<uintptr_t>(src.data()));
    const twin::Access write = detail::UbAccess(to, 1);
    const twin::Access garbage = detail::CheckWorkTensor(
        "scratch of ReduceSum", sharedTmpBuffer, total.repeats, false, false, write, total.reads[0], loc);
    twin::Issue(twin::PartOf({"ReduceSum", loc}, uint64_t{total.repeats} * twin::kLanes<T>, write,
                             total.reads[0], total.reads[1], total.reads[2], garbage),
                [=] { twin::ReduceSumRepeats(to, from, total.mask, total.repeats, total.stride); });
}

namespace detail {

template <class T>
inline void SumRows(const LocalTensor<T>& dst, const LocalTensor<T>& src, const SumParams& p,
                    const LocalTensor<uint8_t>* scratch, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "Sum: half and float only");
    TWIN_RAISE_IF(p.inner * sizeof(T) % twin::kBlockBytes != 0 || p.n > p.inner || p.n == 0, kBadArgument,
                  loc, "Sum: inner %u must be a multiple of 32 bytes, n %u from 1 to inner", p.inner, p.n);
    SetMaskNorm();
    ResetMask();
    if (p.outter == 0) return;
    T* to = dst.Span(p.outter, loc, "Sum destination");
    const uint64_t all = static_cast<uint64_t>(p.outter) * p.inner;
    const T* from = src.Span(all, loc, "Sum source");
    const twin::Access write = UbAccess(to, p.outter);
    const twin::Access read = p.n == p.inner ? UbAccess(from, all)
                                             : twin::Access{reinterpret_cast<uintptr_t>(from),
                                                            p.n * sizeof(T), p.outter, p.inner * sizeof(T)};
    CheckApart("Sum", "source", write.begin, write.bytes, reinterpret_cast<uintptr_t>(from), all * sizeof(T),
               loc);
    if (scratch != nullptr) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(scratch->Span(0, loc, "Sum scratch"));
        CheckApart("Sum", "scratch", write.begin, write.bytes, at, scratch->GetSize(), loc);
        CheckApart("Sum", "scratch (of the source)", reinterpret_cast<uintptr_t>(from), all * sizeof(T), at,
                   scratch->GetSize(), loc);
    }
    twin::Issue(twin::PartOf({"Sum", loc}, all, write, read),
                [=] { twin::SumRows(to, from, p.outter, p.inner, p.n); });
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

}  // namespace AscendC
