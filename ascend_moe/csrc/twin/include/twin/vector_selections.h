// Comparisons, selections, gathering by mask, broadcasts, index sequences.
#pragma once

#include "twin/vector_mask.h"
#include "twin/vector_reductions.h"

namespace AscendC {

struct GatherMaskParams {
    uint8_t src0BlockStride = 1;
    uint16_t repeatTimes = 0;
    uint16_t src0RepeatStride = 0;
    uint8_t src1RepeatStride = 0;
    GatherMaskParams() = default;
    GatherMaskParams(uint8_t block, uint16_t repeats, uint16_t source, uint8_t bits)
        : src0BlockStride(block), repeatTimes(repeats), src0RepeatStride(source), src1RepeatStride(bits) {}
};

struct BrcbRepeatParams {
    uint16_t dstBlkStride = 1;
    uint16_t dstRepStride = 8;
    BrcbRepeatParams() = default;
    BrcbRepeatParams(uint16_t block, uint16_t repeat) : dstBlkStride(block), dstRepStride(repeat) {}
};

namespace detail {

template <class T>
inline void CheckCompare(CMPMODE mode, uint32_t count, const twin::Loc& loc) {
    static_assert(twin::kCompareLegal<T>, "Compare: half, float, or int32_t with EQ");
    if (!twin::CompareModeLegal<T>(mode)) {
        twin::Raise(twin::Finding::kBadArgument, loc, "comparison mode %d of int32: only EQ exists",
                    static_cast<int>(mode));
    }
    if (count * sizeof(T) % 256 != 0) {
        twin::Raise(
            twin::Finding::kBadArgument, loc,
            "a comparison of %u elements: whole 256 bytes only, the last %zu bytes would not be computed",
            count, count * sizeof(T) % 256);
    }
}

template <class T>
inline void CheckGather(uint32_t mask, bool counterMode, const GatherMaskParams& p, const twin::Loc& loc) {
    static_assert(twin::kGatherMaskLegal<T>, "GatherMask: 16- and 32-bit types");
    if (counterMode && mask == 0)
        twin::Raise(twin::Finding::kBadArgument, loc, "GatherMask: mask 0 in counter mode");
    (void)p;
}

template <class T>
inline twin::GatherShape ShapeOf(bool counterMode, uint32_t mask, const GatherMaskParams& p) {
    return {counterMode ? mask : twin::kLanes<T>,
            p.repeatTimes,
            {p.src0BlockStride, p.src0RepeatStride},
            p.src1RepeatStride};
}

}  // namespace detail

// One bit an element, least significant first.
template <class T>
inline void Compare(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b,
                    CMPMODE mode, uint32_t count, twin::Loc loc = twin::Loc::Here()) {
    detail::CheckCompare<T>(mode, count, loc);
    uint8_t* to = dst.Span(count / 8, loc, "Compare destination");
    const T* x = a.Span(count, loc, "Compare source 0");
    const T* y = b.Span(count, loc, "Compare source 1");
    twin::Issue({"Compare",
                 twin::Pipe::kV,
                 loc,
                 {0, count},
                 detail::UbAccess(to, count / 8),
                 {detail::UbAccess(x, count), detail::UbAccess(y, count)}},
                [=] { twin::CompareArray(to, x, y, mode, count); });
}
template <class T>
inline void CompareScalar(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& a, const T scalar,
                          CMPMODE mode, uint32_t count, twin::Loc loc = twin::Loc::Here()) {
    detail::CheckCompare<T>(mode, count, loc);
    uint8_t* to = dst.Span(count / 8, loc, "CompareScalar destination");
    const T* x = a.Span(count, loc, "CompareScalar source");
    twin::Issue({"CompareScalar",
                 twin::Pipe::kV,
                 loc,
                 {0, count},
                 detail::UbAccess(to, count / 8),
                 {detail::UbAccess(x, count)}},
                [=] { twin::CompareScalarArray(to, x, scalar, mode, count); });
}
// The name of CompareScalar in newer headers.
template <class T>
inline void Compares(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& a, const T scalar, CMPMODE mode,
                     uint32_t count, twin::Loc loc = twin::Loc::Here()) {
    CompareScalar(dst, a, scalar, mode, count, loc);
}

// dst = bit ? a : b. Mode 0 uses the first repeat's bits for all repeats.
template <class T, class U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& a,
                   const LocalTensor<T>& b, SELMODE mode, uint32_t count, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kRealType<T>, "Select: half and float only");
    if (mode == SELMODE::VSEL_TENSOR_SCALAR_MODE) {
        twin::Raise(twin::Finding::kBadArgument, loc, "Select of two tensors in VSEL_TENSOR_SCALAR_MODE");
    }
    const uint32_t bits = mode == SELMODE::VSEL_CMPMASK_SPR ? twin::kLanes<T> : count;
    const uint32_t words = (bits / 8 + (bits % 8 != 0) + sizeof(U) - 1) / sizeof(U);
    T* to = dst.Span(count, loc, "Select destination");
    const uint8_t* choose = reinterpret_cast<const uint8_t*>(mask.Span(words, loc, "Select mask"));
    const T* x = a.Span(count, loc, "Select source 0");
    const T* y = b.Span(count, loc, "Select source 1");
    twin::Issue({"Select",
                 twin::Pipe::kV,
                 loc,
                 {0, count},
                 detail::UbAccess(to, count),
                 {detail::UbAccess(x, count), detail::UbAccess(y, count),
                  detail::UbAccess(choose, words * sizeof(U))}},
                [=] { twin::SelectArray(to, choose, x, y, mode, count); });
}
template <class T, class U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& a, T scalar,
                   SELMODE mode, uint32_t count, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kRealType<T>, "Select: half and float only");
    if (mode != SELMODE::VSEL_TENSOR_SCALAR_MODE) {
        twin::Raise(twin::Finding::kBadArgument, loc, "Select with a scalar needs VSEL_TENSOR_SCALAR_MODE");
    }
    const uint32_t words = (count / 8 + (count % 8 != 0) + sizeof(U) - 1) / sizeof(U);
    T* to = dst.Span(count, loc, "Select destination");
    const uint8_t* choose = reinterpret_cast<const uint8_t*>(mask.Span(words, loc, "Select mask"));
    const T* x = a.Span(count, loc, "Select source");
    twin::Issue({"Select",
                 twin::Pipe::kV,
                 loc,
                 {0, count},
                 detail::UbAccess(to, count),
                 {detail::UbAccess(x, count), detail::UbAccess(choose, words * sizeof(U))}},
                [=] { twin::SelectScalarArray(to, choose, x, scalar, count); });
}

