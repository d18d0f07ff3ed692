// Four kernels with one mistake each, which -DFIXED mends.
#include "kernel_operator.h"
#include "lib/hccl/hccl.h"

using namespace AscendC;

// y = 2 * x. The vector unit starts on a tile that MTE2 has not finished loading.
constexpr uint32_t TILE = 256;
extern "C" __global__ __aicore__ void missing_event(GM_ADDR x, GM_ADDR y) {
    TPipe pipe;
    TBuf<> in, out;
    pipe.InitBuffer(in, TILE * sizeof(float));
    pipe.InitBuffer(out, TILE * sizeof(float));
    GlobalTensor<float> xGm, yGm;
    xGm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x) + GetBlockIdx() * TILE, TILE);
    yGm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y) + GetBlockIdx() * TILE, TILE);

    DataCopy(in.Get<float>(), xGm, TILE);
#ifdef FIXED
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
#endif
    Muls(out.Get<float>(), in.Get<float>(), 2.0f, TILE);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(yGm, out.Get<float>(), TILE);
}

// Core 0 counts the launch in a word of GM that the other cores read. Its scalar store stays in its own
// cache.
extern "C" __global__ __aicore__ void missing_clean(GM_ADDR y, GM_ADDR workspace) {
    TPipe pipe;
    TBuf<> out;
    pipe.InitBuffer(out, 32);
    GlobalTensor<int32_t> word, yGm;
    word.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace), 16);
    yGm.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(y) + GetBlockIdx() * 8, 8);

    if (GetBlockIdx() == 0) {
        word.SetValue(0, 42);
#ifdef FIXED
        DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(word);
#endif
    }
    SyncAll();
    Duplicate(out.Get<int32_t>(), word.GetValue(0), 8);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(yGm, out.Get<int32_t>(), 8);
}

// Each core leaves a block in the workspace and then reads its neighbour's, which may not be there yet.
constexpr uint32_t BLOCK = 64;
extern "C" __global__ __aicore__ void missing_sync_all(GM_ADDR y, GM_ADDR workspace) {
    TPipe pipe;
    TBuf<> mine, theirs;
    pipe.InitBuffer(mine, BLOCK * sizeof(int32_t));
    pipe.InitBuffer(theirs, BLOCK * sizeof(int32_t));
    GlobalTensor<int32_t> board, yGm;
    board.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace));
    yGm.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(y));
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    const uint32_t next = (me + 1) % static_cast<uint32_t>(GetBlockNum());

    Duplicate(mine.Get<int32_t>(), static_cast<int32_t>(me), BLOCK);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(board[me * BLOCK], mine.Get<int32_t>(), BLOCK);
    PipeBarrier<PIPE_ALL>();
#ifdef FIXED
    SyncAll();
#endif
    DataCopy(theirs.Get<int32_t>(), board[next * BLOCK], BLOCK);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    DataCopy(yGm[me * BLOCK], theirs.Get<int32_t>(), BLOCK);
}

// Two ranks swap three rows through their windows, each row followed by a flag. Every row goes to the same
// place: the next one may arrive while the peer still reads the one before.
constexpr uint32_t ROW = 64, ROUNDS = 3;
constexpr uint32_t HALF_BYTES = 4096, FLAG_OFFSET = 2048;
extern "C" __global__ __aicore__ void rank_race(GM_ADDR x, GM_ADDR y) {
    Hccl<> hccl;
    hccl.Init(GetHcclContext<0>());
    const uint32_t me = hccl.GetRankId();
    GlobalTensor<float> xGm, yGm, theirRow, ourRow;
    GlobalTensor<int32_t> theirFlag, ourFlag;
    xGm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), ROUNDS * ROW);
    yGm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y), ROUNDS * ROW);
    TPipe pipe;
    TBuf<> rowBuf, flagBuf;
    pipe.InitBuffer(rowBuf, ROW * sizeof(float));
    pipe.InitBuffer(flagBuf, 64);
    LocalTensor<float> row = rowBuf.Get<float>();
    LocalTensor<int32_t> flag = flagBuf.Get<int32_t>();

    for (uint32_t round = 0; round < ROUNDS; ++round) {
#ifdef FIXED
        const uint32_t half = round % 2 * HALF_BYTES;
#else
        const uint32_t half = 0;
#endif
        GM_ADDR there = hccl.GetWindowsInAddr(1 - me) + half;
        GM_ADDR here = hccl.GetWindowsInAddr(me) + half;
        theirRow.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(there), ROW);
        ourRow.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(here), ROW);
        theirFlag.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(there + FLAG_OFFSET), 8);
        ourFlag.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(here + FLAG_OFFSET), 8);

        DataCopy(row, xGm[round * ROW], ROW);
        Duplicate(flag, static_cast<int32_t>(round + 1), 8);
        PipeBarrier<PIPE_ALL>();
        DataCopy(theirRow, row, ROW);
        PipeBarrier<PIPE_ALL>();
        DataCopy(theirFlag, flag, 8);
        do {
            DataCopy(flag[8], ourFlag, 8);
            PipeBarrier<PIPE_ALL>();
        } while (flag.GetValue(8) < static_cast<int32_t>(round + 1));
        DataCopy(row, ourRow, ROW);
        PipeBarrier<PIPE_ALL>();
        DataCopy(yGm[round * ROW], row, ROW);
        PipeBarrier<PIPE_ALL>();
    }
}
