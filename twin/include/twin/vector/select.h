// Select: an element of one operand where its bit is 1, of the other where it is 0.
//
// VSEL_CMPMASK_SPR uses the same 256 / sizeof(T) bits for every repeat; the other modes use up the bits. With
// a scalar, or with bits that are used up, the vendor's code keeps scratch in the last 8 KiB of UB.
#pragma once

#include "twin/math/bit_masks.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

constexpr uint32_t kScratchBegin = 184 * 1024;

// Calls that take scratch of their own from the last 8 KiB of UB.
inline void CheckScratch(const char* name, const twin::Loc& loc) {
    const uint32_t used = twin::current_core().ub_used;
    TWIN_RAISE_IF(
        used > kScratchBegin, kUbOverflow, loc,
        "%s uses the last 8 KiB of UB as scratch: allocations end at %u, at most %u is free for them", name,
        used, kScratchBegin);
}

inline void CheckSelectMode(SELMODE mode, bool scalar, const twin::Loc& loc) {
    TWIN_RAISE_IF(scalar != (mode == SELMODE::VSEL_TENSOR_SCALAR_MODE), kBadArgument, loc,
                  scalar ? "Select with a scalar needs VSEL_TENSOR_SCALAR_MODE"
                         : "Select of two tensors in VSEL_TENSOR_SCALAR_MODE");
    if (mode != SELMODE::VSEL_CMPMASK_SPR) CheckScratch("Select", loc);
}
template <class T, class U>
inline void CheckSelectTypes() {
    static_assert(twin::kRealType<T>, "Select: half and float only");
    static_assert(std::is_unsigned_v<U>, "Select: the mask tensor's type is unsigned");
}

// One repeat: `bits` belong to lane 0 on. With one source, the other operand is the scalar.
template <class T>
struct SelectBody {
    const uint8_t* bits;
    bool scalar = false;
    T value = T(0.0f);
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n, uint32_t lane) const {
        const T* a = UbPointer<T>(from[0]);
        const T* b = scalar ? nullptr : UbPointer<T>(from[1]);
        for (uint32_t i = 0; i < n; ++i) {
            const bool first = (bits[(lane + i) / 8] >> ((lane + i) % 8)) & 1;
            const auto other = scalar ? twin::LoadBits(&value, 0) : twin::LoadBits(b, i);
            twin::StoreBits(UbPointer<T>(to), i, first ? twin::LoadBits(a, i) : other);
        }
    }
};

template <class T, class U, class... S>
inline void SelectRepeats(SELMODE mode, const Work& work, T value, const twin::Loc& loc,
                          const LocalTensor<U>& selMask, const Strided<T>& dst, const Strided<S>&... src) {
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "Select over repeats in counter mode");
    constexpr uint32_t kBytes = twin::kLanes<T> / 8;
    const twin::VectorCall call{"Select", loc};
    const twin::Lanes& lanes = work.lanes;
    twin::Operands all;
    all.dst = dst.Operand();
    ((all.src[all.sources++] = src.Operand()), ...);
    const twin::Runs runs = twin::FindRuns(lanes, all);
    if (runs.count == 0 || lanes.repeats == 0) return;
    const uint64_t last = lanes.repeats - 1;
    const uint32_t end = runs.run[runs.count - 1].lane + runs.run[runs.count - 1].count;
    const uint64_t step = mode == SELMODE::VSEL_CMPMASK_SPR ? 0 : kBytes;
    const uint64_t words = (last * step + (end + 7) / 8 + sizeof(U) - 1) / sizeof(U);
    const uint8_t* bits = reinterpret_cast<const uint8_t*>(selMask.Span(words, loc, "Select mask"));
    dst.Check(last * all.dst.Step() + twin::RepeatExtent(all.dst, runs), call);
    uint32_t i = 0;
    ((src.Check(last * all.src[i].Step() + twin::RepeatExtent(all.src[i], runs), call), ++i), ...);
    twin::CheckLaneOverlap(call, all, runs, lanes.repeats);
    const uint32_t skipped = runs.run[0].lane / 8;
    for (uint32_t r = 0; r < lanes.repeats; ++r) {
        twin::Operands one = all;
        one.dst.begin = all.dst.At(r, 0);
        for (i = 0; i < all.sources; ++i) one.src[i].begin = all.src[i].At(r, 0);
        const twin::Access chosen{reinterpret_cast<uintptr_t>(bits + r * step + skipped),
                                  (end + 7) / 8 - skipped};
        twin::IssueLanes(call, one, {lanes.mask, lanes.width, 1},
                         SelectBody<T>{bits + r * step, sizeof...(S) == 1, value}, chosen);
    }
}

}  // namespace detail

