// Reductions: over a count, over repeats, over blocks, over rows.
#pragma once

#include "twin/vector.h"
#include "twin/vector_reduce.h"

namespace AscendC {

struct SumParams {
    uint32_t outter = 1;  // rows
    uint32_t inner = 0;   // elements of a row, padded to 32 bytes
    uint32_t n = 0;       // of which these are summed
};

namespace detail {

// One value, or value and index, at the front of dst.
template <bool kMax, class T>
inline void Extreme(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                    const LocalTensor<T>& scratch, int32_t count, bool calIndex, const twin::Loc& loc) {
    static_assert(twin::kReduceType<T>, "ReduceMax, ReduceMin: half and float only");
    const uint32_t n = static_cast<uint32_t>(count), results = calIndex ? 2 : 1;
    T* to = dst.Span(results, loc, name, sizeof(T));
    const T* from = src.Span(n, loc, name);
    scratch.Span((n + twin::kLanes<T> - 1) / twin::kLanes<T>, loc, "scratch of a reduction");
    twin::Issue({name, twin::Pipe::kV, loc, {0, n}, UbAccess(to, results), {UbAccess(from, n)}},
                [=] { twin::ReduceExtremeArray<kMax>(to, from, n, calIndex); });
}

inline void CheckRepeats(int32_t mask, int32_t lanes, int32_t repeats, const twin::Loc& loc) {
    if (mask < 1 || mask > lanes) {
        twin::Raise(twin::Finding::kBadArgument, loc, "mask %d is outside 1..%d", mask, lanes);
    }
    if (repeats < 0 || repeats > 255) {
        twin::Raise(twin::Finding::kBadArgument, loc, "repeatTime %d is outside 0..255", repeats);
    }
}

// Elements that `repeats` strided repeats reach over.
template <class T>
inline uint64_t Reach(int32_t repeats, int32_t mask, twin::Strides strides) {
    if (repeats == 0) return 0;
    return twin::LaneOffset<T>(static_cast<uint32_t>(repeats - 1), static_cast<uint32_t>(mask - 1), strides) +
           1;
}

// The repeat forms: `results` elements of dst, then what fills them.
template <class T, class Effect>
inline void OverRepeats(const char* name, const LocalTensor<T>& dst, uint64_t results,
                        const LocalTensor<T>& src, int32_t mask, int32_t repeats, twin::Strides strides,
                        const twin::Loc& loc, Effect&& effect) {
    static_assert(twin::kReduceType<T>, "reductions over repeats: half and float only");
    CheckRepeats(mask, static_cast<int32_t>(twin::kLanes<T>), repeats, loc);
    if (repeats == 0) return;
    T* to = dst.Span(results, loc, name, sizeof(T));
    const uint64_t reach = Reach<T>(repeats, mask, strides);
    const T* from = src.Span(reach, loc, name);
    const twin::LaneMask lanes = twin::LaneMask::First(static_cast<uint32_t>(mask));
    twin::Issue({name, twin::Pipe::kV, loc, {0, reach}, UbAccess(to, results), {UbAccess(from, reach)}},
                [=] { effect(to, from, lanes, static_cast<uint32_t>(repeats), strides); });
}

}  // namespace detail

// dst[0] = the extreme; with `calIndex` dst[1] = the bits of the first index that has it.
template <class T>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& scratch,
                      const int32_t count, bool calIndex = false, twin::Loc loc = twin::Loc::Here()) {
    detail::Extreme<true>("ReduceMax", dst, src, scratch, count, calIndex, loc);
}
template <class T>
inline void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& scratch,
                      const int32_t count, bool calIndex = false, twin::Loc loc = twin::Loc::Here()) {
    detail::Extreme<false>("ReduceMin", dst, src, scratch, count, calIndex, loc);
}
// dst[0] = the sum: a binary tree within each 256 bytes, these in order.
template <class T>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& scratch,
                      const int32_t count, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kReduceType<T>, "ReduceSum: half and float only");
    const uint32_t n = static_cast<uint32_t>(count);
    T* to = dst.Span(1, loc, "ReduceSum destination", sizeof(T));
    const T* from = src.Span(n, loc, "ReduceSum source");
    (void)scratch;
    twin::Issue(
        {"ReduceSum", twin::Pipe::kV, loc, {0, n}, detail::UbAccess(to, 1), {detail::UbAccess(from, n)}},
        [=] { twin::ReduceSumArray(to, from, n); });
}

