// All-to-all over an A2 group: every core lays its part of the rows for each peer into windowsOut, core 0
// posts one BatchWrite for all of them, receivers poll the word that travels behind the rows and take it
// down.
#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"
#include "lib/hccl/hccl.h"

using namespace AscendC;

struct All2AllInfo {
    uint32_t rows;   // for each peer
    uint32_t width;  // int32 a row, a multiple of 8
    uint32_t half;   // 0 or 1: which part of the windows
    uint32_t finalize;
};
struct All2AllTilingData {
    Mc2InitTiling init;
    Mc2CcTiling cc;
    All2AllInfo info;
};
struct BatchWriteItem {
    uint64_t localBuf;
    uint64_t remoteBuf;
    uint64_t count;
    uint32_t dataType;
    uint32_t remoteRankId;
};

#ifndef MORE_BYTES
#define MORE_BYTES 0  // a bug, for the test that it is found
#endif

constexpr uint32_t kFlag = 0x7F00FF01;

class KernelAll2All {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, const All2AllTilingData* tiling,
                                TPipe* pipe) {
        info_ = tiling->info;
        hccl_.InitV2(GetHcclContext<HCCL_GROUP_ID_0>(), tiling);
        hccl_.SetCcTilingV2(offsetof(All2AllTilingData, cc));
        rank_ = hccl_.GetRankId();
        world_ = hccl_.GetRankDim();
        core_ = GetBlockIdx();
        cores_ = GetBlockNum();
        rowsBytes_ = info_.rows * info_.width * sizeof(int32_t);
        regionBytes_ = rowsBytes_ + 64;
        workspace_ = workspace;
        xGm_.SetGlobalBuffer((__gm__ int32_t*)x, world_ * info_.rows * info_.width);
        yGm_.SetGlobalBuffer((__gm__ int32_t*)y, world_ * info_.rows * info_.width);
        pipe_ = pipe;
        pipe_->InitBuffer(rowQueue_, 2, info_.width * sizeof(int32_t));
        pipe_->InitBuffer(flagBuf_, 32);
        pipe_->InitBuffer(itemBuf_, world_ * sizeof(BatchWriteItem));
    }
    __aicore__ inline void Process() {
        CopyOut();
        Post();
        for (uint32_t peer = core_; peer < world_; peer += cores_) {
            Receive(peer);
        }
        SyncAll<true>();
        if (info_.finalize != 0 && core_ == 0) {
            hccl_.Finalize();
        }
    }

private:
    template <HardEvent event>
    __aicore__ inline void SyncFunc() {
        int32_t id = static_cast<int32_t>(pipe_->FetchEventID(event));
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }
    __aicore__ inline GM_ADDR Out(uint32_t peer) {
        return hccl_.GetWindowsOutAddr(rank_) + (info_.half * world_ + peer) * regionBytes_;
    }
    __aicore__ inline GM_ADDR In(uint32_t owner, uint32_t source) {
        return hccl_.GetWindowsInAddr(owner) + (info_.half * world_ + source) * regionBytes_;
    }
    __aicore__ inline void MoveRow(const GlobalTensor<int32_t>& to, const GlobalTensor<int32_t>& from) {
        LocalTensor<int32_t> row = rowQueue_.AllocTensor<int32_t>();
        DataCopy(row, from, info_.width);
        rowQueue_.EnQue(row);
        row = rowQueue_.DeQue<int32_t>();
        DataCopy(to, row, info_.width);
        rowQueue_.FreeTensor(row);
    }
    __aicore__ inline void CopyOut() {
        LocalTensor<int32_t> flag = flagBuf_.Get<int32_t>();
        Duplicate(flag, static_cast<int32_t>(kFlag), 8);
        SyncFunc<HardEvent::V_MTE3>();
        for (uint32_t i = core_; i < world_ * info_.rows; i += cores_) {
            uint32_t peer = i / info_.rows, row = i % info_.rows;
            GlobalTensor<int32_t> out;
            out.SetGlobalBuffer((__gm__ int32_t*)Out(peer));
            MoveRow(out[row * info_.width], xGm_[i * info_.width]);
            if (row == 0) {
                DataCopy(out[info_.rows * info_.width], flag, 8);
            }
        }
        PipeBarrier<PIPE_ALL>();
        SyncAll<true>();
    }
    __aicore__ inline void Post() {
        if (core_ != 0) {
            return;
        }
        LocalTensor<uint64_t> words = itemBuf_.Get<uint64_t>();
        for (uint32_t peer = 0; peer < world_; ++peer) {
            words.SetValue(peer * 4, (uint64_t)Out(peer));
            words.SetValue(peer * 4 + 1, (uint64_t)In(peer, rank_));
            words.SetValue(peer * 4 + 2, rowsBytes_ + 32 + MORE_BYTES);
            words.SetValue(peer * 4 + 3, (static_cast<uint64_t>(peer) << 32) | HCCL_DATA_TYPE_INT8);
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint64_t> list;
        list.SetGlobalBuffer((__gm__ uint64_t*)workspace_, world_ * 4);
        DataCopy(list, words, world_ * 4);
        PipeBarrier<PIPE_ALL>();
        hccl_.BatchWrite<true>(workspace_, world_);
    }
    __aicore__ inline void Receive(uint32_t peer) {
        GlobalTensor<int32_t> in;
        in.SetGlobalBuffer((__gm__ int32_t*)In(rank_, peer));
        LocalTensor<int32_t> flag = flagBuf_.Get<int32_t>();
        GlobalTensor<int32_t> flagGm = in[info_.rows * info_.width];
        SyncFunc<HardEvent::MTE3_MTE2>();
        do {
            DataCopy(flag, flagGm, 8);
            SyncFunc<HardEvent::MTE2_S>();
        } while (flag.GetValue(0) != static_cast<int32_t>(kFlag));
        SyncFunc<HardEvent::S_V>();
        Duplicate(flag, 0, 8);
        SyncFunc<HardEvent::V_MTE3>();
        DataCopy(flagGm, flag, 8);
        for (uint32_t row = 0; row < info_.rows; ++row) {
            MoveRow(yGm_[(peer * info_.rows + row) * info_.width], in[row * info_.width]);
        }
    }

    TPipe* pipe_;
    Hccl<HCCL_SERVER_TYPE_AICPU> hccl_;
    All2AllInfo info_;
    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> rowQueue_;
    TBuf<> flagBuf_, itemBuf_;
    GlobalTensor<int32_t> xGm_, yGm_;
    GM_ADDR workspace_;
    uint32_t rank_, world_, core_, cores_, rowsBytes_, regionBytes_;
};

extern "C" __global__ __aicore__ void all2all_batch_write(GM_ADDR x, GM_ADDR y, GM_ADDR workspace,
                                                          GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(All2AllTilingData, tilingData, tiling);
    TPipe pipe;
    KernelAll2All op;
    op.Init(x, y, workspace, &tilingData, &pipe);
    op.Process();
}