namespace detail {

// `select(to, bits, sources, count)`, of the first `count` elements by as many bits.
template <class T, class U, class Body, class... S>
inline void SelectCounted(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, uint32_t bits,
                          uint32_t count, const twin::Loc& loc, const Body& select, const S&... src) {
    SetMaskNorm();
    ResetMask();
    if (count == 0) return;
    const uint32_t bytes = bits / 8 + (bits % 8 != 0);
    T* to = dst.Span(count, loc, "Select destination");
    const uint8_t* choose = reinterpret_cast<const uint8_t*>(
        selMask.Span((bytes + sizeof(U) - 1) / sizeof(U), loc, "Select mask"));
    struct {
        const T* at[2] = {};
    } from;
    twin::Access reads[3];
    const char* const names[] = {sizeof...(S) == 1 ? "Select source" : "Select source 0", "Select source 1"};
    uint32_t i = 0;
    ((from.at[i] = src.Span(count, loc, names[i]), reads[i] = UbAccess(from.at[i], count),
      CheckOverlap("Select", static_cast<int>(i), reinterpret_cast<uintptr_t>(to), count * sizeof(T),
                   reads[i].begin, reads[i].bytes, loc),
      ++i),
     ...);
    reads[i] = UbAccess(choose, bytes);
    twin::Issue(twin::PartOf({"Select", loc}, count, UbAccess(to, count), reads[0], reads[1], reads[2]),
                [=] { select(to, choose, from.at, count); });
}

}  // namespace detail

template <class T, class U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
                   const LocalTensor<T>& src1, SELMODE selMode, uint32_t count, TWIN_CALLER) {
    detail::CheckSelectTypes<T, U>();
    detail::CheckSelectMode(selMode, false, loc);
    const bool same = selMode == SELMODE::VSEL_CMPMASK_SPR;
    detail::SelectCounted(
        dst, selMask, same ? std::min(count, twin::kLanes<T>) : count, count, loc,
        [=](T* to, const uint8_t* bits, const T* const* from, uint32_t n) {
            twin::SelectArray(to, bits, from[0], from[1], selMode, n);
        },
        src0, src1);
}
template <class T, class U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
                   T src1, SELMODE selMode, uint32_t count, TWIN_CALLER) {
    detail::CheckSelectTypes<T, U>();
    detail::CheckSelectMode(selMode, true, loc);
    detail::SelectCounted(
        dst, selMask, count, count, loc,
        [=](T* to, const uint8_t* bits, const T* const* from, uint32_t n) {
            twin::SelectScalarArray(to, bits, from[0], src1, n);
        },
        src0);
}

template <class T, class U, bool isSetMask = true, class M>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
                   const LocalTensor<T>& src1, SELMODE selMode, M mask, const int32_t repeatTime,
                   const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    detail::CheckSelectTypes<T, U>();
    detail::CheckSelectMode(selMode, false, loc);
    const detail::Work work = detail::WorkOf<isSetMask>(mask, repeatTime, twin::kLanes<T>, loc);
    detail::SelectRepeats(selMode, work, T(0.0f), loc, selMask,
                          detail::Strided<T>{dst, repeatParams.dstBlkStride, repeatParams.dstRepStride},
                          detail::Strided<T>{src0, repeatParams.src0BlkStride, repeatParams.src0RepStride},
                          detail::Strided<T>{src1, repeatParams.src1BlkStride, repeatParams.src1RepStride});
}
template <class T, class U, bool isSetMask = true, class M>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
                   T src1, SELMODE selMode, M mask, const int32_t repeatTime,
                   const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    detail::CheckSelectTypes<T, U>();
    detail::CheckSelectMode(selMode, true, loc);
    const detail::Work work = detail::WorkOf<isSetMask>(mask, repeatTime, twin::kLanes<T>, loc);
    detail::SelectRepeats(selMode, work, src1, loc, selMask,
                          detail::Strided<T>{dst, repeatParams.dstBlkStride, repeatParams.dstRepStride},
                          detail::Strided<T>{src0, repeatParams.src0BlkStride, repeatParams.src0RepStride});
}

