// What WindowContext makes of an A3 context: the first field that differs, then the areas of all ranks; from word 8 on
// the windows again, as they are found in UB, at first and afterwards, and when UB has been given back.
#include "common/contexts.h"

struct ShowPeersTilingData {
    uint32_t rank;
    uint32_t world;
    uint32_t windowKiB;
    uint32_t tableStart;  // put into the context, unless 0
};

extern "C" __global__ __aicore__ void show_peers(GM_ADDR out, GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(ShowPeersTilingData, tiling, tilingGM);
    GM_ADDR address = AscendC::GetHcclContext<0>();
    if (tiling.tableStart != 0) *(__gm__ uint32_t*)(address + 192) = tiling.tableStart;
    moe::MoeDistributeInfo info = {};
    info.contextKind = moe::kContextA3;
    info.rank = tiling.rank;
    info.world = tiling.world;
    info.dataBytes = uint64_t(tiling.windowKiB) * 1024;
    moe::WindowContext context;
    context.Init(address, info);
    const moe::ContextMismatch found = context.Check();
    __gm__ uint64_t* words = (__gm__ uint64_t*)out;
    words[0] = found.field;
    words[1] = found.theirs;
    if (found.field != moe::kContextFieldCount) return;
    for (uint32_t r = 0; r < info.world; ++r) {
        words[2 + 2 * r] = (uint64_t)context.data(r);
        words[3 + 2 * r] = (uint64_t)context.state(r);
    }
    AscendC::TPipe pipe;
    context.LoadPeers(pipe, info);
    moe::SyncFunc<AscendC::HardEvent::MTE2_S>();
    for (uint32_t i = 0; i < 2 * info.world; ++i) words[8 + i] = (uint64_t)context.data(i % info.world);
    AscendC::PipeBarrier<PIPE_ALL>();
    pipe.Reset();
    context.ForgetPeers();
    for (uint32_t r = 0; r < info.world; ++r) words[8 + 2 * info.world + r] = (uint64_t)context.data(r);
}
