// Reductions of the vector unit, in its order.
//
// Sums: inside a repeat (256 bytes) a binary tree over neighbours, ((x0 + x1) + (x2 + x3)) + ..., each node
// rounded to T; lanes that take no part are absent from the tree. ReduceSum over a count adds the repeats'
// sums one after the other; ReduceSum over repeats, and Sum, build trees of the sums again.
// Maxima and minima: the lowest index among equals (-0 and +0 are equal); NaN is passed over unless there is
// nothing else, then the first element wins. (What the hardware does with NaN is not documented.)
#pragma once

#include <vector>

#include "twin/math/element_ops.h"
#include "twin/math/lane_mask.h"

namespace AscendC {

enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

}  // namespace AscendC

namespace twin {

using AscendC::ReduceOrder;

template <class T>
constexpr bool kReduceType = kRealType<T>;

// x + (-0) is x for every x, so that padding with it leaves lanes out.
constexpr float kAbsent = -0.0f;

// The tree over `width` (a power of two) values in `lanes`, which it overwrites.
template <class T>
inline T TreeSum(float* lanes, uint32_t width) {
    for (width /= 2; width > 0; width /= 2) {
        for (uint32_t i = 0; i < width; ++i) lanes[i] = Widen(Narrow<T>(lanes[2 * i] + lanes[2 * i + 1]));
    }
    return Narrow<T>(lanes[0]);
}

// The same over the first n >= 1 of up to kLanes<T> values. A tree of absent lanes beside it changes nothing.
template <class T>
inline T PartialTreeSum(float* lanes, uint32_t n) {
    if (n == kLanes<T>) return TreeSum<T>(lanes, kLanes<T>);  // unrolled
    uint32_t width = 1;
    while (width < n) width *= 2;
    for (uint32_t i = n; i < width; ++i) lanes[i] = kAbsent;
    return TreeSum<T>(lanes, width);
}

// Sum of one repeat: its first n of up to kLanes<T> elements.
template <class T>
inline T RepeatSum(const T* src, uint32_t n) {
    float lanes[kLanes<T>];
    for (uint32_t i = 0; i < n; ++i) lanes[i] = Widen(LoadAt(src, i));
    return PartialTreeSum<T>(lanes, n);
}

template <class T>
constexpr uint32_t RepeatPart(uint64_t n, uint64_t done) {
    return static_cast<uint32_t>(n - done < kLanes<T> ? n - done : kLanes<T>);
}

// ReduceSum over the first n >= 1 elements; returns the sum as well.
template <class T>
inline T ReduceSumArray(T* dst, const T* src, uint32_t n) {
    float sum = kAbsent;
    for (uint32_t done = 0; done < n; done += kLanes<T>) {
        sum = Widen(Narrow<T>(sum + Widen(RepeatSum(src + done, RepeatPart<T>(n, done)))));
    }
    StoreAt(dst, 0, Narrow<T>(sum));
    return Narrow<T>(sum);
}

// Trees of the repeats' sums, then of those trees' sums, until one value is left.
template <class T>
inline T SumOfSums(std::vector<float>& sums) {
    for (size_t n = sums.size(); n > 1; n = (n + kLanes<T> - 1) / kLanes<T>) {
        for (size_t done = 0; done < n; done += kLanes<T>) {
            float lanes[kLanes<T>];
            const uint32_t part = RepeatPart<T>(n, done);
            std::memcpy(lanes, &sums[done], part * sizeof(float));
            sums[done / kLanes<T>] = Widen(PartialTreeSum<T>(lanes, part));
        }
    }
    return Narrow<T>(sums[0]);
}

// Sum: dst[row] = sum of the first n of each row of `inner` elements.
template <class T>
inline void SumRows(T* dst, const T* src, uint32_t rows, uint32_t inner, uint32_t n) {
    if (n == 0) return;
    for (uint32_t row = 0; row < rows; ++row) {
        const T* first = src + uint64_t{row} * inner;
        if (n <= kLanes<T>) {
            StoreAt(dst, row, RepeatSum(first, n));
            continue;
        }
        std::vector<float> sums;
        for (uint32_t done = 0; done < n; done += kLanes<T>)
            sums.push_back(Widen(RepeatSum(first + done, RepeatPart<T>(n, done))));
        StoreAt(dst, row, SumOfSums<T>(sums));
    }
}

// ---- maximum and minimum ----

// An int32_t that orders as the values do, all NaN at the losing end; -0 orders just below +0.
template <bool kMax>
constexpr int32_t OrderKey(float x) {
    constexpr int32_t kLoser = kMax ? INT32_MIN : INT32_MAX;
    const int32_t raw = static_cast<int32_t>(FloatBits(x));
    const int32_t key = raw ^ ((raw >> 31) & 0x7FFFFFFF);
    return Select((raw & 0x7FFFFFFF) > 0x7F800000, kLoser, key);
}

struct Extreme {
    float value;
    uint32_t index;  // 0 unless asked for
};

// The best of n >= 1 leaves load(0), load(1), ...
template <bool kMax, class Load>
inline Extreme FindExtreme(uint32_t n, bool with_index, Load&& load) {
    constexpr int32_t kLoser = kMax ? INT32_MIN : INT32_MAX;
    int32_t best = kLoser;
    for (uint32_t i = 0; i < n; ++i) {
        const int32_t key = OrderKey<kMax>(load(i));
        best = kMax ? (key > best ? key : best) : (key < best ? key : best);
    }
    if (best == kLoser) return {load(0), 0};
    const bool zero = best == 0 || best == -1;  // +0 or -0: whichever comes first
    const float value = FloatOf(static_cast<uint32_t>(best ^ ((best >> 31) & 0x7FFFFFFF)));
    if (!with_index && !zero) return {value, 0};
    uint32_t index = 0;
    while (load(index) != value) ++index;
    return {zero ? load(index) : value, with_index ? index : 0};
}

// An index in the bits of a T, as the vector unit stores it.
template <class T>
constexpr T IndexBits(uint32_t index) {
    if constexpr (std::is_same_v<T, half>) {
        return half::FromBits(static_cast<uint16_t>(index));
    } else {
        return FloatOf(index);
    }
}

// ReduceMax (kMax) or ReduceMin: dst[0] the value and, with_index, dst[1] the index in the bits of T. half
// holds indices up to 65535. n >= 1. Returns what it has found as well.
template <bool kMax, class T>
inline Extreme ReduceExtremeArray(T* dst, const T* src, uint32_t n, bool with_index) {
    const Extreme best = FindExtreme<kMax>(n, with_index, [=](uint32_t i) { return Widen(LoadAt(src, i)); });
    StoreAt(dst, 0, Narrow<T>(best.value));
    if (with_index) StoreAt(dst, 1, IndexBits<T>(best.index));
    return best;
}

// ---- repeat forms: the lanes of one repeat, gathered ----

template <class T>
struct RepeatLanes {
    float value[kLanes<T>];
    uint8_t lane[kLanes<T>];
    uint32_t count = 0;

