// GatherMask, Gather, Gatherb. (Scatter does not exist on A2/A3.)
#pragma once

#include "twin/math/bit_masks.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

template <class T>
inline twin::GatherShape GatherShapeOf(bool counted, uint32_t mask, const GatherMaskParams& p, const twin::Loc& loc) {
    static_assert(twin::kGatherMaskLegal<T>, "GatherMask: 16- and 32-bit types");
    TWIN_RAISE_IF(counted && mask == 0, kBadArgument, loc, "GatherMask: mask 0 in counter mode");
    SetMaskNorm();
    StoreMask({{mask, 0}});  // as the vendor's code leaves it
    return {
        counted ? mask : twin::kLanes<T>, p.repeatTimes, {p.src0BlockStride, p.src0RepeatStride}, p.src1RepeatStride};
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

// What both forms do: checks, and `gather(dst, src)`, which returns how many elements it has selected, at most
// `most`. `chosen`: bytes that it reads besides. The source is declared exactly where its repeats are evenly
// spaced.
template <class T, class Body>
inline uint64_t GatherMasked(const LocalTensor<T>& dst, const LocalTensor<T>& src, const twin::GatherShape& shape,
                             uint64_t most, const twin::Access& chosen, const twin::Loc& loc, const Body& gather) {
    const uint64_t reach = GatherReach<T>(shape);
    const twin::Access hull = src.Part(reach, loc, "GatherMask source");
    const twin::Access write = dst.Part(most, loc, "GatherMask destination");
    CheckOverlap("GatherMask", 0, write, hull, loc);
    twin::Access read = hull;
    const uint64_t row = uint64_t{shape.lanes} * sizeof(T), step = shape.source.repeat * uint64_t{32};
    if (shape.source.block == 1 && shape.repeats > 1 && step != row && step != 0) {
        read = {hull.begin, row, shape.repeats, step};
    } else if (shape.source.block != 1 && shape.repeats == 1 && shape.lanes % twin::kBlockLanes<T> == 0) {
        read = {hull.begin, 32, shape.lanes / twin::kBlockLanes<T>, shape.source.block * uint64_t{32}};
    }
    uint64_t* count = &twin::current_core().gather_count;
    twin::Issue(twin::PartOf({"GatherMask", loc}, write, read, chosen),
                [=] { *count = gather(UbPointer<T>(write.begin), UbPointer<T>(hull.begin)); });
    twin::CompletePipe(twin::Pipe::kV);  // the scalar side waits for the count
    return *count;
}

}  // namespace detail

// Keeps elements by a fixed pattern 1..7, closely packed; rsvdCnt is how many.
template <class T, GatherMaskMode mode = defaultGatherMaskMode>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t src1Pattern,
                       const bool reduceMode, const uint32_t mask, const GatherMaskParams& gatherMaskParams,
                       uint64_t& rsvdCnt, TWIN_CALLER) {
    TWIN_RAISE_IF(src1Pattern < 1 || src1Pattern > 7, kBadArgument, loc, "GatherMask: pattern %u is outside 1..7",
                  src1Pattern);
    const twin::GatherShape shape = detail::GatherShapeOf<T>(reduceMode, mask, gatherMaskParams, loc);
    rsvdCnt = 0;
    if (shape.repeats == 0) return;
    const uint64_t kept = shape.repeats * detail::PatternCount(src1Pattern, shape.lanes);
    rsvdCnt = detail::GatherMasked(dst, src0, shape, kept, {}, loc, [=](T* to, const T* from) {
        return twin::GatherPattern(to, from, src1Pattern, shape);
    });
}

