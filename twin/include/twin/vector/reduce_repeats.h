// Reductions over repeats: of whole repeats, of their blocks, of pairs of neighbours.
//
// Results are declared exactly: outputs whose lanes are all masked off are not written. A call whose outputs
// or sources are unevenly spaced is issued in parts.
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

// Declares the operand's bytes with as few Accesses as possible; where three are not enough, declares their
// hull.
inline void ReadsOf(const twin::Operand& src, const twin::Runs& runs, uint32_t repeats,
                    twin::Access reads[3]) {
    if (twin::AccessOf(src, runs, repeats, &reads[0])) return;
    if (repeats == 1 && runs.count <= 3) {
        for (uint32_t i = 0; i < runs.count; ++i) {
            reads[i] = {src.At(0, runs.run[i].lane), uint64_t{runs.run[i].count} * src.element};
        }
        return;
    }
    const uint64_t first = src.Offset(runs.run[0].lane);
    reads[0] = {src.begin + first, (repeats - 1) * src.Step() + twin::RepeatExtent(src, runs) - first};
}

// `reduce(dst, src, mask, repeats)` on the lanes of consecutive outputs.
template <class T, class Reduce>
inline void ReduceLanes(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                        const Work& work, const ResultLayout& layout, twin::Strides strides,
                        const Reduce& reduce) {
    TWIN_RAISE_IF(work.counted, kBadArgument, call.loc, "%s in counter mode", call.name);
    const twin::Lanes& lanes = work.lanes;
    twin::Operands all;
    all.sources = 1;
    all.src[0] = {reinterpret_cast<uintptr_t>(src.data()), sizeof(T), strides};
    const twin::Runs whole = twin::FindRuns(lanes, all);
    if (lanes.repeats == 0 || whole.count == 0) return;
    const uint64_t last = lanes.repeats - 1;
    const uint32_t each = lanes.width / layout.outputs;
    const uint32_t end = whole.run[whole.count - 1].lane + whole.run[whole.count - 1].count;
    const uint64_t results = last * layout.step + ((end + each - 1) / each) * layout.bytes;
    const uint64_t extent = last * all.src[0].Step() + twin::RepeatExtent(all.src[0], whole);
    const uintptr_t to = reinterpret_cast<uintptr_t>(
        dst.Span((results + sizeof(T) - 1) / sizeof(T), call.loc, call.name, layout.alignment));
    src.Span(extent / sizeof(T), call.loc, call.name);
    TWIN_RAISE_IF(to == all.src[0].begin && last > 0 && layout.step > all.src[0].Step(), kBadArgument,
                  call.loc, "%s in place: results overtake the source and overwrite what later repeats read",
                  call.name);
    if (to != all.src[0].begin)
        CheckApart(call.name, "source (in part)", to, results, all.src[0].begin, extent, call.loc);
    for (uint32_t output = 0; output < layout.outputs;) {
        if (!twin::AnyLane(lanes.mask, output * each, each)) {
            ++output;
            continue;
        }
        uint32_t stop = output + 1;
        while (stop < layout.outputs && twin::AnyLane(lanes.mask, stop * each, each)) ++stop;
        twin::Lanes part = lanes;
        const twin::LaneMask range = twin::LaneMask::Range(output * each, (stop - output) * each);
        for (int i = 0; i < 2; ++i) part.mask.bits[i] &= range.bits[i];
        const twin::Runs runs = twin::FindRuns(part, all);
        twin::Access reads[3];
        const bool even = twin::AccessOf(all.src[0], runs, lanes.repeats, &reads[0]);
        const uint64_t bytes = (stop - output) * layout.bytes;
        const uint32_t times = even ? 1 : lanes.repeats, repeats = even ? lanes.repeats : 1;
        for (uint32_t p = 0; p < times; ++p) {
            twin::Operand from = all.src[0];
            from.begin = from.At(p, 0);
            const uintptr_t out = to + p * layout.step;
            const uintptr_t first = out + output * layout.bytes;
            twin::Access some[3];
            ReadsOf(from, runs, repeats, some);
            const twin::Access write =
                repeats == 1 || layout.step == bytes
                    ? twin::Access{first, bytes * repeats}
                    : twin::Access{first, bytes, layout.step == 0 ? 1 : repeats, layout.step};
            const twin::LaneMask mask = part.mask;
            twin::Issue(twin::PartOf(call, uint64_t{lanes.width} * repeats, write, some[0], some[1], some[2]),
                        [=] { reduce(UbPointer<T>(out), UbPointer<T>(from.begin), mask, repeats); });
        }
        output = stop;
    }
}

