// y = (x - mean) / sqrt(var + eps) * gamma + beta along rows: half in and out, fp32 inside.
#include "kernel_operator.h"

using namespace AscendC;

struct LayerNormTilingData {
    uint32_t rows;
    uint32_t columns;  // a multiple of 16
    float epsilon;
};

template <typename T>
class KernelLayerNorm {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR gamma, GM_ADDR beta, GM_ADDR y, TPipe* pipe,
                                const LayerNormTilingData& tiling) {
        pipe_ = pipe;
        columns_ = tiling.columns;
        epsilon_ = tiling.epsilon;
        uint32_t perCore = tiling.rows / GetBlockNum(), more = tiling.rows % GetBlockNum();
        uint32_t core = GetBlockIdx();
        rows_ = perCore + (core < more ? 1 : 0);
        uint64_t first = static_cast<uint64_t>(perCore) * core + (core < more ? core : more);
        xGm_.SetGlobalBuffer((__gm__ T*)x + first * columns_);
        yGm_.SetGlobalBuffer((__gm__ T*)y + first * columns_);
        gammaGm_.SetGlobalBuffer((__gm__ float*)gamma, columns_);
        betaGm_.SetGlobalBuffer((__gm__ float*)beta, columns_);
        pipe_->InitBuffer(xQueue_, 2, columns_ * sizeof(T));
        pipe_->InitBuffer(yQueue_, 2, columns_ * sizeof(T));
        pipe_->InitBuffer(weightQueue_, 1, 2 * columns_ * sizeof(float));
        pipe_->InitBuffer(floatBuf_, columns_ * sizeof(float));
        pipe_->InitBuffer(squareBuf_, columns_ * sizeof(float));
        pipe_->InitBuffer(reduceBuf_, columns_ * sizeof(float));
        pipe_->InitBuffer(resultBuf_, 32);
    }
    __aicore__ inline void Process() {
        LocalTensor<float> weights = weightQueue_.AllocTensor<float>();
        DataCopy(weights, gammaGm_, columns_);
        DataCopy(weights[columns_], betaGm_, columns_);
        weightQueue_.EnQue(weights);
        weights = weightQueue_.DeQue<float>();
        for (uint32_t row = 0; row < rows_; ++row) {
            CopyIn(row);
            Compute(weights);
            CopyOut(row);
        }
        weightQueue_.FreeTensor(weights);
    }

private:
    __aicore__ inline void CopyIn(uint32_t row) {
        LocalTensor<T> x = xQueue_.template AllocTensor<T>();
        DataCopy(x, xGm_[row * columns_], columns_);
        xQueue_.EnQue(x);
    }
    __aicore__ inline float SumOf(const LocalTensor<float>& values) {
        LocalTensor<float> result = resultBuf_.Get<float>();
        ReduceSum(result, values, reduceBuf_.Get<float>(), columns_);
        event_t event = static_cast<event_t>(pipe_->FetchEventID(HardEvent::V_S));
        SetFlag<HardEvent::V_S>(event);
        WaitFlag<HardEvent::V_S>(event);
        return result.GetValue(0);
    }
    __aicore__ inline void Compute(const LocalTensor<float>& weights) {
        LocalTensor<T> x = xQueue_.template DeQue<T>();
        LocalTensor<T> y = yQueue_.template AllocTensor<T>();
        LocalTensor<float> value = floatBuf_.Get<float>();
        LocalTensor<float> square = squareBuf_.Get<float>();
        Cast(value, x, RoundMode::CAST_NONE, columns_);
        xQueue_.FreeTensor(x);
        PipeBarrier<PIPE_V>();
        float mean = SumOf(value) / static_cast<float>(columns_);
        Adds(value, value, -mean, columns_);
        PipeBarrier<PIPE_V>();
        Mul(square, value, value, columns_);
        PipeBarrier<PIPE_V>();
        float variance = SumOf(square) / static_cast<float>(columns_);
        LocalTensor<float> result = resultBuf_.Get<float>();
        Duplicate(result, variance + epsilon_, 8);
        PipeBarrier<PIPE_V>();
        Sqrt(result, result, 8);
        event_t event = static_cast<event_t>(pipe_->FetchEventID(HardEvent::V_S));
        SetFlag<HardEvent::V_S>(event);
        WaitFlag<HardEvent::V_S>(event);
        Muls(value, value, 1.0f / result.GetValue(0), columns_);
        PipeBarrier<PIPE_V>();
        Mul(value, value, weights, columns_);
        PipeBarrier<PIPE_V>();
        Add(value, value, weights[columns_], columns_);
        PipeBarrier<PIPE_V>();
        Cast(y, value, RoundMode::CAST_RINT, columns_);
        yQueue_.EnQue(y);
    }
    __aicore__ inline void CopyOut(uint32_t row) {
        LocalTensor<T> y = yQueue_.template DeQue<T>();
        DataCopy(yGm_[row * columns_], y, columns_);
        yQueue_.FreeTensor(y);
    }

    TPipe* pipe_;
    TQue<QuePosition::VECIN, 1> xQueue_, weightQueue_;
    TQue<QuePosition::VECOUT, 1> yQueue_;
    TBuf<QuePosition::VECCALC> floatBuf_, squareBuf_, reduceBuf_, resultBuf_;
    GlobalTensor<T> xGm_, yGm_;
    GlobalTensor<float> gammaGm_, betaGm_;
    uint32_t rows_, columns_;
    float epsilon_;
};

extern "C" __global__ __aicore__ void layernorm_custom(GM_ADDR x, GM_ADDR gamma, GM_ADDR beta, GM_ADDR y,
                                                       GM_ADDR workspace, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(LayerNormTilingData, tilingData, tiling);
    TPipe pipe;
#if ORIG_DTYPE_X == DT_FLOAT16
    KernelLayerNorm<DTYPE_X> op;
    op.Init(x, gamma, beta, y, &pipe, tilingData);
    op.Process();
#endif
}
