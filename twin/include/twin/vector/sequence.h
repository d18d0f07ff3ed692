// Brcb, and sequences of numbers.
#pragma once

#include "twin/api/copy.h"
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

// first + r * (lanes of a repeat) + i on lane i of repeat r, each repeat's beginning rounded. Integers wrap.
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

// The most scratch that a Broadcast of `from` elements uses, in bytes: see GetBroadCastMaxMinTmpSize.
template <class T, int32_t axis>
inline uint64_t BroadcastScratch(uint64_t rows, uint64_t columns, uint64_t from) {
    const uint64_t bytes = std::max<uint64_t>(sizeof(T), 2), row = CeilBlock(columns * bytes);
    const uint64_t cast = sizeof(T) == 1 ? CeilBlock(2 * from) + CeilBlock(2 * rows * columns) : 0;
    if (from == 1 || from == rows * columns) return cast == 0 ? 0 : cast + twin::kBlockBytes;
    if (axis == 0) return cast + twin::kBlockBytes;
    return cast + (rows + 7) / 8 * 8 * twin::kBlockBytes + (row == columns * bytes ? 0 : rows * row);
}

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
    const detail::IndexBody<T> body{firstValue};
    detail::FillCounted("CreateVecIndex", dst, count, loc,
                        [=](T* to, uint32_t n) { body(reinterpret_cast<uintptr_t>(to), nullptr, n, 0, 0); });
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

// Rows of one or two dimensions, repeated along an axis where the source has one element.
template <class T, int32_t dim, int32_t axis, bool isReuseSource = false>
inline void Broadcast(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t dstShape[dim],
                      const uint32_t srcShape[dim], TWIN_CALLER) {
    static_assert((dim == 1 || dim == 2) && axis >= 0 && axis < dim, "Broadcast: one or two dimensions");
    const uint32_t rows = dim == 1 ? 1 : dstShape[0], columns = dstShape[dim - 1];
    const uint32_t from_rows = dim == 1 ? 1 : srcShape[0], from_columns = srcShape[dim - 1];
    for (int32_t i = 0; i < dim; ++i)
        TWIN_RAISE_IF(srcShape[i] != dstShape[i] && (srcShape[i] != 1 || i != axis), kBadArgument, loc,
                      "Broadcast: %u elements of axis %d to %u", srcShape[i], i, dstShape[i]);
    TWIN_RAISE_IF(dim == 2 && axis == 0 && from_columns * sizeof(T) % twin::kBlockBytes != 0, kBadArgument, loc,
                  "Broadcast along axis 0: rows of %u elements are not a multiple of 32 bytes", from_columns);
    SetMaskNorm();
    ResetMask();
    if (rows * columns == 0) return;
    const twin::Access write = dst.Part(uint64_t{rows} * columns, loc, "Broadcast destination");
    const twin::Access read = src.Part(uint64_t{from_rows} * from_columns, loc, "Broadcast source");
    detail::CheckApart("Broadcast", "source", write, read, loc);
    twin::Issue(twin::PartOf({"Broadcast", loc}, write, read), [=] {
        for (uint32_t i = 0; i < rows * columns; ++i) {
            const uint32_t row = from_rows == 1 ? 0 : i / columns, column = from_columns == 1 ? 0 : i % columns;
            const T value = twin::LoadAt(detail::UbPointer<T>(read.begin), row * from_columns + column);
            twin::StoreAt(detail::UbPointer<T>(write.begin), i, value);
        }
    });
}
template <class T, int32_t dim, int32_t axis, bool isReuseSource = false>
inline void Broadcast(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t dstShape[dim],
                      const uint32_t srcShape[dim], LocalTensor<uint8_t>& sharedTmpBuffer, TWIN_CALLER) {
    const uint64_t rows = dim == 1 ? 1 : dstShape[0], columns = dstShape[dim - 1];
    const uint64_t from = dim == 1 ? srcShape[0] : uint64_t{srcShape[0]} * srcShape[1];
    const uint64_t used =
        std::min<uint64_t>(detail::BroadcastScratch<T, axis>(rows, columns, from), sharedTmpBuffer.GetSize());
    const twin::Access scratch = sharedTmpBuffer.Part(used, loc, "Broadcast scratch");
    detail::CheckApart("Broadcast", "scratch", dst.Part(rows * columns, loc, "Broadcast destination"), scratch, loc);
    Broadcast<T, dim, axis>(dst, src, dstShape, srcShape, loc);
}

// Stores `size` elements of one value to GM, by way of the UB that no TPipe has taken.
template <class T>
inline void Fill(GlobalTensor<T>& gmWorkspaceAddr, const uint64_t size, const T value, TWIN_CALLER) {
    const uint32_t begin = twin::current_core().ub_used;
    const uint64_t room = std::min<uint64_t>(twin::kUbBytes - begin, 255 * twin::kRepeatBytes) / sizeof(T);
    TWIN_RAISE_IF(room == 0, kUbOverflow, loc, "Fill: no UB is left for the value");
    const LocalTensor<T> scratch(TPosition::VECCALC, begin, static_cast<uint32_t>(room), loc);
    Duplicate(scratch, value, static_cast<int32_t>(room), loc);
    const TEventID filled = GetTPipePtr()->FetchEventID<HardEvent::V_MTE3>(loc);
    SetFlag<HardEvent::V_MTE3>(filled, loc);
    WaitFlag<HardEvent::V_MTE3>(filled, loc);
    for (uint64_t done = 0; done < size; done += room) {
        const uint32_t bytes = static_cast<uint32_t>(std::min(room, size - done) * sizeof(T));
        DataCopyPad(gmWorkspaceAddr[done], scratch, DataCopyExtParams(1, bytes, 0, 0, 0), loc);
    }
    PipeBarrier<PIPE_MTE3>(loc);
}
// The name in CANN 8.1.
template <class T>
inline void InitGlobalMemory(GlobalTensor<T>& gmWorkspaceAddr, const uint64_t size, const T value, TWIN_CALLER) {
    Fill(gmWorkspaceAddr, size, value, loc);
}
template <class T>
inline void InitOutput(GlobalTensor<T> gmWorkspaceAddr, uint32_t size, T value = T(0), TWIN_CALLER) {
    Fill(gmWorkspaceAddr, size, value, loc);
}

}  // namespace AscendC
