// Brcb, and sequences of numbers.
#pragma once

#include "twin/math/bit_masks.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

template <class T, class Body>
inline void FillCounted(const char* name, const LocalTensor<T>& dst, int64_t count, const twin::Loc& loc,
                        const Body& body) {
    static_assert(twin::kIndexType<T>, "index sequences: half, float, int16_t, int32_t");
    const uint32_t n = CheckElementCount(name, count, loc);
    SetMaskNorm();
    ResetMask();
    if (n == 0) return;
    T* to = dst.Span(n, loc, name);
    twin::Issue(twin::PartOf({name, loc}, n, UbAccess(to, n)), [=] { body(to, n); });
}

// One repeat of first, first + 1, ... on the lanes of a mask.
template <class T>
struct IndexBody {
    T first;
    void operator()(uintptr_t to, const uintptr_t*, uint32_t n, uint32_t lane) const {
        for (uint32_t i = 0; i < n; ++i) {
            const auto index = static_cast<twin::Compute<T>>(lane + i);
            twin::StoreAt(UbPointer<T>(to), i, twin::Narrow<T>(twin::AddOp::Do(twin::Widen(first), index)));
        }
    }
};

}  // namespace detail

// Each of 8 elements a repeat fills one 32-byte block.
template <class T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const int32_t repeatTime,
                 const BrcbRepeatParams& repeatParams, TWIN_CALLER) {
    static_assert(twin::kDuplicateType<T>, "Brcb: 16- and 32-bit types");
    detail::CheckRepeatTime(repeatTime, loc);
    TWIN_RAISE_IF(repeatParams.dstBlkStride == 0, kBadArgument, loc, "Brcb: dstBlkStride is 0");
    const uint32_t repeats = static_cast<uint32_t>(repeatTime);
    if (repeats == 0) return;
    constexpr uint64_t kBlock = twin::kBlockBytes;
    const uint64_t gap = repeatParams.dstBlkStride * kBlock, step = repeatParams.dstRepStride * kBlock;
    const uint64_t bytes = (repeats - 1) * step + 7 * gap + kBlock;
    const uintptr_t to = dst.SpanAt(bytes / sizeof(T), loc, "Brcb destination");
    const T* from = src0.Span(8ull * repeats, loc, "Brcb source");
    detail::CheckApart("Brcb", "source", to, bytes, reinterpret_cast<uintptr_t>(from),
                       8ull * repeats * sizeof(T), loc);
    // Blocks at one distance throughout are one instruction, otherwise each repeat is.
    const bool even = repeats == 1 || step == 8 * gap;
    const uint32_t parts = even ? 1 : repeats, each = even ? repeats : 1;
    const twin::VectorCall call{"Brcb", loc};
    for (uint32_t p = 0; p < parts; ++p) {
        const uintptr_t begin = to + p * step;
        const T* values = from + 8 * p;
        const twin::Strides strides{repeatParams.dstBlkStride, repeatParams.dstRepStride};
        const twin::Access write = gap == kBlock ? twin::Access{begin, 8 * each * kBlock}
                                                 : twin::Access{begin, kBlock, 8 * each, gap};
        twin::Issue(twin::PartOf(call, 8ull * each * twin::kBlockLanes<T>, write,
                                 detail::UbAccess(values, 8ull * each)),
                    [=] { twin::BroadcastBlocks(detail::UbPointer<T>(begin), values, each, strides); });
    }
}

// first, first + 1, ...
template <class T>
inline void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, TWIN_CALLER) {
    const T first = firstValue;
    detail::FillCounted("CreateVecIndex", dst, count, loc,
                        [=](T* to, uint32_t n) { twin::IndexArray(to, first, n); });
}
// The same on the lanes of a mask: lane i of repeat r gets firstValue + r * (lanes of a repeat) + i.
template <class T, class M>
inline void CreateVecIndex(LocalTensor<T>& dst, const T& firstValue, M mask, const int32_t repeatTime,
                           uint16_t dstBlkStride, uint8_t dstRepStride, TWIN_CALLER) {
    static_assert(twin::kIndexType<T>, "CreateVecIndex: half, float, int16_t, int32_t");
    detail::CheckRepeatTime(repeatTime, loc);
    const detail::Work work = detail::WorkOf<true>(mask, 1, twin::kLanes<T>, loc);
    const twin::VectorCall call{"CreateVecIndex", loc};
    T first = firstValue;
    for (int32_t r = 0; r < repeatTime; ++r) {
        const LocalTensor<T> part = dst[static_cast<uint32_t>(r) * dstRepStride * twin::kBlockLanes<T>];
        detail::MaskedCall(call, work, {}, detail::IndexBody<T>{first},
                           detail::Strided<T>{part, dstBlkStride, 8});
        first = twin::Narrow<T>(
            twin::AddOp::Do(twin::Widen(first), static_cast<twin::Compute<T>>(twin::kLanes<T>)));
    }
}

// first, first + diff, ...
template <class T>
inline void ArithProgression(const LocalTensor<T>& dstLocal, const T firstValue, const T diffValue,
                             const int32_t count, TWIN_CALLER) {
    detail::FillCounted("ArithProgression", dstLocal, count, loc,
                        [=](T* to, uint32_t n) { twin::ProgressionArray(to, firstValue, diffValue, n); });
}

}  // namespace AscendC