// dst[row] = the sum of the first n elements of each row.
template <class T>
inline void Sum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint8_t>& scratch,
                const SumParams& params, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kReduceType<T>, "Sum: half and float only");
    if (params.inner * sizeof(T) % twin::kBlockBytes != 0 || params.n > params.inner) {
        twin::Raise(twin::Finding::kBadArgument, loc,
                    "Sum: inner %u must be a multiple of 32 bytes, n %u at most inner", params.inner,
                    params.n);
    }
    scratch.CheckAlive(loc);
    const SumParams p = params;
    T* to = dst.Span(p.outter, loc, "Sum destination");
    const uint64_t all = static_cast<uint64_t>(p.outter) * p.inner;
    const T* from = src.Span(all, loc, "Sum source");
    twin::Issue(
        {"Sum", twin::Pipe::kV, loc, {0, all}, detail::UbAccess(to, p.outter), {detail::UbAccess(from, all)}},
        [=] { twin::SumRows(to, from, p.outter, p.inner, p.n); });
}

// One value a repeat, dstRepStride elements apart.
template <class T>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, twin::Loc loc = twin::Loc::Here()) {
    const uint32_t step = static_cast<uint32_t>(dstRepStride);
    const uint64_t results = repeatTime > 0 ? static_cast<uint64_t>(repeatTime - 1) * step + 1 : 0;
    const twin::Strides strides{static_cast<uint32_t>(srcBlkStride), static_cast<uint32_t>(srcRepStride)};
    detail::OverRepeats("WholeReduceSum", dst, results, src, mask, repeatTime, strides, loc,
                        [=](T* to, const T* from, twin::LaneMask lanes, uint32_t repeats, twin::Strides s) {
                            twin::WholeSum(to, from, lanes, repeats, step, s);
                        });
}

#define TWIN_WHOLE_EXTREME(Name, kMax)                                                                 \
    template <class T>                                                                                 \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,         \
                     const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride, \
                     const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,   \
                     twin::Loc loc = twin::Loc::Here()) {                                              \
        const uint32_t step = static_cast<uint32_t>(dstRepStride);                                     \
        const uint64_t values = repeatTime > 0 ? static_cast<uint64_t>(repeatTime - 1) * step + 1 : 0; \
        const uint64_t results = order == ReduceOrder::ORDER_ONLY_VALUE   ? values                     \
                                 : order == ReduceOrder::ORDER_ONLY_INDEX ? values * 4 / sizeof(T)     \
                                                                          : values * 2;                \
        const twin::Strides strides{static_cast<uint32_t>(srcBlkStride),                               \
                                    static_cast<uint32_t>(srcRepStride)};                              \
        detail::OverRepeats(                                                                           \
            #Name, dst, results, src, mask, repeatTime, strides, loc,                                  \
            [=](T* to, const T* from, twin::LaneMask lanes, uint32_t repeats, twin::Strides s) {       \
                twin::WholeExtreme<kMax>(to, from, lanes, repeats, step, s, order);                    \
            });                                                                                        \
    }
TWIN_WHOLE_EXTREME(WholeReduceMax, true)
TWIN_WHOLE_EXTREME(WholeReduceMin, false)
#undef TWIN_WHOLE_EXTREME

// Eight values a repeat, one a block; repeats are dstRepStride * 8 elements apart.
#define TWIN_BLOCK_REDUCE(Name, kOp)                                                                 \
    template <class T>                                                                               \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, \
                     const int32_t mask, const int32_t dstRepStride, const int32_t srcBlkStride,     \
                     const int32_t srcRepStride, twin::Loc loc = twin::Loc::Here()) {                \
        const uint32_t step = static_cast<uint32_t>(dstRepStride);                                   \
        const uint64_t results =                                                                     \
            repeatTime > 0 ? (static_cast<uint64_t>(repeatTime - 1) * step + 1) * 8 : 0;             \
        const twin::Strides strides{static_cast<uint32_t>(srcBlkStride),                             \
                                    static_cast<uint32_t>(srcRepStride)};                            \
        detail::OverRepeats(                                                                         \
            #Name, dst, results, src, mask, repeatTime, strides, loc,                                \
            [=](T* to, const T* from, twin::LaneMask lanes, uint32_t repeats, twin::Strides s) {     \
                twin::BlockReduce<kOp>(to, from, lanes, repeats, step, s);                           \
            });                                                                                      \
    }
TWIN_BLOCK_REDUCE(BlockReduceSum, twin::BlockOp::kSum)
TWIN_BLOCK_REDUCE(BlockReduceMax, twin::BlockOp::kMax)
TWIN_BLOCK_REDUCE(BlockReduceMin, twin::BlockOp::kMin)
#undef TWIN_BLOCK_REDUCE

}  // namespace AscendC
