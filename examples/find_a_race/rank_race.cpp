// Two ranks swap three rows through their windows, each row followed by a flag. Every row goes to the same
// place: the next one may arrive while the peer still reads the one before.
#include "kernel_operator.h"
#include "lib/hccl/hccl.h"

using namespace AscendC;

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
