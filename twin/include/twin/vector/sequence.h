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
    twin::Issue(twin::PartOf({name, loc}, UbAccess(to, n)), [=] { body(to, n); });
}

// first + r * (lanes of a repeat) + i on lane i of repeat r, each repeat's beginning rounded.
template <class T>
struct IndexBody {
    T first;
    void operator()(uintptr_t to, const uintptr_t*, uint32_t n, uint32_t lane, uint32_t repeat) const {
        const auto plus = [](T base, uint32_t count) {
            return twin::Narrow<T>(twin::AddOp::Do(twin::Widen(base), static_cast<twin::Compute<T>>(count)));
        };
        T base = first;
        for (uint32_t r = 0; r < repeat; ++r) base = plus(base, twin::kLanes<T>);
        for (uint32_t i = 0; i < n; ++i) twin::StoreAt(UbPointer<T>(to), i, plus(base, lane + i));
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
    const twin::Access all = dst.Part(bytes / sizeof(T), loc, "Brcb destination");
    const twin::Access read = src0.Part(8ull * repeats, loc, "Brcb source");
    detail::CheckApart("Brcb", "source", all, read, loc);
    const twin::Strides strides{repeatParams.dstBlkStride, repeatParams.dstRepStride};
    const twin::Operand blocks{all.begin, sizeof(T), strides};
    twin::Issue(
        twin::PartOf({"Brcb", loc},
                     twin::AccessOf(blocks, {twin::LaneMask::First(twin::kLanes<T>), twin::kLanes<T>, repeats}), read),
        [=] {
            twin::BroadcastBlocks(detail::UbPointer<T>(all.begin), detail::UbPointer<T>(read.begin), repeats, strides);
        });
}

// first, first + 1, ...
template <class T>
inline void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, TWIN_CALLER) {
    const T first = firstValue;
    detail::FillCounted("CreateVecIndex", dst, count, loc, [=](T* to, uint32_t n) { twin::IndexArray(to, first, n); });
}
// The same on the lanes of a mask: lane i of repeat r gets firstValue + r * (lanes of a repeat) + i.
template <class T, class M>
inline void CreateVecIndex(LocalTensor<T>& dst, const T& firstValue, M mask, const int32_t repeatTime,
                           uint16_t dstBlkStride, uint8_t dstRepStride, TWIN_CALLER) {
    static_assert(twin::kIndexType<T>, "CreateVecIndex: half, float, int16_t, int32_t");
    const detail::Work work = detail::WorkOf<true>(mask, repeatTime, twin::kLanes<T>, loc);
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "CreateVecIndex over repeats in counter mode");
    detail::MaskedCall({"CreateVecIndex", loc}, work, {}, detail::IndexBody<T>{firstValue},
                       detail::Strided<T>{dst, dstBlkStride, dstRepStride});
}

// first, first + diff, ...
template <class T>
inline void ArithProgression(const LocalTensor<T>& dstLocal, const T firstValue, const T diffValue, const int32_t count,
                             TWIN_CALLER) {
    detail::FillCounted("ArithProgression", dstLocal, count, loc,
                        [=](T* to, uint32_t n) { twin::ProgressionArray(to, firstValue, diffValue, n); });
}

}  // namespace AscendC
