// MoE combine in the manner of fused A3 operators: a core takes the rows of some ranks back, flags each when
// done; all wait for every rank's flag; tokens are summed in fp32, k ascending.
#include "moe_mc2_base.h"

namespace Mc2Sample {

class MoeCombine {
public:
    __aicore__ inline void Init(GM_ADDR expandX, GM_ADDR expertIds, GM_ADDR expandIdx, GM_ADDR epSendCounts,
                                GM_ADDR scales, GM_ADDR xOut, TPipe* pipe, const MoeMc2TilingData* tiling) {
        tpipe_ = pipe;
        info_ = tiling->info;
        core_ = GetBlockIdx();
        localExperts_ = info_.moeExpertNum / info_.epWorldSize;
        slots_ = info_.epWorldSize * localExperts_;
        pairs_ = info_.bs * info_.k;
        windows_.Init(info_);
        expandXGm_.SetGlobalBuffer((__gm__ DTYPE_X*)expandX);
        idsGm_.SetGlobalBuffer((__gm__ int32_t*)expertIds);
        idxGm_.SetGlobalBuffer((__gm__ int32_t*)expandIdx);
        countsGm_.SetGlobalBuffer((__gm__ int32_t*)epSendCounts);
        scalesGm_.SetGlobalBuffer((__gm__ float*)scales);
        outGm_.SetGlobalBuffer((__gm__ DTYPE_X*)xOut);
        tpipe_->InitBuffer(moveQueue_, 2, info_.h * sizeof(DTYPE_X));
        tpipe_->InitBuffer(countBuf_, RoundUp(slots_ * sizeof(int32_t), UB_ALIGN));
        tpipe_->InitBuffer(statusBuf_, info_.epWorldSize * UB_ALIGN);
        tpipe_->InitBuffer(flagBuf_, UB_ALIGN);
        tpipe_->InitBuffer(sumBuf_, UB_ALIGN);
        tpipe_->InitBuffer(workBuf_, RoundUp(info_.epWorldSize, 8) * UB_ALIGN);
    }
    __aicore__ inline void Process() {
        CopyBack();
        WaitFlags();
        SumTokens();
    }

private:
    __aicore__ inline void CopyBack() {
        LocalTensor<int32_t> counts = countBuf_.Get<int32_t>();
        DataCopyPad(counts, countsGm_, {1, static_cast<uint32_t>(slots_ * sizeof(int32_t)), 0, 0, 0},
                    {false, 0, 0, 0});
        LocalTensor<float> flag = flagBuf_.Get<float>();
        Duplicate(flag, windows_.Flag(), UB_ALIGN / sizeof(float));
        SyncFunc<HardEvent::MTE2_S>();
        SyncFunc<HardEvent::V_MTE3>();
        uint32_t begin, count;
        Split(info_.epWorldSize, info_.aivNum, core_, begin, count);
        for (uint32_t rank = begin; rank < begin + count; ++rank) {
            for (uint32_t expert = 0; expert < localExperts_; ++expert) {
                uint32_t slot = expert * info_.epWorldSize + rank;
                int32_t first = slot == 0 ? 0 : counts.GetValue(slot - 1);
                SendRows(rank, expert, first, counts.GetValue(slot) - first);
            }
            PipeBarrier<PIPE_MTE3>();
            GlobalTensor<float> target;
            target.SetGlobalBuffer((__gm__ float*)(windows_.StateHalf(rank) + info_.epRankId * STATE_OFFSET));
            DataCopy(target, flag, UB_ALIGN / sizeof(float));
        }
    }
    __aicore__ inline void SendRows(uint32_t rank, uint32_t expert, int32_t first, int32_t rows) {
        GlobalTensor<DTYPE_X> target;
        target.SetGlobalBuffer((__gm__ DTYPE_X*)windows_.Slot(rank, info_.epRankId * localExperts_ + expert));
        for (int32_t i = 0; i < rows; ++i) {
            LocalTensor<DTYPE_X> row = moveQueue_.AllocTensor<DTYPE_X>();
            DataCopy(row, expandXGm_[static_cast<uint64_t>(first + i) * info_.h], info_.h);
            moveQueue_.EnQue(row);
            row = moveQueue_.DeQue<DTYPE_X>();
            DataCopy(target[static_cast<uint64_t>(i) * info_.h], row, info_.h);
            moveQueue_.FreeTensor(row);
        }
    }

    __aicore__ inline void WaitFlags() {
        uint32_t begin, count;
        Split(info_.epWorldSize, info_.aivNum, core_, begin, count);
        if (count > 0) {
            LocalTensor<float> status = statusBuf_.Get<float>();
            LocalTensor<float> sum = sumBuf_.Get<float>();
            GlobalTensor<float> stateGm;
            stateGm.SetGlobalBuffer(
                (__gm__ float*)(windows_.StateHalf(info_.epRankId) + begin * STATE_OFFSET));
            DataCopyParams params{static_cast<uint16_t>(count), 1, STATE_GAP, 0};
            SumParams sumParams{1, count * 8, count * 8};
            float target = windows_.Flag() * count * 8;
            float got = -1.0f;
            while (got < target - 0.5f || got > target + 0.5f) {
                DataCopy<float>(status, stateGm, params);
                SyncFunc<HardEvent::MTE2_V>();
                Sum(sum, status, workBuf_.Get<uint8_t>(), sumParams);
                SyncFunc<HardEvent::V_S>();
                got = sum.GetValue(0);
                SyncFunc<HardEvent::S_V>();
            }
        }
        SyncAll<true>();
    }

