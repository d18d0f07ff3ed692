// Inclusive prefix sum in two phases: every core sums its chunk, all meet in the soft SyncAll, then each adds
// what the earlier chunks came to. The sum of all goes to `all` by atomic adds.
#include "kernel_operator.h"

using namespace AscendC;

struct PrefixTilingData {
    uint32_t chunk;  // elements a core, a multiple of 8
};

class KernelPrefix {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR all, GM_ADDR workspace,
                                const PrefixTilingData& tiling) {
        chunk_ = tiling.chunk;
        cores_ = GetBlockNum();
        xGm_.SetGlobalBuffer((__gm__ int32_t*)x + GetBlockIdx() * chunk_, chunk_);
        yGm_.SetGlobalBuffer((__gm__ int32_t*)y + GetBlockIdx() * chunk_, chunk_);
        allGm_.SetGlobalBuffer((__gm__ int32_t*)all, 8);
        syncGm_.SetGlobalBuffer((__gm__ int32_t*)workspace, cores_ * 8);
        totalGm_.SetGlobalBuffer((__gm__ int32_t*)workspace + cores_ * 8, cores_ * 8);
        pipe_.InitBuffer(dataBuf_, chunk_ * sizeof(int32_t));
        pipe_.InitBuffer(totalBuf_, cores_ * 32);
        pipe_.InitBuffer(syncBuf_, cores_ * 32);
    }
    __aicore__ inline void Process() {
        LocalTensor<int32_t> data = dataBuf_.Get<int32_t>();
        LocalTensor<int32_t> totals = totalBuf_.Get<int32_t>();
        DataCopy(data, xGm_, chunk_);
        Sync<HardEvent::MTE2_S>();
        int32_t sum = 0;
        for (uint32_t i = 0; i < chunk_; ++i) {
            sum += data.GetValue(i);
            data.SetValue(i, sum);
        }
        for (uint32_t i = 0; i < 8; ++i) {
            totals.SetValue(i, sum);
        }
        Sync<HardEvent::S_MTE3>();
        DataCopy(totalGm_[GetBlockIdx() * 8], totals, 8);
        SetAtomicAdd<int32_t>();
        DataCopy(allGm_, totals, 8);
        SetAtomicNone();
        PipeBarrier<PIPE_ALL>();
        SyncAll(syncGm_, syncBuf_.Get<int32_t>(), cores_);
        DataCopy(totals, totalGm_, cores_ * 8);
        Sync<HardEvent::MTE2_S>();
        int32_t before = 0;
        for (uint32_t core = 0; core < GetBlockIdx(); ++core) {
            before += totals.GetValue(core * 8);
        }
        Sync<HardEvent::S_V>();
        Adds(data, data, before, chunk_);
        Sync<HardEvent::V_MTE3>();
        DataCopy(yGm_, data, chunk_);
    }

private:
    template <HardEvent event>
    __aicore__ inline void Sync() {
        const int32_t id = pipe_.FetchEventID(event);
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }
    TPipe pipe_;
    TBuf<> dataBuf_, totalBuf_, syncBuf_;
    GlobalTensor<int32_t> xGm_, yGm_, allGm_, syncGm_, totalGm_;
    uint32_t chunk_;
    int32_t cores_;
};

extern "C" __global__ __aicore__ void prefix_sum(GM_ADDR x, GM_ADDR y, GM_ADDR all, GM_ADDR workspace,
                                                 GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(PrefixTilingData, tilingData, tiling);
    KernelPrefix op;
    op.Init(x, y, all, workspace, tilingData);
    op.Process();
}
