// Hccl<>: the communication object of fused kernels. Windows and BatchWrite; the collectives that a server
// executes (AllGather, AlltoAllV, ...) do not exist here and fail to compile by name.
#pragma once

#include <vector>

#include "kernel_operator.h"
#include "twin/api/hccl_context.h"
#include "twin/engine/copy_agent.h"

namespace AscendC {

using HcclHandle = int8_t;
constexpr HcclHandle INVALID_HANDLE_ID = -1;
constexpr int32_t HCCL_SUCCESS = 0;
constexpr int32_t HCCL_FAILED = -1;
constexpr int32_t HCCL_MAX_HANDLE_ID = 63;
constexpr uint32_t HCCL_MAX_RANK_NUM = twin::hccl::kA2Ranks;

enum HcclReduceOp {
    HCCL_REDUCE_SUM = 0,
    HCCL_REDUCE_PROD = 1,
    HCCL_REDUCE_MAX = 2,
    HCCL_REDUCE_MIN = 3,
    HCCL_REDUCE_RESERVED
};
enum HcclDataType {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_INT16 = 1,
    HCCL_DATA_TYPE_INT32 = 2,
    HCCL_DATA_TYPE_FP16 = 3,
    HCCL_DATA_TYPE_FP32 = 4,
    HCCL_DATA_TYPE_INT64 = 5,
    HCCL_DATA_TYPE_UINT64 = 6,
    HCCL_DATA_TYPE_UINT8 = 7,
    HCCL_DATA_TYPE_UINT16 = 8,
    HCCL_DATA_TYPE_UINT32 = 9,
    HCCL_DATA_TYPE_FP64 = 10,
    HCCL_DATA_TYPE_BFP16 = 11,
    HCCL_DATA_TYPE_INT128 = 12,
    HCCL_DATA_TYPE_RESERVED
};
enum HcclServerType { HCCL_SERVER_TYPE_AICPU = 0, HCCL_SERVER_TYPE_END };
enum class CoreType : uint8_t { DEFAULT, ON_AIV, ON_AIC };
enum class ScopeType : uint8_t { ALL, QUEUE, BLOCK, INVALID_TYPE };
struct HcclServerConfig {
    CoreType type;
    int64_t blockId;
};
static constexpr HcclServerConfig DEFAULT_CFG = {CoreType::DEFAULT, 0};

namespace detail {

// One BatchWrite item in GM, as the public documentation lays it out. Kernels define their own struct.
struct WriteItem {
    uint64_t localBuf;
    uint64_t remoteBuf;
    uint64_t count;
    uint32_t dataType;
    uint32_t remoteRankId;
};
static_assert(sizeof(WriteItem) == 32, "BatchWriteItem");

constexpr uint32_t kMostItems = 255;  // for other ranks in a BatchWrite on A2

constexpr uint64_t HcclTypeBytes(uint32_t type) {
    constexpr uint8_t kBytes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
    return type < sizeof(kBytes) ? kBytes[type] : 0;
}

// A communication context, read through the twin's own header in front of it.
class HcclGroup {
public:
    void Open(GM_ADDR context, const twin::Loc& loc) {
        TWIN_RAISE_IF(context == nullptr, kBadArgument, loc, "Hccl: the context is null");
        const uintptr_t at = reinterpret_cast<uintptr_t>(context) - sizeof(twin::hccl::Header);
        twin::FindGm(twin::current_core(), at, sizeof(twin::hccl::Header), loc);
        header_ = reinterpret_cast<twin::hccl::Header*>(at);
        TWIN_RAISE_IF(header_->magic != twin::hccl::kHeaderMagic, kBadArgument, loc,
                      "Hccl: this is no communication context; take it from GetHcclContext");
    }
    bool open() const { return header_ != nullptr; }
    bool a3() const { return header_->layout == twin::hccl::Layout::kA3; }
    uint32_t rank() const { return header_->rank; }
    uint32_t world() const { return header_->world; }
    twin::CopyAgent* agent() const { return header_->agent; }
    void Served() const { ++header_->served; }
    uint64_t window_bytes() const { return a3() ? A3().winSize : A2().winSize; }
    uint64_t In(uint32_t rank) const {
        if (!a3()) return A2().multiFlag != 0 ? A2Of(rank, true) : A2().windowsIn[rank];
        return rank == this->rank() ? A3().localWindowsIn : A3Of(rank).windowsIn;
    }
    uint64_t Out(uint32_t rank) const {
        if (!a3()) return A2().multiFlag != 0 ? A2Of(rank, false) : A2().windowsOut[rank];
        return rank == this->rank() ? A3().localWindowsOut : A3Of(rank).windowsOut;
    }

private:
    const twin::hccl::A3Context& A3() const { return *reinterpret_cast<const twin::hccl::A3Context*>(header_ + 1); }
    const twin::hccl::A3Remote& A3Of(uint32_t rank) const {
        const auto* const context = reinterpret_cast<const uint8_t*>(&A3());
        return *reinterpret_cast<const twin::hccl::A3Pointer*>(context + A3().rWinStart)[rank].nextDevicePtr;
    }
    const twin::hccl::A2Context& A2() const { return *reinterpret_cast<const twin::hccl::A2Context*>(header_ + 1); }
    uint64_t A2Of(uint32_t rank, bool in) const {
        const twin::hccl::A2Remote& data = A2().data[rank];
        if (rank == this->rank()) return in ? data.localInput.addr : data.localOutput.addr;
        return in ? data.remoteInput.addr : data.remoteOutput.addr;
    }
    twin::hccl::Header* header_ = nullptr;
};

}  // namespace detail

// Calls are made by all cores; only the core config.blockId talks to the server. Tasks complete in order.
template <HcclServerType serverType = HcclServerType::HCCL_SERVER_TYPE_AICPU, const auto& config = DEFAULT_CFG>
class Hccl {
public:
    void Init(GM_ADDR context, __gm__ void* = nullptr, TWIN_CALLER) {
        group_.Open(context, loc);
        needs_tiling_ = false;
    }
    // initTiling must be an object of the core, not GM.
    void InitV2(GM_ADDR context, const void* initTiling, TWIN_CALLER) {
        TWIN_RAISE_IF(initTiling == nullptr, kBadArgument, loc, "Hccl::InitV2 without tiling");
        group_.Open(context, loc);
        needs_tiling_ = true;
    }
    int32_t SetCcTiling(__gm__ void* ccOpTilingData) {
        has_tiling_ = group_.open() && ccOpTilingData != nullptr;
        return has_tiling_ ? HCCL_SUCCESS : HCCL_FAILED;
    }
    int32_t SetCcTilingV2(uint64_t) {
        has_tiling_ = group_.open();
        return has_tiling_ ? HCCL_SUCCESS : HCCL_FAILED;
    }

