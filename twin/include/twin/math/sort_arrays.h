// Sort32, MrgSort, Sort and Extract on (score, index) entries of 8 bytes: the index in the high 4, the score
// in the low 4 (float) or the low 2 (half; the two bytes between are written as 0). Scores descend; equal
// scores (-0 and +0 too) keep their order; NaN ranks below every number (our choice: the vendor documents
// none). Concat is the identity on A2/A3: its result is the source tensor.
#pragma once

#include "twin/math/reduce_arrays.h"

namespace twin {

using SortEntry = uint64_t;

template <class T>
constexpr bool kSortType = kRealType<T>;

template <class T>
inline SortEntry MakeEntry(T score, uint32_t index) {
    uint32_t low;
    if constexpr (std::is_same_v<T, half>) {
        low = score.bits;
    } else {
        low = FloatBits(score);
    }
    return (uint64_t{index} << 32) | low;
}
template <class T>
inline T EntryScore(SortEntry entry) {
    if constexpr (std::is_same_v<T, half>) {
        return half::FromBits(static_cast<uint16_t>(entry));
    } else {
        return FloatOf(static_cast<uint32_t>(entry));
    }
}
template <class T>
inline int32_t EntryRank(SortEntry entry) {
    const int32_t key = OrderKey<true>(Widen(EntryScore<T>(entry)));
    return key == -1 ? 0 : key;  // -0
}

// Entries live in tensors of T: 8 bytes are 2 float or 4 half.
template <class T>
inline SortEntry LoadEntry(const T* entries, uint64_t i) {
    return LoadAt(reinterpret_cast<const SortEntry*>(entries), i);
}
template <class T>
inline void StoreEntry(T* entries, uint64_t i, SortEntry entry) {
    StoreAt(reinterpret_cast<SortEntry*>(entries), i, entry);
}

// Sort32: each run of 32 scores with their indices, sorted.
template <class T>
inline void Sort32Array(T* dst, const T* score, const uint32_t* index, uint32_t repeats) {
    for (uint32_t r = 0; r < repeats; ++r) {
        SortEntry run[32];
        for (uint32_t i = 0; i < 32; ++i) {
            const SortEntry entry = MakeEntry(LoadAt(score, r * 32 + i), LoadAt(index, r * 32 + i));
            const int32_t rank = EntryRank<T>(entry);
            uint32_t at = i;
            for (; at > 0 && EntryRank<T>(run[at - 1]) < rank; --at) run[at] = run[at - 1];
            run[at] = entry;
        }
        for (uint32_t i = 0; i < 32; ++i) StoreEntry(dst, r * 32 + i, run[i]);
    }
}

// One merge of `lists` sorted runs, earlier lists first among equals; returns the entries written. With
// `suspend` it stops as soon as a list is used up. used[] receives how many entries of each list went out.
template <class T>
inline uint32_t MergeRuns(T* dst, const T* const* src, const uint32_t* length, uint32_t lists, bool suspend,
                          uint32_t* used) {
    uint32_t written = 0;
    for (uint32_t i = 0; i < lists; ++i) used[i] = 0;
    for (;;) {
        uint32_t best = lists;
        int32_t best_rank = 0;
        for (uint32_t i = 0; i < lists; ++i) {
            if (used[i] == length[i]) {
                if (suspend) return written;
                continue;
            }
            const int32_t rank = EntryRank<T>(LoadEntry(src[i], used[i]));
            if (best == lists || rank > best_rank) {
                best = i;
                best_rank = rank;
            }
        }
        if (best == lists) return written;
        StoreEntry(dst, written++, LoadEntry(src[best], used[best]++));
    }
}

// MrgSort: 2 to 4 sorted lists into dst, which must not overlap them. With repeats > 1 (four lists of equal
// length, one behind the other) the next repeat takes the next four. GetMrgSortResult reports used[4].
template <class T>
inline void MergeSortArray(T* dst, const T* const src[4], const uint16_t length[4], uint32_t lists, bool suspend,
                           uint32_t repeats, uint32_t used[4]) {
    constexpr uint32_t kEntry = sizeof(SortEntry) / sizeof(T);
    uint32_t total = 0;
    uint32_t lengths[4] = {};
    for (uint32_t i = 0; i < lists; ++i) total += lengths[i] = length[i];
    for (uint32_t r = 0; r < repeats; ++r) {
        const T* from[4] = {};
        for (uint32_t i = 0; i < lists; ++i) from[i] = src[i] + uint64_t{r} * total * kEntry;
        MergeRuns(dst + uint64_t{r} * total * kEntry, from, lengths, lists, suspend, used);
    }
}

// Sort<T, true>: all 32·repeats scores into one run. tmp holds as many entries as dst.
template <class T>
inline void FullSortArray(T* dst, T* tmp, const T* score, const uint32_t* index, uint32_t repeats) {
    constexpr uint32_t kEntry = sizeof(SortEntry) / sizeof(T);
    const uint32_t n = 32 * repeats;
    Sort32Array(dst, score, index, repeats);
    T* from = dst;
    T* to = tmp;
    for (uint32_t width = 32; width < n; width *= 2) {
        for (uint32_t first = 0; first < n; first += 2 * width) {
            const uint32_t left = n - first < width ? n - first : width;
            const uint32_t right = n - first - left < width ? n - first - left : width;
            const uint32_t length[2] = {left, right};
            const T* runs[2] = {from + uint64_t{first} * kEntry, from + uint64_t{first + left} * kEntry};
            uint32_t used[2];
            MergeRuns(to + uint64_t{first} * kEntry, runs, length, 2, false, used);
        }
        T* const merged = to;
        to = from;
        from = merged;
    }
    if (from != dst) std::memcpy(dst, from, uint64_t{n} * sizeof(SortEntry));
}

}  // namespace twin
