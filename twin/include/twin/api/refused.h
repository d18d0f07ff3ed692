// Names of CANN's API that the emulator does not run. A use is a compile error that names the call and says why. These
// lists are the only ones: the classes and kernel_operator.h expand them, tests compare them with asc-devkit's names.
#pragma once

namespace twin {

template <class...>
constexpr bool kNever = false;
// What a refused call returns: anything, so that its own error is the only one.
struct Refused {
    template <class T>
    operator T() const;
};

}  // namespace twin

// A call with template arguments of types, of values, or of types before values. The ellipsis makes it the worst match
// of all: a kernel's own function of that name is called instead. `Const`: of a member.
#define TWIN_REFUSED_FORM(Name, why, Const, Tag, ...)     \
    template <__VA_ARGS__>                                \
    auto Name(...) Const {                                \
        static_assert(twin::kNever<Tag>, #Name ": " why); \
        return twin::Refused{};                           \
    }
#define TWIN_REFUSED_CALL(Name, why, Const)                                           \
    TWIN_REFUSED_FORM(Name, why, Const, Types..., class... Types)                     \
    TWIN_REFUSED_FORM(Name, why, Const, decltype(value), auto value, auto... values)  \
    TWIN_REFUSED_FORM(Name, why, Const, Type, class Type, auto value, auto... values) \
    TWIN_REFUSED_FORM(Name, why, Const, Type, class Type, class Next, auto value, auto... values)
// A class, refused where an object is made.
#define TWIN_REFUSED_CLASS(Name, why)                              \
    struct Name {                                                  \
        template <class... Types>                                  \
        Name(Types&&...) {                                         \
            static_assert(twin::kNever<Types...>, #Name ": " why); \
        }                                                          \
    };
#define TWIN_REFUSED_TEMPLATE(Name, why, Tag, ...)        \
    template <__VA_ARGS__>                                \
    struct Name {                                         \
        static_assert(twin::kNever<Tag>, #Name ": " why); \
    };

// clang-format off
// ---- calls ----

#define TWIN_WHY_950 "the emulator does not model it: Ascend 950 only, not on A2/A3"
#define TWIN_CALLS_950(X) \
    X(Interleave) X(DeInterleave) X(Truncate) X(Histograms) X(Ands) X(Ors) X(Subs) X(Divs) X(Neg) X(Mull) X(Prelu) \
    X(AbsSub) X(FusedAbsSub) X(ExpSub) X(FusedExpSub) X(MulsCast) X(FusedMulsCast) X(DataCopyUnAlign) X(asc_vf_call) \
    X(AtomicAdd) X(AtomicMax) X(AtomicMin) X(AtomicCas) X(AtomicExch) X(AllocMutexID) X(ReleaseMutexID) X(NdDmaDci) \
    X(DataCopyL1ToUB) X(SetLoopModePara) X(ResetLoopModePara) X(GetSpr) X(ClearSpr) X(GetUBSizeInBytes) X(GetVecLen) \
    X(GetRuntimeUBSize) X(GetSsbufBaseAddr) X(Nop) X(SetSaturationStrategy) X(GetSaturationStrategy) \
    X(SetScalarCacheMode) X(GetScalarCacheMode) X(BitwiseAnd) X(BitwiseNot) X(BitwiseOr) X(BitwiseXor) X(Clamp) \
    X(Fma) X(Hypot) X(IsFinite) X(IsInf) X(IsNan) X(Log2) X(Log10) X(LogicalAnd) X(LogicalAnds) X(LogicalNot) \
    X(LogicalOr) X(LogicalOrs) X(LogicalXor) X(PhiloxRandom) X(Rint) X(SinCos) X(Where) X(AntiQuantize) X(Dequantize) \
    X(Quantize) X(GetBroadcastTilingInfo)
#define TWIN_WHY_OTHER "the emulator does not model it: not on A2/A3"
#define TWIN_CALLS_OTHER(X) \
    X(Scatter) X(VectorPadding)
#define TWIN_WHY_CUBE "the emulator does not model cube cores"
#define TWIN_CALLS_CUBE(X) \
    X(Mmad) X(MmadMx) X(MmadWithSparse) X(LoadData) X(LoadDataWithStride) X(LoadDataWithTranspose) \
    X(LoadDataWithSparse) X(LoadDataUnzip) X(LoadUnzipIndex) X(LoadImageToLocal) X(BroadCastVecToMM) \
    X(InitConstValue) X(SetLoadDataPaddingValue) X(SetFmatrix) X(SetLoadDataBoundary) X(SetLoadDataRepeat) \
    X(SetLoadDataRepeatWithStride) X(SetHF32Mode) X(SetHF32TransMode) X(SetMMRowMajor) X(SetMMColumnMajor) \
    X(SetMMLayoutTransform) X(Fixpipe) X(SetFixPipeConfig) X(SetFixpipeNz2ndFlag) X(SetFixpipePreQuantFlag) \
    X(SetFixPipeClipRelu) X(SetFixPipeAddr) X(Conv2D) X(GetConv2dTiling) X(Gemm) X(GetGemmTiling) X(SetAippFunctions) \
    X(CreateCubeResGroup)
#define TWIN_WHY_ADVANCED "the emulator does not model this call of CANN's advanced API"
#define TWIN_CALLS_ADVANCED(X) \
    X(GeGLU) X(Gelu) X(FasterGelu) X(FasterGeluV2) X(LogSoftMax) X(ReGlu) X(Sigmoid) X(Silu) X(SimpleSoftMax) \
    X(SoftMax) X(AdjustSoftMaxRes) X(SoftmaxFlash) X(SoftmaxFlashV2) X(SoftMaxFlashV2TilingFunc) X(SoftmaxFlashV3) \
    X(SoftmaxGrad) X(SoftmaxGradFront) X(SwiGLU) X(Swish) X(DropOut) X(Acos) X(Acosh) X(Asin) X(Asinh) X(Atan) \
    X(Atanh) X(Cos) X(Cosh) X(Digamma) X(Erf) X(Erfc) X(Floor) X(Fmod) X(Frac) X(Lgamma) X(Log) X(Power) X(Round) \
    X(Sign) X(Sin) X(Sinh) X(Tan) X(Tanh) X(Trunc) X(Xor) X(BatchNorm) X(DeepNorm) X(GroupNorm) X(LayerNorm) \
    X(WelfordUpdate) X(WelfordFinalize) X(LayerNormGrad) X(LayerNormGradBeta) X(Normalize) X(RmsNorm) X(Pad) X(UnPad) \
    X(AscendAntiQuant) X(AscendDequant) X(AscendQuant) X(Mean) X(ReduceMean) X(ReduceProd) X(ReduceAny) X(ReduceAll) \
    X(ReduceXorSum) X(TopK) X(TransData) X(SelectWithBytesMask) X(ConfusionTranspose)
#define TWIN_WHY_SYSTEM "the emulator does not model it"
#define TWIN_CALLS_SYSTEM(X) \
    X(Transpose) X(TransDataTo5HD) X(BilinearInterpolation) X(AddDeqRelu) X(AddReluCast) X(SubReluCast) X(MulCast) \
    X(SetStoreAtomicConfig) X(GetStoreAtomicConfig) X(CheckLocalMemoryIA) X(SetSaturationFlag) X(GetSaturationFlag) \
    X(GetSysWorkSpacePtr) X(SetSysWorkSpacePtr) X(SetDumpWorkSpacePtr) X(GetDumpWorkSpacePtr) X(GetArchVersion) \
    X(GetProgramCounter) X(InitDetermineComputeWorkspace) X(WaitPreBlock) X(NotifyNextBlock)
// Calls with a replacement.
#define TWIN_CALLS_REPLACED(X) \
    X(Arange, "the emulator does not model it: not in CANN 8.1, use CreateVecIndex or ArithProgression") \
    X(RpSort16, "the emulator does not model it: not on A2/A3, use Sort32") \
    X(MrgSort4, "the emulator does not model it: not on A2/A3, use MrgSort") \
    X(ProposalConcat, "the emulator does not model it: not on A2/A3, use Concat") \
    X(ProposalExtract, "the emulator does not model it: not on A2/A3, use Extract") \
    X(CastDeq, "the emulator does not model it: use Cast after SetDeqScale(half)") \
    X(CastDequant, "the emulator does not model it: use Cast after SetDeqScale(half)")

// Register programming (namespaces Reg and MicroAPI).
#define TWIN_CALLS_REG(X) \
    X(CreateAddrReg) X(Move) X(LoadAlign) X(StoreAlign) X(LoadUnAlignPre) X(LoadUnAlign) X(Load) X(StoreUnAlign) \
    X(StoreUnAlignPost) X(Store) X(Gather) X(GatherB) X(Scatter) X(Squeeze) X(Unsqueeze) X(ClearSpr) X(Histograms) \
    X(UpdateMask) X(CreateMask) X(Not) X(And) X(MaskGenWithRegTensor) X(Or) X(Xor) X(Interleave) X(DeInterleave) \
    X(Select) X(Pack) X(UnPack) X(MoveMask) X(LocalMemBar) X(Arange) X(Add) X(Sub) X(Mul) X(Div) X(Max) X(Min) \
    X(ShiftLeft) X(ShiftRight) X(Prelu) X(Mull) X(MulAddDst) X(AddC) X(SubC) X(Adds) X(Muls) X(Maxs) X(Mins) \
    X(ShiftLefts) X(ShiftRights) X(LeakyRelu) X(Compare) X(Compares) X(Duplicate) X(MulsCast) X(AbsSub) X(ExpSub) \
    X(MulDstAdd) X(Reduce) X(ReduceDataBlock) X(PairReduceElem) X(Axpy) X(Abs) X(Relu) X(Exp) X(Sqrt) X(Ln) X(Log) \
    X(Log2) X(Log10) X(Neg) X(Cast) X(Truncate)

// ---- classes: with their reasons; T: templates over types, V: over values first ----

#define TWIN_CLASSES(X) \
    X(KfcWorkspace, TWIN_WHY_CUBE) X(Load2DBitModeParam, TWIN_WHY_CUBE) X(Load3DBitModeParam, TWIN_WHY_CUBE) \
    X(SetFMatrixBitModeParams, TWIN_WHY_CUBE) X(MmadBitModeParams, TWIN_WHY_CUBE) X(Mutex, TWIN_WHY_950) \
    X(ListTensorDesc, TWIN_WHY_SYSTEM) X(SliceInfo, TWIN_WHY_SYSTEM) X(int4b_t, TWIN_WHY_SYSTEM)
#define TWIN_CLASSES_T(X) \
    X(CubeResGroupHandle, TWIN_WHY_CUBE) X(MatmulImpl, TWIN_WHY_CUBE) X(MatmulClientBase, TWIN_WHY_CUBE) \
    X(Conv3dIntf, TWIN_WHY_CUBE) X(Conv3DBpFilterIntf, TWIN_WHY_CUBE) X(Conv3DBpInputIntf, TWIN_WHY_CUBE) \
    X(TensorDesc, TWIN_WHY_SYSTEM) X(NumericLimits, TWIN_WHY_SYSTEM) X(ElemwiseOpBase, TWIN_WHY_SYSTEM) \
    X(ElemwiseFrame, TWIN_WHY_SYSTEM)
#define TWIN_CLASSES_V(X) \
    X(GroupBarrier, TWIN_WHY_CUBE) X(TBufPool, TWIN_WHY_SYSTEM) X(Hcomm, TWIN_WHY_950)

// ---- members of classes that the emulator has ----

#define TWIN_REFUSED_MEMBER(Name) TWIN_REFUSED_CALL(Name, TWIN_WHY_SYSTEM, const)
#define TWIN_REFUSE_MEMBERS(Class) TWIN_MEMBERS_##Class(TWIN_REFUSED_MEMBER) static_assert(true)
#define TWIN_MEMBERS_LocalTensor(X) \
    X(Print) X(SetUserTag) X(GetUserTag) X(SetShapeInfo) X(GetShapeInfo)
#define TWIN_MEMBERS_GlobalTensor(X) \
    X(SetShapeInfo) X(GetShapeInfo)
#define TWIN_MEMBERS_TQueBind(X) \
    X(FreeBuffer) X(GetBufferAddr) X(GetState) X(InitStartBufHandle) X(InitBufHandle)
#define TWIN_WHY_POSITIONS "the emulator does not model it with two positions: give the type alone"
#define TWIN_MEMBERS_TBuf(X) \
    X(EnQue) X(DeQue) X(GetState) X(FreeBuffer) X(GetBufferAddr) X(InitStartBufHandle)
#define TWIN_MEMBERS_TPipe(X) \
    X(InitBufPool) X(GetAbsAddr) X(GetBaseAddr) X(AllocMutexID) X(ReleaseMutexID) X(InitSpmBuffer) X(WriteSpmBuffer) \
    X(ReadSpmBuffer)
#define TWIN_MEMBERS_Hccl(X) \
    X(AllReduce) X(AllGather) X(ReduceScatter) X(AlltoAll) X(AlltoAllV) X(AlltoAllvWrite) X(Iterate)
// clang-format on
