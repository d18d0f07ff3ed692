// Kernels whose times can be computed by hand.
#include "lib/hccl/hccl.h"
#include "moe_mc2_base.h"

using namespace Mc2Sample;

// z = x + y of 256 floats, on one core.
extern "C" __global__ __aicore__ void add_once(GM_ADDR x, GM_ADDR y, GM_ADDR z) {
    constexpr uint32_t kCount = 256;
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 2 * kCount * sizeof(float));
    LocalTensor<float> a = buffer.Get<float>(), b = a[kCount];
    DataCopy(a, Gm<float>(x), kCount);
    DataCopy(b, Gm<float>(y), kCount);
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    Add(a, a, b, kCount);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(Gm<float>(z), a, kCount);
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
    const GlobalTensor<float> gm = Gm<float>(x);
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
    DataCopy(row, Gm<float>(x), kRow);
    PipeBarrier<PIPE_ALL>();
    DataCopy(Gm<float>(there), row, kRow);
    PipeBarrier<PIPE_MTE3>();
    if (late.atomic != 0) {
        SetAtomicAdd<int32_t>();
    }
    DataCopy(Gm<int32_t>(there + kFlagAt), flag, 8);
    SetAtomicNone();
    do {
        DataCopy(flag[8], Gm<int32_t>(here + kFlagAt), 8);
        PipeBarrier<PIPE_ALL>();
    } while (flag.GetValue(8) != 1);
    DataCopy(row, Gm<float>(here), kRow);
    PipeBarrier<PIPE_ALL>();
    DataCopy(Gm<float>(y), row, kRow);
}
