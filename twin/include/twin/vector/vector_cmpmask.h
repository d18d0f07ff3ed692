// The CmpMask register: 128 bits that a Compare without a destination fills and a Select without a mask uses.
#pragma once

#include "twin/vector/vector_select.h"

namespace AscendC {

namespace detail {

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
    twin::Issue({"Compare", twin::Pipe::kV, loc, {0, twin::kLanes<T>}, {}, {reads[0], reads[1]}}, [=] {
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

#define TWIN_COMPARE_TO_REGISTER(Mask)                                                                 \
    template <class T, bool isSetMask = true>                                                          \
    inline void Compare(const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode, Mask, \
                        const BinaryRepeatParams& repeatParams, twin::Loc loc = twin::Loc::Here()) {   \
        const detail::Work work = detail::WorkOf<isSetMask>(mask, 1, twin::kLanes<T>, loc);            \
        detail::CompareToRegister(cmpMode, src0, src1, work, repeatParams, loc);                       \
    }
TWIN_COMPARE_TO_REGISTER(const uint64_t mask)
TWIN_COMPARE_TO_REGISTER(const uint64_t mask[])
#undef TWIN_COMPARE_TO_REGISTER

template <class T>
inline void GetCmpMask(const LocalTensor<T>& dst, twin::Loc loc = twin::Loc::Here()) {
    T* to = dst.Span(128 / sizeof(T), loc, "GetCmpMask", 16);
    const uint64_t* bits = twin::current_core().compare_mask;
    twin::Issue({"GetCmpMask", twin::Pipe::kV, loc, {0, 1}, {reinterpret_cast<uintptr_t>(to), 16}, {}},
                [=] { std::memcpy(to, bits, 16); });
}
template <class T>
inline void SetCmpMask(const LocalTensor<T>& src, twin::Loc loc = twin::Loc::Here()) {
    const T* from = src.Span(16 / sizeof(T), loc, "SetCmpMask", 16);
    uint64_t* bits = twin::current_core().compare_mask;
    twin::Issue({"SetCmpMask", twin::Pipe::kV, loc, {0, 1}, {}, {{reinterpret_cast<uintptr_t>(from), 16}}},
                [=] { std::memcpy(bits, from, 16); });
}

// Select by the bits of the register; the vector mask says which lanes.
template <class T, SELMODE selMode>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                   const int32_t repeatTime, const BinaryRepeatParams& repeatParams,
                   twin::Loc loc = twin::Loc::Here()) {
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
