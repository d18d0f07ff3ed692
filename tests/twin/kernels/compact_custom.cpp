// Keeps the elements above a threshold, in order: a compare makes the mask, GatherMask moves. Each core
// compacts its own chunk and writes how many it kept.
#include "kernel_operator.h"

using namespace AscendC;

struct CompactTilingData {
    uint32_t chunk;  // elements a core, a multiple of 64
    float threshold;
};

class KernelCompact {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR counts, const CompactTilingData& tiling) {
        tiling_ = tiling;
        xGm_.SetGlobalBuffer((__gm__ float*)x + GetBlockIdx() * tiling.chunk, tiling.chunk);
        yGm_.SetGlobalBuffer((__gm__ float*)y + GetBlockIdx() * tiling.chunk, tiling.chunk);
        countGm_.SetGlobalBuffer((__gm__ int32_t*)counts + GetBlockIdx() * 8, 8);
        pipe_.InitBuffer(inQueue_, 1, tiling.chunk * sizeof(float));
        pipe_.InitBuffer(outQueue_, 1, tiling.chunk * sizeof(float));
        pipe_.InitBuffer(maskBuf_, tiling.chunk / 8 < 32 ? 32 : tiling.chunk / 8);
        pipe_.InitBuffer(countBuf_, 32);
    }
    __aicore__ inline void Process() {
        LocalTensor<float> x = inQueue_.AllocTensor<float>();
        DataCopy(x, xGm_, tiling_.chunk);
        inQueue_.EnQue(x);
        x = inQueue_.DeQue<float>();
        LocalTensor<float> y = outQueue_.AllocTensor<float>();
        LocalTensor<uint8_t> mask = maskBuf_.Get<uint8_t>();
        CompareScalar(mask, x, tiling_.threshold, CMPMODE::GT, tiling_.chunk);
        PipeBarrier<PIPE_V>();
        uint64_t kept = 0;
        GatherMask(y, x, mask.ReinterpretCast<uint32_t>(), true, tiling_.chunk, {1, 1, 8, 0}, kept);
        SetFlag<HardEvent::V_S>(EVENT_ID0);
        WaitFlag<HardEvent::V_S>(EVENT_ID0);
        outQueue_.EnQue(y);
        inQueue_.FreeTensor(x);
        LocalTensor<int32_t> count = countBuf_.Get<int32_t>();
        Duplicate(count, static_cast<int32_t>(kept), 8);
        SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
        DataCopy(countGm_, count, 8);
        y = outQueue_.DeQue<float>();
        if (kept > 0) {
            DataCopyPad(yGm_, y, {1, static_cast<uint32_t>(kept * sizeof(float)), 0, 0, 0});
        }
        outQueue_.FreeTensor(y);
    }

private:
    TPipe pipe_;
    TQue<QuePosition::VECIN, 1> inQueue_;
    TQue<QuePosition::VECOUT, 1> outQueue_;
    TBuf<> maskBuf_, countBuf_;
    GlobalTensor<float> xGm_, yGm_;
    GlobalTensor<int32_t> countGm_;
    CompactTilingData tiling_;
};

extern "C" __global__ __aicore__ void compact_custom(GM_ADDR x, GM_ADDR y, GM_ADDR counts, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(CompactTilingData, tilingData, tiling);
    KernelCompact op;
    op.Init(x, y, counts, tilingData);
    op.Process();
}
