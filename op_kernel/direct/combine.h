// Combine, algorithm "direct": every rank publishes its experts' rows in its own ping-pong buffer, or in place if
// expand_x lies in its registered area. The ranks whose tokens the rows are read and sum them there.
//
// "sources:" applies if rows have source indices (source rank, token, k), "index:" if expand_idx is used instead. A:
// rows of expand_x. Owner: the rank of an expert. A core's share of the tokens in phase 3 is the tokens that it sums in
// phase 7.
//
// phase | function        | which cores    | reads                            | writes                   | which cores
//       |                 |                |                                  |                          | synchronize
// ------+-----------------+----------------+----------------------------------+--------------------------+------------
// 0     | Exchange::Enter | all            | context, epoch word              | nothing                  |
// 1     | LookForFailure  | all            | core 0: abort blocks, others:    | nothing: after a failure |
//       |                 |                | local abort flag                 | peers may still read     |
//       |                 |                |                                  | this ping-pong buffer    |
// 2     | RowReturn::     | all: a share   | expand_x [A][H], ep_send_counts  | own ping-pong buffer:    |
//       | Begin (index:   | of the bytes   | [L*W] int32                      | the rows as in expand_x, |
//       | after Count)    |                |                                  | without this rank's own; |
//       |                 |                |                                  | nothing when registered; |
//       |                 |                |                                  | int8: all rows           |
// 3     | Count,          | all: a share   | expert_ids [BS][K] int32,        | workspace: histograms    | cores of
//       | RowReturn::     | of the tokens, | x_active_mask; index: expand_idx | [cores][E] int32, index: | the rank
//       | Check,          | sources: of    | [BS*K] int32; sources: source    | largest positions        |
//       | Prepare-        | source         | indices [A][3] int32             | [cores][E] int32; core   |
//       | Messages,       | indices; all   |                                  | 0, after the core        |
//       | Exchange::Agree | counts         |                                  | barrier: epoch word      |
// 4     | SetStatus       | a share of the | nothing: ep_send_counts are in   | a status message to      |
//       |                 | peers: all,    | UB                               | every rank: rows of each |
//       |                 | from 8 cores   |                                  | local expert, and where  |
//       |                 | on not core 0  |                                  | they begin               |
// 5     | SumBuffInit     | all            | ids, mask, expert_scales [BS][K] | nothing                  |
//       |                 |                | fp32, index: expand_idx; core 0, |                          |
//       |                 |                | sources: all histograms; core 0, |                          |
//       |                 |                | index: largest positions         |                          |
// 6     | WaitForAll      | all: all       | status messages; core 0: abort   | core 0, when it gives    | all ranks
//       |                 | owners         | blocks, others: local abort flag | up: local abort flag     |
// 7     | SumRows         | all: a share   | rows in the owners' ping-pong    | x [BS][H]                |
//       |                 | of (token,     | buffers or registered areas, own |                          |
//       |                 | part of H)     | rows in expand_x, other addends  |                          |
//       |                 |                | (Addends)                        |                          |
//
// No core barrier follows phase 6; see LocalAbortFlag (common/aborts.h). In phase 7 core 0, while its first rows load,
// compares the counts in all messages with this rank's own (Judge). Every core publishes its status before its sums and
// reads the others' after them (Exchange::ArriveBeforeSums). If a core finds that an owner may overflow (kRecheck), all
// cores count exactly between phases 3 and 4 (CountAll). In split mode, send returns after phase 4; finish runs phase
// 0, Count and the core barrier of 3, and 5 to 7.
#ifndef ASCEND_MOE_DIRECT_COMBINE_H
#define ASCEND_MOE_DIRECT_COMBINE_H

#include "sum.h"
#include "publish.h"

namespace moe {

template <typename XType, bool kQuant>
class DirectCombine {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        sourceIndices_ = info_->sourceIndices != 0;
        rowBytes_ = ReturnedRowBytes(*info_, sizeof(XType));
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpCombine, args_.group, args_.workspace, args_.performanceInfo,
                            args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }

private:
    __aicore__ inline void Run() {
        BuffInit();
        if (!exchange_.Agree(info_->part == kPartFinish ? CountAgain() : Publish())) {
            Leave();
            return;
        }
        if (exchange_.status().code == kRecheck) CountAll();
        if (info_->part != kPartFinish) exchange_.SetStatus(return_, rowBytes_);
        if (exchange_.Sent()) return;
        SumBuffInit();
        if (!exchange_.WaitForAll(waiter_)) {
            exchange_.ArriveBeforeSums(OpStatus());
            Leave();
        } else if (!SumRows()) {
            Leave();
        }
    }
    __aicore__ inline OpStatus Publish() {
        return_.Load();
        routing_.Fetch();
        OpStatus mine = exchange_.LookForFailure();
        if (mine.code != kOk) return mine;
        SyncFunc<HardEvent::MTE2_S>();
        if (sourceIndices_) return_.Begin();
        mine = Count();
        if (!sourceIndices_) return_.Begin();  // after Count, or its loads would delay those of expand_idx
        Worsen(mine, return_.Check());
        exchange_.PrepareMessages(return_);
        return mine;
    }
    // Finish: recomputes the histograms for places and checks.
    __aicore__ inline OpStatus CountAgain() {
        routing_.Fetch();
        SyncFunc<HardEvent::MTE2_S>();
        return Count();
    }