// Keeps elements whose bit is set.
template <class T, class U, GatherMaskMode mode = defaultGatherMaskMode>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<U>& src1Pattern,
                       const bool reduceMode, const uint32_t mask, const GatherMaskParams& gatherMaskParams,
                       uint64_t& rsvdCnt, TWIN_CALLER) {
    static_assert(twin::kGatherBitsLegal<T, U>,
                  "GatherMask: the bit tensor is uint16_t for 16-bit elements, uint32_t for 32-bit ones");
    const twin::GatherShape shape = detail::GatherShapeOf<T>(reduceMode, mask, gatherMaskParams, loc);
    rsvdCnt = 0;
    if (shape.repeats == 0) return;
    const uint64_t row = (uint64_t{shape.lanes} + 7) / 8, step = shape.bits_stride * uint64_t{32};
    const uint64_t bytes = (shape.repeats - 1) * step + row;
    const U* choose = src1Pattern.Span((bytes + sizeof(U) - 1) / sizeof(U), loc, "GatherMask bits");
    const uint64_t room = std::max<uint64_t>(dst.GetSize(), 1);
#ifndef TWIN_TIMED
    twin::CompletePipe(twin::Pipe::kV);  // the bits are there: they say how much is written
#endif
    const uint64_t kept = twin::CountBits(choose, shape);
    twin::Access chosen = detail::UbAccess(choose, 0);
    chosen.bytes = step == row ? bytes : row;
    if (step != row && step != 0) {
        chosen.count = shape.repeats;
        chosen.stride = step;
    }
    rsvdCnt = detail::GatherMasked(dst, src0, shape, std::min(kept, room), chosen, loc, [=](T* to, const T* from) {
        TWIN_RAISE_IF(kept > room, kOutOfBounds, loc, "GatherMask keeps %llu elements, the destination holds %llu",
                      static_cast<unsigned long long>(kept), static_cast<unsigned long long>(room));
        return twin::GatherBits(to, from, choose, shape);
    });
}

// The number of elements selected by the last GatherMask.
inline int64_t GetGatherMaskRemainCount() {
    twin::CompletePipe(twin::Pipe::kV);
    return static_cast<int64_t>(twin::current_core().gather_count);
}

namespace detail {

// The offsets in UB decide what is read: reads them after the vector unit has written them. Returns the hull
// of the pieces of `bytes` that they name in a source, as far as it lies in the source.
inline twin::Access OffsetsHull(const char* name, const twin::Access& offsets, const twin::Access& source,
                                uint64_t base, uint64_t bytes, const twin::Loc& loc) {
    twin::Issue(twin::PartOf({name, loc}, {}, offsets), [] {});
    twin::CompletePipe(twin::Pipe::kV);
    uint64_t low = UINT64_MAX, high = 0;
    twin::ForEachPiece(offsets, [&](uintptr_t begin, uint64_t size) {
        for (uint64_t i = 0; i < size / 4; ++i) {
            const uint64_t at = base + twin::LoadAt(UbPointer<uint32_t>(begin), i);
            low = std::min(low, at);
            high = std::max(high, at + bytes);
        }
    });
    return high <= source.bytes ? twin::Access{source.begin + low, high - low} : twin::Access{};
}
// Of the source only what the offsets name is read: the rest of its view may contain the destination.
inline void CheckOffset(const char* name, const char* unit, uint64_t at, uint64_t bytes, uint32_t index,
                        const twin::Access& source, const twin::Access& write, const twin::Loc& loc) {
    const bool inside = at % bytes == 0 && at + bytes <= source.bytes;
    if (inside && Apart({source.begin + at, bytes}, write)) return;
    TWIN_RAISE_IF(inside, kBadArgument, loc, "%s: destination and source overlap: offset %llu of %s %u lies in both",
                  name, static_cast<unsigned long long>(at), unit, index);
    twin::Raise(at % bytes != 0 ? twin::Finding::kMisaligned : twin::Finding::kOutOfBounds, loc,
                "%s: offset %llu of %s %u into a source of %llu bytes", name, static_cast<unsigned long long>(at), unit,
                index, static_cast<unsigned long long>(source.bytes));
}

// Lane i of a repeat of `to` = the element at base + offset i, for the lanes of `runs`. The source counts as
// read from the lowest to the highest address that the offsets name when the call is made.
template <class T>
inline void GatherLanes(const LocalTensor<T>& src, uint32_t base, const twin::Operand& to, const twin::Operand& offsets,
                        const twin::Access& write, const twin::Access& chosen, const twin::Access& whole,
                        const twin::Runs& runs, uint32_t repeats, const twin::Loc& loc) {
    const twin::Access source = src.Part(src.GetSize(), loc, "Gather source");
    twin::Access read;
#ifdef TWIN_FORWARDS
    read = source;  // all that may be read
#endif
    if constexpr (twin::kChecked) read = OffsetsHull("Gather", chosen, source, base, sizeof(T), loc);
    twin::IssueWithin(twin::PartOf({"Gather", loc}, write, chosen, read), [=] {
        for (uint32_t n = 0; n < repeats * runs.count; ++n) {
            const uint32_t r = n / runs.count;
            const twin::Run run = runs.run[n % runs.count];
            T* out = UbPointer<T>(to.At(r, run.lane));
            const uint32_t* at_offset = UbPointer<uint32_t>(offsets.At(r, run.lane));
            for (uint32_t i = 0; i < run.count; ++i) {
                const uint64_t at = uint64_t{base} + twin::LoadAt(at_offset, i);
                CheckOffset("Gather", "lane", at, sizeof(T), run.lane + i, source, whole, loc);
                twin::StoreBits(out, i, twin::LoadBits(UbPointer<T>(source.begin + at), 0));
            }
        }
    });
}

template <class T>
inline void CheckGather(const LocalTensor<T>& src, uint32_t base, const twin::Loc& loc) {
    static_assert(twin::kDuplicateType<T>, "Gather: 16- and 32-bit types");
    src.Span(0, loc, "Gather source");
    TWIN_RAISE_IF(base % sizeof(T) != 0, kMisaligned, loc, "Gather: base address %u is not a multiple of %zu", base,
                  sizeof(T));
}

template <class T>
inline void GatherRepeats(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
                          uint32_t base, const Work& work, uint32_t dst_step, const twin::Loc& loc) {
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "Gather over repeats in counter mode");
    const twin::Lanes& lanes = work.lanes;
    const twin::Runs runs = twin::FindRuns(lanes, {});
    if (lanes.repeats == 0 || runs.count == 0) return;
    const uint64_t last = lanes.repeats - 1;
    const twin::Access whole = dst.Part(last * dst_step * twin::kBlockLanes<T> + runs.end(), loc, "Gather destination");
    const twin::Operand to{whole.begin, sizeof(T), {1, dst_step}};
    const twin::Operand offsets{
        srcOffset.Part(last * twin::kLanes<T> + runs.end(), loc, "Gather offsets").begin, 4, {1, lanes.width / 8}};
    GatherLanes(src, base, to, offsets, twin::AccessOf(to, lanes), twin::AccessOf(offsets, lanes), whole, runs,
                lanes.repeats, loc);
}

}  // namespace detail

