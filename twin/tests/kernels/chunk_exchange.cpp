// All-to-all of rows in chunks that carry their own flag: 480 bytes of data and 32 of 1.0f, stored as one. No
// core waits for another: receivers poll the flags of a row's chunks, take the data out, take the flags down.
// At the end all ranks meet in the state windows.
#include "moe_mc2_base.h"

using namespace Mc2Sample;

struct ChunkTilingData {
    uint32_t rank;
    uint32_t world;
    uint32_t rows;    // for each peer
    uint32_t chunks;  // of 480 bytes, a row
    int32_t step;     // another one in every launch
};

constexpr uint32_t kData = 480;
constexpr uint32_t kChunk = 512;
constexpr uint32_t kFlagFloats = 8;

extern "C" __global__ __aicore__ void chunk_exchange(GM_ADDR x, GM_ADDR y, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(ChunkTilingData);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA_WITH_STRUCT(ChunkTilingData, t, tiling);
    GM_ADDR context = GetHcclContext<0>();
    const uint32_t rowBytes = t.chunks * kData, flags = t.chunks * kFlagFloats;
    const uint16_t chunks = static_cast<uint16_t>(t.chunks);
    const auto window = [&](uint32_t rank, uint32_t source, uint32_t row) {
        return WindowIn(context, rank) + (source * t.rows + row) * t.chunks * kChunk;
    };
    TPipe pipe;
    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> sendQueue, takeQueue;
    TBuf<> flagBuf, sumBuf, workBuf, meetBuf;
    pipe.InitBuffer(sendQueue, 2, t.chunks * kChunk);
    pipe.InitBuffer(takeQueue, 2, rowBytes);
    pipe.InitBuffer(flagBuf, t.chunks * 32);
    pipe.InitBuffer(sumBuf, 32);
    pipe.InitBuffer(workBuf, t.chunks * 32);
    pipe.InitBuffer(meetBuf, (t.world + 1) * 32);
    for (uint32_t i = GetBlockIdx(); i < t.world * t.rows; i += GetBlockNum()) {
        // 480 bytes a chunk into UB, 32 left free behind each for the flag.
        LocalTensor<uint8_t> row = sendQueue.AllocTensor<uint8_t>();
        DataCopy(row, Gm<uint8_t>(x + i * rowBytes), {chunks, kData / 32, 0, (kChunk - kData) / 32});
        for (uint32_t chunk = 0; chunk < t.chunks; ++chunk) {
            Duplicate(row.ReinterpretCast<float>()[(chunk * kChunk + kData) / 4], 1.0f, kFlagFloats);
        }
        SyncFunc<HardEvent::V_MTE3>();
        sendQueue.EnQue(row);
        row = sendQueue.DeQue<uint8_t>();
        DataCopy(Gm<uint8_t>(window(i / t.rows, t.rank, i % t.rows)), row, t.chunks * kChunk);
        sendQueue.FreeTensor(row);
        SyncFunc<HardEvent::MTE3_V>();
    }
    LocalTensor<float> seen = flagBuf.Get<float>(), sum = sumBuf.Get<float>();
    for (uint32_t i = GetBlockIdx(); i < t.world * t.rows; i += GetBlockNum()) {
        GM_ADDR from = window(t.rank, i / t.rows, i % t.rows);
        GlobalTensor<float> flagGm = Gm<float>(from + kData);
        SyncFunc<HardEvent::MTE3_MTE2>();
        float up = 0.0f;
        while (up != static_cast<float>(flags)) {
            DataCopy(seen, flagGm, {chunks, 1, kData / 32, 0});
            SyncFunc<HardEvent::MTE2_V>();
            ReduceSum(sum, seen, workBuf.Get<float>(), static_cast<int32_t>(flags));
            SyncFunc<HardEvent::V_S>();
            up = sum.GetValue(0);
            SyncFunc<HardEvent::S_V>();
        }
        LocalTensor<uint8_t> row = takeQueue.AllocTensor<uint8_t>();
        DataCopy(row, Gm<uint8_t>(from), {chunks, kData / 32, (kChunk - kData) / 32, 0});
        takeQueue.EnQue(row);
        row = takeQueue.DeQue<uint8_t>();
        DataCopy(Gm<uint8_t>(y + i * rowBytes), row, rowBytes);
        takeQueue.FreeTensor(row);
        Duplicate(seen, 0.0f, flags);
        SyncFunc<HardEvent::V_MTE3>();
        DataCopy(flagGm, seen, {chunks, 1, 0, kData / 32});
    }
    PipeBarrier<PIPE_ALL>();
    SyncAll<true>();
    if (GetBlockIdx() != 0) {
        return;
    }
    LocalTensor<int32_t> met = meetBuf.Get<int32_t>(), step = met[t.world * 8];
    Duplicate(step, t.step, 8);
    SyncFunc<HardEvent::V_MTE3>();
    for (uint32_t rank = 0; rank < t.world; ++rank) {
        DataCopy(Gm<int32_t>(WindowExp(context, rank) + t.rank * kChunk), step, 8);
    }
    for (uint32_t there = 0; there != t.world;) {
        there = 0;
        DataCopy(met, Gm<int32_t>(WindowExp(context, t.rank)), {static_cast<uint16_t>(t.world), 1, 15, 0});
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t rank = 0; rank < t.world; ++rank) {
            there += met.GetValue(rank * 8) == t.step ? 1 : 0;
        }
        SyncFunc<HardEvent::S_MTE2>();
    }
}
