// The names that CANN's own communicating kernels take from kernel_operator.h alone, each used once.
#include "kernel_operator.h"
#include "lib/matmul_intf.h"

using namespace AscendC;

struct VendorNamesTilingData {
    Mc2InitTiling mc2InitTiling;
    Mc2CcTiling mc2CcTiling;
    uint32_t rows;
    uint32_t width;
};
static_assert(sizeof(IbVerbsData) == 120 && HCCL_MAX_RANK_NUM == 32 && HcclDataType::HCCL_DATA_TYPE_INT8 == 0);
static_assert(std::is_same_v<Conditional<true, int, float>::type, int> && Std::is_same<int, int>::value &&
              !Std::IsSame<int, float>::value);

constexpr CumSumConfig kColumns = {false, false, true};

template <class T>
class VendorNames {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR words, const VendorNamesTilingData& tiling, TPipe* pipe) {
        rows_ = tiling.rows;
        width_ = tiling.width;
        x_.SetGlobalBuffer((__gm__ T*)x);
        y_.SetGlobalBuffer((__gm__ T*)y);
        words_.SetGlobalBuffer((__gm__ int32_t*)words, 32);
        const uint32_t bytes = rows_ * width_ * sizeof(T);
        pipe->InitBuffer(in_, bytes);
        pipe->InitBuffer(out_, bytes);
        pipe->InitBuffer(last_, width_ * sizeof(T));
        pipe->InitBuffer(scratch_, 16 * width_ * sizeof(T) * 3 + rows_ * width_ * sizeof(float));
        pipe->InitBuffer(numbers_, 256);
    }
    __aicore__ inline void Sums() {
        LocalTensor<T> in = in_.template AllocTensor<T>();
        LocalTensor<T> out = out_.template Get<T>(), last = last_.template Get<T>();
        LocalTensor<uint8_t> scratch = scratch_.template Get<uint8_t>();
        const DataCopyExtParams copy = {1U, static_cast<uint32_t>(rows_ * width_ * sizeof(T)), 0U, 0U, 0U};
        const DataCopyPadExtParams<T> pad = {false, 0U, 0U, 0U};
        DataCopyPad(in, x_, copy, pad);
        TQueSync<PIPE_MTE2, PIPE_V> arrived;
        arrived.SetFlag(0);
        arrived.WaitFlag(0);
        CumSum(out, last, in, scratch, CumSumInfo{rows_, width_});
        CumSum<T, kColumns>(out, last, out, scratch, CumSumInfo{rows_, width_});
        TQueSync<PIPE_V, PIPE_MTE3> summed;
        summed.SetFlag(1);
        summed.WaitFlag(1);
        DataCopyPad(y_, out, copy);
        DataCopy(y_[rows_ * width_], last, width_);
        in_.FreeTensor(in);
    }
    __aicore__ inline void Scalars() {
        LocalTensor<int32_t> numbers = numbers_.Get<int32_t>();
        numbers(0) = 5;
        numbers(0) += 3;
        numbers(0) -= 1;
        numbers(1) = numbers(0)++;
        ++numbers(1);
        int32_t sum = numbers(0) + numbers(1);
        words_(0) = sum;  // 8 + 8
        words_(1) = static_cast<int32_t>(Std::max(3, 4U) * 10 + Std::min(3, 4U));
        words_(2) = max(uint32_t(2), 7) * 10 + min(2, 7);
        words_(3) = Ceil(33, 32) + static_cast<int32_t>(CACHE_LINE_SIZE);
        words_(4) = likely(rows_ > 0) && !unlikely(rows_ == 0) ? 1 : 0;
        words_(5) = static_cast<int32_t>(get_imm(7, 1));
        words_(6) = static_cast<int32_t>(numbers[8].address_.bufferAddr - numbers.address_.bufferAddr);
        words_(7) = static_cast<int32_t>(numbers[8].address_.dataLen);
        words_(8) =
            (TPosition)numbers.address_.logicPos == TPosition::VECCALC && numbers.GetPosition() == TPosition::VECCALC;
        words_(9) += words_(0);
        words_(10) = max(numbers(0), 9);
        TBuffAddr address = numbers.address_;
        words_(11) = static_cast<int32_t>(address.dataLen);
        DataCacheCleanAndInvalid<int32_t, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(words_);
    }
    __aicore__ inline void PastTheEnd(uint32_t key) {
        LocalTensor<int32_t> numbers = numbers_.Get<int32_t>();
        if (key == 2) numbers(64) = 1;
        if (key == 3) words_(32) += 1;
    }

private:
    GlobalTensor<T> x_, y_;
    GlobalTensor<int32_t> words_;
    TBuf<> in_, out_, last_, scratch_;
    TBuf<TPosition::VECCALC> numbers_;
    uint32_t rows_ = 0, width_ = 0;
};