// dst[i] = the element at srcBaseAddr + srcOffset[i] bytes of src.
template <class T>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
                   const uint32_t srcBaseAddr, const uint32_t count, TWIN_CALLER) {
    detail::CheckGather(src, srcBaseAddr, loc);
    SetMaskNorm();
    ResetMask();
    if (count == 0) return;
    const twin::Access to = dst.Part(count, loc, "Gather destination");
    const twin::Access offsets = srcOffset.Part(count, loc, "Gather offsets");
    twin::Runs all;
    all.run[all.count++] = {0, count};
    detail::GatherLanes(src, srcBaseAddr, {to.begin, sizeof(T)}, {offsets.begin, 4}, to, offsets, to, all, 1, loc);
}
template <class T, class M>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
                   const uint32_t srcBaseAddr, M mask, const int32_t repeatTime, const uint16_t dstRepStride,
                   TWIN_CALLER) {
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
    const twin::Access to = dst.Part(bytes / sizeof(T), loc, "Gatherb destination");
    const twin::Access chosen = offset.Part(8ull * repeats, loc, "Gatherb offsets");
    const twin::Access source = src.Part(src.GetSize(), loc, "Gatherb source");
    const twin::Access read = detail::OffsetsHull("Gatherb", chosen, source, 0, kBlock, loc);
    const twin::Operand blocks{to.begin, sizeof(T), {static_cast<uint32_t>(gap / kBlock), repeatParams.dstRepStride}};
    const twin::Lanes lanes{twin::LaneMask::First(twin::kLanes<T>), twin::kLanes<T>, repeats};
    twin::Issue(twin::PartOf({"Gatherb", loc}, twin::AccessOf(blocks, lanes), chosen, read), [=] {
        for (uint32_t i = 0; i < 8 * repeats; ++i) {
            const uint64_t at = twin::LoadAt(detail::UbPointer<uint32_t>(chosen.begin), i);
            detail::CheckOffset("Gatherb", "block", at, kBlock, i, source, to, loc);
            std::memcpy(detail::UbPointer<T>(to.begin + i / 8 * step + i % 8 * gap),
                        detail::UbPointer<T>(source.begin + at), kBlock);
        }
    });
}

}  // namespace AscendC
