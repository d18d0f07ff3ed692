// What kernels in use do against the API's rules, and what no kernel should do, by tiling key.
#include "moe_mc2_base.h"

using namespace Mc2Sample;

extern "C" __global__ __aicore__ void habits(GM_ADDR x, GM_ADDR y) {
    if (GetBlockIdx() != 0) return;
    TPipe pipe;
    TBuf<> buf, small;
    pipe.InitBuffer(buf, 192);
    pipe.InitBuffer(small, 64);
    LocalTensor<float> row = buf.Get<float>(), words = small.Get<float>();
    DataCopy(row, Gm<float>(x), 48);
    SyncFunc<HardEvent::MTE2_V>();
    if (TILING_KEY_IS(0)) DataCopy(row, Gm<float>(x), 0);
    if (TILING_KEY_IS(1)) DataCopy(Gm<float>(y), row, 0);
    if (TILING_KEY_IS(2) || TILING_KEY_IS(3)) {
        if (TILING_KEY_IS(2)) Sum(row, row, SumParams{2, 24, 24});
        if (TILING_KEY_IS(3)) Sum(words, row, SumParams{4, 12, 12});
        SyncFunc<HardEvent::V_MTE3>();
        DataCopy(Gm<float>(y), TILING_KEY_IS(2) ? row : words, 8);
    }
    PipeBarrier<PIPE_V>();
    if (TILING_KEY_IS(4)) Duplicate(words, 1.0f, 24);
    uint64_t firstOfBlocks[2] = {0x0101010101010101, 0};
    if (TILING_KEY_IS(5)) Duplicate(words, 1.0f, firstOfBlocks, 1, 1, 8);
    volatile uint32_t* nowhere = (volatile uint32_t*)16;
    if (TILING_KEY_IS(10)) *(__gm__ uint32_t*)y = *nowhere;
    if (TILING_KEY_IS(11)) *nowhere = 1;
    if (TILING_KEY_IS(12)) *(__gm__ uint32_t*)y = *(volatile uint32_t*)0xdead000000000000;
}
