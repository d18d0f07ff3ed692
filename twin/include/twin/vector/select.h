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
    TWIN_RAISE_IF(used > kScratchBegin, kUbOverflow, loc,
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

// `bits` belong to lane 0 on of the first repeat. With one source, the other operand is the scalar.
template <class T>
struct SelectBody {
    const uint8_t* bits;
    uint64_t step = 0;  // from a repeat's bits to the next one's
    bool scalar = false;
    T value = T(0.0f);
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n, uint32_t lane, uint32_t repeat) const {
        for (uint32_t i = 0; i < n; ++i) {
            const bool first = (bits[repeat * step + (lane + i) / 8] >> ((lane + i) % 8)) & 1;
            const auto other = scalar ? twin::LoadBits(&value, 0) : twin::LoadBits(UbPointer<T>(from[1]), i);
            twin::StoreBits(UbPointer<T>(to), i, first ? twin::LoadBits(UbPointer<T>(from[0]), i) : other);
        }
    }
};

template <class T, class U, class... S>
inline void SelectRepeats(SELMODE mode, const Work& work, T value, const twin::Loc& loc, const LocalTensor<U>& selMask,
                          const Strided<T>& dst, const Strided<S>&... src) {
    TWIN_RAISE_IF(work.counted, kBadArgument, loc, "Select over repeats in counter mode");
    const twin::Runs runs = twin::FindRuns(work.lanes, {});
    const uint32_t repeats = work.lanes.repeats, bytes = (runs.end() + 7) / 8;
    if (runs.count == 0 || repeats == 0) return;
    const uint64_t step = mode == SELMODE::VSEL_CMPMASK_SPR ? 0 : twin::kLanes<T> / 8;
    const uint64_t words = ((repeats - 1) * step + bytes + sizeof(U) - 1) / sizeof(U);
    const uintptr_t bits = selMask.Part(words, loc, "Select mask").begin;
    const uint32_t skipped = runs.run[0].lane / 8;
    const twin::Access chosen{bits + skipped, bytes - skipped, step == 0 ? 1 : repeats, step};
    MaskedCall({"Select", loc}, work, {false, false, chosen},
               SelectBody<T>{UbPointer<uint8_t>(bits), step, sizeof...(S) == 1, value}, dst, src...);
}

// `select(to, bits, sources, count)`, of the first `count` elements by as many bits.
template <class T, class U, class Body, class... S>
inline void SelectCounted(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, uint32_t bits, uint32_t count,
                          const twin::Loc& loc, const Body& select, const S&... src) {
    SetMaskNorm();
    ResetMask();
    if (count == 0) return;
    const uint32_t bytes = bits / 8 + (bits % 8 != 0);
    const twin::Access write = dst.Part(count, loc, "Select destination");
    const uintptr_t choose = selMask.Part((bytes + sizeof(U) - 1) / sizeof(U), loc, "Select mask").begin;
    struct {
        const T* at[2] = {};
    } from;
    twin::Access reads[2];
    uint32_t i = 0;
    const auto read = [&](const LocalTensor<T>& source) {
        const char* const names[] = {sizeof...(S) == 1 ? "Select source" : "Select source 0", "Select source 1"};
        reads[i] = source.Part(count, loc, names[i]);
        from.at[i] = UbPointer<T>(reads[i].begin);
        CheckOverlap("Select", i, write, reads[i], loc);
        ++i;
    };
    (read(src), ...);
    twin::Issue(twin::PartOf({"Select", loc}, write, {choose, bytes}, reads[0], reads[1]),
                [=] { select(UbPointer<T>(write.begin), UbPointer<uint8_t>(choose), from.at, count); });
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
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
                   SELMODE selMode, uint32_t count, TWIN_CALLER) {
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
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
                   SELMODE selMode, M mask, const int32_t repeatTime, const BinaryRepeatParams& repeatParams,
                   TWIN_CALLER) {
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
    work.lanes.repeats = 1;
    const twin::Runs runs = twin::FindRuns(work.lanes, all);
    if (runs.count == 0) return;
    x.Check(twin::Extent(all.src[0], runs, 1), {"Compare", loc});
    y.Check(twin::Extent(all.src[1], runs, 1), {"Compare", loc});
    uint64_t* bits = twin::current_core().compare_mask;
    const twin::Access first = twin::AccessOf(all.src[0], work.lanes);
    twin::Issue(twin::PartOf({"Compare", loc}, {}, first, twin::AccessOf(all.src[1], work.lanes)), [=] {
        uint64_t found[2] = {};
        for (uint32_t r = 0; r < runs.count; ++r) {
            for (uint32_t lane = runs.run[r].lane; lane < runs.run[r].lane + runs.run[r].count; ++lane) {
                uint8_t bit = 0;
                twin::CompareArray(&bit, UbPointer<T>(all.src[0].At(0, lane)), UbPointer<T>(all.src[1].At(0, lane)),
                                   mode, 1);
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
    twin::Issue(twin::PartOf({"GetCmpMask", loc}, {reinterpret_cast<uintptr_t>(to), 16}),
                [=] { std::memcpy(to, bits, 16); });
}
template <class T>
inline void SetCmpMask(const LocalTensor<T>& src, TWIN_CALLER) {
    const T* from = src.Span(16 / sizeof(T), loc, "SetCmpMask", 16);
    uint64_t* bits = twin::current_core().compare_mask;
    twin::Issue(twin::PartOf({"SetCmpMask", loc}, {}, {reinterpret_cast<uintptr_t>(from), 16}),
                [=] { std::memcpy(bits, from, 16); });
}

// Select by the bits of the register; the vector mask says which lanes.
template <class T, SELMODE selMode>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                   const int32_t repeatTime, const BinaryRepeatParams& repeatParams, TWIN_CALLER) {
    static_assert(twin::kRealType<T>, "Select: half and float only");
    static_assert(selMode == SELMODE::VSEL_CMPMASK_SPR,
                  "Select without a mask tensor: VSEL_CMPMASK_SPR only; give the mask tensor to Select instead");
    const detail::Work work = detail::WorkOf<false>(uint64_t{0}, repeatTime, twin::kLanes<T>, loc);
    const detail::SelectBody<T> body{reinterpret_cast<const uint8_t*>(twin::current_core().compare_mask)};
    detail::MaskedCall({"Select", loc}, work, {}, body,
                       detail::Strided<T>{dst, repeatParams.dstBlkStride, repeatParams.dstRepStride},
                       detail::Strided<T>{src0, repeatParams.src0BlkStride, repeatParams.src0RepStride},
                       detail::Strided<T>{src1, repeatParams.src1BlkStride, repeatParams.src1RepStride});
}

}  // namespace AscendC
