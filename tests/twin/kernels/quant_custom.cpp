// Per-row int8 quantisation of half or bfloat16 rows: 127 / max|x| in fp32, then fp32 -> int32 -> half ->
// int8.
#include "kernel_operator.h"

using namespace AscendC;

struct QuantTilingData {
    uint32_t rows;
    uint32_t hidden;  // a multiple of 32
};

class KernelQuant {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR scales, const QuantTilingData& tiling) {
        rows_ = tiling.rows;
        hidden_ = tiling.hidden;
        xGm_.SetGlobalBuffer((__gm__ DTYPE_X*)x);
        yGm_.SetGlobalBuffer((__gm__ int8_t*)y);
        scaleGm_.SetGlobalBuffer((__gm__ float*)scales, rows_);
        pipe_.InitBuffer(inQueue_, 2, hidden_ * sizeof(DTYPE_X));
        pipe_.InitBuffer(outQueue_, 2, hidden_);
        pipe_.InitBuffer(scaleQueue_, 2, 32);
        pipe_.InitBuffer(floatBuf_, hidden_ * sizeof(float));
        pipe_.InitBuffer(absBuf_, hidden_ * sizeof(float));
        pipe_.InitBuffer(workBuf_, hidden_ * sizeof(float));
    }
    __aicore__ inline void Process() {
        for (uint32_t row = GetBlockIdx(); row < rows_; row += GetBlockNum()) {
            LocalTensor<DTYPE_X> x = inQueue_.AllocTensor<DTYPE_X>();
            DataCopy(x, xGm_[static_cast<uint64_t>(row) * hidden_], hidden_);
            inQueue_.EnQue(x);
            Quantise();
            LocalTensor<int8_t> y = outQueue_.DeQue<int8_t>();
            DataCopy(yGm_[static_cast<uint64_t>(row) * hidden_], y, hidden_);
            outQueue_.FreeTensor(y);
            LocalTensor<float> scale = scaleQueue_.DeQue<float>();
            DataCopyPad(scaleGm_[row], scale, {1, sizeof(float), 0, 0, 0});
            scaleQueue_.FreeTensor(scale);
        }
    }

private:
    template <HardEvent event>
    __aicore__ inline void SyncFunc() {
        int32_t id = static_cast<int32_t>(pipe_.FetchEventID(event));
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }
    __aicore__ inline void Quantise() {
        LocalTensor<DTYPE_X> x = inQueue_.DeQue<DTYPE_X>();
        LocalTensor<int8_t> y = outQueue_.AllocTensor<int8_t>();
        LocalTensor<float> scale = scaleQueue_.AllocTensor<float>();
        LocalTensor<float> value = floatBuf_.Get<float>();
        LocalTensor<float> magnitude = absBuf_.Get<float>();
        LocalTensor<float> work = workBuf_.Get<float>();
        Cast(value, x, RoundMode::CAST_NONE, hidden_);
        inQueue_.FreeTensor(x);
        PipeBarrier<PIPE_V>();
        Abs(magnitude, value, hidden_);
        PipeBarrier<PIPE_V>();
        ReduceMax(magnitude, magnitude, work, hidden_, false);
        SyncFunc<HardEvent::V_S>();
        const float factor = 127.0f / magnitude.GetValue(0);
        SyncFunc<HardEvent::S_V>();
        Muls(value, value, factor, hidden_);
        PipeBarrier<PIPE_V>();
        LocalTensor<int32_t> integer = work.ReinterpretCast<int32_t>();
        Cast(integer, value, RoundMode::CAST_RINT, hidden_);
        PipeBarrier<PIPE_V>();
        LocalTensor<half> narrow = magnitude.ReinterpretCast<half>();
        SetDeqScale(static_cast<half>(1.0f));
        Cast(narrow, integer, RoundMode::CAST_ROUND, hidden_);
        PipeBarrier<PIPE_V>();
        Cast(y, narrow, RoundMode::CAST_TRUNC, hidden_);
        Duplicate(scale, 1.0f / factor, 8);
        outQueue_.EnQue(y);
        scaleQueue_.EnQue(scale);
    }

    TPipe pipe_;
    TQue<QuePosition::VECIN, 1> inQueue_;
    TQue<QuePosition::VECOUT, 1> outQueue_, scaleQueue_;
    TBuf<> floatBuf_, absBuf_, workBuf_;
    GlobalTensor<DTYPE_X> xGm_;
    GlobalTensor<int8_t> yGm_;
    GlobalTensor<float> scaleGm_;
    uint32_t rows_, hidden_;
};

extern "C" __global__ __aicore__ void quant_custom(GM_ADDR x, GM_ADDR y, GM_ADDR scales, GM_ADDR workspace,
                                                   GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(QuantTilingData, tilingData, tiling);
    KernelQuant op;
    op.Init(x, y, scales, tilingData);
    op.Process();
}
