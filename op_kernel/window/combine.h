// MoeDistributeCombine, algorithm "window": expert rows go back to the window of the rank whose token they
// are. That rank sums the K rows of each token, weighted, in fp32 and in ascending k.
//
// V2 here means that rows have triples (source rank, token, k): the V2 contract where no rank is reached by
// RDMA. Everything else is V1. "Source" is the rank whose token a row is. A: rows of expand_x.
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 0     | Exchange::Enter     | all          | context, epoch word    | nothing                  |
// 1     | RoutingTable::      | all: a share | expert_ids [BS][K]     | workspace: histograms    | cores of
//       | Count,              | of the       | int32, x_active_mask,  | [cores][E] int32; core   | the rank
//       | LoadAllSegments,    | pairs, all   | ep_send_counts [L*W]   | 0, after the meeting:    |
//       | Exchange::Open      | segments     | int32; core 0: abort   | epoch word               |
//       |                     |              | blocks                 |                          |
// 2     | Accumulate, Place,  | all; core 0  | histograms             | workspace: totals [E]    |
//       | StoreTotals         | stores       |                        | int32                    |
// 3     | SetWaitTp-          | all: a share | expand_x [A][H]; V2:   | the sources' halves:     | cores of
//       | StatusAndDisPatch,  | of the rows  | triples [A][3] int32;  | rows                     | the rank
//       | MeetAfterSend       |              | V1, only to check it:  |                          |
//       |                     |              | expand_idx [BS*K]      |                          |
//       |                     |              | int32                  |                          |
// 4     | SetStatus           | all: a share | nothing: the segments  | a status message to      | RDMA:
//       |                     | of the peers | are in UB              | every rank; RDMA: staged | cores of
//       |                     |              |                        | with a BatchWrite item,  | the rank
//       |                     |              |                        | core 0 posts the items   |
// 5     | WaitStatus, Arrived | all: a share | status messages, abort | nothing: compares their  | all
//       |                     | of the       | blocks                 | counts with its totals   | ranks,
//       |                     | owners       |                        | in UB                    | then
//       |                     |              |                        |                          | cores of
//       |                     |              |                        |                          | the rank
// 6     | LocalWindowCopy     | all: a share | rows in the own half,  | x [BS][H]                |
//       |                     | of (token,   | expert_ids,            |                          |
//       |                     | part of H)   | x_active_mask, totals, |                          |
//       |                     |              | expert_scales [BS][K]  |                          |
//       |                     |              | fp32, V1: expand_idx,  |                          |
//       |                     |              | shared_expert_x        |                          |
//       |                     |              | [BS][H]                |                          |
//
// Wrong ids or counts end in phase 1, wrong triples in phase 3: the status messages of phase 4 then carry the
// error, and every rank raises it after phase 5. A RoutingMismatch (phases 3 and 5) is this rank's alone.
// After any failure Leave writes zeros into x, and core 0 the error record.
#ifndef ASCEND_MOE_WINDOW_COMBINE_H
#define ASCEND_MOE_WINDOW_COMBINE_H

#include "../common/inputs.h"
#include "sum.h"

namespace moe {

template <typename XType>
class MoeDistributeCombine {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        triples_ = info_->triples != 0;
        rowBytes_ = static_cast<uint32_t>(info_->hidden * sizeof(XType));
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpCombine, args_.workspace, args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }

private:
    __aicore__ inline void Run() {
        BuffInit();
        if (triples_) sendCounts_.Load(args_.epSendCounts);
        Verdict mine = routing_.Count();
        Worsen(mine, triples_ ? CheckSendCounts() : LoadAllSegments());
        if (!exchange_.Open(mine)) {
            Leave();
            return;
        }
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        const bool rdma = info_->transport == kTransportRdma;
        exchange_.MeetAfterSend(rdma ? SetWaitTpStatusAndDisPatch<true>() : SetWaitTpStatusAndDisPatch<false>());
        exchange_.SetStatus(*this, rowBytes_);
        if (!exchange_.WaitStatus(*this)) {
            Leave();
            return;
        }
        LocalWindowCopy();
    }

public:
    // Exchange::SetStatus calls Select and Rows: rows of a local expert that go back to `peer`.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t localExpert) {
        const uint32_t slot = localExpert * info_->world + peer;
        return triples_ ? sendCounts_.End(slot) - sendCounts_.Start(slot) : segments_.End(slot) - segments_.Start(slot);
    }
    // Exchange::WaitStatus calls this for each message of this core's share.
    __aicore__ inline Verdict Arrived(uint32_t source, const LocalTensor<uint32_t>& message) {
        return CompareCounts(*info_, routing_, source, message);
    }

