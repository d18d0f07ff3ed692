// Core 0 counts the launch in a word of GM that the other cores read. Its scalar store stays in its own
// cache.
#include "kernel_operator.h"

using namespace AscendC;

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
