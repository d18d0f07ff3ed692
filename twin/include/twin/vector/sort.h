// Sorting of (score, index) entries of 8 bytes, scores descending.
#pragma once

#include "twin/math/sort_arrays.h"
#include "twin/vector/call.h"

namespace AscendC {

struct MrgSort4Info {
    uint16_t elementLengths[4] = {};
    bool ifExhaustedSuspension = false;
    uint16_t validBit = 0;
    uint8_t repeatTimes = 1;
    MrgSort4Info() = default;
    MrgSort4Info(const uint16_t lengths[4], const bool suspend, const uint16_t valid, const uint16_t repeats)
        : ifExhaustedSuspension(suspend), validBit(valid), repeatTimes(static_cast<uint8_t>(repeats)) {
        for (int i = 0; i < 4; ++i) elementLengths[i] = lengths[i];
    }
};

template <class T>
struct MrgSortSrcList {
    LocalTensor<T> src1, src2, src3, src4;
    MrgSortSrcList() = default;
    MrgSortSrcList(const LocalTensor<T>& a, const LocalTensor<T>& b, const LocalTensor<T>& c, const LocalTensor<T>& d)
        : src1(a), src2(b), src3(c), src4(d) {}
};

namespace detail {

template <class T>
constexpr uint64_t kEntryElements = sizeof(twin::SortEntry) / sizeof(T);

// Checks the operands of Sort32 and Sort<T, ...>: scores, indices, and room for as many entries in dst.
template <class T>
struct SortOperands {
    twin::Access entries, scores, indices;
    uint32_t n;

    T* to() const { return UbPointer<T>(entries.begin); }
    const T* score() const { return UbPointer<T>(scores.begin); }
    const uint32_t* index() const { return UbPointer<uint32_t>(indices.begin); }
};
template <class T>
inline SortOperands<T> CheckSort(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& score,
                                 const LocalTensor<uint32_t>& index, int32_t repeatTime, const twin::Loc& loc) {
    static_assert(twin::kSortType<T>, "sorting: half and float only");
    CheckRepeatTime(repeatTime, loc);
    const uint32_t n = 32 * static_cast<uint32_t>(repeatTime);
    const SortOperands<T> all{dst.Part(n * kEntryElements<T>, loc, name), score.Part(n, loc, name),
                              index.Part(n, loc, name), n};
    CheckApart(name, "scores", all.entries, all.scores, loc);
    CheckApart(name, "indices", all.entries, all.indices, loc);
    return all;
}

}  // namespace detail

// Each run of 32 scores with their indices, sorted.
template <class T>
inline void Sort32(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<uint32_t>& src1,
                   const int32_t repeatTime, TWIN_CALLER) {
    const auto all = detail::CheckSort("Sort32", dst, src0, src1, repeatTime, loc);
    if (all.n == 0) return;
    twin::Issue(twin::PartOf({"Sort32", loc}, all.entries, all.scores, all.indices),
                [=] { twin::Sort32Array(all.to(), all.score(), all.index(), all.n / 32); });
}

// With isFullSort all 32 * repeatTime scores into one run; otherwise as Sort32. `tmp` is as large as dst.
template <class T, bool isFullSort>
inline void Sort(const LocalTensor<T>& dst, const LocalTensor<T>& concat, const LocalTensor<uint32_t>& index,
                 LocalTensor<T>& tmp, const int32_t repeatTime, TWIN_CALLER) {
    const auto all = detail::CheckSort("Sort", dst, concat, index, repeatTime, loc);
    if (all.n == 0) return;
    twin::Access scratch;
    if (isFullSort) {
        scratch = tmp.Part(all.n * detail::kEntryElements<T>, loc, "Sort scratch");
        detail::CheckApart("Sort", "scratch", all.entries, scratch, loc);
    }
    twin::Issue(twin::PartOf({"Sort", loc}, all.entries, all.scores, all.indices, {}, scratch), [=] {
        if (isFullSort) {
            twin::FullSortArray(all.to(), detail::UbPointer<T>(scratch.begin), all.score(), all.index(), all.n / 32);
        } else {
            twin::Sort32Array(all.to(), all.score(), all.index(), all.n / 32);
        }
    });
}

// Scores and indices of 32 * repeatTime entries apart again: one instruction each.
template <class T>
inline void Extract(const LocalTensor<T>& dstValue, const LocalTensor<uint32_t>& dstIndex, const LocalTensor<T>& sorted,
                    const int32_t repeatTime, TWIN_CALLER) {
    static_assert(twin::kSortType<T>, "Extract: half and float only");
    detail::CheckRepeatTime(repeatTime, loc);
    const uint32_t n = 32 * static_cast<uint32_t>(repeatTime);
    if (n == 0) return;
    const twin::Access values = dstValue.Part(n, loc, "Extract values");
    const twin::Access indices = dstIndex.Part(n, loc, "Extract indices");
    const twin::Access entries = sorted.Part(n * detail::kEntryElements<T>, loc, "Extract source");
    const uintptr_t from = entries.begin;
    detail::CheckApart("Extract", "source", values, entries, loc);
    detail::CheckApart("Extract", "source", indices, entries, loc);
    twin::Issue(twin::PartOf({"Extract", loc}, values, {from, sizeof(T), n, 8}), [=] {
        for (uint32_t i = 0; i < n; ++i) {
            const twin::SortEntry entry = twin::LoadEntry(detail::UbPointer<T>(from), i);
            twin::StoreAt(detail::UbPointer<T>(values.begin), i, twin::EntryScore<T>(entry));
        }
    });
    twin::Issue(twin::PartOf({"Extract", loc}, indices, {from + 4, 4, n, 8}), [=] {
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t index = twin::LoadAt(detail::UbPointer<uint32_t>(from + 4), 2 * i);
            twin::StoreAt(detail::UbPointer<uint32_t>(indices.begin), i, index);
        }
    });
}

