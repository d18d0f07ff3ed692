// All-to-all over an A2 group: every core lays its part of the rows for each peer into windowsOut, core 0
// posts one BatchWrite for all of them, receivers poll the word that travels behind the rows and take it
// down.
#include "lib/hccl/hccl.h"
#include "moe_mc2_base.h"

using namespace Mc2Sample;

struct All2AllInfo {
    uint32_t rows;   // for each peer
    uint32_t width;  // int32 a row, a multiple of 8
    uint32_t half;   // 0 or 1: which part of the windows
    uint32_t finalize;
};
struct All2AllTilingData {
    Mc2InitTiling init;
    Mc2CcTiling cc;
    All2AllInfo info;
};

#ifndef COMMIT
#define COMMIT true
#endif
#ifndef MORE_BYTES
#define MORE_BYTES 0  // a bug, for the test that it is found
#endif
#ifndef TIMES
#define TIMES 1  // that each item is in the list
#endif

constexpr uint32_t kFlag = 0x7F00FF01;

extern "C" __global__ __aicore__ void all2all_batch_write(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(All2AllTilingData, tilingData, tiling);
    const All2AllInfo t = tilingData.info;
    Hccl<HCCL_SERVER_TYPE_AICPU> hccl;
    hccl.InitV2(GetHcclContext<HCCL_GROUP_ID_0>(), &tilingData);
    hccl.SetCcTilingV2(offsetof(All2AllTilingData, cc));
    const uint32_t rank = hccl.GetRankId(), world = hccl.GetRankDim();
    const uint32_t core = GetBlockIdx(), cores = GetBlockNum();
    const uint32_t rowsBytes = t.rows * t.width * sizeof(int32_t), regionBytes = rowsBytes + 64;
    const auto out = [&](uint32_t peer) {
        return hccl.GetWindowsOutAddr(rank) + (t.half * world + peer) * regionBytes;
    };
    const auto in = [&](uint32_t owner, uint32_t source) {
        return hccl.GetWindowsInAddr(owner) + (t.half * world + source) * regionBytes;
    };
    TPipe pipe;
    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> rowQueue;
    TBuf<> flagBuf, itemBuf;
    pipe.InitBuffer(rowQueue, 2, t.width * sizeof(int32_t));
    pipe.InitBuffer(flagBuf, 32);
    pipe.InitBuffer(itemBuf, world * TIMES * 32);
    LocalTensor<int32_t> flag = flagBuf.Get<int32_t>();
    Duplicate(flag, static_cast<int32_t>(kFlag), 8);
    SyncFunc<HardEvent::V_MTE3>();
    for (uint32_t i = core; i < world * t.rows; i += cores) {
        GlobalTensor<int32_t> to = Gm<int32_t>(out(i / t.rows));
        MoveRow(rowQueue, to[i % t.rows * t.width], Gm<int32_t>(x)[i * t.width], t.width);
        if (i % t.rows == 0) {
            DataCopy(to[t.rows * t.width], flag, 8);
        }
    }
    PipeBarrier<PIPE_ALL>();
    SyncAll<true>();  // all rows are there
    if (core == 0) {
        LocalTensor<uint64_t> items = itemBuf.Get<uint64_t>();
        for (uint32_t i = 0; i < world * TIMES; ++i) {
            const uint32_t peer = i % world;
            items.SetValue(i * 4, (uint64_t)out(peer));
            items.SetValue(i * 4 + 1, (uint64_t)in(peer, rank));
            items.SetValue(i * 4 + 2, rowsBytes + 32 + MORE_BYTES);
            items.SetValue(i * 4 + 3, (static_cast<uint64_t>(peer) << 32) | HCCL_DATA_TYPE_INT8);
        }
#ifdef STORES
        DataCopy(Gm<int32_t>(in(rank ^ 1, rank)), flag, 8);  // where its own item is to land
#endif
        SyncFunc<HardEvent::S_MTE3>();
        DataCopy(Gm<uint64_t>(workspace), items, world * TIMES * 4);
        PipeBarrier<PIPE_ALL>();
        hccl.BatchWrite<COMMIT>(workspace, world * TIMES);
    }
    for (uint32_t peer = core; peer < world; peer += cores) {
        GlobalTensor<int32_t> from = Gm<int32_t>(in(rank, peer));
        GlobalTensor<int32_t> flagGm = from[t.rows * t.width];
        SyncFunc<HardEvent::MTE3_MTE2>();
        do {
            DataCopy(flag, flagGm, 8);
            SyncFunc<HardEvent::MTE2_S>();
        } while (flag.GetValue(0) != static_cast<int32_t>(kFlag));
        SyncFunc<HardEvent::S_V>();
        Duplicate(flag, 0, 8);
        SyncFunc<HardEvent::V_MTE3>();
        DataCopy(flagGm, flag, 8);
        for (uint32_t row = 0; row < t.rows; ++row) {
            MoveRow(rowQueue, Gm<int32_t>(y)[(peer * t.rows + row) * t.width], from[row * t.width], t.width);
        }
    }
    SyncAll<true>();
    if (t.finalize != 0 && core == 0) {
        hccl.Finalize();
    }
}
