// GatherMask, Gather, Gatherb. (Scatter does not exist on A2/A3.)
#pragma once

#include "twin/math/bit_masks.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

template <class T>
inline twin::GatherShape GatherShapeOf(bool counted, uint32_t mask, const GatherMaskParams& p,
                                       const twin::Loc& loc) {
    static_assert(twin::kGatherMaskLegal<T>, "GatherMask: 16- and 32-bit types");
    TWIN_RAISE_IF(counted && mask == 0, kBadArgument, loc, "GatherMask: mask 0 in counter mode");
    SetMaskNorm();
    StoreMask({{mask, 0}});  // as the vendor's code leaves it
    return {counted ? mask : twin::kLanes<T>,
            p.repeatTimes,
            {p.src0BlockStride, p.src0RepeatStride},
            p.src1RepeatStride};
}

// The part of the source that is read: exact where its repeats are evenly spaced.
template <class T>
inline twin::Access GatherRead(const T* from, const twin::GatherShape& shape, uint64_t reach) {
    const twin::Access hull = UbAccess(from, reach);
    const uint64_t row = uint64_t{shape.lanes} * sizeof(T), step = shape.source.repeat * uint64_t{32};
    if (shape.source.block == 1) {
        if (shape.repeats == 1 || step == row || step == 0) return hull;
        return {hull.begin, row, shape.repeats, step};
    }
    if (shape.repeats == 1 && shape.lanes % twin::kBlockLanes<T> == 0) {
        return {hull.begin, 32, shape.lanes / twin::kBlockLanes<T>, shape.source.block * uint64_t{32}};
    }
    return hull;
}
template <class T>
inline uint64_t GatherReach(const twin::GatherShape& shape) {
    const uint64_t last = shape.lanes - 1;
    uint64_t reach = twin::LaneOffset<T>(shape.repeats - 1, static_cast<uint32_t>(last), shape.source) + 1;
    if (shape.source.block == 0) {
        reach += std::min<uint64_t>(last, twin::kBlockLanes<T> - 1) - last % twin::kBlockLanes<T>;
    }
    return reach;
}

// How many of `lanes` elements a fixed pattern keeps.
inline uint64_t PatternCount(uint8_t pattern, uint64_t lanes) {
    if (pattern == 7) return lanes;
    const uint64_t period = pattern <= 2 ? 2 : 4, first = pattern <= 2 ? pattern - 1u : pattern - 3u;
    return lanes / period + (lanes % period > first ? 1 : 0);
}

}  // namespace detail

// Keeps elements by a fixed pattern 1..7, closely packed; rsvdCnt is how many.
template <class T, GatherMaskMode mode = defaultGatherMaskMode>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t src1Pattern,
                       const bool reduceMode, const uint32_t mask, const GatherMaskParams& gatherMaskParams,
                       uint64_t& rsvdCnt, TWIN_CALLER) {
    TWIN_RAISE_IF(src1Pattern < 1 || src1Pattern > 7, kBadArgument, loc,
                  "GatherMask: pattern %u is outside 1..7", src1Pattern);
    const twin::GatherShape shape = detail::GatherShapeOf<T>(reduceMode, mask, gatherMaskParams, loc);
    rsvdCnt = 0;
    if (shape.repeats == 0) return;
    const uint64_t reach = detail::GatherReach<T>(shape);
    const uint64_t kept = shape.repeats * detail::PatternCount(src1Pattern, shape.lanes);
    const T* from = src0.Span(reach, loc, "GatherMask source");
    T* to = dst.Span(kept, loc, "GatherMask destination");
    detail::CheckOverlap("GatherMask", 0, reinterpret_cast<uintptr_t>(to), kept * sizeof(T),
                         reinterpret_cast<uintptr_t>(from), reach * sizeof(T), loc);
    uint64_t* count = &twin::current_core().gather_count;
    twin::Issue(twin::PartOf({"GatherMask", loc}, reach, detail::UbAccess(to, kept),
                             detail::GatherRead(from, shape, reach)),
                [=] { *count = twin::GatherPattern(to, from, src1Pattern, shape); });
    twin::SettlePipe(twin::Pipe::kV);  // the scalar side waits for the count
    rsvdCnt = *count;
}