// On A2/A3 the result is the source itself.
template <class T>
inline void Concat(LocalTensor<T>& concat, const LocalTensor<T>& src, const LocalTensor<T>& tmp,
                   const int32_t repeatTime, TWIN_CALLER) {
    static_assert(twin::kSortType<T>, "Concat: half and float only");
    detail::CheckRepeatTime(repeatTime, loc);
    (void)tmp;
    src.CheckAlive(loc);
    concat = src;
}

namespace detail {

struct MergeLists {
    uint32_t count = 0;
    uint16_t length[4] = {};
    uintptr_t from[4] = {};
    uint64_t total = 0;  // entries
};

inline uint32_t ListsOf(uint16_t valid, const twin::Loc& loc) {
    TWIN_RAISE_IF(valid != 3 && valid != 7 && valid != 15, kBadArgument, loc, "MrgSort: validBit %u is not 3, 7 or 15",
                  valid);
    return valid == 15 ? 4 : valid == 7 ? 3 : 2;
}

// More than one repeat: four lists of equal length that lie one behind the other, and no suspension.
inline void CheckMergeRepeats(const MergeLists& lists, const MrgSort4Info& params, const twin::Loc& loc) {
    bool regular = lists.count == 4 && !params.ifExhaustedSuspension;
    for (uint32_t i = 1; i < lists.count; ++i) {
        regular = regular && lists.length[i] == lists.length[0] &&
                  lists.from[i] == lists.from[0] + i * 8ull * lists.length[0];
    }
    if (regular) return;
    twin::Raise(twin::Finding::kBadArgument, loc,
                "MrgSort: %u repeats need four lists of one length, one behind the other, without suspension",
                params.repeatTimes);
}

}  // namespace detail

