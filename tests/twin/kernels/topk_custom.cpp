// The k largest of each row of 128, with their places: four sorts of 32, one merge, Extract.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kRow = 128;
constexpr uint32_t kRun = 32;

struct TopkTilingData {
    uint32_t rows;
    uint32_t k;  // a multiple of 8
};

class KernelTopk {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR values, GM_ADDR indices, const TopkTilingData& tiling) {
        rows_ = tiling.rows;
        k_ = tiling.k;
        xGm_.SetGlobalBuffer((__gm__ float*)x, rows_ * kRow);
        valueGm_.SetGlobalBuffer((__gm__ float*)values, rows_ * k_);
        indexGm_.SetGlobalBuffer((__gm__ uint32_t*)indices, rows_ * k_);
        pipe_.InitBuffer(inQueue_, 2, kRow * sizeof(float));
        pipe_.InitBuffer(valueQueue_, 2, kRow * sizeof(float));
        pipe_.InitBuffer(indexQueue_, 2, kRow * sizeof(uint32_t));
        pipe_.InitBuffer(placeBuf_, kRow * sizeof(int32_t));
        pipe_.InitBuffer(sortedBuf_, 2 * kRow * sizeof(float));
        pipe_.InitBuffer(mergedBuf_, 2 * kRow * sizeof(float));
    }
    __aicore__ inline void Process() {
        LocalTensor<int32_t> place = placeBuf_.Get<int32_t>();
        CreateVecIndex(place, 0, kRow);
        for (uint32_t row = GetBlockIdx(); row < rows_; row += GetBlockNum()) {
            LocalTensor<float> x = inQueue_.AllocTensor<float>();
            DataCopy(x, xGm_[row * kRow], kRow);
            inQueue_.EnQue(x);
            Select(place.ReinterpretCast<uint32_t>());
            LocalTensor<float> value = valueQueue_.DeQue<float>();
            LocalTensor<uint32_t> index = indexQueue_.DeQue<uint32_t>();
            DataCopy(valueGm_[row * k_], value, k_);
            DataCopy(indexGm_[row * k_], index, k_);
            valueQueue_.FreeTensor(value);
            indexQueue_.FreeTensor(index);
        }
    }

private:
    __aicore__ inline void Select(const LocalTensor<uint32_t>& place) {
        LocalTensor<float> x = inQueue_.DeQue<float>();
        LocalTensor<float> sorted = sortedBuf_.Get<float>();
        LocalTensor<float> merged = mergedBuf_.Get<float>();
        PipeBarrier<PIPE_V>();
        Sort32(sorted, x, place, kRow / kRun);
        PipeBarrier<PIPE_V>();
        const uint16_t lengths[4] = {kRun, kRun, kRun, kRun};
        MrgSort(merged, {sorted, sorted[2 * kRun], sorted[4 * kRun], sorted[6 * kRun]},
                {lengths, false, 15, 1});
        inQueue_.FreeTensor(x);
        PipeBarrier<PIPE_V>();
        LocalTensor<float> value = valueQueue_.AllocTensor<float>();
        LocalTensor<uint32_t> index = indexQueue_.AllocTensor<uint32_t>();
        Extract(value, index, merged, kRow / kRun);
        valueQueue_.EnQue(value);
        indexQueue_.EnQue(index);
    }

    TPipe pipe_;
    TQue<QuePosition::VECIN, 1> inQueue_;
    TQue<QuePosition::VECOUT, 1> valueQueue_, indexQueue_;
    TBuf<> placeBuf_, sortedBuf_, mergedBuf_;
    GlobalTensor<float> xGm_, valueGm_;
    GlobalTensor<uint32_t> indexGm_;
    uint32_t rows_, k_;
};

extern "C" __global__ __aicore__ void topk_custom(GM_ADDR x, GM_ADDR values, GM_ADDR indices,
                                                  GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(TopkTilingData, tilingData, tiling);
    KernelTopk op;
    op.Init(x, values, indices, tilingData);
    op.Process();
}
