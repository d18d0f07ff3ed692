// What the samples share: the communication context as op sources declare it themselves, small helpers.
#ifndef MOE_MC2_BASE_H
#define MOE_MC2_BASE_H

#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"

// ---- the context of a group on A3 ----

constexpr uint32_t AICPU_MAX_RANK_NUM = 128 * 1024;

struct HcclRankRelationResV2 {
    uint32_t remoteUsrRankId;
    uint32_t remoteWorldRank;
    uint64_t windowsIn;
    uint64_t windowsOut;
    uint64_t windowsExp;
    uint64_t nextTagRes[4];
};
struct RemoteResPtr {
    uint64_t nextHostPtr;
    uint64_t nextDevicePtr;
};
struct HcclOpResParam {
    uint64_t mc2WorkSpace[2];
    uint32_t localUsrRankId;
    uint32_t rankSize;
    uint64_t winSize;
    uint64_t localWindowsIn;
    uint64_t localWindowsOut;
    char hcomId[128];
    uint64_t winExpSize;
    uint64_t localWindowsExp;
    uint32_t rWinStart;
    uint32_t rWinOffset;
    uint64_t version;
    uint64_t localRes[309];
    uint32_t topoInfo[40];
    uint64_t config[6];
    uint64_t hostStateInfo;
    uint64_t aicpuStateInfo;
    uint64_t lockAddr;
    uint32_t rsv[16];
    uint32_t notifysize;
    uint32_t remoteResNum;
    RemoteResPtr remoteRes[AICPU_MAX_RANK_NUM];
};

namespace Mc2Sample {
using namespace AscendC;

template <HardEvent event>
__aicore__ inline void SyncFunc() {
    int32_t eventID = static_cast<int32_t>(GetTPipePtr()->FetchEventID(event));
    SetFlag<event>(eventID);
    WaitFlag<event>(eventID);
}

template <class T>
__aicore__ inline GlobalTensor<T> Gm(GM_ADDR address) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer((__gm__ T*)address);
    return tensor;
}

template <class T>
__aicore__ inline void CleanLine(const GlobalTensor<T>& line) {
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(line);
}

// One row from GM to GM by way of a queue.
template <class T, class Queue>
__aicore__ inline void MoveRow(Queue& queue, const GlobalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
    LocalTensor<T> row = queue.template AllocTensor<T>();
    DataCopy(row, from, count);
    queue.EnQue(row);
    row = queue.template DeQue<T>();
    DataCopy(to, row, count);
    queue.FreeTensor(row);
}

__aicore__ inline GM_ADDR WindowIn(__gm__ HcclOpResParam* context, uint32_t rank) {
    auto remote = (__gm__ HcclRankRelationResV2*)context->remoteRes[rank].nextDevicePtr;
    return (GM_ADDR)(rank == context->localUsrRankId ? context->localWindowsIn : remote->windowsIn);
}
__aicore__ inline GM_ADDR WindowExp(__gm__ HcclOpResParam* context, uint32_t rank) {
    auto remote = (__gm__ HcclRankRelationResV2*)context->remoteRes[rank].nextDevicePtr;
    return (GM_ADDR)(rank == context->localUsrRankId ? context->localWindowsExp : remote->windowsExp);
}
}  // namespace Mc2Sample
#endif
