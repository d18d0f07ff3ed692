// MoeDistributeCombine, algorithm "window": expert rows go back to the window of the rank whose token they
// are. That rank sums the K rows of each token, weighted, in fp32 and in ascending k.
//
// V2 here means that rows have triples (source rank, token, k): the V2 contract where no rank is reached by
// RDMA. Everything else is V1. "Source" is the rank whose token a row is. A: rows of expand_x.
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 0     | Exchange::Enter     | all          | context, epoch word    | nothing                  |
// V2
// 1     | RoutingTable::      | all: a share | abort blocks,          | workspace: histograms    |
//       | Count,              | of the       | expert_ids [BS][K]     | [cores][E] int32         |
//       | CheckSendCounts     | pairs, all   | int32, x_active_mask,  |                          |
//       |                     | segments     | ep_send_counts [L*W]   |                          |
// 2     | SetWaitTp-          | all: a share | expand_x [A][H],       | the sources' halves:     | cores of
//       | StatusAndDisPatch,  | of the rows  | triples [A][3] int32   | rows; core 0, after the  | the rank
//       | Agree               |              |                        | meeting: epoch word      |
// 3     | SetStatus           | all: a share | nothing                | a status message to      |
//       |                     | of the peers |                        | every rank               |
// 4     | WaitForAll;         | all: all     | status messages; core  | nothing: compares their  | all ranks
//       | RowPlaces::Find,    | messages;    | 0: abort blocks,       | counts with the totals   |
//       | Judge               | core 0       | histograms             |                          |
// 5     | LocalWindowCopy     | all: a share | as in V1, less what is | x [BS][H]                |
//       |                     | (token, part | for places             |                          |
//       |                     | of H)        |                        |                          |
// V1
// 1     | Count,              | all: a share | as above; core 0:      | histograms; core 0,      | cores of
//       | LoadAllSegments,    | of the       | abort blocks           | after the meeting: epoch | the rank
//       | Exchange::Open      | pairs        |                        | word                     |
// 2     | RowPlaces::Find,    | all; core 0  | histograms             | workspace: totals [E]    |
//       | StoreTotals         | stores       |                        | int32                    |
// 3     | SetWaitTp-          | all: a share | expand_x; only to      | the sources' halves:     | cores of
//       | StatusAndDisPatch,  | of the rows  | check it: expand_idx   | rows                     | the rank
//       | MeetAfterSend       |              | [BS*K] int32           |                          |
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
//       |                     |              | fp32, expand_idx,      |                          |
//       |                     |              | shared_expert_x        |                          |
//       |                     |              | [BS][H]                |                          |
//
// Wrong ids, counts or triples are known before the status messages leave: these then carry the error, and every
// rank raises it. A RoutingMismatch is this rank's alone. After any failure Leave writes zeros into x, and core 0
// the error record. In V2 no core waits for the others between phases 4 and 5: each tells them in phase 5 whether its
// rows have come, and hears them after its sums (Exchange::Tell).
//
// Of two launches send ends with the status messages; finish counts its ids anew, and goes on from the wait.
#ifndef ASCEND_MOE_WINDOW_COMBINE_H
#define ASCEND_MOE_WINDOW_COMBINE_H

#include "../common/inputs.h"
#include "../common/triples.h"
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
        stride_ = triples_ ? SlotBytes(rowBytes_) : rowBytes_;
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpCombine, args_.workspace, args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }

