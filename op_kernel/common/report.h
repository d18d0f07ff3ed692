// What core 0 writes when an op fails: the error record and, on a fatal error, abort blocks to the peers.
#ifndef ASCEND_MOE_COMMON_REPORT_H
#define ASCEND_MOE_COMMON_REPORT_H

#include "send.h"
#include "status.h"

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

    // Call on core 0 with the UB free: resets the pipe. `items`: room in GM for a BatchWrite list.
    __aicore__ inline void Write(TPipe& pipe, const OpStatus& status, WindowSender& sender, RdmaLink& link,
                                 GM_ADDR items) {
        AscendC::PipeBarrier<PIPE_ALL>();
        pipe.Reset();
        UbBuf recordBuf, headerBuf, abortBuf, itemBuf, beforeBuf;
        pipe.InitBuffer(recordBuf, kErrorRecordWords * sizeof(int32_t));
        pipe.InitBuffer(headerBuf, 2 * info_->world * kBlock);
        pipe.InitBuffer(abortBuf, kBlock);
        pipe.InitBuffer(itemBuf, info_->world * kBlock);
        pipe.InitBuffer(beforeBuf, kBlock);
        LocalTensor<int32_t> words = recordBuf.Get<int32_t>();
        AscendC::Duplicate(words, static_cast<int32_t>(0), kErrorRecordWords);
        SyncFunc<HardEvent::V_S>();
        words.SetValue(kRecMagic, kRecordMagic);
        words.SetValue(kRecCode, static_cast<int32_t>(status.code));
        words.SetValue(kRecOp, static_cast<int32_t>(op_));
        words.SetValue(kRecEpoch, static_cast<int32_t>(epoch_));
        words.SetValue(kRecRank, static_cast<int32_t>(info_->rank));
        words.SetValue(kRecCulprit, static_cast<int32_t>(status.source));
        words.SetValue(kRecDetail0, static_cast<int32_t>(status.detail0));
        words.SetValue(kRecDetail1, static_cast<int32_t>(status.detail1));
        words.SetValue(kRecDetail2, static_cast<int32_t>(status.detail2));
        words.SetValue(kRecReporter, static_cast<int32_t>(status.reporter));
        words.SetValue(kRecCapacity, static_cast<int32_t>(info_->capacity));
        words.SetValue(kRecWaitedMillis, static_cast<int32_t>(info_->deadlineCycles / (1000 * kCyclesPerMicro)));
        words.SetValue(kRecIds, static_cast<int32_t>(info_->ids));
        words.SetValue(kRecMaxBatch, static_cast<int32_t>(info_->maxBatch));
        words.SetValue(kRecTopK, static_cast<int32_t>(info_->topK));
        words.SetValue(kRecWorld, static_cast<int32_t>(info_->world));
        if (status.code >= kFirstFatal && status.code != kContextMismatch) {
            LocalTensor<uint32_t> headers = headerBuf.Get<uint32_t>();
            LoadHeaders(headers, sender.servers());
            // If this rank has not sent its message yet, it found the failure at entry and awaits nobody.
            if (Arrived(headers, info_->rank)) ListAwaited(headers, words, status);
            if (status.reporter == info_->rank) {
                const LocalTensor<uint32_t> block = abortBuf.Get<uint32_t>();
                SetAbort(block, status, FirstFailure(block));
                PostAborts(headers, block, sender);
                if (info_->transport == kTransportRdma)
                    PostInterNodeAborts(headers, block, sender, itemBuf.Get<uint64_t>(), link, items);
                PostAwaitedAborts(headers, block, sender);
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        if (!AlreadyReported(beforeBuf.Get<int32_t>(), status)) CopyOut(record_, words, kErrorRecordWords);
        if (status.code != kContextMismatch) {
            GlobalTensor<int32_t> own;
            own.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(context_->state(info_->rank) + kErrorRecordOffset),
                                kErrorRecordWords);
            CopyOut(own, words, kErrorRecordWords);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    // Whether the record already holds a failure that must stay. On an NPU the host reads the record after more ops
    // have run, and the first failure explains the others. A fatal failure replaces a collective one.
    __aicore__ inline bool AlreadyReported(const LocalTensor<int32_t>& before, const OpStatus& status) const {
        const DataCopyExtParams params{1, kBlock, 0, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(before, record_, params, pad);
        SyncFunc<HardEvent::MTE2_S>();
        if (before.GetValue(kRecMagic) != kRecordMagic) return false;
        return before.GetValue(kRecCode) >= static_cast<int32_t>(kFirstFatal) || status.code < kFirstFatal;
    }
    // Loads header 0 of every message, [2 parities][W] blocks. Over RDMA messages of inter-node ranks follow their
    // rows; blocks there that are no header become zeros.
    __aicore__ inline void LoadHeaders(const LocalTensor<uint32_t>& headers, const ServerMap& servers) {
        const uint32_t stride = StatusStride(info_->world);
        GlobalTensor<uint32_t> messages;
        messages.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context_->state(info_->rank) + StatusOffset(info_->world, 0, 0)),
            static_cast<uint64_t>(2 * info_->world) * stride / sizeof(uint32_t));
        const DataCopyExtParams params{Pieces(2 * info_->world), kBlock, stride - kBlock, 0, 0};
        const DataCopyPadExtParams<uint32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(headers, messages, params, pad);
        if (info_->transport == kTransportRdma && info_->algorithm != kAlgorithmHierarchy) {
            AscendC::PipeBarrier<PIPE_ALL>();
            LoadInterNodeHeaders(headers, servers);
        }
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline void LoadInterNodeHeaders(const LocalTensor<uint32_t>& headers, const ServerMap& servers) {
        for (uint32_t parity = 0; parity < 2; ++parity) {
            for (uint32_t rank = 0; rank < info_->world; ++rank) {
                if (!servers.InterNode(rank)) continue;
                GlobalTensor<uint32_t> message;
                message.SetGlobalBuffer(InterNodeMessage(*context_, parity, rank), kBlockWords);
                AscendC::DataCopy(headers[HeaderAt(parity, rank)], message, kBlockWords);
                SyncFunc<HardEvent::MTE2_S>();
                const uint32_t at = HeaderAt(parity, rank), epoch = headers.GetValue(at + kH0Epoch);
                if (headers.GetValue(at + kH0Magic) == HeaderWord(epoch) && headers.GetValue(at + kH0Source) == rank)
                    continue;
                for (uint32_t w = 0; w < kBlockWords; ++w) headers.SetValue(at + w, 0);
            }
        }
    }
    __aicore__ inline bool Arrived(const LocalTensor<uint32_t>& headers, uint32_t rank) const {
        return headers.GetValue(HeaderAt(Parity(epoch_), rank) + kH0Magic) == HeaderWord(epoch_);
    }
    __aicore__ inline uint32_t HeaderAt(uint32_t parity, uint32_t rank) const {
        return (parity * info_->world + rank) * kBlockWords;
    }
    // The newest header of a rank that has not arrived: of the previous op, or older.
    __aicore__ inline uint32_t NewestHeader(const LocalTensor<uint32_t>& headers, uint32_t rank) const {
        const uint32_t other = HeaderAt(1 - Parity(epoch_), rank);
        const uint32_t seen = headers.GetValue(other + kH0Magic) ^ kStatusMagic;
        return NextEpoch(seen) == epoch_ ? other : HeaderAt(Parity(epoch_), rank);
    }
    __aicore__ inline void ListAwaited(const LocalTensor<uint32_t>& headers, const LocalTensor<int32_t>& words,
                                       const OpStatus& status) {
        // A message may have arrived before all blocks of its rows.
        const bool late = info_->rdmaFlags != 0 && status.code == kCommTimeout && status.reporter == info_->rank;
        uint32_t count = 0;
        for (uint32_t rank = 0; rank < info_->world; ++rank) {
            if (Arrived(headers, rank) && !(late && rank == status.source)) continue;
            // Messages of other servers may wait for their relay.
            if (info_->algorithm == kAlgorithmHierarchy && rank != status.source) continue;
            if (count < kMaxAwaited) {
                const uint32_t at = kRecAwaited + count * 3, header = NewestHeader(headers, rank);
                words.SetValue(at, static_cast<int32_t>(rank));
                words.SetValue(at + 1, static_cast<int32_t>(headers.GetValue(header + kH0Epoch)));
                words.SetValue(at + 2, static_cast<int32_t>(headers.GetValue(header + kH0OpPhase) >> 24));
            }
            ++count;
        }
        words.SetValue(kRecAwaitedCount, static_cast<int32_t>(count));
    }
    // The op in which this rank failed, or in which its host saw that a peer is gone; AbortWatch compares it. Later ops
    // of this rank post the same block again.
    __aicore__ inline uint32_t FirstFailure(const LocalTensor<uint32_t>& block) const {
        GlobalTensor<uint32_t> own;
        own.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context_->state(info_->rank) + AbortOffset(info_->rank)),
                            kBlockWords);
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(block, own, kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        return block.GetValue(kAbMagic) == kAbortMagic ? block.GetValue(kAbEpoch) : epoch_;
    }
    __aicore__ inline void SetAbort(const LocalTensor<uint32_t>& block, const OpStatus& status, uint32_t epoch) {
        block.SetValue(kAbMagic, kAbortMagic);
        block.SetValue(kAbEpoch, epoch);
        block.SetValue(kAbCode, status.code);
        block.SetValue(kAbCulprit, status.source);
        block.SetValue(kAbReporter, info_->rank);
        block.SetValue(kAbDetail0, status.detail0);
        block.SetValue(kAbDetail1, status.detail1);
        block.SetValue(kAbTag, kAbortMagic);
        SyncFunc<HardEvent::S_MTE3>();
    }
    // Posts to this rank, so that the failure is sticky; to peers that have arrived; through the server to inter-node
    // ranks; and last to awaited ranks, whose memory may be gone.
    __aicore__ inline void PostAborts(const LocalTensor<uint32_t>& headers, const LocalTensor<uint32_t>& block,
                                      WindowSender& sender) {
        sender.PutAbort(info_->rank, block);
        for (uint32_t rank = 0; rank < info_->world; ++rank) {
            if (rank != info_->rank && Arrived(headers, rank) && !sender.servers().InterNode(rank))
                sender.PutAbort(rank, block);
        }
        sender.Flush();
    }
    __aicore__ inline void PostAwaitedAborts(const LocalTensor<uint32_t>& headers, const LocalTensor<uint32_t>& block,
                                             WindowSender& sender) {
        for (uint32_t rank = 0; rank < info_->world; ++rank) {
            if (rank != info_->rank && !Arrived(headers, rank) && !sender.servers().InterNode(rank))
                sender.PutAbort(rank, block);
        }
        sender.Flush();
    }
    // One item of one block per inter-node rank, arrived ranks first.
    __aicore__ inline void PostInterNodeAborts(const LocalTensor<uint32_t>& headers, const LocalTensor<uint32_t>& block,
                                               WindowSender& sender, const LocalTensor<uint64_t>& list, RdmaLink& link,
                                               GM_ADDR items) {
        constexpr uint32_t kItemWords = kBlock / sizeof(uint64_t);
        sender.StageAbort(block);
        uint32_t count = 0;
        for (uint32_t here = 0; here < 2; ++here) {
            for (uint32_t rank = 0; rank < info_->world; ++rank) {
                if (!sender.servers().InterNode(rank) || Arrived(headers, rank) != (here == 0)) continue;
                WindowSender::SetItem(list[count * kItemWords], sender.AbortItemOf(rank));
                ++count;
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint64_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(items),
                               static_cast<uint64_t>(info_->world) * kItemWords);
        AscendC::DataCopy(target, list, count * kItemWords);
        sender.Flush();
        link.Post(items, count);
    }

    const WindowContext* context_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> record_;
    uint32_t op_ = 0;
    uint32_t epoch_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_REPORT_H