    // A single UB layout for the whole op: a new one would have to wait for stores in flight.
    __aicore__ inline void BuffInit() {
        MOE_PHASE(exchange_.timestamps(), BuffInit);
        TPipe& pipe = exchange_.pipe();
        exchange_.BarrierInit();
        exchange_.LoadPeers();
        RoutingInit();
        if (!sourceIndices_) bounds_.Init(pipe, *info_, args_.expandIdx, args_.workspace, exchange_.core());
        match_.Init(pipe, *info_);
        return_.Init(exchange_, args_, *tiling_, rowBytes_);
        rows_.Init(exchange_, waiter_, *info_, args_.expandX, args_.expandIdx, rowBytes_);
        sum_.Init(pipe, *tiling_, args_, rows_, exchange_.core());
    }
    // A core counts the tokens that it sums. If several cores sum parts of a token, the one with the first part counts
    // it.
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        const uint32_t parts = tiling_->partsPerToken, items = info_->batch * parts;
        const uint32_t first = PartBegin(items, exchange_.core(), info_->cores);
        routing_.ShareTokens(CeilDiv(first, parts),
                             CeilDiv(PartBegin(items, exchange_.core() + 1, info_->cores), parts));
    }
    __aicore__ inline OpStatus Count() {
        OpStatus mine = routing_.Count();
        if (routing_.MayOverflow()) {
            OpStatus recheck;
            recheck.code = kRecheck;
            Worsen(mine, recheck);
        }
        if (!sourceIndices_) bounds_.Store(routing_);
        return mine;
    }
    // Every core gets all totals, so that all cores' messages carry the same error, or none.
    __aicore__ inline void CountAll() {
        exchange_.RecheckTogether();
        routing_.AccumulateShare(sum_.queue(), sum_.room(), 0, info_->experts);
        exchange_.Fail(routing_.Place());
    }
    // While the messages are in flight: every core finds the places of its first tokens; core 0 gets this rank's
    // totals, which the counts in the messages must equal, and checks expand_idx if there are no source indices.
    __aicore__ inline void SumBuffInit() {
        sum_.Fetch(routing_);
        if (exchange_.core() == 0) {
            routing_.AccumulateShare(sum_.queue(), sum_.room(), 0, info_->experts);
            if (!sourceIndices_) mine_ = bounds_.CheckAll(sum_.queue(), sum_.room(), routing_);
        }
        if (sourceIndices_) routing_.AccumulateBefore(sum_.queue(), sum_.room());
        sum_.Prepare(routing_);
    }
    __aicore__ inline bool SumRows() {
        MOE_PHASE(exchange_.timestamps(), SumRows);
        if (mine_.code == kOk) sum_.Begin(routing_);
        const bool good = exchange_.core() != 0 || Judge();
        exchange_.ArriveBeforeSums(OpStatus());
        if (!good) {
            sum_.Drop();
            return false;
        }
        sum_.Run(routing_);
        const bool allGood = exchange_.WaitAfterSums();
        AscendC::PipeBarrier<PIPE_ALL>();
        return allGood;
    }
    __aicore__ inline bool Judge() {
        Worsen(mine_, JudgeMessages(exchange_, *info_, routing_, waiter_, match_));
        exchange_.Fail(mine_);
        return exchange_.status().code == kOk;
    }

    // After a failure core 0 writes the error record, and each core writes zeros into its share of x.
    __aicore__ inline void Leave() {
        LeaveCombine(exchange_, *tiling_, args_.x, static_cast<uint32_t>(info_->hidden * sizeof(XType)));
    }

    CombineArguments args_;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    IndexBounds bounds_;
    RowReturn<XType, kQuant> return_;
    ReturnedRows rows_;
    DirectSum<XType, kQuant> sum_;
    StatusWaiter waiter_;
    CountsMatch match_;
    OpStatus mine_;          // core 0: from the checks of expand_idx and of the counts in the messages
    uint32_t rowBytes_ = 0;  // of a row in flight
    bool sourceIndices_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_COMBINE_H
