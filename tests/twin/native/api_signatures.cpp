// Every form of every vector call, as kernels write them. This file must compile with the twin's headers and
// with the vendor's, so that the two take the same arguments. Nothing here is meant to run.
// Not in CANN 8.1: what OLD_HEADERS leaves out. Not in asc-devkit: what NEW_HEADERS leaves out.
#include "kernel_operator.h"

using namespace AscendC;

template <class T>
__aicore__ inline void Arithmetic(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<T> b) {
    uint64_t mask = 32, bits[2] = {1, 1};
    const BinaryRepeatParams p(1, 1, 1, 8, 8, 8);
    const UnaryRepeatParams u(1, 1, 8, 8);
#define BINARY(Name)           \
    Name(d, a, b, 64);         \
    Name(d, a, b, mask, 2, p); \
    Name(d, a, b, bits, 2, p); \
    Name<T, false>(d, a, b, MASK_PLACEHOLDER, 2, {1, 1, 1, 8, 8, 8})
#define SCALAR(Name)               \
    Name(d, a, T(1), 64);          \
    Name<T, false>(d, a, T(1), 1); \
    Name(d, a, T(1), mask, 2, u);  \
    Name(d, a, T(1), bits, 2, u);  \
    Name<T, false>(d, a, T(1), MASK_PLACEHOLDER, 2, {1, 1, 8, 8})
    BINARY(Add);
    BINARY(Sub);
    BINARY(Mul);
    BINARY(Max);
    BINARY(Min);
    SCALAR(Adds);
    SCALAR(Muls);
    SCALAR(Maxs);
    SCALAR(Mins);
}

template <class T>
__aicore__ inline void Real(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<T> b) {
    uint64_t mask = 32, bits[2] = {1, 1};
    const BinaryRepeatParams p;
    const UnaryRepeatParams u;
#define UNARY(Name)         \
    Name(d, a, 64);         \
    Name(d, a, mask, 2, u); \
    Name(d, a, bits, 2, u); \
    Name<T, false>(d, a, MASK_PLACEHOLDER, 2, {1, 1, 8, 8})
    BINARY(Div);
    BINARY(AddRelu);
    BINARY(SubRelu);
    BINARY(FusedMulAdd);
    BINARY(FusedMulAddRelu);
    SCALAR(LeakyRelu);
    UNARY(Abs);
    UNARY(Relu);
    UNARY(Sqrt);
    UNARY(Rsqrt);
    UNARY(Reciprocal);
    UNARY(Exp);
    UNARY(Ln);
    Axpy(d, a, T(1), 64);
    Axpy(d, a, T(1), mask, 2, u);
    Axpy(d, a, T(1), bits, 2, u);
    MulAddDst(d, a, b, 64);
    MulAddDst(d, a, b, mask, 2, p);
    MulAddDst(d, a, b, bits, 2, p);
    MulAddDst<T, T, false>(d, a, b, MASK_PLACEHOLDER, 2, p);
}

template <class T>
__aicore__ inline void Bits(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<T> b) {
    uint64_t mask = 32, bits[2] = {1, 1};
    const BinaryRepeatParams p;
    const UnaryRepeatParams u;
    BINARY(And);
    BINARY(Or);
    UNARY(Not);
    SCALAR(ShiftLeft);
    SCALAR(ShiftRight);
    ShiftRight(d, a, T(1), mask, 2, u, true);
}

template <class T>
__aicore__ inline void Moves(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<uint32_t> offsets) {
    uint64_t mask = 32, bits[2] = {1, 1}, kept = 0;
    Duplicate(d, T(1), 64);
    Duplicate(d, T(1), mask, 2, 1, 8);
    Duplicate(d, T(1), bits, 2, 1, 8);
    Duplicate<T, false>(d, T(1), MASK_PLACEHOLDER, 2, 1, 8);
    Copy(d, a, mask, 2, {1, 1, 8, 8});
    Copy(d, a, bits, 2, CopyRepeatParams(1, 1, 8, 8));
    Copy<T, false>(d, a, MASK_PLACEHOLDER, 2, {1, 1, 8, 8});
    Brcb(d, a, 2, {1, 8});
    GatherMask(d, a, static_cast<uint8_t>(1), false, 0, {1, 1, 8, 8}, kept);
    GatherMask(d, a, offsets.ReinterpretCast<std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>(), true,
               64, {1, 1, 8, 8}, kept);
    Gather(d, a, offsets, 0, 64);
    Gather(d, a, offsets, 0, mask, 2, 8);
    Gather(d, a, offsets, 0, bits, 2, 8);
    (void)GetGatherMaskRemainCount();
}

template <class T>
__aicore__ inline void Indices(LocalTensor<T> d) {
    uint64_t mask = 32, bits[2] = {1, 1};
    CreateVecIndex(d, T(0), 64);
    CreateVecIndex(d, T(0), mask, 2, 1, 8);
    CreateVecIndex(d, T(0), bits, 2, 1, 8);
#ifndef NEW_HEADERS
    ArithProgression(d, T(0), T(1), 64);
#endif
}