// Keeps elements by a fixed pattern 1..7, closely packed; rsvdCnt is how many.
template <class T>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t pattern,
                       const bool reduceMode, const uint32_t mask, const GatherMaskParams& params,
                       uint64_t& rsvdCnt, twin::Loc loc = twin::Loc::Here()) {
    detail::CheckGather<T>(mask, reduceMode, params, loc);
    if (pattern < 1 || pattern > 7)
        twin::Raise(twin::Finding::kBadArgument, loc, "GatherMask: pattern %u is outside 1..7", pattern);
    const twin::GatherShape shape = detail::ShapeOf<T>(reduceMode, mask, params);
    if (shape.repeats == 0) return;
    const uint64_t reach = twin::LaneOffset<T>(shape.repeats - 1, shape.lanes - 1, shape.source) + 1;
    const T* from = src.Span(reach, loc, "GatherMask source");
    T* to = dst.Span(1, loc, "GatherMask destination");
    uint64_t* kept = &rsvdCnt;
    twin::Issue({"GatherMask",
                 twin::Pipe::kV,
                 loc,
                 {0, reach},
                 detail::UbAccess(to, reach),
                 {detail::UbAccess(from, reach)}},
                [=] { *kept = twin::GatherPattern(to, from, pattern, shape); });
}
// Keeps elements whose bit is set.
template <class T, class U>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<U>& bits,
                       const bool reduceMode, const uint32_t mask, const GatherMaskParams& params,
                       uint64_t& rsvdCnt, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kGatherBitsLegal<T, U>,
                  "GatherMask: the bit tensor is as wide as the elements, unsigned");
    detail::CheckGather<T>(mask, reduceMode, params, loc);
    const twin::GatherShape shape = detail::ShapeOf<T>(reduceMode, mask, params);
    if (shape.repeats == 0) return;
    const uint64_t reach = twin::LaneOffset<T>(shape.repeats - 1, shape.lanes - 1, shape.source) + 1;
    const uint64_t bytes = static_cast<uint64_t>(shape.repeats - 1) * shape.bits_stride * twin::kBlockBytes +
                           (shape.lanes + 7) / 8;
    const T* from = src.Span(reach, loc, "GatherMask source");
    const U* choose = bits.Span((bytes + sizeof(U) - 1) / sizeof(U), loc, "GatherMask bits");
    T* to = dst.Span(1, loc, "GatherMask destination");
    uint64_t* kept = &rsvdCnt;
    twin::Issue(
        {"GatherMask",
         twin::Pipe::kV,
         loc,
         {0, reach},
         detail::UbAccess(to, reach),
         {detail::UbAccess(from, reach), detail::UbAccess(choose, (bytes + sizeof(U) - 1) / sizeof(U))}},
        [=] { *kept = twin::GatherBits(to, from, choose, shape); });
}

