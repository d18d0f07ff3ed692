// Comparisons into bits, one an element, and selections by bits; least significant bit first.
#pragma once

#include "twin/math/bit_masks.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

template <class T, class U>
inline void CheckCompareMode(const char* name, CMPMODE mode, const twin::Loc& loc) {
    static_assert(twin::kCompareLegal<T>, "comparisons: half, float, or int32_t with EQ");
    static_assert(twin::kOneOf<U, uint8_t, int8_t>, "comparisons: the destination is int8_t or uint8_t");
    TWIN_RAISE_IF(!twin::CompareModeLegal<T>(mode), kBadArgument, loc,
                  "%s: comparison mode %d of int32: only EQ exists", name, static_cast<int>(mode));
}
// The elements that are compared: of whole repeats, as on an NPU.
template <class T>
inline uint32_t CheckCompareCount(const char* name, uint32_t count, const twin::Loc& loc) {
    TWIN_RULE_IF(uint64_t{count} * sizeof(T) % 256 != 0, kCompareTail, kBadArgument, loc,
                 "%s of %u elements: whole 256 bytes only, the last %zu bytes would not be computed", name, count,
                 static_cast<size_t>(uint64_t{count} * sizeof(T) % 256));
    return count / twin::kLanes<T> * twin::kLanes<T>;
}

// `compare(bits, sources, n)` on all lanes of every repeat; the repeats' bits follow one another. The mask
// argument has no effect on A2/A3.
template <class T, class U, class Body, class... S>
inline void CompareRepeats(const twin::VectorCall& call, int32_t repeats, const Body& compare,
                           const LocalTensor<U>& dst, const Strided<S>&... src) {
    CheckRepeatTime(repeats, call.loc);
    TWIN_RAISE_IF(twin::current_core().counter_mode, kBadArgument, call.loc, "%s over repeats in counter mode",
                  call.name);
    constexpr uint32_t kLanes = twin::kLanes<T>, kBytes = kLanes / 8;
    const twin::Lanes lanes = {twin::LaneMask::First(kLanes), kLanes, static_cast<uint32_t>(repeats)};
    if (repeats == 0) return;
    const twin::Access write = dst.Part(lanes.repeats * kBytes, call.loc, call.name);
    twin::Operands all;
    ((all.src[all.sources++] = src.Operand()), ...);
    const twin::Runs runs = twin::FindRuns(lanes, all);
    twin::Access reads[2];
    uint32_t i = 0;
    const auto check = [&](const auto& source) {
        const twin::Operand& operand = all.src[i];
        const uint64_t extent = twin::Extent(operand, runs, lanes.repeats);
        source.Check(extent, call);
        ListOverlap(call.name, i, write, {operand.begin, extent}, call.loc);
        reads[i++] = twin::AccessOf(operand, lanes);
    };
    (check(src), ...);
    twin::Issue(twin::PartOf(call, write, reads[0], reads[1]), [=] {
        uint8_t bits[kBytes];  // the vector unit reads a repeat before it writes it
        for (uint32_t r = 0; r < lanes.repeats; ++r) {
            for (uint32_t run = 0; run < runs.count; ++run) {
                const uint32_t lane = runs.run[run].lane;
                uintptr_t from[2] = {};
                for (uint32_t s = 0; s < all.sources; ++s) from[s] = all.src[s].At(r, lane);
                compare(reinterpret_cast<uintptr_t>(bits) + lane / 8, from, runs.run[run].count);
            }
            memcpy(UbPointer<uint8_t>(write.begin + r * kBytes), bits, kBytes);
        }
    });
}

template <class T>
struct CompareBody {
    CMPMODE mode;
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        twin::CompareArray(UbPointer<uint8_t>(to), UbPointer<T>(from[0]), UbPointer<T>(from[1]), mode, n);
    }
};
template <class T>
struct CompareScalarBody {
    CMPMODE mode;
    T scalar;
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        twin::CompareScalarArray(UbPointer<uint8_t>(to), UbPointer<T>(from[0]), scalar, mode, n);
    }
};

template <class T, class U, class Body, class... S>
inline void CompareCounted(const char* name, const twin::Loc& loc, uint32_t count, const Body& body,
                           const LocalTensor<U>& dst, const LocalTensor<S>&... src) {
    const uint32_t n = CheckCompareCount<T>(name, count, loc);
    SetMaskNorm();
    ResetMask();
    if (n == 0) return;
    const twin::Access write = dst.Part(n / 8, loc, name);
    struct {
        uintptr_t at[2] = {};
    } from;
    twin::Access reads[2];
    uint32_t i = 0;
    bool overlaps = false;
    const auto read = [&](const auto& source) {
        reads[i] = source.Part(n, loc, name);
        from.at[i] = reads[i].begin;
        overlaps |= ListOverlap<twin::Rule::kCompareOverlap>(name, i, write, reads[i], loc);
        ++i;
    };
    (read(src), ...);
    twin::IssueWithin(twin::PartOf({name, loc}, write, reads[0], reads[1]), [=] {
        if (overlaps) {
            ByRepeats<S...>(body, 1, write.begin, from.at, n);
        } else {
            body(write.begin, from.at, n);
        }
    });
}

}  // namespace detail

template <class T, class U>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
                    uint32_t count, TWIN_CALLER) {
    detail::CheckCompareMode<T, U>("Compare", cmpMode, loc);
    detail::CompareCounted<T>("Compare", loc, count, detail::CompareBody<T>{cmpMode}, dst, src0, src1);
}

template <class T, class U, bool isSetMask = true, class M>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
                    M, const int32_t repeatTime, const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    detail::CheckCompareMode<T, U>("Compare", cmpMode, loc);
    detail::CompareRepeats<T>({"Compare", loc}, repeatTime, detail::CompareBody<T>{cmpMode}, dst,
                              detail::Strided<T>{src0, repeatParams.src0BlkStride, repeatParams.src0RepStride},
                              detail::Strided<T>{src1, repeatParams.src1BlkStride, repeatParams.src1RepStride});
}

// CompareScalar, and its name in newer headers.
#define TWIN_COMPARE_SCALAR(Name)                                                                                   \
    template <class T, class U>                                                                                     \
    inline void Name(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,    \
                     uint32_t count, TWIN_CALLER) {                                                                 \
        detail::CheckCompareMode<T, U>(#Name, cmpMode, loc);                                                        \
        detail::CompareCounted<T>(#Name, loc, count, detail::CompareScalarBody<T>{cmpMode, src1Scalar}, dst, src0); \
    }                                                                                                               \
    template <class T, class U, bool isSetMask = true, class M>                                                     \
    inline void Name(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode, M, \
                     const int32_t repeatTime, const UnaryRepeatParams& repeatParams, TWIN_CALLER) {                \
        detail::CheckCompareMode<T, U>(#Name, cmpMode, loc);                                                        \
        detail::CompareRepeats<T>({#Name, loc}, repeatTime, detail::CompareScalarBody<T>{cmpMode, src1Scalar}, dst, \
                                  detail::Strided<T>{src0, repeatParams.srcBlkStride, repeatParams.srcRepStride});  \
    }
TWIN_COMPARE_SCALAR(CompareScalar)
TWIN_COMPARE_SCALAR(Compares)
#undef TWIN_COMPARE_SCALAR

}  // namespace AscendC