template <class T>
__aicore__ inline void Compares_(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<T> b,
                                 LocalTensor<uint8_t> m) {
    uint64_t mask = 32, bits[2] = {1, 1};
    const BinaryRepeatParams p;
    const UnaryRepeatParams u;
    LocalTensor<uint32_t> wide = m.template ReinterpretCast<uint32_t>();
    LocalTensor<int8_t> narrow = m.template ReinterpretCast<int8_t>();
    Compare(m, a, b, CMPMODE::LT, 256);
    Compare(narrow, a, b, CMPMODE::NE, 256);
    Compare(m, a, b, CMPMODE::GT, mask, 2, p);
    Compare(m, a, b, CMPMODE::EQ, bits, 2, p);
    Compare(a, b, CMPMODE::EQ, mask, p);
    Compare(a, b, CMPMODE::EQ, bits, p);
    GetCmpMask(m);
    SetCmpMask(m);
    CompareScalar(m, a, T(0), CMPMODE::LE, 256);
    CompareScalar(m, a, T(0), CMPMODE::GE, mask, 2, u);
    CompareScalar(m, a, T(0), CMPMODE::GE, bits, 2, u);
#ifndef OLD_HEADERS
    Compares(m, a, T(0), CMPMODE::LE, 256);
    Compares(m, a, T(0), CMPMODE::GE, mask, 2, u);
#endif
    Select(d, m, a, b, SELMODE::VSEL_CMPMASK_SPR, 256);
    Select(d, wide, a, T(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, 256);
    Select(d, m, a, b, SELMODE::VSEL_TENSOR_TENSOR_MODE, mask, 2, p);
    Select(d, m, a, b, SELMODE::VSEL_TENSOR_TENSOR_MODE, bits, 2, p);
    Select(d, m, a, T(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, mask, 2, p);
    Select(d, m, a, T(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, bits, 2, p);
    Select<T, SELMODE::VSEL_CMPMASK_SPR>(d, a, b, 2, p);
}

template <class T>
__aicore__ inline void Reductions(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<T> w,
                                  LocalTensor<uint8_t> m) {
    uint64_t bits[2] = {1, 1};
#define REDUCE_TO_ONE(Name)        \
    Name(d, a, w, 128, true);      \
    Name(d, a, w, 32, 2, 8, true); \
    Name(d, a, w, bits, 2, 8);
    REDUCE_TO_ONE(ReduceMax) REDUCE_TO_ONE(ReduceMin) ReduceSum(d, a, w, 128);
    ReduceSum<T, false>(d, a, w, 1);
    ReduceSum(d, a, w, 32, 2, 8);
    ReduceSum(d, a, w, bits, 2, 8);
    WholeReduceSum(d, a, 32, 2, 1, 1, 8);
    WholeReduceSum(d, a, bits, 2, 1, 1, 8);
    WholeReduceSum<T, false>(d, a, MASK_PLACEHOLDER, 2, 1, 1, 8);
    WholeReduceMax(d, a, 32, 2, 1, 1, 8);
    WholeReduceMax(d, a, bits, 2, 1, 1, 8, ReduceOrder::ORDER_ONLY_INDEX);
    WholeReduceMin(d, a, 32, 2, 1, 1, 8, ReduceOrder::ORDER_INDEX_VALUE);
#define REDUCE_PARTS(Name)        \
    Name(d, a, 2, 32, 1, 1, 8);   \
    Name(d, a, 2, bits, 1, 1, 8); \
    Name<T, false>(d, a, 2, MASK_PLACEHOLDER, 1, 1, 8);
    REDUCE_PARTS(BlockReduceSum)
    REDUCE_PARTS(BlockReduceMax)
    REDUCE_PARTS(BlockReduceMin) REDUCE_PARTS(PairReduceSum) RepeatReduceSum(d, a, 2, 32, 1, 1, 1, 8);
#ifndef OLD_HEADERS
    ReduceRepeat<ReduceType::SUM>(d, a, 32, 2, 1, 1, 8);
    ReduceRepeat<ReduceType::MAX>(d, a, bits, 2, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    ReduceDataBlock<ReduceType::MIN>(d, a, 32, 2, 1, 1, 8);
    ReducePairElem<ReduceType::SUM>(d, a, 32, 2, 1, 1, 8);
#endif
    SumParams rows{2, 32, 30};
    Sum(d, a, m, rows);
    Sum(d, a, rows);
}

template <class T>
__aicore__ inline void Sorting(LocalTensor<T> d, LocalTensor<T> a, LocalTensor<T> w,
                               LocalTensor<uint32_t> i) {
    const uint16_t lengths[4] = {32, 32, 32, 32};
    uint32_t sorted[4];
    uint16_t n0, n1, n2, n3;
    Sort32(d, a, i, 2);
    Concat(w, a, d, 2);
    Sort<T, true>(d, a, i, w, 2);
    Sort<T, false>(d, a, i, w, 2);
    MrgSort(d, MrgSortSrcList<T>(a, a, a, a), MrgSort4Info(lengths, false, 15, 1));
    MrgSort<T, true>(d, MrgSortSrcList<T>(a, a, a, a), lengths, sorted, 15, 1);
    GetMrgSortResult(n0, n1, n2, n3);
    Extract(d, i, a, 2);
    (void)GetSortOffset<T>(GetSortLen<T>(32));
}

template <class T, class U>
__aicore__ inline void Conversion(LocalTensor<T> d, LocalTensor<U> a, RoundMode mode) {
    uint64_t mask = 32, bits[2] = {1, 1};
    const UnaryRepeatParams u;
    Cast(d, a, mode, 64);
    Cast(d, a, mode, mask, 2, u);
    Cast(d, a, mode, bits, 2, u);
    Cast<T, U, false>(d, a, mode, MASK_PLACEHOLDER, 2, u);
}

__aicore__ inline void Rest(LocalTensor<uint8_t> m, LocalTensor<float> f, LocalTensor<half> h,
                            GlobalTensor<float> g) {
    SetMaskCount();
    SetVectorMask<float, MaskMode::COUNTER>(100);
    SetMaskNorm();
    SetVectorMask<half, MaskMode::NORMAL>(0, 7);
    SetVectorMask<half>(64);
    ResetMask();
    Axpy(f, h, half(1), 64);
    MulAddDst(f, h, h, 64);
    SetDeqScale(half(1));
    SetPadValue<float>(1.0f);
    (void)ScalarGetSFFValue<1>(4);
    (void)ScalarGetCountOfValue<1>(4);
    (void)ScalarCountLeadingZero(4);
    (void)CountBitsCntSameAsSignBit(4);
    (void)ScalarCast<float, int32_t, RoundMode::CAST_RINT>(1.5f);
    (void)ScalarCast<float, half, RoundMode::CAST_ODD>(1.5f);
    (void)ToFloat(ToBfloat16(1.0f));
    CrossCoreSetFlag<0, PIPE_MTE3>(1);
    CrossCoreWaitFlag(1);
    DumpTensor(f, 1, 32);
    DumpTensor(g, 1, 32);
    AscendC::printf("value %d %f\n", 1, 2.0f);
    PRINTF("value %d\n", 1);
    assert(1 == 1);
    ASCENDC_ASSERT((1 == 1), { KERNEL_LOG(KERNEL_ERROR, "never %d", 1); });
    LocalTensor<uint16_t> u16 = m.ReinterpretCast<uint16_t>();
    Gatherb(u16, u16, m.ReinterpretCast<uint32_t>(), 1, {1, 8});
}

extern "C" __global__ __aicore__ void api_signatures(GM_ADDR memory) {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 1024);
    LocalTensor<uint8_t> bytes = buf.Get<uint8_t>();
    LocalTensor<float> f = buf.Get<float>();
    LocalTensor<half> h = buf.Get<half>();
    LocalTensor<int16_t> i16 = buf.Get<int16_t>();
    LocalTensor<int32_t> i32 = buf.Get<int32_t>();
    LocalTensor<uint32_t> u32 = buf.Get<uint32_t>();
    Arithmetic(f, f, f);
    Arithmetic(h, h, h);
    Arithmetic(i16, i16, i16);
    Arithmetic(i32, i32, i32);
    Real(f, f, f);
    Real(h, h, h);
    Bits(i16, i16, i16);
    Moves(f, f, u32);
    Moves(h, h, u32);
    Moves(buf.Get<bfloat16_t>(), buf.Get<bfloat16_t>(), u32);
    Moves(buf.Get<uint16_t>(), buf.Get<uint16_t>(), u32);
    Moves(i32, i32, u32);
    Indices(f);
    Indices(h);
    Indices(i16);
    Indices(i32);
    Compares_(f, f, f, bytes);
    Compares_(h, h, h, bytes);
    Compare(bytes, i32, i32, CMPMODE::EQ, 64);
    CompareScalar(bytes, i32, 1, CMPMODE::EQ, 64);
    Reductions(f, f, f, bytes);
    Reductions(h, h, h, bytes);
    Sorting(f, f, f, u32);
    Sorting(h, h, h, u32);
    Conversion(h, f, RoundMode::CAST_RINT);
    Conversion(f, h, RoundMode::CAST_NONE);
    Conversion(i32, f, RoundMode::CAST_FLOOR);
    Conversion(h, i32, RoundMode::CAST_NONE);
    Conversion(buf.Get<int8_t>(), h, RoundMode::CAST_TRUNC);
    Conversion(buf.Get<bfloat16_t>(), f, RoundMode::CAST_RINT);
    Conversion(buf.Get<int64_t>(), f, RoundMode::CAST_RINT);
    GlobalTensor<float> g;
    g.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(memory), 256);
    Rest(bytes, f, h, g);
}
