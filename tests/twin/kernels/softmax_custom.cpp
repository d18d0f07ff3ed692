// y = softmax(x) along rows, fp32. Rows are spread over the cores; a row's length is any number.
#include "kernel_operator.h"

using namespace AscendC;

struct SoftmaxTilingData {
    uint32_t rows;
    uint32_t columns;
};

class KernelSoftmax {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, const SoftmaxTilingData* tiling) {
        rows_ = tiling->rows;
        columns_ = tiling->columns;
        stride_ = (columns_ + 7) / 8 * 8;
        xGm_.SetGlobalBuffer((__gm__ float*)x, static_cast<uint64_t>(rows_) * columns_);
        yGm_.SetGlobalBuffer((__gm__ float*)y, static_cast<uint64_t>(rows_) * columns_);
        pipe_.InitBuffer(inQueue_, 2, stride_ * sizeof(float));
        pipe_.InitBuffer(outQueue_, 2, stride_ * sizeof(float));
        pipe_.InitBuffer(workBuf_, stride_ * sizeof(float));
        pipe_.InitBuffer(scalarBuf_, 32);
    }
    __aicore__ inline void Process() {
        for (uint32_t row = GetBlockIdx(); row < rows_; row += GetBlockNum()) {
            LocalTensor<float> x = inQueue_.AllocTensor<float>();
            DataCopyPad(x, xGm_[static_cast<uint64_t>(row) * columns_],
                        {1, static_cast<uint32_t>(columns_ * sizeof(float)), 0, 0, 0}, {false, 0, 0, 0});
            inQueue_.EnQue(x);
            Compute();
            LocalTensor<float> y = outQueue_.DeQue<float>();
            DataCopyPad(yGm_[static_cast<uint64_t>(row) * columns_], y,
                        {1, static_cast<uint32_t>(columns_ * sizeof(float)), 0, 0, 0});
            outQueue_.FreeTensor(y);
        }
    }

private:
    // A vector result that the scalar unit needs next, and the other way round.
    __aicore__ inline float Read(const LocalTensor<float>& value) {
        int32_t event = static_cast<int32_t>(pipe_.FetchEventID(HardEvent::V_S));
        SetFlag<HardEvent::V_S>(event);
        WaitFlag<HardEvent::V_S>(event);
        return value.GetValue(0);
    }
    __aicore__ inline void Compute() {
        LocalTensor<float> x = inQueue_.DeQue<float>();
        LocalTensor<float> y = outQueue_.AllocTensor<float>();
        LocalTensor<float> work = workBuf_.Get<float>();
        LocalTensor<float> scalar = scalarBuf_.Get<float>();
        ReduceMax(scalar, x, work, columns_, false);
        float largest = Read(scalar);
        Adds(x, x, -largest, columns_);
        PipeBarrier<PIPE_V>();
        Exp(y, x, columns_);
        PipeBarrier<PIPE_V>();
        ReduceSum(scalar, y, work, columns_);
        float total = Read(scalar);
        Muls(y, y, 1.0f / total, columns_);
        outQueue_.EnQue(y);
        inQueue_.FreeTensor(x);
    }

    TPipe pipe_;
    TQue<TPosition::VECIN, 1> inQueue_;
    TQue<TPosition::VECOUT, 1> outQueue_;
    TBuf<TPosition::VECCALC> workBuf_, scalarBuf_;
    GlobalTensor<float> xGm_, yGm_;
    uint32_t rows_, columns_, stride_;
};

extern "C" __global__ __aicore__ void softmax_custom(GM_ADDR x, GM_ADDR y, GM_ADDR workspace,
                                                     GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(SoftmaxTilingData, tilingData, tiling);
    KernelSoftmax op;
    op.Init(x, y, &tilingData);
    op.Process();
}