private:
    __aicore__ inline void Run() {
        BuffInit();
        if (!(triples_ ? SendAtOnce() : SendPlaced())) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        if (!(triples_ ? WaitAtOnce() : exchange_.WaitStatus(*this)) || !LocalWindowCopy()) Leave();
    }
    // V2: rows need no places, so they leave at once. The cores meet when they have left, and then each waits for
    // all messages, as in direct (see FailWatch). Finish counts alone. False: the communicator has failed before.
    __aicore__ inline bool SendAtOnce() {
        if (info_->part == kPartFinish) return exchange_.Agree(routing_.Count());
        sendCounts_.Load(args_.epSendCounts);
        Verdict mine = exchange_.LookForAborts();
        if (mine.code == kOk) {
            mine = routing_.Count();
            Worsen(mine, CheckSendCounts());
            if (mine.code == kOk) {
                const uint32_t rows = sendCounts_.Rows(), begin = PartBegin(rows, exchange_.core(), info_->cores);
                const uint32_t end = PartBegin(rows, exchange_.core() + 1, info_->cores);
                assist_.Begin(begin, end);
                mine = SendSlots(begin, end);
            }
            if (mine.code == kOk && routing_.MayOverflow()) mine.code = kRecheck;
        }
        exchange_.sender().Flush();
        if (!exchange_.Agree(mine)) return false;
        if (exchange_.verdict().code == kRecheck) {
            exchange_.RecheckTogether();
            exchange_.Fail(places_.Find());
        }
        exchange_.SetStatus(*this, rowBytes_);
        return true;
    }
    __aicore__ inline bool WaitAtOnce() {
        if (exchange_.core() == 0) places_.Find();  // the totals
        if (exchange_.WaitForAll(waiter_) && (exchange_.core() != 0 || Judge())) return true;
        exchange_.Tell(Verdict());
        return false;
    }
    __aicore__ inline bool Judge() {
        exchange_.Fail(JudgeMessages(exchange_, *info_, routing_, waiter_, match_));
        return exchange_.verdict().code == kOk;
    }
    // V1 and RDMA: rows lie packed by (local expert, position). As above.
    __aicore__ inline bool SendPlaced() {
        const bool sends = info_->part != kPartFinish, rdma = info_->transport == kTransportRdma;
        Verdict mine = routing_.Count();
        if (sends) Worsen(mine, LoadAllSegments());
        if (sends ? !exchange_.Open(mine) : !exchange_.Agree(mine)) return false;
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        if (sends) {
            exchange_.MeetAfterSend(rdma ? SetWaitTpStatusAndDisPatch<true>() : SetWaitTpStatusAndDisPatch<false>());
            exchange_.SetStatus(*this, rowBytes_);
        } else {
            exchange_.MeetAfterSend(CheckOwnIndex());
        }
        return true;
    }
    __aicore__ inline Verdict CheckOwnIndex() {
        if (exchange_.verdict().code != kOk) return Verdict();
        return CheckIndex(*info_, args_.expandIdx, routing_, routing_.begin(), routing_.end(),
                          indexBuf_.Get<int32_t>());
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
    // TokenSum calls this. In V1 the cores have met.
    __aicore__ inline void Tell(const Verdict& missing) {
        if (triples_) exchange_.Tell(missing);
    }

private:
    // UB plan 1 (phases 1 to 5): routing tables, segments of expand_x, two chunks of rows on their way.
    __aicore__ inline void BuffInit() {
        MOE_PHASE("BuffInit");
        exchange_.BoardInit();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
        if (triples_) {
            // MayOverflow compares the pairs of a token.
            routing_.ShareTokens(PartBegin(info_->batch, exchange_.core(), info_->cores),
                                 PartBegin(info_->batch, exchange_.core() + 1, info_->cores));
            sendCounts_.Init(exchange_.pipe(), *info_);
            match_.Init(exchange_.pipe(), *info_);
            assist_.Init(exchange_.pipe(), *info_, args_.expandIdx);
        } else {
            segments_.Init(exchange_.pipe(), *info_);
            exchange_.pipe().InitBuffer(indexBuf_, kChunkPairs * sizeof(int32_t));
            exchange_.pipe().InitBuffer(prefixBuf_, PaddedInts(segments_.slots()) * sizeof(int32_t));
        }
        exchange_.pipe().InitBuffer(copyQueue_, static_cast<uint8_t>(tiling_->returnRing), tiling_->sendRows * stride_);
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

    // V1: sends this core's share of the rows back to their sources; checks its share of expand_idx before.
    template <bool kRdma>
    __aicore__ inline Verdict SetWaitTpStatusAndDisPatch() {
        MOE_PHASE("SetWaitTpStatusAndDisPatch");
        const Verdict verdict = CheckOwnIndex();
        if (exchange_.verdict().code != kOk) return verdict;
        const uint32_t begin = PartBegin(segments_.Rows(), exchange_.core(), info_->cores);
        const uint32_t end = PartBegin(segments_.Rows(), exchange_.core() + 1, info_->cores);
        if (begin == end) return verdict;
        const uint64_t base = kRdma ? exchange_.sender().rows_at() : 0;
        uint32_t slot = segments_.Seek(begin);
        for (uint32_t row = begin; row < end;) {
            while (segments_.End(slot) <= row) ++slot;
            const uint32_t count = Min(tiling_->sendRows, Min(end, segments_.End(slot)) - row);
            LoadRows(row, count);
            LocalTensor<int8_t> chunk = copyQueue_.template DeQue<int8_t>();
            const int32_t at = segments_.Offset(slot) + static_cast<int32_t>(row - segments_.Start(slot));
            exchange_.sender().template PutRows<kRdma>(slot % info_->world, base + RowOffsetBytes(at, rowBytes_), chunk,
                                                       count * rowBytes_);
            copyQueue_.FreeTensor(chunk);
            row += count;
        }
        return verdict;
    }
    // V2: sends each row of the share [begin, end) to the slot (token, k) of the source that its triple names. All
    // triples of a chunk are checked before its first store, while the first rows come.
    __aicore__ inline Verdict SendSlots(uint32_t begin, uint32_t end) {
        MOE_PHASE("SetWaitTpStatusAndDisPatch");
        Verdict verdict;
        if (begin == end) return verdict;
        uint32_t row = begin, count = BeginRows(row, begin, end);
        while (assist_.Next(sendCounts_, verdict)) {
            while (row < assist_.stop()) {
                LocalTensor<int8_t> chunk = copyQueue_.template DeQue<int8_t>();
                MarkRows(chunk, count);
                for (uint32_t i = 0; i < count; ++i, ++row) SendSlot(row, chunk[i * stride_]);
                copyQueue_.FreeTensor(chunk);
                if (row < end) count = BeginRows(row, begin, end);
            }
        }
        if (row < end) {
            LocalTensor<int8_t> chunk = copyQueue_.template DeQue<int8_t>();
            copyQueue_.FreeTensor(chunk);
        }
        return verdict;
    }
    // The epoch's mark behind each row. The chunk is there, so what was stored from its memory before has left.
    __aicore__ inline void MarkRows(const LocalTensor<int8_t>& chunk, uint32_t count) {
        const LocalTensor<int32_t> words = chunk.template ReinterpretCast<int32_t>();
        SyncFunc<HardEvent::MTE2_V>();
        for (uint32_t i = 0; i < count; ++i) {
            AscendC::Duplicate(words[(i * stride_ + rowBytes_) / static_cast<uint32_t>(sizeof(int32_t))],
                               static_cast<int32_t>(SlotMark(exchange_.epoch())), kBlockWords);
        }
        SyncFunc<HardEvent::V_MTE3>();
    }
    __aicore__ inline void SendSlot(uint32_t row, const LocalTensor<int8_t>& bytes) {
        const uint64_t slot = static_cast<uint64_t>(assist_.Word(row, 1)) * info_->topK + assist_.Word(row, 2);
        exchange_.sender().PutSlot(assist_.Word(row, 0), slot * stride_, bytes, stride_);
    }
    // Begins to load rows of the share from `row` on, of one chunk of triples. Returns how many.
    __aicore__ inline uint32_t BeginRows(uint32_t row, uint32_t begin, uint32_t end) {
        const uint32_t count = Min(tiling_->sendRows, Min(end - row, kTripleRows - (row - begin) % kTripleRows));
        LoadRows(row, count);
        return count;
    }
    // Rows `stride_` bytes apart in UB.
    __aicore__ inline void LoadRows(uint32_t row, uint32_t count) {
        LocalTensor<int8_t> chunk = copyQueue_.template AllocTensor<int8_t>();
        GlobalTensor<int8_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(args_.expandX + static_cast<uint64_t>(row) * rowBytes_),
                               static_cast<uint64_t>(count) * rowBytes_);
        const DataCopyExtParams params{static_cast<uint16_t>(count), rowBytes_, 0, (stride_ - rowBytes_) / kBlock, 0};
        const DataCopyPadExtParams<int8_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(chunk, source, params, pad);
        copyQueue_.EnQue(chunk);
    }

    // UB plan 2 (phase 6): the routing tables again, and the sums of this core's share.
    __aicore__ inline bool LocalWindowCopy() {
        MOE_PHASE("LocalWindowCopy");
        exchange_.NextPlan();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        if (!triples_) {
            routing_.LoadTotals();
            routing_.Place();
        }
        WindowRows rows;
        rows.Init(exchange_.pipe(), *info_, args_.expandIdx, rowBytes_, exchange_.Half() + exchange_.sender().rows_at(),
                  RegionBytes(exchange_.context().data_bytes(), info_->world), exchange_.epoch());
        TokenSum<XType, WindowRows> sum;
        const TokenSumPlan plan = {args_.expertScales, args_.sharedExpertX, args_.x};
        sum.Init(exchange_.pipe(), *tiling_, plan, rows);
        sum.Run(routing_, exchange_.core(), info_->cores, *this);
        const bool good = !triples_ || exchange_.Hear();
        AscendC::PipeBarrier<PIPE_ALL>();
        return good;
    }

    // After a failure each core writes zeros into its share of x, and core 0 the error record.
    __aicore__ inline void Leave() {
        exchange_.NextPlan();
        ZeroSums(exchange_, *tiling_, args_.x, rowBytes_);
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
    TripleReader assist_;      // V2
    StatusWaiter waiter_;      // V2
    CountsMatch match_;        // V2
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    UbBuf indexBuf_, prefixBuf_;
    bool triples_ = false;
    uint32_t rowBytes_ = 0;
    uint32_t stride_ = 0;  // of rows on their way: V2 has a mark behind each
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_COMBINE_H
