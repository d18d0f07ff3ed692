// Sorting of (score, index) entries of 8 bytes, scores descending.
#pragma once

#include "twin/vector_sort.h"
#include "twin/vector_strided.h"

namespace AscendC {

struct MrgSort4Info {
    uint16_t elementLengths[4] = {};
    bool ifExhaustedSuspension = false;
    uint16_t validBit = 0;
    uint16_t repeatTimes = 0;
    MrgSort4Info() = default;
    MrgSort4Info(const uint16_t lengths[4], bool suspend, uint16_t valid, uint16_t repeats)
        : ifExhaustedSuspension(suspend), validBit(valid), repeatTimes(repeats) {
        for (int i = 0; i < 4; ++i) elementLengths[i] = lengths[i];
    }
};

template <class T>
struct MrgSortSrcList {
    LocalTensor<T> src1, src2, src3, src4;
    MrgSortSrcList() = default;
    MrgSortSrcList(const LocalTensor<T>& a, const LocalTensor<T>& b, const LocalTensor<T>& c,
                   const LocalTensor<T>& d)
        : src1(a), src2(b), src3(c), src4(d) {}
};

namespace detail {
template <class T>
constexpr uint64_t kEntryElements = sizeof(twin::SortEntry) / sizeof(T);
}

// Each run of 32 scores with their indices, sorted.
template <class T>
inline void Sort32(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& index,
                   const int32_t repeatTime, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kSortType<T>, "Sort32: half and float only");
    detail::CheckRepeats(1, 1, repeatTime, loc);
    const uint32_t repeats = static_cast<uint32_t>(repeatTime), n = 32 * repeats;
    T* to = dst.Span(n * detail::kEntryElements<T>, loc, "Sort32 destination");
    const T* score = src.Span(n, loc, "Sort32 scores");
    const uint32_t* at = index.Span(n, loc, "Sort32 indices");
    twin::Issue({"Sort32",
                 twin::Pipe::kV,
                 loc,
                 {0, n},
                 detail::UbAccess(to, n * detail::kEntryElements<T>),
                 {detail::UbAccess(score, n), detail::UbAccess(at, n)}},
                [=] { twin::Sort32Array(to, score, at, repeats); });
}

// Scores and indices of 32 * repeatTime entries apart again.
template <class T>
inline void Extract(const LocalTensor<T>& score, const LocalTensor<uint32_t>& index,
                    const LocalTensor<T>& sorted, const int32_t repeatTime,
                    twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kSortType<T>, "Extract: half and float only");
    detail::CheckRepeats(1, 1, repeatTime, loc);
    const uint32_t repeats = static_cast<uint32_t>(repeatTime), n = 32 * repeats;
    T* to = score.Span(n, loc, "Extract scores");
    uint32_t* at = index.Span(n, loc, "Extract indices");
    const T* entries = sorted.Span(n * detail::kEntryElements<T>, loc, "Extract source");
    twin::Issue({"Extract",
                 twin::Pipe::kV,
                 loc,
                 {0, n},
                 detail::UbAccess(to, n),
                 {detail::UbAccess(entries, n * detail::kEntryElements<T>)}},
                [=] { twin::ExtractArray(to, at, entries, repeats); });
}

// On A2/A3 the source itself.
template <class T>
inline void Concat(LocalTensor<T>& concat, const LocalTensor<T>& src, const LocalTensor<T>& scratch,
                   const int32_t repeatTime, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kSortType<T>, "Concat: half and float only");
    detail::CheckRepeats(1, 1, repeatTime, loc);
    scratch.CheckAlive(loc);
    src.CheckAlive(loc);
    concat = src;
}

// Merges the lists that validBit names (3, 7 or 15) into dst.
template <class T>
inline void MrgSort(const LocalTensor<T>& dst, const MrgSortSrcList<T>& src, const MrgSort4Info& params,
                    twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kSortType<T>, "MrgSort: half and float only");
    const uint32_t lists = params.validBit == 15  ? 4
                           : params.validBit == 7 ? 3
                           : params.validBit == 3 ? 2
                                                  : 0;
    if (lists == 0)
        twin::Raise(twin::Finding::kBadArgument, loc, "MrgSort: validBit %u is not 3, 7 or 15",
                    params.validBit);
    const LocalTensor<T>* tensors[4] = {&src.src1, &src.src2, &src.src3, &src.src4};
    struct Lists {
        const T* from[4];
        uint16_t length[4];
    } all = {};
    uint64_t total = 0;
    const uint32_t repeats = params.repeatTimes;
    for (uint32_t i = 0; i < lists; ++i) {
        all.length[i] = params.elementLengths[i];
        all.from[i] = tensors[i]->Span(all.length[i] * detail::kEntryElements<T>, loc, "MrgSort list");
        total += all.length[i];
    }
    T* to = dst.Span(total * repeats * detail::kEntryElements<T>, loc, "MrgSort destination");
    const bool suspend = params.ifExhaustedSuspension;
    twin::Issue({"MrgSort",
                 twin::Pipe::kV,
                 loc,
                 {0, total},
                 detail::UbAccess(to, total * repeats * detail::kEntryElements<T>),
                 {}},
                [=] {
                    uint32_t used[4];
                    twin::MergeSortArray(to, all.from, all.length, lists, suspend, repeats, used);
                });
}

}  // namespace AscendC
