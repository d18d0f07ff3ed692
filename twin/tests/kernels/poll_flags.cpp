// Waits in the ways that kernels wait, each for the core behind it: a flag by a copy, a scalar word cleaned
// before every look, a flag beside a heartbeat that is stored at every look.
#include "moe_mc2_base.h"

using namespace Mc2Sample;

constexpr uint32_t kBlock = 8;

__aicore__ inline void Wait(GlobalTensor<int32_t> flagGm, GlobalTensor<int32_t> word, GlobalTensor<int32_t> seen,
                            TPipe* pipe, bool scalar, bool heartbeat) {
    TBuf<> flagBuf, beatBuf;
    pipe->InitBuffer(flagBuf, 32);
    pipe->InitBuffer(beatBuf, 32);
    LocalTensor<int32_t> flag = flagBuf.Get<int32_t>(), beat = beatBuf.Get<int32_t>();
    int32_t looks = 0;
    for (bool up = false; !up;) {
        DataCopy(flag, flagGm, kBlock);
        SyncFunc<HardEvent::MTE2_S>();
        up = flag.GetValue(0) == 1;
        SyncFunc<HardEvent::S_MTE2>();
        if (heartbeat) {
            beat.SetValue(0, ++looks);
            SyncFunc<HardEvent::S_MTE3>();
            DataCopy(seen, beat, kBlock);
            SyncFunc<HardEvent::MTE3_S>();
        }
    }
    while (scalar) {
        CleanLine(word);
        if (word.GetValue(0) == 1) {
            break;
        }
    }
}

// Cores but the last wait first, so that none may be run to its end before the others. `all`: the last too,
// and nobody ever moves.
__aicore__ inline void Process(GM_ADDR seen, GM_ADDR workspace, bool scalar, bool heartbeat, bool all) {
    uint32_t core = GetBlockIdx(), cores = GetBlockNum(), next = (core + 1) % cores;
    GlobalTensor<int32_t> flagGm = Gm<int32_t>(workspace), wordGm = flagGm[cores * kBlock];
    TPipe pipe;
    TBuf<> outBuf;
    pipe.InitBuffer(outBuf, 32);
    if (all || core != cores - 1) {
        Wait(flagGm[next * kBlock], wordGm[next * 16], Gm<int32_t>(seen)[core * kBlock], &pipe, scalar, heartbeat);
    }
    LocalTensor<int32_t> out = outBuf.Get<int32_t>();
    Duplicate(out, 1, kBlock);
    SyncFunc<HardEvent::V_MTE3>();
    DataCopy(flagGm[core * kBlock], out, kBlock);
    wordGm.SetValue(core * 16, 1);
    CleanLine(wordGm[core * 16]);
}

extern "C" __global__ __aicore__ void poll_flags(GM_ADDR seen, GM_ADDR workspace) {
    const uint64_t key = TILING_KEY_VAR;
    Process(seen, workspace, key % 10 == 1, key % 10 == 2, key >= 10);
}
