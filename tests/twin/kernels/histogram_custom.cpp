// How often each id occurs: every core counts its chunk in UB and adds its counts to GM atomically.
#include "kernel_operator.h"

using namespace AscendC;

struct HistogramTilingData {
    uint32_t total;
    uint32_t bins;  // a multiple of 8
};

class KernelHistogram {
public:
    __aicore__ inline void Init(GM_ADDR ids, GM_ADDR counts, const HistogramTilingData& tiling) {
        bins_ = tiling.bins;
        const uint32_t perCore = (tiling.total + GetBlockNum() - 1) / GetBlockNum();
        const uint32_t begin = perCore * GetBlockIdx();
        count_ =
            begin >= tiling.total ? 0 : (tiling.total - begin < perCore ? tiling.total - begin : perCore);
        idGm_.SetGlobalBuffer((__gm__ int32_t*)ids + begin, count_ == 0 ? 1 : count_);
        countGm_.SetGlobalBuffer((__gm__ int32_t*)counts, bins_);
        pipe_.InitBuffer(idBuf_, (perCore * sizeof(int32_t) + 31) / 32 * 32);
        pipe_.InitBuffer(countBuf_, bins_ * sizeof(int32_t));
    }
    __aicore__ inline void Process() {
        if (count_ == 0) {
            return;
        }
        LocalTensor<int32_t> ids = idBuf_.Get<int32_t>();
        LocalTensor<int32_t> counts = countBuf_.Get<int32_t>();
        DataCopyPad(ids, idGm_, {1, static_cast<uint32_t>(count_ * sizeof(int32_t)), 0, 0, 0},
                    {false, 0, 0, 0});
        Duplicate(counts, 0, bins_);
        SetFlag<HardEvent::V_S>(EVENT_ID0);
        WaitFlag<HardEvent::V_S>(EVENT_ID0);
        SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
        for (uint32_t i = 0; i < count_; ++i) {
            const int32_t id = ids.GetValue(i);
            counts.SetValue(id, counts.GetValue(id) + 1);
        }
        SetFlag<HardEvent::S_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::S_MTE3>(EVENT_ID0);
        SetAtomicAdd<int32_t>();
        DataCopy(countGm_, counts, bins_);
        SetAtomicNone();
    }

private:
    TPipe pipe_;
    TBuf<> idBuf_, countBuf_;
    GlobalTensor<int32_t> idGm_, countGm_;
    uint32_t bins_, count_;
};

extern "C" __global__ __aicore__ void histogram_custom(GM_ADDR ids, GM_ADDR counts, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(HistogramTilingData, tilingData, tiling);
    KernelHistogram op;
    op.Init(ids, counts, tilingData);
    op.Process();
}
