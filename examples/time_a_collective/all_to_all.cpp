// y of each rank = what every rank's x holds for it. A core sends a part to one rank after the other, each followed by
// a flag, and copies the parts out of its own window when their flags have come. The windows are zero at the launch.
#include "kernel_operator.h"
#include "lib/hccl/hccl.h"

using namespace AscendC;

struct AllToAllTilingData {
    uint32_t bytes;  // from each rank to each, a multiple of 32
    uint32_t tile;   // bytes of a copy, a multiple of 32
};

constexpr uint32_t BLOCK = 32;

// From GM to GM through UB: the next tile is loaded while this one is stored.
__aicore__ inline void Copy(TQueBind<TPosition::VECIN, TPosition::VECOUT, 2>& queue, GM_ADDR to, GM_ADDR from,
                            uint32_t bytes, uint32_t tile) {
    GlobalTensor<uint8_t> source, target;
    source.SetGlobalBuffer((__gm__ uint8_t*)from, bytes);
    target.SetGlobalBuffer((__gm__ uint8_t*)to, bytes);
    for (uint32_t done = 0; done < bytes; done += tile) {
        const uint32_t count = bytes - done < tile ? bytes - done : tile;
        LocalTensor<uint8_t> row = queue.AllocTensor<uint8_t>();
        DataCopy(row, source[done], count);
        queue.EnQue(row);
        row = queue.DeQue<uint8_t>();
        DataCopy(target[done], row, count);
        queue.FreeTensor(row);
    }
}

extern "C" __global__ __aicore__ void all_to_all(GM_ADDR x, GM_ADDR y, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(AllToAllTilingData);
    GET_TILING_DATA_WITH_STRUCT(AllToAllTilingData, sizes, tiling);
    Hccl<> hccl;
    hccl.Init(GetHcclContext<0>());
    const uint32_t me = hccl.GetRankId(), world = hccl.GetRankDim();
    // As many cores share what goes to a rank as there are for each rank.
    const uint32_t blocks = GetBlockNum(), parts = blocks < world ? 1 : blocks / world;
    const uint32_t share = (sizes.bytes + parts * BLOCK - 1) / (parts * BLOCK) * BLOCK;
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> queue;
    TBuf<> flagBuf;
    pipe.InitBuffer(queue, 2, sizes.tile);
    pipe.InitBuffer(flagBuf, 2 * BLOCK);
    LocalTensor<int32_t> flag = flagBuf.Get<int32_t>();
    Duplicate(flag, static_cast<int32_t>(1), BLOCK / sizeof(int32_t));
    PipeBarrier<PIPE_ALL>();
    const uint64_t rows = static_cast<uint64_t>(world) * sizes.bytes;  // the flags lie behind them
    for (uint32_t item = GetBlockIdx(); item < world * parts; item += blocks) {
        const uint32_t peer = (me + item) % world, part = item / world, begin = part * share;
        if (begin >= sizes.bytes) continue;
        const uint32_t bytes = sizes.bytes - begin < share ? sizes.bytes - begin : share;
        GM_ADDR window = hccl.GetWindowsInAddr(peer);
        Copy(queue, window + static_cast<uint64_t>(me) * sizes.bytes + begin,
             x + static_cast<uint64_t>(peer) * sizes.bytes + begin, bytes, sizes.tile);
        PipeBarrier<PIPE_ALL>();  // the rows come before their flag
        GlobalTensor<int32_t> theirs;
        theirs.SetGlobalBuffer((__gm__ int32_t*)(window + rows + (me * parts + part) * BLOCK), BLOCK);
        DataCopy(theirs, flag, BLOCK / sizeof(int32_t));
    }
    LocalTensor<int32_t> seen = flag[BLOCK / sizeof(int32_t)];
    for (uint32_t item = GetBlockIdx(); item < world * parts; item += blocks) {
        const uint32_t peer = (me + world - item % world) % world, part = item / world, begin = part * share;
        if (begin >= sizes.bytes) continue;
        const uint32_t bytes = sizes.bytes - begin < share ? sizes.bytes - begin : share;
        GM_ADDR window = hccl.GetWindowsInAddr(me);
        GlobalTensor<int32_t> ours;
        ours.SetGlobalBuffer((__gm__ int32_t*)(window + rows + (peer * parts + part) * BLOCK), BLOCK);
        do {
            DataCopy(seen, ours, BLOCK / sizeof(int32_t));
            PipeBarrier<PIPE_ALL>();
        } while (seen.GetValue(0) != 1);
        const uint64_t at = static_cast<uint64_t>(peer) * sizes.bytes + begin;
        Copy(queue, y + at, window + at, bytes, sizes.tile);
    }
}