// Merges the lists that validBit names (3, 7 or 15) into dst. With suspension it stops when one is used up;
// how much is written is known only then, so all of it that could be counts as written.
template <class T>
inline void MrgSort(const LocalTensor<T>& dst, const MrgSortSrcList<T>& src, const MrgSort4Info& params, TWIN_CALLER) {
    static_assert(twin::kSortType<T>, "MrgSort: half and float only");
    const LocalTensor<T>* tensors[4] = {&src.src1, &src.src2, &src.src3, &src.src4};
    detail::MergeLists lists;
    lists.count = detail::ListsOf(params.validBit, loc);
    const uint32_t repeats = params.repeatTimes;
    for (uint32_t i = 0; i < lists.count; ++i) {
        TWIN_RAISE_IF(params.elementLengths[i] > 4095, kBadArgument, loc,
                      "MrgSort: list %u of %u entries, at most 4095", i, params.elementLengths[i]);
        lists.length[i] = params.elementLengths[i];
        lists.from[i] = reinterpret_cast<uintptr_t>(
            tensors[i]->Span(lists.length[i] * detail::kEntryElements<T>, loc, "MrgSort list", 8));
        lists.total += lists.length[i];
    }
    if (repeats == 0 || lists.total == 0) return;
    if (repeats > 1) {
        detail::CheckMergeRepeats(lists, params, loc);
        src.src1.Span(lists.total * repeats * detail::kEntryElements<T>, loc, "MrgSort lists", 8);
    }
    const uint64_t entries = lists.total * repeats;
    const twin::Access write = dst.Part(entries * detail::kEntryElements<T>, loc, "MrgSort destination");
    twin::Instruction merge = twin::PartOf({"MrgSort", loc}, write);
    for (uint32_t i = 0; i < lists.count; ++i) {
        const twin::Access list{lists.from[i], lists.length[i] * 8ull};
        detail::CheckApart("MrgSort", "a list", write, list, loc);
        if (repeats == 1) merge.reads[i] = list;
    }
    if (repeats > 1) merge.reads[0] = {lists.from[0], entries * 8};
    const bool suspend = params.ifExhaustedSuspension;
    uint16_t* counts = twin::current_core().merge_counts;
    twin::Issue(merge, [=] {
        uint32_t used[4] = {};
        const T* from[4] = {};
        for (uint32_t i = 0; i < lists.count; ++i) from[i] = detail::UbPointer<T>(lists.from[i]);
        twin::MergeSortArray(detail::UbPointer<T>(write.begin), from, lists.length, lists.count, suspend, repeats,
                             used);
        for (uint32_t i = 0; i < 4; ++i) counts[i] = static_cast<uint16_t>(used[i]);
    });
}

// How many entries of each list the last MrgSort has taken.
inline void GetMrgSortResult(uint16_t& mrgSortList1, uint16_t& mrgSortList2, uint16_t& mrgSortList3,
                             uint16_t& mrgSortList4) {
    twin::CompletePipe(twin::Pipe::kV);
    const uint16_t* counts = twin::current_core().merge_counts;
    mrgSortList1 = counts[0];
    mrgSortList2 = counts[1];
    mrgSortList3 = counts[2];
    mrgSortList4 = counts[3];
}

// The same as arguments; sortedNum receives how many entries of each list were taken.
template <class T, bool isExhaustedSuspension = false>
inline void MrgSort(const LocalTensor<T>& dst, const MrgSortSrcList<T>& sortList, const uint16_t elementCountList[4],
                    uint32_t sortedNum[4], uint16_t validBit, const int32_t repeatTime, TWIN_CALLER) {
    detail::CheckRepeatTime(repeatTime, loc);
    MrgSort(dst, sortList,
            MrgSort4Info(elementCountList, isExhaustedSuspension, validBit, static_cast<uint16_t>(repeatTime)), loc);
    twin::CompletePipe(twin::Pipe::kV);
    for (int i = 0; i < 4; ++i) sortedNum[i] = twin::current_core().merge_counts[i];
}

// Elements of T that the entries before `elemOffset`, or `elemCount` entries, take.
template <class T>
inline uint32_t GetSortOffset(const uint32_t elemOffset) {
    static_assert(twin::kSortType<T>, "GetSortOffset: half and float only");
    return elemOffset * static_cast<uint32_t>(detail::kEntryElements<T>);
}
template <class T>
inline uint32_t GetSortLen(const uint32_t elemCount) {
    static_assert(twin::kSortType<T>, "GetSortLen: half and float only");
    return elemCount * static_cast<uint32_t>(detail::kEntryElements<T>);
}

}  // namespace AscendC
