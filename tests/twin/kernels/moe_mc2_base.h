// What the samples share: the communication context as the op source itself declares it, the places of flags
// and rows in the windows, small helpers.
#ifndef MOE_MC2_BASE_H
#define MOE_MC2_BASE_H

#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"

struct MoeMc2Info {
    uint32_t epWorldSize;
    uint32_t epRankId;
    uint32_t moeExpertNum;
    uint32_t globalBs;
    uint32_t bs;
    uint32_t k;
    uint32_t h;
    uint32_t aivNum;
    uint32_t reserved[2];
    uint64_t totalWinSize;
};
struct MoeMc2TilingData {
    Mc2InitTiling mc2InitTiling;
    Mc2CcTiling mc2CcTiling1;
    Mc2CcTiling mc2CcTiling2;
    MoeMc2Info info;
};

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

constexpr uint32_t UB_ALIGN = 32;
constexpr uint32_t WIN_STATE_OFFSET = 512 * 1024;   // one half of the state window
constexpr uint32_t SELF_STATE_OFFSET = 256 * 1024;  // polarity words, in a half
constexpr uint32_t DATA_STATE_OFFSET = 900 * 1024;  // phase words, in the state window
constexpr uint32_t STATE_OFFSET = 512;              // between two flags
constexpr uint32_t WORD_STRIDE = 128;               // between the words of two cores
constexpr uint32_t STATE_GAP = STATE_OFFSET / UB_ALIGN - 1;

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
__aicore__ inline void MoveRow(Queue& queue, const GlobalTensor<T>& to, const GlobalTensor<T>& from,
                               uint32_t count) {
    LocalTensor<T> row = queue.template AllocTensor<T>();
    DataCopy(row, from, count);
    queue.EnQue(row);
    row = queue.template DeQue<T>();
    DataCopy(to, row, count);
    queue.FreeTensor(row);
}

__aicore__ inline uint32_t RoundUp(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit * unit; }

// Which part of `total` this core has.
__aicore__ inline void Split(uint32_t total, uint32_t cores, uint32_t core, uint32_t& begin,
                             uint32_t& count) {
    uint32_t each = total / cores, more = total % cores;
    count = each + (core < more ? 1 : 0);
    begin = each * core + (core < more ? core : more);
}

__aicore__ inline GM_ADDR WindowIn(__gm__ HcclOpResParam* context, uint32_t rank) {
    auto remote = (__gm__ HcclRankRelationResV2*)context->remoteRes[rank].nextDevicePtr;
    return (GM_ADDR)(rank == context->localUsrRankId ? context->localWindowsIn : remote->windowsIn);
}
__aicore__ inline GM_ADDR WindowExp(__gm__ HcclOpResParam* context, uint32_t rank) {
    auto remote = (__gm__ HcclRankRelationResV2*)context->remoteRes[rank].nextDevicePtr;
    return (GM_ADDR)(rank == context->localUsrRankId ? context->localWindowsExp : remote->windowsExp);
}

class Windows {
public:
    // The half that this op uses, and what its flags are to become. Every op on this group calls it once.
    __aicore__ inline void Init(const MoeMc2Info& info, uint32_t rowBytes) {
        context_ = (__gm__ HcclOpResParam*)GetHcclContext<HCCL_GROUP_ID_0>();
        uint32_t word = GetBlockIdx() * WORD_STRIDE;
        half_ = Turn(WindowExp(context_, info.epRankId) + DATA_STATE_OFFSET + word, 1);
        flag_ = Turn(StateHalf(info.epRankId) + SELF_STATE_OFFSET + word, 0x3F800000) == 0 ? 1.0f : 0.0f;
        slotSize_ = static_cast<uint64_t>(info.globalBs / info.epWorldSize) * rowBytes;
        dataHalf_ = half_ * static_cast<uint64_t>(info.moeExpertNum) * slotSize_;
    }
    __aicore__ inline GM_ADDR StateHalf(uint32_t rank) {
        return WindowExp(context_, rank) + half_ * WIN_STATE_OFFSET;
    }
    __aicore__ inline GM_ADDR Slot(uint32_t rank, uint32_t slot) {
        return WindowIn(context_, rank) + dataHalf_ + slot * slotSize_;
    }
    __aicore__ inline float Flag() const { return flag_; }

private:
    // What the word is; it becomes `other`, or 0 again.
    __aicore__ inline int32_t Turn(GM_ADDR address, int32_t other) {
        GlobalTensor<int32_t> word = Gm<int32_t>(address);
        CleanLine(word);
        int32_t value = word.GetValue(0);
        word.SetValue(0, value == 0 ? other : 0);
        CleanLine(word);
        return value;
    }

    __gm__ HcclOpResParam* context_;
    uint32_t half_;
    uint64_t slotSize_;
    uint64_t dataHalf_;
    float flag_;
};
}  // namespace Mc2Sample
#endif
