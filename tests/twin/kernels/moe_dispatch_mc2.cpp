// MoE dispatch in the manner of fused A3 operators: rows straight into the peers' windows, a float flag and a
// count a (source, local expert), polled by DataCopy and a vector sum; queues move the rows.
#include "moe_mc2_base.h"

namespace Mc2Sample {

class MoeDispatch {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR expertIds, GM_ADDR expandXOut, GM_ADDR expandIdxOut,
                                GM_ADDR sendCountsOut, TPipe* pipe, const MoeMc2TilingData* tiling) {
        tpipe_ = pipe;
        info_ = tiling->info;
        core_ = GetBlockIdx();
        pairs_ = info_.bs * info_.k;
        localExperts_ = info_.moeExpertNum / info_.epWorldSize;
        slots_ = info_.epWorldSize * localExperts_;
        rowBytes_ = info_.h * sizeof(DTYPE_X);
        windows_.Init(info_, rowBytes_);
        xGm_ = Gm<DTYPE_X>(x);
        idsGm_ = Gm<int32_t>(expertIds);
        expandXGm_ = Gm<DTYPE_X>(expandXOut);
        expandIdxGm_ = Gm<int32_t>(expandIdxOut);
        sendCountsGm_ = Gm<int32_t>(sendCountsOut);
        uint32_t idBytes = RoundUp(pairs_ * sizeof(int32_t), 256);
        tpipe_->InitBuffer(xQueue_, 2, rowBytes_);
        tpipe_->InitBuffer(idsBuf_, idBytes);
        tpipe_->InitBuffer(compareBuf_, idBytes);
        tpipe_->InitBuffer(workBuf_, idBytes);
        tpipe_->InitBuffer(idxBuf_, idBytes);
        tpipe_->InitBuffer(sumBuf_, UB_ALIGN);
        tpipe_->InitBuffer(blockBuf_, UB_ALIGN);
        tpipe_->InitBuffer(statusBuf_, slots_ * UB_ALIGN);
        tpipe_->InitBuffer(statusWorkBuf_, slots_ * UB_ALIGN);
        tpipe_->InitBuffer(countBuf_, RoundUp(slots_ * sizeof(int32_t), UB_ALIGN));
    }
    __aicore__ inline void Process() {
        AlltoAllDispatch();
        SetStatus();
        WaitDispatch();
        LocalWindowCopy();
    }

private:
    // How many of the first n ids differ from `expert`: |id - expert| cut to 1, summed as the bits of floats.
    __aicore__ inline int32_t Differing(int32_t expert, uint32_t n) {
        LocalTensor<int32_t> ids = idsBuf_.Get<int32_t>();
        LocalTensor<int32_t> compare = compareBuf_.Get<int32_t>();
        LocalTensor<float> sum = sumBuf_.Get<float>();
        Adds(compare, ids, -expert, n);
        PipeBarrier<PIPE_V>();
        LocalTensor<float> magnitude = compare.ReinterpretCast<float>();
        Abs(magnitude, magnitude, n);  // the sign bit goes, whatever else the bits mean
        PipeBarrier<PIPE_V>();
        Mins(compare, compare, 1, n);
        PipeBarrier<PIPE_V>();
        ReduceSum(sum, magnitude, workBuf_.Get<float>(), n);
        SyncFunc<HardEvent::V_S>();
        int32_t result = sum.ReinterpretCast<int32_t>().GetValue(0);
        SyncFunc<HardEvent::S_V>();
        return result;
    }

    __aicore__ inline void AlltoAllDispatch() {
        LocalTensor<int32_t> ids = idsBuf_.Get<int32_t>();
        if (pairs_ > 0) {
            DataCopyPad(ids, idsGm_, {1, static_cast<uint32_t>(pairs_ * sizeof(int32_t)), 0, 0, 0},
                        {false, 0, 0, 0});
        }
        SyncFunc<HardEvent::MTE2_V>();
        SyncFunc<HardEvent::MTE2_S>();
        uint32_t begin, count;
        Split(pairs_, info_.aivNum, core_, begin, count);
        LocalTensor<int32_t> idx = idxBuf_.Get<int32_t>();
        for (uint32_t i = 0; i < count; ++i) {
            uint32_t pair = begin + i;
            int32_t expert = ids.GetValue(pair);
            int32_t position = pair == 0 ? 0 : static_cast<int32_t>(pair) - Differing(expert, pair);
            idx.SetValue(i, position);
            GM_ADDR slot = windows_.Slot(expert / localExperts_,
                                         info_.epRankId * localExperts_ + expert % localExperts_);
            MoveRow(xQueue_, Gm<DTYPE_X>(slot + static_cast<uint64_t>(position) * rowBytes_),
                    xGm_[static_cast<uint64_t>(pair / info_.k) * info_.h], info_.h);
        }
        if (count > 0) {
            SyncFunc<HardEvent::S_MTE3>();
            DataCopyPad(expandIdxGm_[begin], idx,
                        {1, static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0});
        }
    }
    __aicore__ inline void SetStatus() {
        PipeBarrier<PIPE_ALL>();
        SyncAll<true>();
        uint32_t begin, count;
        Split(info_.moeExpertNum, info_.aivNum, core_, begin, count);
        LocalTensor<int32_t> block = blockBuf_.Get<int32_t>();
        for (uint32_t expert = begin; expert < begin + count; ++expert) {
            int32_t rows = pairs_ == 0 ? 0 : static_cast<int32_t>(pairs_) - Differing(expert, pairs_);
            Duplicate(block, 0, UB_ALIGN / sizeof(int32_t));
            SyncFunc<HardEvent::V_S>();
            block.ReinterpretCast<float>().SetValue(0, windows_.Flag());
            block.SetValue(1, rows);
            SyncFunc<HardEvent::S_MTE3>();
            GM_ADDR state = windows_.StateHalf(expert / localExperts_);
            uint32_t place = info_.epRankId + (expert % localExperts_) * info_.epWorldSize;
            DataCopy(Gm<int32_t>(state + place * STATE_OFFSET), block, UB_ALIGN / sizeof(int32_t));
            SyncFunc<HardEvent::MTE3_V>();
            SyncFunc<HardEvent::MTE3_S>();
        }
    }

