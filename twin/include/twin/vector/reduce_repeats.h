// Reductions over repeats: of whole repeats, of their blocks, of pairs of neighbours.
//
// Results are declared exactly: outputs whose lanes are all masked off are not written.
#pragma once

#include "twin/math/reduce_arrays.h"
#include "twin/vector/call.h"

namespace AscendC {

enum class ReduceType { NONE = -1, SUM = 0, MAX, MIN };

namespace detail {

// How one repeat's results lie: `outputs` of them, `bytes` each, from lanes/outputs lanes each; the next
// repeat's are `step` bytes on.
struct ResultLayout {
    uint32_t outputs = 1;
    uint64_t bytes = 0;
    uint64_t step = 0;
    uint32_t alignment = 1;
};

// `reduce(dst, src, mask, repeats)` on the lanes of consecutive outputs.
template <class T, class Reduce>
inline void ReduceLanes(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                        const Work& work, const ResultLayout& layout, twin::Strides strides, const Reduce& reduce) {
    static_assert(twin::kReduceType<T>, "reductions over repeats: half and float only");
    TWIN_RAISE_IF(work.counted, kBadArgument, call.loc, "%s in counter mode", call.name);
    const twin::Lanes& lanes = work.lanes;
    const twin::Operand from{reinterpret_cast<uintptr_t>(src.data()), sizeof(T), strides};
    const twin::Runs runs = twin::FindRuns(lanes.mask, lanes.width, strides.block == 1);
    if (lanes.repeats == 0 || runs.count == 0) return;
    const uint64_t last = lanes.repeats - 1;
    const uint32_t each = lanes.width / layout.outputs;
    const uint64_t results = last * layout.step + ((runs.end() + each - 1) / each) * layout.bytes;
    const twin::Access read{from.begin, twin::Extent(from, runs, lanes.repeats)};
    const twin::Access hull{
        dst.Part((results + sizeof(T) - 1) / sizeof(T), call.loc, call.name, layout.alignment).begin, results};
    src.Span(read.bytes / sizeof(T), call.loc, call.name);
    TWIN_RAISE_IF(hull.begin == from.begin && last > 0 && layout.step > from.Step(), kBadArgument, call.loc,
                  "%s in place: results overtake the source and overwrite what later repeats read", call.name);
    if (hull.begin != from.begin) CheckApart(call.name, "source (in part)", hull, read, call.loc);
    // Results as lanes of one repeat: an output is written where a lane of it takes part.
    twin::LaneMask written{};
    uint64_t bytes = 0;
    for (uint32_t output = 0; output < layout.outputs; ++output) {
        if (!twin::AnyLane(lanes.mask, output * each, each)) continue;
        written.bits[output / 64] |= uint64_t{1} << output % 64;
        bytes += layout.bytes;
    }
    twin::Access write{hull.begin, results};
    const bool whole = bytes == layout.outputs * layout.bytes;
    if (!whole) {
        write = {hull.begin, bytes, lanes.repeats, layout.step, false, 128, sizeof(T), twin::kBlockBytes, written};
    } else if (lanes.repeats > 1 && layout.step != bytes) {
        write = {hull.begin, bytes, layout.step == 0 ? 1 : lanes.repeats, layout.step};
    }
    twin::Issue(twin::PartOf(call, write, twin::AccessOf(from, lanes)),
                [=] { reduce(UbPointer<T>(hull.begin), UbPointer<T>(from.begin), lanes.mask, lanes.repeats); });
}

inline uint32_t CheckStride(const char* name, const char* what, int32_t stride, const twin::Loc& loc) {
    TWIN_RAISE_IF(stride < 0 || stride > 65535, kBadArgument, loc, "%s: %s %d is outside 0..65535", name, what, stride);
    return static_cast<uint32_t>(stride);
}

struct ReduceStrides {
    uint32_t dst;
    twin::Strides src;
};
inline ReduceStrides CheckStrides(const char* name, int32_t dst, int32_t block, int32_t repeat, const twin::Loc& loc) {
    return {CheckStride(name, "dstRepStride", dst, loc),
            {CheckStride(name, "srcBlkStride", block, loc), CheckStride(name, "srcRepStride", repeat, loc)}};
}

// A reduction's result in its special register, in the bits of T.
template <class T>
inline twin::Reduced ReducedOf(float value, uint32_t index = 0) {
    const T narrow = twin::Narrow<T>(value);
    twin::Reduced result{0, index, sizeof(T)};
    memcpy(&result.value, &narrow, sizeof(T));
    return result;
}

template <bool kMax, class T>
inline void WholeReduceExtreme(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                               const Work& work, const ReduceStrides& s, ReduceOrder order) {
    const uint32_t bytes = order == ReduceOrder::ORDER_ONLY_VALUE   ? sizeof(T)
                           : order == ReduceOrder::ORDER_ONLY_INDEX ? 4
                                                                    : 2 * sizeof(T);
    twin::Reduced* const kept = &twin::current_core().reduced_extreme;
    ReduceLanes(call, dst, src, work, {1, bytes, uint64_t{s.dst} * bytes, bytes}, s.src,
                [=](T* to, const T* from, twin::LaneMask mask, uint32_t repeats) {
                    const auto best = twin::WholeExtreme<kMax>(to, from, mask, repeats, s.dst, s.src, order);
                    *kept = ReducedOf<T>(best.value, best.index);
                });
}
// One value for each kGroup lanes.
template <twin::ReduceOp kOp, uint32_t kGroup, class T>
inline void GroupReduce(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                        const Work& work, const ReduceStrides& s) {
    constexpr uint32_t kOutputs = twin::kLanes<T> / kGroup;
    constexpr uint32_t kAlignment = kOutputs == 1 ? sizeof(T) : kOutputs == 8 ? 8 * sizeof(T) : twin::kBlockBytes;
    const ResultLayout layout{kOutputs, sizeof(T), uint64_t{s.dst} * kOutputs * sizeof(T), kAlignment};
    ReduceLanes(call, dst, src, work, layout, s.src, [=](T* to, const T* from, twin::LaneMask mask, uint32_t repeats) {
        twin::GroupReduce<kOp, kGroup>(to, from, mask, repeats, s.dst, s.src);
    });
}

template <class T, bool isSetMask, class M>
inline Work ReduceWork(M mask, int32_t repeats, const twin::Loc& loc) {
    if constexpr (std::is_integral_v<M>) {
        const uint64_t lanes = static_cast<uint64_t>(static_cast<int32_t>(mask));
        if (isSetMask && static_cast<int64_t>(lanes) < 0) CheckMask(lanes, twin::kLanes<T>, loc);
        return WorkOf<isSetMask>(lanes, repeats, twin::kLanes<T>, loc);
    } else {
        return WorkOf<isSetMask>(mask, repeats, twin::kLanes<T>, loc);
    }
}

}  // namespace detail

// The extreme of each repeat and its index in the repeat, as `order` says.
#define TWIN_WHOLE_EXTREME(Name, kMax)                                                                       \
    template <class T, bool isSetMask = true, class M>                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask, const int32_t repeatTime, \
                     const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,     \
                     ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, TWIN_CALLER) {                      \
        const auto strides = detail::CheckStrides(#Name, dstRepStride, srcBlkStride, srcRepStride, loc);     \
        const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);                   \
        detail::WholeReduceExtreme<kMax>({#Name, loc}, dst, src, work, strides, order);                      \
    }
TWIN_WHOLE_EXTREME(WholeReduceMax, true)
TWIN_WHOLE_EXTREME(WholeReduceMin, false)
#undef TWIN_WHOLE_EXTREME

// One value a repeat.
template <class T, bool isSetMask = true, class M>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask, const int32_t repeatTime,
                           const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                           TWIN_CALLER) {
    const auto strides = detail::CheckStrides("WholeReduceSum", dstRepStride, srcBlkStride, srcRepStride, loc);
    const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);
    detail::GroupReduce<twin::ReduceOp::kSum, twin::kLanes<T>>({"WholeReduceSum", loc}, dst, src, work, strides);
}
// Eight values a repeat, one a block; or a value for each pair of neighbours.
#define TWIN_PART_REDUCE(Name, kOp, kGroup)                                                                  \
    template <class T, bool isSetMask = true, class M>                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, M mask, \
                     const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,     \
                     TWIN_CALLER) {                                                                          \
        const auto strides = detail::CheckStrides(#Name, dstRepStride, srcBlkStride, srcRepStride, loc);     \
        const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);                   \
        detail::GroupReduce<twin::ReduceOp::kOp, kGroup>({#Name, loc}, dst, src, work, strides);             \
    }
TWIN_PART_REDUCE(BlockReduceSum, kSum, twin::kBlockLanes<T>)
TWIN_PART_REDUCE(BlockReduceMax, kMax, twin::kBlockLanes<T>)
TWIN_PART_REDUCE(BlockReduceMin, kMin, twin::kBlockLanes<T>)
TWIN_PART_REDUCE(PairReduceSum, kSum, 2)
#undef TWIN_PART_REDUCE

// WholeReduceSum with its arguments in another order; dstBlkStride has no effect.
template <class T, bool isSetMask = true>
inline void RepeatReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime,
                            const int32_t mask, const int32_t dstBlkStride, const int32_t srcBlkStride,
                            const int32_t dstRepStride, const int32_t srcRepStride, TWIN_CALLER) {
    (void)dstBlkStride;
    const auto strides = detail::CheckStrides("RepeatReduceSum", dstRepStride, srcBlkStride, srcRepStride, loc);
    const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);
    detail::GroupReduce<twin::ReduceOp::kSum, twin::kLanes<T>>({"RepeatReduceSum", loc}, dst, src, work, strides);
}

