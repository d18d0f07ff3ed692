// The mask and repeat forms of elementwise instructions: up to 255 repeats of 256 bytes, strides in blocks.
#pragma once

#include "twin/vector_selections.h"

namespace AscendC {

struct BinaryRepeatParams {
    uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
    uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
    BinaryRepeatParams() = default;
    BinaryRepeatParams(uint8_t dstBlk, uint8_t src0Blk, uint8_t src1Blk, uint8_t dstRep, uint8_t src0Rep,
                       uint8_t src1Rep)
        : dstBlkStride(dstBlk),
          src0BlkStride(src0Blk),
          src1BlkStride(src1Blk),
          dstRepStride(dstRep),
          src0RepStride(src0Rep),
          src1RepStride(src1Rep) {}
};

struct UnaryRepeatParams {
    uint16_t dstBlkStride = 1, srcBlkStride = 1;
    uint8_t dstRepStride = 8, srcRepStride = 8;
    UnaryRepeatParams() = default;
    UnaryRepeatParams(uint16_t dstBlk, uint16_t srcBlk, uint8_t dstRep, uint8_t srcRep)
        : dstBlkStride(dstBlk), srcBlkStride(srcBlk), dstRepStride(dstRep), srcRepStride(srcRep) {}
};

namespace detail {

// A checked operand of a strided form.
template <class T>
inline T* StridedSpan(const LocalTensor<T>& tensor, uint64_t mask, uint8_t repeats, twin::Strides strides,
                      const char* name, const twin::Loc& loc) {
    CheckRepeats(static_cast<int32_t>(mask), static_cast<int32_t>(twin::kLanes<T>), repeats, loc);
    return tensor.Span(Reach<T>(repeats, static_cast<int32_t>(mask), strides), loc, name);
}

template <class Op, class T>
inline void BinaryRepeats(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& a,
                          const LocalTensor<T>& b, uint64_t mask, uint8_t repeats,
                          const BinaryRepeatParams& p, const twin::Loc& loc) {
    static_assert(Op::template kLegal<T>, "element type not supported on A2/A3");
    if (repeats == 0) return;
    const twin::Strides d{p.dstBlkStride, p.dstRepStride}, s0{p.src0BlkStride, p.src0RepStride},
        s1{p.src1BlkStride, p.src1RepStride};
    T* to = StridedSpan(dst, mask, repeats, d, name, loc);
    const T* x = StridedSpan(a, mask, repeats, s0, name, loc);
    const T* y = StridedSpan(b, mask, repeats, s1, name, loc);
    const twin::LaneMask lanes = twin::LaneMask::First(static_cast<uint32_t>(mask));
    const int32_t width = static_cast<int32_t>(mask);
    twin::Issue({name,
                 twin::Pipe::kV,
                 loc,
                 {0, mask * repeats},
                 UbAccess(to, Reach<T>(repeats, width, d)),
                 {UbAccess(x, Reach<T>(repeats, width, s0)), UbAccess(y, Reach<T>(repeats, width, s1))}},
                [=] {
                    twin::ForEachLane(twin::kLanes<T>, lanes, repeats, [&](uint32_t r, uint32_t lane) {
                        twin::BinaryArray<Op>(to + twin::LaneOffset<T>(r, lane, d),
                                              x + twin::LaneOffset<T>(r, lane, s0),
                                              y + twin::LaneOffset<T>(r, lane, s1), 1);
                    });
                });
}

// One source: `element(to, from)` does one lane.
template <class T, class Element>
inline void UnaryRepeats(const char* name, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                         uint64_t mask, uint8_t repeats, const UnaryRepeatParams& p, const twin::Loc& loc,
                         Element&& element) {
    if (repeats == 0) return;
    const twin::Strides d{p.dstBlkStride, p.dstRepStride}, s{p.srcBlkStride, p.srcRepStride};
    T* to = StridedSpan(dst, mask, repeats, d, name, loc);
    const T* from = StridedSpan(src, mask, repeats, s, name, loc);
    const twin::LaneMask lanes = twin::LaneMask::First(static_cast<uint32_t>(mask));
    const int32_t width = static_cast<int32_t>(mask);
    twin::Issue({name,
                 twin::Pipe::kV,
                 loc,
                 {0, mask * repeats},
                 UbAccess(to, Reach<T>(repeats, width, d)),
                 {UbAccess(from, Reach<T>(repeats, width, s))}},
                [=] {
                    twin::ForEachLane(twin::kLanes<T>, lanes, repeats, [&](uint32_t r, uint32_t lane) {
                        element(to + twin::LaneOffset<T>(r, lane, d), from + twin::LaneOffset<T>(r, lane, s));
                    });
                });
}

}  // namespace detail

#define TWIN_BINARY(Name)                                                                         \
    template <class T>                                                                            \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, \
                     uint64_t mask, const uint8_t repeatTime, const BinaryRepeatParams& params,   \
                     twin::Loc loc = twin::Loc::Here()) {                                         \
        detail::BinaryRepeats<twin::Name##Op>(#Name, dst, a, b, mask, repeatTime, params, loc);   \
    }
TWIN_BINARY(Add)
TWIN_BINARY(Sub)
TWIN_BINARY(Mul)
TWIN_BINARY(Div)
TWIN_BINARY(Max)
TWIN_BINARY(Min)
TWIN_BINARY(And)
TWIN_BINARY(Or)
#undef TWIN_BINARY

#define TWIN_SCALAR(Name, Op)                                                                              \
    template <class T>                                                                                     \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, uint64_t mask, \
                     const uint8_t repeatTime, const UnaryRepeatParams& params,                            \
                     twin::Loc loc = twin::Loc::Here()) {                                                  \
        static_assert(twin::Op::template kLegal<T>, #Name ": element type not supported on A2/A3");        \
        const T value = scalar;                                                                            \
        detail::UnaryRepeats(#Name, dst, src, mask, repeatTime, params, loc, [=](T* to, const T* from) {   \
            twin::ScalarArray<twin::Op>(to, from, value, 1);                                               \
        });                                                                                                \
    }
TWIN_SCALAR(Adds, AddOp)
TWIN_SCALAR(Muls, MulOp)
TWIN_SCALAR(Maxs, MaxOp)
TWIN_SCALAR(Mins, MinOp)
#undef TWIN_SCALAR

#define TWIN_UNARY(Name)                                                                                    \
    template <class T>                                                                                      \
    inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask,                   \
                     const uint8_t repeatTime, const UnaryRepeatParams& params,                             \
                     twin::Loc loc = twin::Loc::Here()) {                                                   \
        static_assert(twin::Name##Op::template kLegal<T>, #Name ": element type not supported on A2/A3");   \
        detail::UnaryRepeats(#Name, dst, src, mask, repeatTime, params, loc,                                \
                             [=](T* to, const T* from) { twin::UnaryArray<twin::Name##Op>(to, from, 1); }); \
    }
TWIN_UNARY(Abs)
TWIN_UNARY(Relu)
TWIN_UNARY(Not)
TWIN_UNARY(Sqrt)
TWIN_UNARY(Rsqrt)
TWIN_UNARY(Reciprocal)
TWIN_UNARY(Exp)
TWIN_UNARY(Ln)
#undef TWIN_UNARY

}  // namespace AscendC
