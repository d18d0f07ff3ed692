// Elementwise instructions that read their destination: Axpy, MulAddDst, FusedMulAdd. Products are rounded
// before the sum.
#pragma once

#include "twin/vector/vector.h"

namespace AscendC {

#define TWIN_CHECK_PAIR(Name)                    \
    static_assert(twin::kMultiplyAddLegal<T, U>, \
                  #Name ": (half, half), (float, float), or a float destination with half sources")

// dst += src * scalar
template <class T, class U>
inline void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue,
                 const int32_t& count, twin::Loc loc = twin::Loc::Here()) {
    TWIN_CHECK_PAIR(Axpy);
    detail::CountCall("Axpy", loc, count, true, detail::AxpyBody<T, U>{scalarValue}, dst, src);
}
// dst += src0 * src1
template <class T, class U>
inline void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1,
                      const int32_t& count, twin::Loc loc = twin::Loc::Here()) {
    TWIN_CHECK_PAIR(MulAddDst);
    detail::CountCall("MulAddDst", loc, count, true, detail::MulAddDstBody<T, U>{}, dst, src0, src1);
}
#define TWIN_FUSED_MASK_FORMS(AxpyMask, MulMask)                                                             \
    template <class T, class U, bool isSetMask = true>                                                       \
    inline void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, AxpyMask,   \
                     const int32_t repeatTime, const UnaryRepeatParams& repeatParams,                        \
                     twin::Loc loc = twin::Loc::Here()) {                                                    \
        TWIN_CHECK_PAIR(Axpy);                                                                               \
        detail::UnaryMasked<isSetMask>({"Axpy", loc}, true, detail::AxpyBody<T, U>{scalarValue}, dst, src,   \
                                       mask, repeatTime, repeatParams);                                      \
    }                                                                                                        \
    template <class T, class U, bool isSetMask = true>                                                       \
    inline void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, \
                          MulMask, const int32_t repeatTime, const BinaryRepeatParams& repeatParams,         \
                          twin::Loc loc = twin::Loc::Here()) {                                               \
        TWIN_CHECK_PAIR(MulAddDst);                                                                          \
        detail::BinaryMasked<isSetMask>({"MulAddDst", loc}, true, detail::MulAddDstBody<T, U>{}, dst, src0,  \
                                        src1, mask, repeatTime, repeatParams);                               \
    }
TWIN_FUSED_MASK_FORMS(uint64_t mask, uint64_t mask)
TWIN_FUSED_MASK_FORMS(uint64_t mask[], const uint64_t mask[])
#undef TWIN_FUSED_MASK_FORMS
#undef TWIN_CHECK_PAIR

// dst = src0 * dst + src1, and the same with negative results set to 0.
#define TWIN_FUSED_MASK_FORM(Name, kRelu, Mask)                                                             \
    template <class T, bool isSetMask = true>                                                               \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,     \
                     Mask, const int32_t repeatTime, const BinaryRepeatParams& repeatParams,                \
                     twin::Loc loc = twin::Loc::Here()) {                                                   \
        static_assert(twin::kRealType<T>, #Name ": half and float only");                                   \
        detail::BinaryMasked<isSetMask>({#Name, loc}, true, detail::FusedMulAddBody<kRelu, T>{}, dst, src0, \
                                        src1, mask, repeatTime, repeatParams);                              \
    }
#define TWIN_FUSED(Name, kRelu)                                                                           \
    template <class T>                                                                                    \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,   \
                     const int32_t& count, twin::Loc loc = twin::Loc::Here()) {                           \
        static_assert(twin::kRealType<T>, #Name ": half and float only");                                 \
        detail::CountCall(#Name, loc, count, true, detail::FusedMulAddBody<kRelu, T>{}, dst, src0, src1); \
    }                                                                                                     \
    TWIN_FUSED_MASK_FORM(Name, kRelu, uint64_t mask)                                                      \
    TWIN_FUSED_MASK_FORM(Name, kRelu, uint64_t mask[])
TWIN_FUSED(FusedMulAdd, false)
TWIN_FUSED(FusedMulAddRelu, true)
#undef TWIN_FUSED
#undef TWIN_FUSED_MASK_FORM

}  // namespace AscendC
