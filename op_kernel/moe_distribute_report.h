// What core 0 leaves behind when an op fails: the error record, and on a fatal error abort blocks to the
// peers.
#ifndef ASCEND_MOE_DISTRIBUTE_REPORT_H
#define ASCEND_MOE_DISTRIBUTE_REPORT_H

#include "moe_distribute_send.h"
#include "moe_distribute_status.h"

namespace moe {

class FailureReport {
public:
    __aicore__ inline void Init(const WindowContext& context, const MoeDistributeInfo& info, uint32_t op,
                                uint32_t epoch, GM_ADDR record) {
        context_ = &context;
        info_ = &info;
        op_ = op;
        epoch_ = epoch;
        record_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(record), kErrorRecordWords);
    }

    // Call on core 0 with the UB free: resets the pipe.
    __aicore__ inline void Write(TPipe& pipe, const Verdict& verdict) {
        AscendC::PipeBarrier<PIPE_ALL>();
        pipe.Reset();
        UbBuf recordBuf, headerBuf, abortBuf;
        pipe.InitBuffer(recordBuf, kErrorRecordWords * sizeof(int32_t));
        pipe.InitBuffer(headerBuf, info_->world * kBlock);
        pipe.InitBuffer(abortBuf, kBlock);
        LocalTensor<int32_t> words = recordBuf.Get<int32_t>();
        AscendC::Duplicate(words, static_cast<int32_t>(0), kErrorRecordWords);
        SyncFunc<HardEvent::V_S>();
        words.SetValue(kRecMagic, kRecordMagic);
        words.SetValue(kRecCode, static_cast<int32_t>(verdict.code));
        words.SetValue(kRecOp, static_cast<int32_t>(op_));
        words.SetValue(kRecEpoch, static_cast<int32_t>(epoch_));
        words.SetValue(kRecRank, static_cast<int32_t>(info_->rank));
        words.SetValue(kRecCulprit, static_cast<int32_t>(verdict.source));
        words.SetValue(kRecDetail0, static_cast<int32_t>(verdict.detail0));
        words.SetValue(kRecDetail1, static_cast<int32_t>(verdict.detail1));
        words.SetValue(kRecDetail2, static_cast<int32_t>(verdict.detail2));
        words.SetValue(kRecReporter, static_cast<int32_t>(verdict.reporter));
        words.SetValue(kRecCapacity, static_cast<int32_t>(info_->capacity));
        words.SetValue(kRecWaitedMicros, static_cast<int32_t>(info_->deadlineCycles / kCyclesPerMicro));
        words.SetValue(kRecExperts, static_cast<int32_t>(info_->experts));
        words.SetValue(kRecMaxBatch, static_cast<int32_t>(info_->maxBatch));
        words.SetValue(kRecTopK, static_cast<int32_t>(info_->topK));
        if (verdict.code >= kFirstFatal && verdict.code != kContextMismatch) {
            LocalTensor<uint32_t> headers = headerBuf.Get<uint32_t>();
            LoadHeaders(headers);
            ListAwaited(headers, words);
            if (verdict.reporter == info_->rank) PostAborts(headers, abortBuf.Get<uint32_t>(), verdict);
        }
        SyncFunc<HardEvent::S_MTE3>();
        CopyOut(record_, words, kErrorRecordWords);
        if (verdict.code != kContextMismatch) {
            GlobalTensor<int32_t> own;
            own.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(context_->state(info_->rank) + kErrorRecordOffset),
                kErrorRecordWords);
            CopyOut(own, words, kErrorRecordWords);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    // Header 0 of every source, this parity.
    __aicore__ inline void LoadHeaders(const LocalTensor<uint32_t>& headers) {
        const uint32_t stride = StatusStride(info_->world);
        GlobalTensor<uint32_t> runs;
        runs.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context_->state(info_->rank) +
                                               StatusOffset(info_->world, Parity(epoch_), 0)),
            static_cast<uint64_t>(info_->world) * stride / sizeof(uint32_t));
        const DataCopyExtParams params{static_cast<uint16_t>(info_->world), kBlock, stride - kBlock, 0, 0};
        const DataCopyPadExtParams<uint32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(headers, runs, params, pad);
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline bool Arrived(const LocalTensor<uint32_t>& headers, uint32_t rank) const {
        return headers.GetValue(rank * kBlockWords + kH0Magic) == HeaderWord(epoch_);
    }
    __aicore__ inline void ListAwaited(const LocalTensor<uint32_t>& headers,
                                       const LocalTensor<int32_t>& words) {
        uint32_t count = 0;
        for (uint32_t rank = 0; rank < info_->world; ++rank) {
            if (Arrived(headers, rank)) continue;
            if (count < kMaxAwaited) {
                const uint32_t at = kRecAwaited + count * 3;
                words.SetValue(at, static_cast<int32_t>(rank));
                words.SetValue(at + 1, static_cast<int32_t>(headers.GetValue(rank * kBlockWords + kH0Epoch)));
                words.SetValue(at + 2,
                               static_cast<int32_t>(headers.GetValue(rank * kBlockWords + kH0OpPhase) >> 24));
            }
            ++count;
        }
        words.SetValue(kRecAwaitedCount, static_cast<int32_t>(count));
    }
    // To this rank itself, so that the failure is sticky; to peers that are here; then to those awaited,
    // whose memory may be gone.
    __aicore__ inline void PostAborts(const LocalTensor<uint32_t>& headers,
                                      const LocalTensor<uint32_t>& block, const Verdict& verdict) {
        block.SetValue(kAbMagic, kAbortMagic);
        block.SetValue(kAbEpoch, epoch_);
        block.SetValue(kAbCode, verdict.code);
        block.SetValue(kAbCulprit, verdict.source);
        block.SetValue(kAbOp, op_);
        block.SetValue(kAbReporter, info_->rank);
        block.SetValue(kAbDetail, verdict.detail0);
        block.SetValue(7, 0u);
        SyncFunc<HardEvent::S_MTE3>();
        WindowSender sender;
        sender.Init(*context_, epoch_);
        sender.PutAbort(info_->rank, block);
        for (uint32_t rank = 0; rank < info_->world; ++rank) {
            if (rank != info_->rank && Arrived(headers, rank)) sender.PutAbort(rank, block);
        }
        sender.Flush();
        for (uint32_t rank = 0; rank < info_->world; ++rank) {
            if (rank != info_->rank && !Arrived(headers, rank)) sender.PutAbort(rank, block);
        }
        sender.Flush();
    }

    const WindowContext* context_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> record_;
    uint32_t op_ = 0;
    uint32_t epoch_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_REPORT_H
