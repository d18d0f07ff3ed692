// y = 2 * x. The vector unit starts on a tile that MTE2 has not finished loading.
#include "kernel_operator.h"

using namespace AscendC;

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