    GM_ADDR GetWindowsInAddr(uint32_t rankId, TWIN_CALLER) {
        CheckRank(rankId, loc);
        return reinterpret_cast<GM_ADDR>(group_.In(rankId));
    }
    GM_ADDR GetWindowsOutAddr(uint32_t rankId, TWIN_CALLER) {
        CheckRank(rankId, loc);
        return reinterpret_cast<GM_ADDR>(group_.Out(rankId));
    }
    uint32_t GetRankId() { return group_.rank(); }
    uint32_t GetRankDim() { return group_.world(); }
    uint16_t GetQueueNum() { return 1; }

    // Copies itemNum pieces of local windows to remote ones, asynchronously, from Commit on; at once with `commit`.
    template <bool commit = false>
    HcclHandle BatchWrite(GM_ADDR batchWriteInfo, uint32_t itemNum, uint16_t queueID = 0, TWIN_CALLER) {
        (void)queueID;
        CheckOpen("BatchWrite", loc);
        TWIN_RAISE_IF(needs_tiling_ && !has_tiling_, kBadArgument, loc, "BatchWrite before SetCcTilingV2");
        if (batchWriteInfo == nullptr || itemNum == 0) return INVALID_HANDLE_ID;
        TWIN_RAISE_IF(handles_ >= HCCL_MAX_HANDLE_ID, kBadArgument, loc, "more than %d tasks before Finalize",
                      HCCL_MAX_HANDLE_ID);
        const auto handle = static_cast<HcclHandle>(handles_++);
        prepared_[handle] = {batchWriteInfo, itemNum};
        if (commit) Commit(handle, loc);
        return handle;
    }
    void Commit(HcclHandle handleId, TWIN_CALLER) {
        CheckOpen("Commit", loc);
        TWIN_RAISE_IF(handleId < 0 || handleId >= handles_, kBadArgument, loc, "Hccl::Commit of handle %d of %d",
                      static_cast<int>(handleId), handles_);
        // Tasks complete in order, and so they start.
        for (; committed_ <= handleId; ++committed_) {
            const Prepared& list = prepared_[committed_];
            if (IsClient()) last_task_ = group_.agent()->Post(Items(list.items, list.count, loc), loc);
        }
    }
    int32_t Wait(HcclHandle handleId, TWIN_CALLER) {
        CheckOpen("Wait", loc);
        if (handleId < 0 || handleId >= handles_) return HCCL_FAILED;
        TWIN_RAISE_IF(handleId >= committed_, kBadArgument, loc, "Hccl::Wait for handle %d before its Commit",
                      static_cast<int>(handleId));
        WaitFor(static_cast<uint32_t>(handleId) + 1, loc);
        return HCCL_SUCCESS;
    }
    int32_t Query(HcclHandle handleId, TWIN_CALLER) {
        CheckOpen("Query", loc);
        if (handleId < 0 || handleId >= handles_) return HCCL_FAILED;
        return group_.agent()->Finished() > static_cast<uint32_t>(handleId) ? 1 : 0;
    }
    template <ScopeType type = ScopeType::ALL>
    void QueueBarrier(uint16_t) {}
    void InterHcclGroupSync(int8_t, HcclHandle) {}
    // Waits until everything posted has left.
    template <bool sync = true>
    void Finalize(TWIN_CALLER) {
        CheckOpen("Finalize", loc);
        TWIN_RAISE_IF(IsClient() && committed_ < handles_, kBadArgument, loc,
                      "Hccl::Finalize before Commit of %d tasks", handles_ - committed_);
        if (sync && IsClient() && last_task_ != 0) WaitFor(last_task_, loc);
        if (IsClient()) group_.Served();
    }
    TWIN_REFUSE_MEMBERS(Hccl);

private:
    struct Prepared {
        GM_ADDR items;
        uint32_t count;
    };
    static bool IsClient() { return GetBlockIdx() == config.blockId; }
    void CheckOpen(const char* what, const twin::Loc& loc) const {
        TWIN_RAISE_IF(!group_.open(), kBadArgument, loc, "Hccl::%s before Init", what);
    }
    void CheckRank(uint32_t rank, const twin::Loc& loc) const {
        CheckOpen("GetWindows...Addr", loc);
        TWIN_RAISE_IF(rank >= group_.world(), kBadArgument, loc, "no rank %u in a group of %u", rank, group_.world());
    }
    void WaitFor(uint32_t task, const twin::Loc& loc) {
        while (group_.agent()->Finished() < task) twin::PollYield(loc);
    }

