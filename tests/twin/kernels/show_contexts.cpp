// What a kernel sees of its communication contexts, by its own struct definitions and through Hccl<>.
#include "adv_api/hccl/hccl.h"
#include "moe_mc2_base.h"

namespace A2 {
struct IbVerbsMemory {
    uint64_t size;
    uint64_t addr;
    uint32_t key;
};
struct IbVerbsData {
    IbVerbsMemory remoteInput, remoteOutput, localInput, localOutput;
    uint8_t res[24];
};
struct HcclA2CombineOpParam {
    uint64_t workSpace;
    uint64_t workSpaceSize;
    uint32_t rankId;
    uint32_t rankNum;
    uint64_t winSize;
    uint64_t windowsIn[32];
    uint64_t windowsOut[32];
    uint8_t res[8328];
    uint8_t multiFlag;
    __gm__ IbVerbsData* data;
    uint64_t dataSize;
    uint64_t sizeOfAiRMAInfo;
    uint64_t aiRMAInfo;
    __gm__ uint64_t* capability;
    uint64_t capabilitySize;
};
}  // namespace A2

// words[0..7] the context's own, then in/out/exp of every rank, then in/out of every rank through Hccl<>.
template <uint32_t group>
__aicore__ inline void Show(GM_ADDR to, bool a3, uint32_t peers) {
    __gm__ uint64_t* words = (__gm__ uint64_t*)to;
    GM_ADDR context = AscendC::GetHcclContext<group>();
    if (context == nullptr) {
        words[0] = ~0ull;
        return;
    }
    AscendC::Hccl<AscendC::HCCL_SERVER_TYPE_AICPU> hccl;
    hccl.Init(context);
    words[0] = hccl.GetRankId();
    words[1] = hccl.GetRankDim();
    for (uint32_t r = 0; r < peers; ++r) {
        words[8 + 3 * peers + 2 * r] = (uint64_t)hccl.GetWindowsInAddr(r);
        words[8 + 3 * peers + 2 * r + 1] = (uint64_t)hccl.GetWindowsOutAddr(r);
    }
    if (a3) {
        auto c = (__gm__ HcclOpResParam*)context;
        words[2] = c->localUsrRankId;
        words[3] = c->rankSize;
        words[4] = c->winSize;
        words[5] = c->winExpSize;
        words[6] = (uint64_t)((GM_ADDR)c + c->rWinStart == (GM_ADDR)c->remoteRes);
        words[7] = c->hcomId[0];
        for (uint32_t r = 0; r < peers; ++r) {
            auto peer = (__gm__ HcclRankRelationResV2*)c->remoteRes[r].nextDevicePtr;
            words[8 + 3 * r] = peer->windowsIn;
            words[8 + 3 * r + 1] = peer->windowsOut;
            words[8 + 3 * r + 2] = peer->windowsExp;
        }
    } else {
        auto c = (__gm__ A2::HcclA2CombineOpParam*)context;
        words[2] = c->rankId;
        words[3] = c->rankNum;
        words[4] = c->winSize;
        words[5] = c->multiFlag;
        words[6] = *c->capability;
        words[7] = c->dataSize / sizeof(A2::IbVerbsData);
        for (uint32_t r = 0; r < peers; ++r) {
            words[8 + 3 * r] = c->multiFlag != 0 ? c->data[r].remoteInput.addr : c->windowsIn[r];
            words[8 + 3 * r + 1] = c->multiFlag != 0 ? c->data[r].remoteOutput.addr : c->windowsOut[r];
            words[8 + 3 * r + 2] = c->data[r].localInput.addr;
        }
    }
}

// tiling: peers of either group, and whether its context is an A3 one.
struct ShowTilingData {
    uint32_t peers[2];
    uint32_t a3[2];
};
extern "C" __global__ __aicore__ void show_contexts(GM_ADDR first, GM_ADDR second, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(ShowTilingData, t, tiling);
    Show<0>(first, t.a3[0] != 0, t.peers[0]);
    Show<1>(second, t.a3[1] != 0, t.peers[1]);
}