extern "C" __global__ __aicore__ void vendor_names(GM_ADDR x, GM_ADDR y, GM_ADDR words, GM_ADDR padded,
                                                   GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(VendorNamesTilingData, tiling, tilingGM);
    TPipe pipe;
    VendorNames<DTYPE_X> kernel;
    kernel.Init(x, y, words, tiling, &pipe);
    if (TILING_KEY_IS(1)) {
        kernel.Sums();
        kernel.Scalars();
        // bfloat16_t has no arithmetic, but a pad value.
        TBuf<> rowBuf;
        pipe.InitBuffer(rowBuf, 64);
        LocalTensor<bfloat16_t> row = rowBuf.Get<bfloat16_t>();
        GlobalTensor<bfloat16_t> words16;
        words16.SetGlobalBuffer((__gm__ bfloat16_t*)padded);
        DataCopyPad(row, words16, {1, 10, 0, 0, 0}, DataCopyPadExtParams<bfloat16_t>{true, 0, 11, 0});
        TQueSync<PIPE_MTE2, PIPE_MTE3> moved;
        moved.SetFlag(0);
        moved.WaitFlag(0);
        DataCopy(words16, row, 16);
        Hccl<HCCL_SERVER_TYPE_AICPU> hccl;
        (void)hccl;
        return;
    }
    kernel.PastTheEnd(TILING_KEY_IS(2) ? 2 : 3);
}

__aicore__ inline void StoreWord(__gm__ uint32_t* to, uint32_t value) { WriteGmByPassDCache(to, value); }

// The calls of system.h, and those of the advanced API. Core 1 waits for core 0.
extern "C" __global__ __aicore__ void more_names(GM_ADDR x, GM_ADDR words, GM_ADDR flags) {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 4096);
    LocalTensor<float> f = buf.Get<float>(), rows = f[256];
    LocalTensor<int32_t> turn = f[512].ReinterpretCast<int32_t>();
    GlobalTensor<int32_t> turns;
    turns.SetGlobalBuffer((__gm__ int32_t*)flags, 32);
    GlobalTensor<float> out;
    out.SetGlobalBuffer((__gm__ float*)x, 256);
    GlobalTensor<uint64_t> none;
    __gm__ uint32_t* word = (__gm__ uint32_t*)words;
    WaitPreTaskEnd();
    MetricsProfStart();
    ICachePreLoad(GetICachePreloadStatus());
    DataCachePreload(none, 0);
    if (GetBlockIdx() == 1) {
        IBWait(turns, turn, 1, 0);
        StoreWord(word + 16, ReadGmByPassDCache(word) + 1);
        return;
    }
    uint32_t magic = 0, shift = 0;
    GetUintDivMagicAndShift(magic, shift, 7u);
    const uint32_t sizes[] = {3, 5};
    StoreWord(word + 1, magic);
    StoreWord(word + 2, shift);
    StoreWord(word + 3, static_cast<uint32_t>(GetShapeSize(ShapeInfo(2, sizes))));
    Async<EngineType::AIV, StoreWord>(word, 41u);
    Async<EngineType::AIC, StoreWord>(word, 99u);
    DataSyncBarrier<MemDsbT::DDR>();
    IBSet(turns, turn, 1, 0);
    // x: 32 of the value 5, then a column of 4 as rows of 8, a row of 8 in 4 rows, 64 of 1 * 2 + 3, some at most 2, at
    // least.
    InitGlobalMemory(out, 32, 5.0f);
    CreateVecIndex(f, 1.0f, 8);
    PipeBarrier<PIPE_V>();
    const uint32_t all[] = {4, 8}, column[] = {4, 1}, row[] = {1, 8};
    Broadcast<float, 2, 1>(rows, f, all, column);
    LocalTensor<float> second;
    second.SetAddrWithOffset(rows, 32);
    second.SetBufferLen(32 * sizeof(float));
    Broadcast<float, 2, 0>(second, f, all, row);
    Duplicate(rows[64], 1.0f, 64);
    Duplicate(f[64], 2.0f, 64);
    Duplicate(f[128], 3.0f, 64);
    PipeBarrier<PIPE_V>();
    MulAddRelu(rows[64], f[64], f[128], 64, 1, {1, 1, 1, 8, 8, 8});
    ClampMax(rows[128], f, 2.0f, 8);
    ClampMin(rows[136], f, f[64].ReinterpretCast<uint8_t>(), 7.0f, 8);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    SetAtomicAdd<half>();
    SetAtomicType<float>();
    DataCopy(out[32], rows, 144);
    DisableDmaAtomic();
    SetNextTaskStart();
    MetricsProfStop();
}