private:
    // UB plan 1 (phases 1 to 5): routing tables, segments of expand_x, two chunks of rows on their way.
    __aicore__ inline void BuffInit() {
        MOE_PHASE("BuffInit");
        exchange_.BoardInit();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
        if (triples_) {
            sendCounts_.Init(exchange_.pipe(), *info_);
            exchange_.pipe().InitBuffer(tripleBuf_, PaddedInts(tiling_->sendRows * kTripleWords) * sizeof(int32_t));
        } else {
            segments_.Init(exchange_.pipe(), *info_);
            exchange_.pipe().InitBuffer(indexBuf_, kChunkPairs * sizeof(int32_t));
            exchange_.pipe().InitBuffer(prefixBuf_, PaddedInts(segments_.slots()) * sizeof(int32_t));
        }
        exchange_.pipe().InitBuffer(copyQueue_, 2, tiling_->sendRows * rowBytes_);
    }

    __aicore__ inline Verdict LoadAllSegments() {
        const Verdict verdict = LoadSegments(*info_, args_.epSendCounts, prefixBuf_.Get<int32_t>(), segments_);
        if (verdict.code == kOk && info_->transport == kTransportRdma) segments_.AlignEnd();
        return verdict;
    }

    __aicore__ inline Verdict CheckSendCounts() {
        SyncFunc<HardEvent::MTE2_V>();
        SyncFunc<HardEvent::MTE2_S>();
        return sendCounts_.Check();
    }

    // Sends this core's share of the rows back to their sources. V1: checks its share of expand_idx before.
    template <bool kRdma>
    __aicore__ inline Verdict SetWaitTpStatusAndDisPatch() {
        MOE_PHASE("SetWaitTpStatusAndDisPatch");
        Verdict verdict;
        if (exchange_.verdict().code != kOk) return verdict;
        if (!triples_) {
            verdict = CheckIndex(*info_, args_.expandIdx, routing_, routing_.begin(), routing_.end(),
                                 indexBuf_.Get<int32_t>());
        }
        const uint32_t rows = triples_ ? sendCounts_.Rows() : segments_.Rows();
        const uint32_t begin = PartBegin(rows, exchange_.core(), info_->cores);
        const uint32_t end = PartBegin(rows, exchange_.core() + 1, info_->cores);
        if (begin == end) return verdict;
        const uint64_t base = kRdma ? exchange_.sender().rows_at() : 0;
        uint32_t slot = triples_ ? 0 : segments_.Seek(begin);
        for (uint32_t row = begin; row < end;) {
            while (!triples_ && segments_.End(slot) <= row) ++slot;
            const uint32_t stop = triples_ ? end : Min(end, segments_.End(slot));
            const uint32_t count = Min(tiling_->sendRows, stop - row);
            LocalTensor<int8_t> chunk = copyQueue_.template AllocTensor<int8_t>();
            GlobalTensor<int8_t> source;
            source.SetGlobalBuffer(
                reinterpret_cast<__gm__ int8_t*>(args_.expandX + static_cast<uint64_t>(row) * rowBytes_),
                static_cast<uint64_t>(count) * rowBytes_);
            AscendC::DataCopy(chunk, source, count * rowBytes_);
            copyQueue_.EnQue(chunk);
            chunk = copyQueue_.template DeQue<int8_t>();
            if (triples_) {
                Worsen(verdict, SendSlots(chunk, row, count));
            } else {
                const int32_t at = segments_.Offset(slot) + static_cast<int32_t>(row - segments_.Start(slot));
                exchange_.sender().template PutRows<kRdma>(slot % info_->world, base + RowOffsetBytes(at, rowBytes_),
                                                           chunk, count * rowBytes_);
            }
            copyQueue_.FreeTensor(chunk);
            row += count;
        }
        return verdict;
    }
    // V2: sends each row to the slot (token, k) of the source that its triple names. Checks all triples of
    // the chunk before the first store.
    __aicore__ inline Verdict SendSlots(const LocalTensor<int8_t>& chunk, uint32_t row, uint32_t count) {
        GlobalTensor<int32_t> assist;
        assist.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(args_.expandIdx) + static_cast<uint64_t>(row) * kTripleWords,
            count * kTripleWords);
        LocalTensor<int32_t> triple = tripleBuf_.Get<int32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        CopyIn(triple, assist, count * kTripleWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count; ++i) {
            const Verdict verdict = CheckTriple(*info_, triple, i * kTripleWords, row + i);
            if (verdict.code != kOk) return verdict;
        }
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t at = i * kTripleWords;
            const uint64_t slot =
                static_cast<uint64_t>(triple.GetValue(at + 1)) * info_->topK + triple.GetValue(at + 2);
            exchange_.sender().PutSlot(static_cast<uint32_t>(triple.GetValue(at)), slot * rowBytes_,
                                       chunk[i * rowBytes_], rowBytes_);
        }
        return Verdict();
    }
    // UB plan 2 (phase 6): the routing tables again, and the sums of this core's share.
    __aicore__ inline void LocalWindowCopy() {
        MOE_PHASE("LocalWindowCopy");
        exchange_.NextPlan();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        if (!triples_) {
            routing_.LoadTotals();
            routing_.Place();
        }
        WindowRows rows;
        rows.Init(exchange_.pipe(), *info_, args_.expandIdx, rowBytes_, exchange_.Half() + exchange_.sender().rows_at(),
                  RegionBytes(exchange_.context().data_bytes(), info_->world));
        TokenSum<XType, WindowRows> sum;
        const TokenSumPlan plan = {args_.expertScales, args_.sharedExpertX, args_.x};
        sum.Init(exchange_.pipe(), *tiling_, plan, rows);
        sum.Run(routing_, exchange_.core());
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    // After a failure each core writes zeros into its share of x, and core 0 the error record.
    __aicore__ inline void Leave() {
        exchange_.NextPlan();
        ZeroSums(exchange_, *info_, args_.x, rowBytes_);
        exchange_.Report();
    }

    CombineArguments args_;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    RowPlaces places_;
    SegmentTable segments_;    // V1
    ReturnCounts sendCounts_;  // V2
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    UbBuf indexBuf_, tripleBuf_, prefixBuf_;
    bool triples_ = false;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_COMBINE_H