    __aicore__ inline void WaitDispatch() {
        uint32_t begin, count;
        Split(slots_, info_.aivNum, core_, begin, count);
        if (count > 0) {
            LocalTensor<float> status = statusBuf_.Get<float>();
            LocalTensor<float> sum = sumBuf_.Get<float>();
            GlobalTensor<float> stateGm =
                Gm<float>(windows_.StateHalf(info_.epRankId) + begin * STATE_OFFSET);
            DataCopyParams params{static_cast<uint16_t>(count), 1, STATE_GAP, 0};
            float target = windows_.Flag() * count;
            float got = -1.0f;
            while (got < target - 0.5f || got > target + 0.5f) {
                DataCopy(status, stateGm, params);
                SyncFunc<HardEvent::MTE2_V>();
                // Counts stand beside the flags; as floats they are next to nothing.
                ReduceSum(sum, status, statusWorkBuf_.Get<float>(), static_cast<int32_t>(count * 8));
                SyncFunc<HardEvent::V_S>();
                got = sum.GetValue(0);
                SyncFunc<HardEvent::S_V>();
            }
        }
        SyncAll<true>();
    }

    // Every core loads all counts; it copies the rows of its slots and writes its piece of the prefix sums.
    __aicore__ inline void LocalWindowCopy() {
        LocalTensor<int32_t> status = statusBuf_.Get<int32_t>();
        LocalTensor<int32_t> counts = countBuf_.Get<int32_t>();
        DataCopy(status, Gm<int32_t>(windows_.StateHalf(info_.epRankId)),
                 {static_cast<uint16_t>(slots_), 1, STATE_GAP, 0});
        SyncFunc<HardEvent::MTE2_S>();
        uint32_t begin, count;
        Split(slots_, info_.aivNum, core_, begin, count);
        int32_t before = 0;
        for (uint32_t slot = 0; slot < begin; ++slot) {
            before += status.GetValue(slot * 8 + 1);
        }
        for (uint32_t i = 0; i < count; ++i) {
            uint32_t slot = begin + i;
            int32_t rows = status.GetValue(slot * 8 + 1);
            uint32_t source = slot % info_.epWorldSize, expert = slot / info_.epWorldSize;
            GM_ADDR from = windows_.Slot(info_.epRankId, source * localExperts_ + expert);
            for (int32_t row = 0; row < rows; ++row, ++before) {
                MoveRow(xQueue_, expandXGm_[static_cast<uint64_t>(before) * info_.h],
                        Gm<DTYPE_X>(from + static_cast<uint64_t>(row) * rowBytes_), info_.h);
            }
            counts.SetValue(i, before);
        }
        if (count > 0) {
            SyncFunc<HardEvent::S_MTE3>();
            DataCopyPad(sendCountsGm_[begin], counts,
                        {1, static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0});
        }
    }
    TPipe* tpipe_;
    MoeMc2Info info_;
    Windows windows_;
    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> xQueue_;
    TBuf<> idsBuf_, compareBuf_, workBuf_, idxBuf_, sumBuf_, blockBuf_, statusBuf_, statusWorkBuf_, countBuf_;
    GlobalTensor<DTYPE_X> xGm_, expandXGm_;
    GlobalTensor<int32_t> idsGm_, expandIdxGm_, sendCountsGm_;
    uint32_t core_, pairs_, localExperts_, slots_, rowBytes_;
};
}  // namespace Mc2Sample

extern "C" __global__ __aicore__ void moe_dispatch_mc2(GM_ADDR x, GM_ADDR expertIds, GM_ADDR scales,
                                                       GM_ADDR xActiveMask, GM_ADDR expertScales,
                                                       GM_ADDR expandXOut, GM_ADDR dynamicScalesOut,
                                                       GM_ADDR expandIdxOut, GM_ADDR expertTokenNumsOut,
                                                       GM_ADDR epSendCountsOut, GM_ADDR tpSendCountsOut,
                                                       GM_ADDR expandScalesOut, GM_ADDR workspaceGM,
                                                       GM_ADDR tilingGM) {
    REGISTER_TILING_DEFAULT(MoeMc2TilingData);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    AscendC::TPipe pipe;
    if (TILING_KEY_IS(1000)) {
        GET_TILING_DATA_WITH_STRUCT(MoeMc2TilingData, tilingData, tilingGM);
        Mc2Sample::MoeDispatch op;
        op.Init(x, expertIds, expandXOut, expandIdxOut, epSendCountsOut, &pipe, &tilingData);
        op.Process();
        return;
    }
}
