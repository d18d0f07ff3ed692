// Inclusive prefix sum in two phases: every core sums its chunk, all meet in the soft SyncAll, then each adds
// what the earlier chunks came to. The sum of all goes to `all` by atomic adds.
#include "moe_mc2_base.h"

using namespace Mc2Sample;

struct PrefixTilingData {
    uint32_t chunk;  // elements a core, a multiple of 8
};

extern "C" __global__ __aicore__ void prefix_sum(GM_ADDR x, GM_ADDR y, GM_ADDR all, GM_ADDR workspace, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(PrefixTilingData, t, tiling);
    const uint32_t core = GetBlockIdx(), cores = GetBlockNum();
    GlobalTensor<int32_t> syncGm = Gm<int32_t>(workspace), totalGm = syncGm[cores * 8];
    TPipe pipe;
    TBuf<> dataBuf, totalBuf, syncBuf;
    pipe.InitBuffer(dataBuf, t.chunk * sizeof(int32_t));
    pipe.InitBuffer(totalBuf, cores * 32);
    pipe.InitBuffer(syncBuf, cores * 32);
    LocalTensor<int32_t> data = dataBuf.Get<int32_t>(), totals = totalBuf.Get<int32_t>();
    DataCopy(data, Gm<int32_t>(x)[core * t.chunk], t.chunk);
    SyncFunc<HardEvent::MTE2_S>();
    int32_t sum = 0;
    for (uint32_t i = 0; i < t.chunk; ++i) {
        sum += data.GetValue(i);
        data.SetValue(i, sum);
    }
    for (uint32_t i = 0; i < 8; ++i) {
        totals.SetValue(i, sum);
    }
    SyncFunc<HardEvent::S_MTE3>();
    DataCopy(totalGm[core * 8], totals, 8);
    SetAtomicAdd<int32_t>();
    DataCopy(Gm<int32_t>(all), totals, 8);
    SetAtomicNone();
    PipeBarrier<PIPE_ALL>();
    SyncAll(syncGm, syncBuf.Get<int32_t>(), static_cast<int32_t>(cores));
    DataCopy(totals, totalGm, cores * 8);
    SyncFunc<HardEvent::MTE2_S>();
    int32_t before = 0;
    for (uint32_t other = 0; other < core; ++other) {
        before += totals.GetValue(other * 8);
    }
    SyncFunc<HardEvent::S_V>();
    Adds(data, data, before, t.chunk);
    SyncFunc<HardEvent::V_MTE3>();
    DataCopy(Gm<int32_t>(y)[core * t.chunk], data, t.chunk);
}