namespace detail {

// ---- The CmpMask register: 128 bits that a Compare without a destination fills and a Select without a mask
// uses.

// One repeat of bits into the register; lanes that take no part give 0.
template <class T>
inline void CompareToRegister(CMPMODE mode, const LocalTensor<T>& a, const LocalTensor<T>& b, Work work,
                              const BinaryRepeatParams& p, const twin::Loc& loc) {
    static_assert(twin::kRealType<T>, "Compare into the CmpMask register: half and float only");
    const Strided<T> x{a, p.src0BlkStride, p.src0RepStride}, y{b, p.src1BlkStride, p.src1RepStride};
    twin::Operands all;
    all.sources = 2;
    all.src[0] = x.Operand();
    all.src[1] = y.Operand();
    const twin::Runs runs = twin::FindRuns(work.lanes, all);
    if (runs.count == 0) return;
    x.Check(twin::RepeatExtent(all.src[0], runs), {"Compare", loc});
    y.Check(twin::RepeatExtent(all.src[1], runs), {"Compare", loc});
    twin::Access reads[2];
    for (int i = 0; i < 2; ++i) {
        if (!twin::AccessOf(all.src[i], runs, 1, &reads[i])) {
            reads[i] = {all.src[i].begin, twin::RepeatExtent(all.src[i], runs)};
        }
    }
    uint64_t* bits = twin::current_core().compare_mask;
    twin::Issue(twin::PartOf({"Compare", loc}, twin::kLanes<T>, {}, reads[0], reads[1]), [=] {
        uint64_t found[2] = {};
        for (uint32_t r = 0; r < runs.count; ++r) {
            for (uint32_t lane = runs.run[r].lane; lane < runs.run[r].lane + runs.run[r].count; ++lane) {
                uint8_t bit = 0;
                twin::CompareArray(&bit, UbPointer<T>(all.src[0].At(0, lane)),
                                   UbPointer<T>(all.src[1].At(0, lane)), mode, 1);
                found[lane / 64] |= uint64_t{bit} << (lane % 64);
            }
        }
        bits[0] = found[0];
        bits[1] = found[1];
    });
}

}  // namespace detail

template <class T, bool isSetMask = true, class M>
inline void Compare(const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode, M mask,
                    const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    const detail::Work work = detail::WorkOf<isSetMask>(mask, 1, twin::kLanes<T>, loc);
    detail::CompareToRegister(cmpMode, src0, src1, work, repeatParams, loc);
}

template <class T>
inline void GetCmpMask(const LocalTensor<T>& dst, TWIN_CALLER) {
    T* to = dst.Span(128 / sizeof(T), loc, "GetCmpMask", 16);
    const uint64_t* bits = twin::current_core().compare_mask;
    twin::Issue(twin::PartOf({"GetCmpMask", loc}, 1, {reinterpret_cast<uintptr_t>(to), 16}),
                [=] { std::memcpy(to, bits, 16); });
}
template <class T>
inline void SetCmpMask(const LocalTensor<T>& src, TWIN_CALLER) {
    const T* from = src.Span(16 / sizeof(T), loc, "SetCmpMask", 16);
    uint64_t* bits = twin::current_core().compare_mask;
    twin::Issue(twin::PartOf({"SetCmpMask", loc}, 1, {}, {reinterpret_cast<uintptr_t>(from), 16}),
                [=] { std::memcpy(bits, from, 16); });
}

// Select by the bits of the register; the vector mask says which lanes.
template <class T, SELMODE selMode>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                   const int32_t repeatTime, const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    static_assert(twin::kRealType<T>, "Select: half and float only");
    static_assert(
        selMode == SELMODE::VSEL_CMPMASK_SPR,
        "Select without a mask tensor: VSEL_CMPMASK_SPR only; give the mask tensor to Select instead");
    const detail::Work work = detail::WorkOf<false>(uint64_t{0}, repeatTime, twin::kLanes<T>, loc);
    const detail::SelectBody<T> body{reinterpret_cast<const uint8_t*>(twin::current_core().compare_mask)};
    detail::MaskedCall({"Select", loc}, work, {}, body,
                       detail::Strided<T>{dst, repeatParams.dstBlkStride, repeatParams.dstRepStride},
                       detail::Strided<T>{src0, repeatParams.src0BlkStride, repeatParams.src0RepStride},
                       detail::Strided<T>{src1, repeatParams.src1BlkStride, repeatParams.src1RepStride});
}

}  // namespace AscendC
