// Kernels whose times can be computed by hand.
#include "kernel_operator.h"
#include "lib/hccl/hccl.h"

using namespace AscendC;

// z = x + y of 256 floats, on one core.
extern "C" __global__ __aicore__ void add_once(GM_ADDR x, GM_ADDR y, GM_ADDR z) {
    constexpr uint32_t kCount = 256;
    GlobalTensor<float> xGm, yGm, zGm;
    xGm.SetGlobalBuffer((__gm__ float*)x, kCount);
    yGm.SetGlobalBuffer((__gm__ float*)y, kCount);
    zGm.SetGlobalBuffer((__gm__ float*)z, kCount);
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 2 * kCount * sizeof(float));
    LocalTensor<float> a = buffer.Get<float>(), b = a[kCount];
    DataCopy(a, xGm, kCount);
    DataCopy(b, yGm, kCount);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    Add(a, a, b, kCount);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(zGm, a, kCount);
}

struct Tiles {
    uint32_t count;
    uint32_t buffers;
};

// x += 1 in tiles of 2048 floats, with one or two buffers a queue.
extern "C" __global__ __aicore__ void add_tiles(GM_ADDR x, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(Tiles);
    GET_TILING_DATA_WITH_STRUCT(Tiles, tiles, tiling);
    constexpr uint32_t kTile = 2048;
    GlobalTensor<float> gm;
    gm.SetGlobalBuffer((__gm__ float*)x, tiles.count * kTile);
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECOUT, 2> out;
    pipe.InitBuffer(in, tiles.buffers, kTile * sizeof(float));
    pipe.InitBuffer(out, tiles.buffers, kTile * sizeof(float));
    for (uint32_t i = 0; i < tiles.count; ++i) {
        LocalTensor<float> from = in.AllocTensor<float>();
        DataCopy(from, gm[i * kTile], kTile);
        in.EnQue(from);
        from = in.DeQue<float>();
        LocalTensor<float> to = out.AllocTensor<float>();
        Adds(to, from, 1.0f, kTile);
        out.EnQue(to);
        in.FreeTensor(from);
        to = out.DeQue<float>();
        DataCopy(gm[i * kTile], to, kTile);
        out.FreeTensor(to);
    }
}

struct Late {
    uint32_t adds;    // before this rank sends
    uint32_t atomic;  // the flag is added, not stored
};

// Two ranks swap a row: rows, then a flag; each waits for the other's flag, then copies the row into y.
extern "C" __global__ __aicore__ void swap_rows(GM_ADDR x, GM_ADDR y, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(Late);
    GET_TILING_DATA_WITH_STRUCT(Late, late, tiling);
    constexpr uint32_t kRow = 1024, kFlagAt = 8192;
    Hccl<> hccl;
    hccl.Init(GetHcclContext<0>());
    GM_ADDR there = hccl.GetWindowsInAddr(1 - hccl.GetRankId());
    GM_ADDR here = hccl.GetWindowsInAddr(hccl.GetRankId());
    GlobalTensor<float> xGm, yGm, theirRow, ourRow;
    GlobalTensor<int32_t> theirFlag, ourFlag;
    xGm.SetGlobalBuffer((__gm__ float*)x, kRow);
    yGm.SetGlobalBuffer((__gm__ float*)y, kRow);
    theirRow.SetGlobalBuffer((__gm__ float*)there, kRow);
    ourRow.SetGlobalBuffer((__gm__ float*)here, kRow);
    theirFlag.SetGlobalBuffer((__gm__ int32_t*)(there + kFlagAt), 8);
    ourFlag.SetGlobalBuffer((__gm__ int32_t*)(here + kFlagAt), 8);
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 2 * kRow * sizeof(float) + 64);
    LocalTensor<float> row = buffer.Get<float>(), spare = row[kRow];
    LocalTensor<int32_t> flag = row[2 * kRow].ReinterpretCast<int32_t>();
    Duplicate(spare, 0.0f, kRow);
    for (uint32_t i = 0; i < late.adds; ++i) {
        PipeBarrier<PIPE_V>();
        Adds(spare, spare, 1.0f, kRow);
    }
    Duplicate(flag, static_cast<int32_t>(1), 8);
    DataCopy(row, xGm, kRow);
    PipeBarrier<PIPE_ALL>();
    DataCopy(theirRow, row, kRow);
    PipeBarrier<PIPE_MTE3>();
    if (late.atomic != 0) {
        SetAtomicAdd<int32_t>();
    }
    DataCopy(theirFlag, flag, 8);
    SetAtomicNone();
    do {
        DataCopy(flag[8], ourFlag, 8);
        PipeBarrier<PIPE_ALL>();
    } while (flag.GetValue(8) != 1);
    DataCopy(row, ourRow, kRow);
    PipeBarrier<PIPE_ALL>();
    DataCopy(yGm, row, kRow);
}