// The names of newer headers.
template <ReduceType reduceType, class T, class U, bool isSetMask = true, class M>
inline void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask, const int32_t repeatTime,
                         const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                         ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, TWIN_CALLER) {
    static_assert(std::is_same_v<T, U>, "ReduceRepeat: one element type on A2/A3");
    static_assert(reduceType != ReduceType::NONE, "ReduceRepeat: SUM, MAX or MIN");
    const auto strides = detail::CheckStrides("ReduceRepeat", dstRepStride, srcBlkStride, srcRepStride, loc);
    const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);
    const twin::VectorCall call{"ReduceRepeat", loc};
    if constexpr (reduceType == ReduceType::SUM) {
        detail::GroupReduce<twin::ReduceOp::kSum, twin::kLanes<T>>(call, dst, src, work, strides);
    } else {
        detail::WholeReduceExtreme<reduceType == ReduceType::MAX>(call, dst, src, work, strides, order);
    }
}
template <ReduceType reduceType, class T, class U, bool isSetMask = true, class M>
inline void ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask, const int32_t repeatTime,
                            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                            TWIN_CALLER) {
    static_assert(std::is_same_v<T, U>, "ReduceDataBlock: one element type on A2/A3");
    static_assert(reduceType != ReduceType::NONE, "ReduceDataBlock: SUM, MAX or MIN");
    constexpr twin::ReduceOp kOp = static_cast<twin::ReduceOp>(reduceType);
    const auto strides = detail::CheckStrides("ReduceDataBlock", dstRepStride, srcBlkStride, srcRepStride, loc);
    const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);
    detail::GroupReduce<kOp, twin::kBlockLanes<T>>({"ReduceDataBlock", loc}, dst, src, work, strides);
}
template <ReduceType reduceType, class T, class U, bool isSetMask = true, class M>
inline void ReducePairElem(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask, const int32_t repeatTime,
                           const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                           TWIN_CALLER) {
    static_assert(std::is_same_v<T, U> && reduceType == ReduceType::SUM, "ReducePairElem: SUM only");
    PairReduceSum<T, isSetMask>(dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride, loc);
}

}  // namespace AscendC
