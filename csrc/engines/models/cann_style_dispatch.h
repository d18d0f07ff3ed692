// Dispatch in the style of CANN's A3 operator, from its public description: every (token, k) pair reads and
// quantises its row again, all cores meet before 32-byte status stores, one an expert, all cores poll their
// share of them and meet again, then copy rows out of the window with three stores a row and meet once more
// before the token numbers. (The notes on UBEP speak of five phases with SyncAll between them; the operator's
// description has these three.)
#pragma once

#include "cann_style_quantize.h"
#include "protocol/tiling.h"

namespace models {

struct DispatchTensors {
    GM_ADDR x;
    GM_ADDR expertIds;
    GM_ADDR expandX;
    GM_ADDR dynamicScales;
    GM_ADDR triples;
    GM_ADDR tokenNums;
    GM_ADDR recvCounts;
    GM_ADDR workspace;
};

template <typename XType, bool kQuant>
class CannStyleDispatch {
public:
    __aicore__ inline void Init(const DispatchTensors& tensors, const MoeDistributeDispatchTiling& tiling) {
        gm_ = tensors;
        info_ = &tiling.info;
        numsType_ = tiling.tokenNumsType;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        context_.Init(AscendC::GetHcclContext<0>(), *info_);
        wire_ = PayloadBytes(info_->hidden, kQuant ? sizeof(int8_t) : sizeof(XType));
        unit_ = static_cast<uint32_t>(AlignTo(wire_ + 2 * kBlock, 512));
        slotBytes_ = static_cast<uint64_t>(info_->maxBatch) * unit_;
        const uint64_t combine = static_cast<uint64_t>(info_->maxBatch) * info_->topK *
                                 AlignTo(info_->hidden * sizeof(XType), 512);
        half_ = TakeHalf(context_, kDispatchPhase, core_);
        rowsAt_ = kStatusBytes + half_ * ((info_->dataBytes - kStatusBytes) / 2 / 512 * 512) + combine;
        slots_ = info_->world * info_->localExperts;
        first_ = PartBegin(slots_, core_, info_->cores);
        mine_ = PartBegin(slots_, core_ + 1, info_->cores) - first_;
    }
    __aicore__ inline void Process(TPipe& pipe) {
        pipe_ = &pipe;
        Send();
        SetStatus();
        WaitStatus();
        LocalWindowCopy();
    }

private:
    __aicore__ inline GlobalTensor<int8_t> Bytes(GM_ADDR at, uint64_t bytes) const {
        GlobalTensor<int8_t> view;
        view.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(at), bytes);
        return view;
    }
    __aicore__ inline GlobalTensor<float> Status(uint32_t rank, uint32_t slot, uint32_t blocks) const {
        GlobalTensor<float> view;
        view.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(context_.data(rank) + half_ * kHalfStatusBytes +
                                                             static_cast<uint64_t>(slot) * kBlock),
                             blocks * kBlockWords);
        return view;
    }
    __aicore__ inline void LoadIds() {
        const uint32_t pairs = info_->batch * info_->topK;
        pipe_->InitBuffer(idBuf_, static_cast<uint32_t>(CeilTo(pairs * sizeof(int32_t), 256)));
        count_.Init(*pipe_, pairs);
        GlobalTensor<int32_t> ids;
        ids.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(gm_.expertIds), pairs);
        CopyIn(idBuf_.Get<int32_t>(), ids, pairs);
        SyncFunc<HardEvent::MTE2_S>();
        SyncFunc<HardEvent::MTE2_V>();
    }

    __aicore__ inline void Send() {
        MOE_PHASE("AlltoAllDispatch");
        LoadIds();
        pipe_->InitBuffer(inQueue_, 2, static_cast<uint32_t>(CeilTo(info_->hidden * sizeof(XType), kBlock)));
        pipe_->InitBuffer(outQueue_, 2, unit_);
        if constexpr (kQuant) quantizer_.Init(*pipe_, info_->hidden);
        const uint32_t pairs = info_->batch * info_->topK;
        const uint32_t end = PartBegin(pairs, core_ + 1, info_->cores);
        for (uint32_t i = PartBegin(pairs, core_, info_->cores); i < end; ++i) {
            const int32_t id = idBuf_.Get<int32_t>().GetValue(i);
            const uint32_t position = count_.Of(idBuf_.Get<int32_t>(), i, id);
            SendPair(i, static_cast<uint32_t>(id), position);
        }
    }
    __aicore__ inline void SendPair(uint32_t pair, uint32_t id, uint32_t position) {
        const uint32_t token = pair / info_->topK;
        const uint32_t rowBytes = static_cast<uint32_t>(info_->hidden * sizeof(XType));
        LocalTensor<int8_t> in = inQueue_.template AllocTensor<int8_t>();
        CopyIn(in, Bytes(gm_.x + static_cast<uint64_t>(token) * rowBytes, rowBytes), rowBytes);
        inQueue_.EnQue(in);
        in = inQueue_.template DeQue<int8_t>();
        LocalTensor<int8_t> out = outQueue_.template AllocTensor<int8_t>();
        SyncFunc<HardEvent::MTE3_S>();
        if constexpr (kQuant) {
            quantizer_.Quantize(out, in.template ReinterpretCast<XType>());
        } else {
            AscendC::DataCopy(out, in, static_cast<uint32_t>(CeilTo(rowBytes, kBlock)));
        }
        inQueue_.FreeTensor(in);
        LocalTensor<int32_t> triple = out[wire_ + kBlock].template ReinterpretCast<int32_t>();
        triple.SetValue(0, static_cast<int32_t>(info_->rank));
        triple.SetValue(1, static_cast<int32_t>(token));
        triple.SetValue(2, static_cast<int32_t>(pair % info_->topK));
        SyncFunc<HardEvent::S_MTE3>();
        outQueue_.EnQue(out);
        out = outQueue_.template DeQue<int8_t>();
        const uint32_t owner = id / info_->localExperts, local = id % info_->localExperts;
        const uint32_t bytes = wire_ + kBlock + kTripleWords * static_cast<uint32_t>(sizeof(int32_t));
        CopyOut(Bytes(Row(context_.data(owner), info_->rank, local, position), bytes), out, bytes);
        outQueue_.FreeTensor(out);
    }
    __aicore__ inline GM_ADDR Row(GM_ADDR window, uint32_t source, uint32_t local, uint32_t position) const {
        const uint64_t slot = static_cast<uint64_t>(source) * info_->localExperts + local;
        return window + rowsAt_ + slot * slotBytes_ + static_cast<uint64_t>(position) * unit_;
    }

    // Each core counts for its share of the experts; flags leave when the slowest core's last row has.
    __aicore__ inline void SetStatus() {
        MOE_PHASE("SetStatus");
        const uint32_t begin = PartBegin(info_->experts, core_, info_->cores);
        const uint32_t end = PartBegin(info_->experts, core_ + 1, info_->cores);
        pipe_->InitBuffer(statusBuf_, Max(end - begin, 1) * kBlock);
        LocalTensor<int32_t> status = statusBuf_.Get<int32_t>();
        AscendC::Duplicate(status, static_cast<int32_t>(0), Max(end - begin, 1) * kBlockWords);
        SyncFunc<HardEvent::V_S>();
        for (uint32_t e = begin; e < end; ++e) {
            const uint32_t rows =
                count_.Of(idBuf_.Get<int32_t>(), info_->batch * info_->topK, static_cast<int32_t>(e));
            status.ReinterpretCast<float>().SetValue((e - begin) * kBlockWords, 1.0f);
            status.SetValue((e - begin) * kBlockWords + 1, static_cast<int32_t>(rows));
        }
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        for (uint32_t e = begin; e < end; ++e) {
            const uint32_t slot = e % info_->localExperts * info_->world + info_->rank;
            AscendC::DataCopy(Status(e / info_->localExperts, slot, 1),
                              status.ReinterpretCast<float>()[(e - begin) * kBlockWords], kBlockWords);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    // The share's flags; its counts; and the sum of its counts to all cores, by way of the workspace.
    __aicore__ inline void WaitStatus() {
        MOE_PHASE("WaitStatus");
        pipe_->Reset();
        wait_.Init(*pipe_, mine_);
        pipe_->InitBuffer(countBuf_, PaddedInts(Max(mine_, 1)) * sizeof(int32_t));
        pipe_->InitBuffer(statusBuf_, info_->cores * kBlock);
        LocalTensor<int32_t> counts = countBuf_.Get<int32_t>(), shared = statusBuf_.Get<int32_t>();
        int32_t sum = 0;
        if (mine_ > 0) {
            const LocalTensor<float> read = wait_.Wait(Status(info_->rank, first_, mine_), mine_, 1);
            for (uint32_t i = 0; i < mine_; ++i) {
                const int32_t rows = read.template ReinterpretCast<int32_t>().GetValue(i * kBlockWords + 1);
                counts.SetValue(i, rows);
                sum += rows;
            }
            wait_.Clear(Status(info_->rank, first_, mine_), mine_);
        }
        SyncFunc<HardEvent::S_V>();
        AscendC::Duplicate(shared, sum, info_->cores * kBlockWords);
        SyncFunc<HardEvent::V_MTE3>();
        // A column: the block of this core in the row of every core.
        const AscendC::DataCopyParams column(static_cast<uint16_t>(info_->cores), 1, 0,
                                             static_cast<uint16_t>(info_->cores - 1));
        AscendC::DataCopy(Sums(core_, info_->cores * info_->cores - core_), shared, column);
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        AscendC::DataCopy(shared, Sums(core_ * info_->cores, info_->cores), info_->cores * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        before_ = 0;
        for (uint32_t c = 0; c < core_; ++c)
            before_ += static_cast<uint32_t>(shared.GetValue(c * kBlockWords));
    }
    __aicore__ inline GlobalTensor<int32_t> Sums(uint32_t block, uint32_t blocks) const {
        GlobalTensor<int32_t> view;
        view.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(gm_.workspace) + block * kBlockWords,
                             blocks * kBlockWords);
        return view;
    }

    // Window rows of this core's slots to the outputs: payload, scale and triple of every row by themselves.
    __aicore__ inline void LocalWindowCopy() {
        MOE_PHASE("LocalWindowCopy");
        pipe_->InitBuffer(copyQueue_, 2, unit_);
        pipe_->InitBuffer(endBuf_, PaddedInts(Max(mine_, 1)) * sizeof(int32_t));
        uint32_t row = before_;
        for (uint32_t i = 0; i < mine_; ++i) {
            const uint32_t slot = first_ + i,
                           count = static_cast<uint32_t>(countBuf_.Get<int32_t>().GetValue(i));
            for (uint32_t position = 0; position < count; ++position, ++row)
                CopyRow(Row(context_.data(info_->rank), slot % info_->world, slot / info_->world, position),
                        row);
            endBuf_.Get<int32_t>().SetValue(i, static_cast<int32_t>(row));
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int32_t> counts;
        counts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(gm_.recvCounts), slots_);
        if (mine_ > 0) CopyOut(counts[first_], endBuf_.Get<int32_t>(), mine_);
        AscendC::PipeBarrier<PIPE_ALL>();
        if (info_->localExperts > 1) AscendC::SyncAll<true>();
        if (core_ + 1 == info_->cores) TokenNums(counts);
        AscendC::PipeBarrier<PIPE_ALL>();
    }
    __aicore__ inline void CopyRow(GM_ADDR from, uint32_t row) {
        const uint32_t rowBytes = info_->hidden * (kQuant ? sizeof(int8_t) : sizeof(XType));
        LocalTensor<int8_t> chunk = copyQueue_.template AllocTensor<int8_t>();
        AscendC::DataCopy(chunk, Bytes(from, wire_ + 2 * kBlock), wire_ + 2 * kBlock);
        copyQueue_.EnQue(chunk);
        chunk = copyQueue_.template DeQue<int8_t>();
        CopyOut(Bytes(gm_.expandX + static_cast<uint64_t>(row) * rowBytes, rowBytes), chunk, rowBytes);
        if constexpr (kQuant) {
            CopyOut(Bytes(gm_.dynamicScales + static_cast<uint64_t>(row) * sizeof(float), sizeof(float)),
                    chunk[wire_], sizeof(float));
        }
        const uint32_t triple = kTripleWords * sizeof(int32_t);
        CopyOut(Bytes(gm_.triples + static_cast<uint64_t>(row) * triple, triple), chunk[wire_ + kBlock],
                triple);
        copyQueue_.FreeTensor(chunk);
    }
    __aicore__ inline void TokenNums(const GlobalTensor<int32_t>& counts) {
        pipe_->Reset();
        pipe_->InitBuffer(countBuf_, PaddedInts(slots_) * sizeof(int32_t));
        pipe_->InitBuffer(endBuf_, info_->localExperts * sizeof(int64_t) + kBlock);
        CopyIn(countBuf_.Get<int32_t>(), counts, slots_);
        SyncFunc<HardEvent::MTE2_S>();
        LocalTensor<int64_t> nums = endBuf_.Get<int64_t>();
        int32_t before = 0;
        for (uint32_t l = 0; l < info_->localExperts; ++l) {
            const int32_t end = countBuf_.Get<int32_t>().GetValue((l + 1) * info_->world - 1);
            nums.SetValue(l, numsType_ == 0 ? end : end - before);
            before = end;
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int64_t> out;
        out.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(gm_.tokenNums), info_->localExperts);
        CopyOut(out, nums, info_->localExperts);
    }

    DispatchTensors gm_;
    const MoeDistributeInfo* info_ = nullptr;
    TPipe* pipe_ = nullptr;
    WindowContext context_;
    EqualCount count_;
    FlagWait wait_;
    Quantizer<XType> quantizer_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    UbBuf idBuf_, statusBuf_, countBuf_, endBuf_;
    uint32_t numsType_ = 1, core_ = 0, half_ = 0, wire_ = 0, unit_ = 0, slots_ = 0, first_ = 0, mine_ = 0,
             before_ = 0;
    uint64_t slotBytes_ = 0, rowsAt_ = 0;
};

}  // namespace models