inline uint32_t CheckStride(const char* name, const char* what, int32_t stride, const twin::Loc& loc) {
    TWIN_RAISE_IF(stride < 0 || stride > 65535, kBadArgument, loc, "%s: %s %d is outside 0..65535", name,
                  what, stride);
    return static_cast<uint32_t>(stride);
}

struct ReduceStrides {
    uint32_t dst;
    twin::Strides src;
};
inline ReduceStrides CheckStrides(const char* name, int32_t dst, int32_t block, int32_t repeat,
                                  const twin::Loc& loc) {
    return {CheckStride(name, "dstRepStride", dst, loc),
            {CheckStride(name, "srcBlkStride", block, loc), CheckStride(name, "srcRepStride", repeat, loc)}};
}

template <class T>
inline void WholeReduceSum(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                           const Work& work, const ReduceStrides& s) {
    static_assert(twin::kReduceType<T>, "reductions over repeats: half and float only");
    const ResultLayout layout{1, sizeof(T), s.dst * sizeof(T), sizeof(T)};
    ReduceLanes(call, dst, src, work, layout, s.src,
                [=](T* to, const T* from, twin::LaneMask mask, uint32_t repeats) {
                    twin::WholeSum(to, from, mask, repeats, s.dst, s.src);
                });
}
template <bool kMax, class T>
inline void WholeReduceExtreme(const twin::VectorCall& call, const LocalTensor<T>& dst,
                               const LocalTensor<T>& src, const Work& work, const ReduceStrides& s,
                               ReduceOrder order) {
    static_assert(twin::kReduceType<T>, "reductions over repeats: half and float only");
    const uint32_t bytes = order == ReduceOrder::ORDER_ONLY_VALUE   ? sizeof(T)
                           : order == ReduceOrder::ORDER_ONLY_INDEX ? 4
                                                                    : 2 * sizeof(T);
    ReduceLanes(call, dst, src, work, {1, bytes, uint64_t{s.dst} * bytes, bytes}, s.src,
                [=](T* to, const T* from, twin::LaneMask mask, uint32_t repeats) {
                    twin::WholeExtreme<kMax>(to, from, mask, repeats, s.dst, s.src, order);
                });
}
template <twin::BlockOp kOp, class T>
inline void BlockReduce(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                        const Work& work, const ReduceStrides& s) {
    static_assert(twin::kReduceType<T>, "reductions over repeats: half and float only");
    const ResultLayout layout{8, sizeof(T), s.dst * 8 * sizeof(T), 8 * sizeof(T)};
    ReduceLanes(call, dst, src, work, layout, s.src,
                [=](T* to, const T* from, twin::LaneMask mask, uint32_t repeats) {
                    twin::BlockReduce<kOp>(to, from, mask, repeats, s.dst, s.src);
                });
}
template <class T>
inline void PairReduce(const twin::VectorCall& call, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                       const Work& work, const ReduceStrides& s) {
    static_assert(twin::kReduceType<T>, "reductions over repeats: half and float only");
    const ResultLayout layout{twin::kLanes<T> / 2, sizeof(T), s.dst * 128ull, twin::kBlockBytes};
    ReduceLanes(call, dst, src, work, layout, s.src,
                [=](T* to, const T* from, twin::LaneMask mask, uint32_t repeats) {
                    twin::PairSum(to, from, mask, repeats, s.dst, s.src);
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

// One value a repeat, dstRepStride results apart.
template <class T, bool isSetMask = true, class M>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, TWIN_CALLER) {
    const auto strides =
        detail::CheckStrides("WholeReduceSum", dstRepStride, srcBlkStride, srcRepStride, loc);
    const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);
    detail::WholeReduceSum({"WholeReduceSum", loc}, dst, src, work, strides);
}

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

// Eight values a repeat, one a block; or a value for each pair of neighbours.
#define TWIN_PART_REDUCE(Name, Call)                                                                         \
    template <class T, bool isSetMask = true, class M>                                                       \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, M mask, \
                     const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,     \
                     TWIN_CALLER) {                                                                          \
        const auto strides = detail::CheckStrides(#Name, dstRepStride, srcBlkStride, srcRepStride, loc);     \
        const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);                   \
        detail::Call({#Name, loc}, dst, src, work, strides);                                                 \
    }
TWIN_PART_REDUCE(BlockReduceSum, BlockReduce<twin::BlockOp::kSum>)
TWIN_PART_REDUCE(BlockReduceMax, BlockReduce<twin::BlockOp::kMax>)
TWIN_PART_REDUCE(BlockReduceMin, BlockReduce<twin::BlockOp::kMin>)
TWIN_PART_REDUCE(PairReduceSum, PairReduce)
#undef TWIN_PART_REDUCE

// WholeReduceSum with its arguments in another order; dstBlkStride has no effect.
template <class T, bool isSetMask = true>
inline void RepeatReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime,
                            const int32_t mask, const int32_t dstBlkStride, const int32_t srcBlkStride,
                            const int32_t dstRepStride, const int32_t srcRepStride, TWIN_CALLER) {
    (void)dstBlkStride;
    const auto strides =
        detail::CheckStrides("RepeatReduceSum", dstRepStride, srcBlkStride, srcRepStride, loc);
    const detail::Work work = detail::ReduceWork<T, isSetMask>(mask, repeatTime, loc);
    detail::WholeReduceSum({"RepeatReduceSum", loc}, dst, src, work, strides);
}

// The names of newer headers.
template <ReduceType reduceType, class T, class U, bool isSetMask = true, class M>
inline void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask,
                         const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                         const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                         TWIN_CALLER) {
    static_assert(std::is_same_v<T, U>, "ReduceRepeat: one element type on A2/A3");
    if constexpr (reduceType == ReduceType::SUM) {
        WholeReduceSum<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                     loc);
    } else if constexpr (reduceType == ReduceType::MAX) {
        WholeReduceMax<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                     order, loc);
    } else {
        static_assert(reduceType == ReduceType::MIN, "ReduceRepeat: SUM, MAX or MIN");
        WholeReduceMin<T, isSetMask>(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                                     order, loc);
    }
}
template <ReduceType reduceType, class T, class U, bool isSetMask = true, class M>
inline void ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask,
                            const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                            const int32_t srcRepStride, TWIN_CALLER) {
    static_assert(std::is_same_v<T, U>, "ReduceDataBlock: one element type on A2/A3");
    if constexpr (reduceType == ReduceType::SUM) {
        BlockReduceSum<T, isSetMask>(dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride,
                                     loc);
    } else if constexpr (reduceType == ReduceType::MAX) {
        BlockReduceMax<T, isSetMask>(dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride,
                                     loc);
    } else {
        static_assert(reduceType == ReduceType::MIN, "ReduceDataBlock: SUM, MAX or MIN");
        BlockReduceMin<T, isSetMask>(dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride,
                                     loc);
    }
}
template <ReduceType reduceType, class T, class U, bool isSetMask = true, class M>
inline void ReducePairElem(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask,
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, TWIN_CALLER) {
    static_assert(std::is_same_v<T, U> && reduceType == ReduceType::SUM, "ReducePairElem: SUM only");
    PairReduceSum<T, isSetMask>(dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride, loc);
}

}  // namespace AscendC