    RepeatLanes(const T* src, uint32_t repeat, uint32_t begin, uint32_t end, LaneMask mask, Strides strides) {
        for (uint32_t i = begin; i < end; ++i) {
            if (!mask[i]) continue;
            value[count] = Widen(LoadAt(src, LaneOffset<T>(repeat, i, strides)));
            lane[count++] = static_cast<uint8_t>(i);
        }
    }
};

// The tree over lanes [kBegin, kBegin + kCount) of a repeat, absent lanes left out.
template <class T, uint32_t kCount>
inline T MaskedSum(const T* src, uint32_t repeat, uint32_t begin, LaneMask mask, Strides strides) {
    float lanes[kCount];
    for (uint32_t i = 0; i < kCount; ++i) {
        const uint32_t lane = begin + i;
        lanes[i] = mask[lane] ? Widen(LoadAt(src, LaneOffset<T>(repeat, lane, strides))) : kAbsent;
    }
    return TreeSum<T>(lanes, kCount);
}

inline bool AnyLane(LaneMask mask, uint32_t begin, uint32_t count) {
    for (uint32_t i = begin; i < begin + count; ++i) {
        if (mask[i]) return true;
    }
    return false;
}

// ReduceSum over repeats: a tree over the repeats' sums.
template <class T>
inline void ReduceSumRepeats(T* dst, const T* src, LaneMask mask, uint32_t repeats, uint32_t repeat_stride) {
    if (repeats == 0 || !AnyLane(mask, 0, kLanes<T>)) return;
    std::vector<float> sums;
    const Strides strides{1, repeat_stride};
    for (uint32_t r = 0; r < repeats; ++r) sums.push_back(Widen(MaskedSum<T, kLanes<T>>(src, r, 0, mask, strides)));
    StoreAt(dst, 0, SumOfSums<T>(sums));
}

// WholeReduceMax or WholeReduceMin: value and index within the repeat, in `order`; results dst_stride apart,
// in pairs of T (both), T (value only) or uint32_t (index only). Returns the best of all repeats; its index counts
// lanes.
template <bool kMax, class T>
inline Extreme WholeExtreme(T* dst, const T* src, LaneMask mask, uint32_t repeats, uint32_t dst_stride, Strides strides,
                            ReduceOrder order) {
    Extreme all{};
    for (uint32_t r = 0; r < repeats; ++r) {
        const RepeatLanes<T> lanes(src, r, 0, kLanes<T>, mask, strides);
        if (lanes.count == 0) return all;
        const Extreme best = FindExtreme<kMax>(lanes.count, true, [&](uint32_t i) { return lanes.value[i]; });
        const uint32_t index = lanes.lane[best.index];
        if (r == 0 || (kMax ? best.value > all.value : best.value < all.value))
            all = {best.value, r * kLanes<T> + index};
        const uint64_t at = uint64_t{r} * dst_stride;
        switch (order) {
            case ReduceOrder::ORDER_ONLY_VALUE: StoreAt(dst, at, Narrow<T>(best.value)); break;
            case ReduceOrder::ORDER_ONLY_INDEX: StoreAt(reinterpret_cast<uint32_t*>(dst), at, index); break;
            default: {
                const bool value_first = order == ReduceOrder::ORDER_VALUE_INDEX;
                StoreAt(dst, 2 * at + (value_first ? 0 : 1), Narrow<T>(best.value));
                StoreAt(dst, 2 * at + (value_first ? 1 : 0), IndexBits<T>(index));
            }
        }
    }
    return all;
}

// ReduceMax (kMax) or ReduceMin over repeats: the index counts lanes, kLanes<T> a repeat.
template <bool kMax, class T>
inline Extreme ReduceExtremeRepeats(T* dst, const T* src, LaneMask mask, uint32_t repeats, uint32_t repeat_stride,
                                    bool with_index) {
    const Strides strides{1, repeat_stride};
    uint32_t present[kLanes<T>], count = 0;
    for (uint32_t lane = 0; lane < kLanes<T>; ++lane) {
        if (mask[lane]) present[count++] = lane;
    }
    if (count == 0 || repeats == 0) return {};
    const auto load = [&](uint32_t i) {
        return Widen(LoadAt(src, LaneOffset<T>(i / count, present[i % count], strides)));
    };
    const Extreme best = FindExtreme<kMax>(repeats * count, with_index, load);
    StoreAt(dst, 0, Narrow<T>(best.value));
    if (with_index) StoreAt(dst, 1, IndexBits<T>(best.index / count * kLanes<T> + present[best.index % count]));
    return best;
}

enum class ReduceOp : uint8_t { kSum, kMax, kMin };  // numbered as ReduceType

// WholeReduceSum, BlockReduceSum, BlockReduceMax, BlockReduceMin, PairReduceSum: one value for each kGroup
// lanes; a repeat's values are dst_stride times their number apart. A group without a lane in the mask writes
// nothing.
template <ReduceOp kOp, uint32_t kGroup, class T>
inline void GroupReduce(T* dst, const T* src, LaneMask mask, uint32_t repeats, uint32_t dst_stride, Strides strides) {
    constexpr uint32_t kGroups = kLanes<T> / kGroup;
    for (uint32_t r = 0; r < repeats; ++r) {
        for (uint32_t group = 0; group < kGroups; ++group) {
            const uint32_t begin = group * kGroup;
            if (!AnyLane(mask, begin, kGroup)) continue;
            const uint64_t at = uint64_t{r} * dst_stride * kGroups + group;
            if constexpr (kOp == ReduceOp::kSum) {
                StoreAt(dst, at, MaskedSum<T, kGroup>(src, r, begin, mask, strides));
            } else {
                const RepeatLanes<T> lanes(src, r, begin, begin + kGroup, mask, strides);
                const auto load = [&](uint32_t i) { return lanes.value[i]; };
                StoreAt(dst, at, Narrow<T>(FindExtreme<kOp == ReduceOp::kMax>(lanes.count, false, load).value));
            }
        }
    }
}

}  // namespace twin