// Keeps elements whose bit is set. How much of dst is written is known only then: all of it that could be
// counts as written.
template <class T, class U, GatherMaskMode mode = defaultGatherMaskMode>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                       const LocalTensor<U>& src1Pattern, const bool reduceMode, const uint32_t mask,
                       const GatherMaskParams& gatherMaskParams, uint64_t& rsvdCnt, TWIN_CALLER) {
    static_assert(twin::kGatherBitsLegal<T, U>,
                  "GatherMask: the bit tensor is uint16_t for 16-bit elements, uint32_t for 32-bit ones");
    const twin::GatherShape shape = detail::GatherShapeOf<T>(reduceMode, mask, gatherMaskParams, loc);
    rsvdCnt = 0;
    if (shape.repeats == 0) return;
    const uint64_t reach = detail::GatherReach<T>(shape);
    const uint64_t row = (uint64_t{shape.lanes} + 7) / 8, step = shape.bits_stride * uint64_t{32};
    const uint64_t bytes = (shape.repeats - 1) * step + row;
    const T* from = src0.Span(reach, loc, "GatherMask source");
    const U* choose = src1Pattern.Span((bytes + sizeof(U) - 1) / sizeof(U), loc, "GatherMask bits");
    T* to = dst.Span(1, loc, "GatherMask destination");
    const uint64_t room = dst.GetSize();
    const uint64_t most = std::min<uint64_t>(uint64_t{shape.repeats} * shape.lanes, room);
    detail::CheckOverlap("GatherMask", 0, reinterpret_cast<uintptr_t>(to), most * sizeof(T),
                         reinterpret_cast<uintptr_t>(from), reach * sizeof(T), loc);
    const uintptr_t bits = reinterpret_cast<uintptr_t>(choose);
    const twin::Access chosen = step == row || shape.repeats == 1
                                    ? twin::Access{bits, bytes}
                                    : twin::Access{bits, row, step == 0 ? 1 : shape.repeats, step};
    uint64_t* count = &twin::current_core().gather_count;
    twin::Issue(twin::PartOf({"GatherMask", loc}, reach, detail::UbAccess(to, most),
                             detail::GatherRead(from, shape, reach), chosen),
                [=] {
                    const uint64_t kept = twin::CountBits(choose, shape);
                    TWIN_RAISE_IF(kept > room, kOutOfBounds, loc,
                                  "GatherMask keeps %llu elements, the destination holds %llu",
                                  static_cast<unsigned long long>(kept),
                                  static_cast<unsigned long long>(room));
                    *count = twin::GatherBits(to, from, choose, shape);
                });
    twin::SettlePipe(twin::Pipe::kV);
    rsvdCnt = *count;
}

// The number of elements that the last GatherMask kept.
inline int64_t GetGatherMaskRemainCount() {
    twin::SettlePipe(twin::Pipe::kV);
    return static_cast<int64_t>(twin::current_core().gather_count);
}

namespace detail {

// The offsets in UB decide what is read: reads them after the vector unit has written them.
inline void SettleOffsets(const twin::VectorCall& call, const uint32_t* offsets, uint64_t count) {
    twin::Issue(twin::PartOf(call, 0, {}, UbAccess(offsets, count)), [] {});
    twin::SettlePipe(twin::Pipe::kV);
}

// One repeat of up to `n` offsets: dst lane i = the element at base + offset i. The source counts as read
// from the lowest to the highest address that the offsets name when the call is made.
template <class T>
inline void GatherLanes(const LocalTensor<T>& src, const uint32_t* offsets, uint32_t base, uintptr_t to,
                        const twin::Runs& runs, const twin::VectorCall& call) {
    const twin::Loc loc = call.loc;
    const uintptr_t from = reinterpret_cast<uintptr_t>(src.data());
    const uint64_t room = uint64_t{src.GetSize()} * sizeof(T);
    twin::Access read;
    if constexpr (twin::kChecked) {
        SettleOffsets(call, offsets, runs.run[runs.count - 1].lane + runs.run[runs.count - 1].count);
        uint64_t low = UINT64_MAX, high = 0;
        for (uint32_t r = 0; r < runs.count; ++r) {
            for (uint32_t i = runs.run[r].lane; i < runs.run[r].lane + runs.run[r].count; ++i) {
                const uint64_t at = uint64_t{base} + twin::LoadAt(offsets, i);
                low = std::min(low, at);
                high = std::max(high, at + sizeof(T));
            }
        }
        if (high <= room) read = {from + low, high - low};
    }
    for (uint32_t r = 0; r < runs.count; ++r) {
        const twin::Run run = runs.run[r];
        const uintptr_t out = to + run.lane * sizeof(T);
        twin::Issue(twin::PartOf(call, run.count, {out, run.count * sizeof(T)},
                                 UbAccess(offsets + run.lane, run.count), read),
                    [=] {
                        for (uint32_t i = 0; i < run.count; ++i) {
                            const uint64_t at = uint64_t{base} + twin::LoadAt(offsets, run.lane + i);
                            if (at % sizeof(T) != 0 || at + sizeof(T) > room) {
                                twin::Raise(at % sizeof(T) != 0 ? twin::Finding::kMisaligned
                                                                : twin::Finding::kOutOfBounds,
                                            loc, "Gather: offset %llu of lane %u into a source of %llu bytes",
                                            static_cast<unsigned long long>(at), run.lane + i,
                                            static_cast<unsigned long long>(room));
                            }
                            twin::StoreBits(UbPointer<T>(out), i, twin::LoadBits(UbPointer<T>(from + at), 0));
                        }
                    });
    }
}

template <class T>
inline void CheckGather(const LocalTensor<T>& src, uint32_t base, const twin::Loc& loc) {
    static_assert(twin::kDuplicateType<T>, "Gather: 16- and 32-bit types");
    src.Span(0, loc, "Gather source");
    TWIN_RAISE_IF(base % sizeof(T) != 0, kMisaligned, loc, "Gather: base address %u is not a multiple of %zu",
                  base, sizeof(T));
}

template <class T>
inline void GatherRepeats(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                          const LocalTensor<uint32_t>& srcOffset, uint32_t base, const Work& work,
                          uint32_t dst_step, const twin::Loc& loc) {
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "Gather over repeats in counter mode");
    const twin::Runs runs = twin::FindRuns(work.lanes, {});
    if (work.lanes.repeats == 0 || runs.count == 0) return;
    const uint64_t last = work.lanes.repeats - 1;
    const uint64_t end = runs.run[runs.count - 1].lane + runs.run[runs.count - 1].count;
    const uint64_t reach = last * dst_step * twin::kBlockLanes<T> + end;
    const uintptr_t to = dst.SpanAt(reach, loc, "Gather destination");
    const uint32_t* offsets = srcOffset.Span(last * twin::kLanes<T> + end, loc, "Gather offsets");
    CheckApart("Gather", "source", to, reach * sizeof(T), reinterpret_cast<uintptr_t>(src.data()),
               src.GetSize() * sizeof(T), loc);
    const twin::VectorCall call{"Gather", loc};
    for (uint32_t r = 0; r <= last; ++r) {
        GatherLanes(src, offsets + r * twin::kLanes<T>, base,
                    to + uint64_t{r} * dst_step * twin::kVectorBlockBytes, runs, call);
    }
}

}  // namespace detail