    // The list as it lies in GM, every item checked: what is read is registered, what is written is the
    // window of the rank that the item names.
    std::vector<twin::CopyItem> Items(GM_ADDR list, uint32_t count, const twin::Loc& loc) const {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(list);
        twin::Core& core = twin::current_core();
        twin::FindGm(core, begin, count * sizeof(detail::WriteItem), loc);
        std::vector<twin::CopyItem> items;
        uint32_t others = 0;
        for (uint32_t i = 0; i < count; ++i) {
            detail::WriteItem item;
            memcpy(&item, reinterpret_cast<const void*>(begin + i * sizeof(item)), sizeof(item));
            const uint64_t bytes = item.count * detail::HcclTypeBytes(item.dataType);
            TWIN_RAISE_IF(detail::HcclTypeBytes(item.dataType) == 0 || item.remoteRankId >= group_.world(),
                          kBadArgument, loc, "BatchWrite item %u: dataType %u, remoteRankId %u in a group of %u", i,
                          item.dataType, item.remoteRankId, group_.world());
            if (bytes == 0) continue;
            const uint64_t window = group_.In(item.remoteRankId);
            TWIN_RAISE_IF(item.remoteBuf < window || item.remoteBuf + bytes > window + group_.window_bytes(),
                          kOutOfBounds, loc, "BatchWrite item %u: %llu bytes that do not lie in windowsIn of rank %u",
                          i, static_cast<unsigned long long>(bytes), item.remoteRankId);
            twin::FindGm(core, item.localBuf, bytes, loc);
            uint32_t* doorbell = twin::FindItemGm(core, item.remoteBuf, bytes, loc).doorbell;
            items.push_back({item.localBuf, item.remoteBuf, bytes, item.remoteRankId, doorbell});
            others += item.remoteRankId != group_.rank();
        }
        TWIN_RAISE_IF(others > detail::kMostItems && !group_.a3(), kBadArgument, loc,
                      "BatchWrite of %u items to other ranks: HCCL's server counts them in 8 bits, %u are the most",
                      others, detail::kMostItems);
        return items;
    }

    detail::HcclGroup group_;
    bool needs_tiling_ = false;
    bool has_tiling_ = false;
    int32_t handles_ = 0;
    int32_t committed_ = 0;  // handles below it
    Prepared prepared_[HCCL_MAX_HANDLE_ID];
    uint32_t last_task_ = 0;
};

}  // namespace AscendC