// Each of 8 elements a repeat fills one 32-byte block.
template <class T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t repeatTime,
                 const BrcbRepeatParams& params, twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kDuplicateType<T>, "Brcb: 16- and 32-bit types");
    if (params.dstBlkStride == 0) twin::Raise(twin::Finding::kBadArgument, loc, "Brcb: dstBlkStride is 0");
    if (repeatTime == 0) return;
    const uint32_t repeats = repeatTime;
    const twin::Strides strides{params.dstBlkStride, params.dstRepStride};
    const uint64_t blocks = static_cast<uint64_t>(repeats - 1) * strides.repeat + 7ull * strides.block + 1;
    const uint64_t count = blocks * twin::kBlockLanes<T>;
    T* to = dst.Span(count, loc, "Brcb destination");
    const T* from = src.Span(8ull * repeats, loc, "Brcb source");
    if (to == from) twin::Raise(twin::Finding::kBadArgument, loc, "Brcb in place");
    twin::Issue({"Brcb",
                 twin::Pipe::kV,
                 loc,
                 {0, count},
                 detail::UbAccess(to, count),
                 {detail::UbAccess(from, 8ull * repeats)}},
                [=] { twin::BroadcastBlocks(to, from, repeats, strides); });
}

// first, first + 1, ...
template <class T>
inline void CreateVecIndex(const LocalTensor<T>& dst, const T first, uint32_t count,
                           twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kIndexType<T>, "CreateVecIndex: half, float, int16, int32");
    T* to = dst.Span(count, loc, "CreateVecIndex destination");
    twin::Issue({"CreateVecIndex", twin::Pipe::kV, loc, {0, count}, detail::UbAccess(to, count), {}},
                [=] { twin::IndexArray(to, first, count); });
}
// first, first + step, ...
template <class T>
inline void ArithProgression(const LocalTensor<T>& dst, const T first, const T step, const int32_t count,
                             twin::Loc loc = twin::Loc::Here()) {
    static_assert(twin::kIndexType<T>, "ArithProgression: half, float, int16, int32");
    const uint32_t n = static_cast<uint32_t>(count);
    T* to = dst.Span(n, loc, "ArithProgression destination");
    twin::Issue({"ArithProgression", twin::Pipe::kV, loc, {0, n}, detail::UbAccess(to, n), {}},
                [=] { twin::ProgressionArray(to, first, step, n); });
}

}  // namespace AscendC