    __aicore__ inline void SumTokens() {
        uint32_t begin, count;
        Split(info_.bs, info_.aivNum, core_, begin, count);
        if (count == 0) {
            return;
        }
        tpipe_->Reset();
        uint32_t few = RoundUp(count * info_.k * sizeof(int32_t), UB_ALIGN), floats = info_.h * sizeof(float);
        tpipe_->InitBuffer(rowQueue_, 2, info_.h * sizeof(DTYPE_X));
        tpipe_->InitBuffer(outQueue_, 1, info_.h * sizeof(DTYPE_X));
        tpipe_->InitBuffer(idsBuf_, few);
        tpipe_->InitBuffer(idxBuf_, few);
        tpipe_->InitBuffer(scaleBuf_, few);
        tpipe_->InitBuffer(rowBuf_, floats);
        tpipe_->InitBuffer(accBuf_, floats);
        LocalTensor<int32_t> ids = idsBuf_.Get<int32_t>(), idx = idxBuf_.Get<int32_t>();
        LocalTensor<float> scales = scaleBuf_.Get<float>();
        uint32_t first = begin * info_.k;
        DataCopyExtParams params{1, static_cast<uint32_t>(count * info_.k * sizeof(int32_t)), 0, 0, 0};
        DataCopyPad(ids, idsGm_[first], params, {false, 0, 0, 0});
        DataCopyPad(idx, idxGm_[first], params, {false, 0, 0, 0});
        DataCopyPad(scales, scalesGm_[first], params, {false, 0, 0, 0.0f});
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t token = 0; token < count; ++token) {
            LocalTensor<float> acc = accBuf_.Get<float>(), value = rowBuf_.Get<float>();
            Duplicate(acc, 0.0f, info_.h);
            for (uint32_t k = 0; k < info_.k; ++k) {
                uint32_t pair = token * info_.k + k;
                FetchRow(ids.GetValue(pair), idx.GetValue(pair));
                LocalTensor<DTYPE_X> row = rowQueue_.DeQue<DTYPE_X>();
                PipeBarrier<PIPE_V>();
                Cast(value, row, RoundMode::CAST_NONE, info_.h);
                PipeBarrier<PIPE_V>();
                rowQueue_.FreeTensor(row);
                Muls(value, value, scales.GetValue(pair), info_.h);
                PipeBarrier<PIPE_V>();
                Add(acc, acc, value, info_.h);
            }
            LocalTensor<DTYPE_X> out = outQueue_.AllocTensor<DTYPE_X>();
            PipeBarrier<PIPE_V>();
            Cast(out, acc, RoundMode::CAST_RINT, info_.h);
            PipeBarrier<PIPE_V>();
            outQueue_.EnQue(out);
            out = outQueue_.DeQue<DTYPE_X>();
            DataCopy(outGm_[static_cast<uint64_t>(begin + token) * info_.h], out, info_.h);
            outQueue_.FreeTensor(out);
        }
    }
    __aicore__ inline void FetchRow(int32_t expert, int32_t position) {
        GlobalTensor<DTYPE_X> from;
        from.SetGlobalBuffer((__gm__ DTYPE_X*)windows_.Slot(info_.epRankId, expert));
        LocalTensor<DTYPE_X> row = rowQueue_.AllocTensor<DTYPE_X>();
        DataCopy(row, from[static_cast<uint64_t>(position) * info_.h], info_.h);
        rowQueue_.EnQue(row);
    }

    TPipe* tpipe_;
    MoeMc2Info info_;
    Windows windows_;
    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> moveQueue_;
    TQue<QuePosition::VECIN, 1> rowQueue_;
    TQue<QuePosition::VECOUT, 1> outQueue_;
    TBuf<> countBuf_, statusBuf_, flagBuf_, sumBuf_, workBuf_, idsBuf_, idxBuf_, scaleBuf_, rowBuf_, accBuf_;
    GlobalTensor<DTYPE_X> expandXGm_, outGm_;
    GlobalTensor<int32_t> idsGm_, idxGm_, countsGm_;
    GlobalTensor<float> scalesGm_;
    uint32_t core_, localExperts_, slots_, pairs_;
};
}  // namespace Mc2Sample

extern "C" __global__ __aicore__ void moe_combine_mc2(GM_ADDR expandX, GM_ADDR expertIds, GM_ADDR expandIdx,
                                                      GM_ADDR epSendCounts, GM_ADDR expertScales,
                                                      GM_ADDR tpSendCounts, GM_ADDR xOut, GM_ADDR workspaceGM,
                                                      GM_ADDR tilingGM) {
    REGISTER_TILING_DEFAULT(MoeMc2TilingData);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    AscendC::TPipe pipe;
    if (TILING_KEY_IS(1000)) {
        GET_TILING_DATA_WITH_STRUCT(MoeMc2TilingData, tilingData, tilingGM);
        Mc2Sample::MoeCombine op;
        op.Init(expandX, expertIds, expandIdx, epSendCounts, expertScales, xOut, &pipe, &tilingData);
        op.Process();
    }
}