// dst[i] = the element at srcBaseAddr + srcOffset[i] bytes of src.
template <class T>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                   const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseAddr, const uint32_t count,
                   TWIN_CALLER) {
    detail::CheckGather(src, srcBaseAddr, loc);
    SetMaskNorm();
    ResetMask();
    if (count == 0) return;
    const uintptr_t to = dst.SpanAt(count, loc, "Gather destination");
    const uint32_t* offsets = srcOffset.Span(count, loc, "Gather offsets");
    detail::CheckApart("Gather", "source", to, count * sizeof(T), reinterpret_cast<uintptr_t>(src.data()),
                       src.GetSize() * sizeof(T), loc);
    twin::Runs all;
    all.run[all.count++] = {0, count};
    detail::GatherLanes(src, offsets, srcBaseAddr, to, all, {"Gather", loc});
}
template <class T, class M>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                   const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseAddr, M mask,
                   const int32_t repeatTime, const uint16_t dstRepStride, TWIN_CALLER) {
    detail::CheckGather(src, srcBaseAddr, loc);
    const detail::Work work = detail::WorkOf<true>(mask, repeatTime, twin::kLanes<T>, loc);
    detail::GatherRepeats(dst, src, srcOffset, srcBaseAddr, work, dstRepStride, loc);
}

// Whole 32-byte blocks: block i of a repeat comes from offset i, 8 a repeat.
template <class T>
inline void Gatherb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offset,
                    const int32_t repeatTime, const GatherRepeatParams& repeatParams, TWIN_CALLER) {
    static_assert(twin::kOneOf<T, uint16_t, uint32_t>, "Gatherb: uint16_t and uint32_t only");
    constexpr uint64_t kBlock = twin::kBlockBytes;
    detail::CheckRepeatTime(repeatTime, loc);
    ResetMask();
    const uint32_t repeats = static_cast<uint32_t>(repeatTime);
    if (repeats == 0) return;
    const uint64_t gap = std::max<uint64_t>(repeatParams.dstBlkStride, 1) * kBlock;
    const uint64_t step = repeatParams.dstRepStride * kBlock;
    const uint64_t bytes = (repeats - 1) * step + 7 * gap + kBlock;
    const uintptr_t to = dst.SpanAt(bytes / sizeof(T), loc, "Gatherb destination");
    const uint32_t* offsets = offset.Span(8ull * repeats, loc, "Gatherb offsets");
    const uintptr_t from = src.SpanAt(0, loc, "Gatherb source");
    const uint64_t room = uint64_t{src.GetSize()} * sizeof(T);
    detail::CheckApart("Gatherb", "source", to, bytes, from, room, loc);
    const twin::VectorCall call{"Gatherb", loc};
    detail::SettleOffsets(call, offsets, 8ull * repeats);
    for (uint32_t i = 0; i < 8 * repeats; ++i) {
        const uint64_t at = twin::LoadAt(offsets, i);
        const uintptr_t out = to + i / 8 * step + i % 8 * gap;
        if (at % kBlock != 0 || at + kBlock > room) {
            twin::Raise(at % kBlock != 0 ? twin::Finding::kMisaligned : twin::Finding::kOutOfBounds, loc,
                        "Gatherb: offset %llu of block %u into a source of %llu bytes",
                        static_cast<unsigned long long>(at), i, static_cast<unsigned long long>(room));
        }
        twin::Issue(twin::PartOf(call, kBlock / sizeof(T), {out, kBlock}, {from + at, kBlock},
                                 detail::UbAccess(offsets + i, 1)),
                    [=] { std::memcpy(detail::UbPointer<T>(out), detail::UbPointer<T>(from + at), kBlock); });
    }
}

}  // namespace AscendC
