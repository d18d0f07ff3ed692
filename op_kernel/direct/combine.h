// MoeDistributeCombine, algorithm "direct": every rank publishes the rows of its experts in its own half, or
// in place when expand_x lies in its lent area. The ranks whose tokens the rows are read them there and sum.
//
// "triples:" is where rows have triples (source rank, token, k), "index:" where expand_idx stands for them. A: rows of
// expand_x. An owner is the rank of an expert. A core's share of the tokens in phase 3 is the tokens that it sums in
// phase 7.
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 0     | Exchange::Enter     | all          | context, epoch word    | nothing                  |
// 1     | LookForFailure      | all          | core 0: abort blocks,  | nothing: after a failure |
//       |                     |              | others: fail block     | peers may still read     |
//       |                     |              |                        | this half                |
// 2     | RowReturn::Begin    | all: a share | expand_x [A][H],       | own half: the rows as in |
//       | (index: after Count)| of the bytes | ep_send_counts [L*W]   | expand_x, without this   |
//       |                     |              | int32                  | rank's own; nothing when |
//       |                     |              |                        | lent; int8: all rows     |
// 3     | Count, RowReturn::  | all: a share | expert_ids [BS][K]     | workspace: histograms    | cores of
//       | Check,              | of the       | int32, x_active_mask;  | [cores][E] int32, index: | the rank
//       | PrepareMessages,    | tokens, of   | index: expand_idx      | largest positions        |
//       | Exchange::Agree     | triples; all | [BS*K] int32; triples: | [cores][E] int32; core   |
//       |                     | counts       | [A][3] int32           | 0, after the meeting:    |
//       |                     |              |                        | epoch word               |
// 4     | SetStatus           | a share of   | nothing:               | a status message to      |
//       |                     | the peers:   | ep_send_counts are in  | every rank: rows of each |
//       |                     | all, from 8  | UB                     | local expert, and where  |
//       |                     | cores on not |                        | they begin               |
//       |                     | core 0       |                        |                          |
// 5     | SumBuffInit         | all          | ids, mask,             | nothing                  |
//       |                     |              | expert_scales [BS][K]  |                          |
//       |                     |              | fp32, index:           |                          |
//       |                     |              | expand_idx; core 0,    |                          |
//       |                     |              | triples: all:          |                          |
//       |                     |              | histograms; core 0,    |                          |
//       |                     |              | index: largest         |                          |
//       |                     |              | positions              |                          |
// 6     | WaitForAll          | all: all     | status messages; core  | core 0, when it gives    | all ranks
//       |                     | owners       | 0: abort blocks,       | up: fail block           |
//       |                     |              | others: fail block     |                          |
// 7     | SumRows             | all: a share | rows in the owners'    | x [BS][H]                |
//       |                     | of (token,   | halves or lent areas,  |                          |
//       |                     | part of H)   | own rows in expand_x,  |                          |
//       |                     |              | other terms (Terms)    |                          |
//
// No meeting follows phase 6: FailWatch (common/aborts.h) says why the cores agree all the same. In phase 7
// core 0, while its first rows load, compares the counts in all messages with this rank's own (Judge). Every core
// tells the others that it has not failed, and hears them after its sums (Exchange::Tell). If a
// core has seen that an owner may overflow (kRecheck), all cores count exactly between phases 3 and 4
// (CountAll). Of two launches send ends after phase 4; finish does 0, Count and the meeting of 3, and 5 to 7.
#ifndef ASCEND_MOE_DIRECT_COMBINE_H
#define ASCEND_MOE_DIRECT_COMBINE_H

#include "sum.h"
#include "publish.h"

namespace moe {

template <typename XType, bool kQuant>
class MoeDistributeDirectCombine {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        triples_ = info_->triples != 0;
        rowBytes_ = ReturnedRowBytes(*info_, sizeof(XType));
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpCombine, args_.workspace, args_.performanceInfo, args_.errorRecord,
                            args_.tiling, tiling_->mc2))
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
        if (exchange_.verdict().code == kRecheck) CountAll();
        if (info_->part != kPartFinish) exchange_.SetStatus(return_, rowBytes_);
        if (exchange_.Sent()) return;
        SumBuffInit();
        if (!exchange_.WaitForAll(waiter_)) {
            exchange_.Tell(Verdict());
            Leave();
        } else if (!SumRows()) {
            Leave();
        }
    }
    __aicore__ inline Verdict Publish() {
        return_.Load();
        routing_.Fetch();
        Verdict mine = exchange_.LookForFailure();
        if (mine.code != kOk) return mine;
        SyncFunc<HardEvent::MTE2_S>();
        if (triples_) return_.Begin();
        mine = Count();
        if (!triples_) return_.Begin();  // after Count: its loads would delay those of expand_idx
        Worsen(mine, return_.Check());
        exchange_.PrepareMessages(return_);
        return mine;
    }
    // Finish: the histograms that places and checks are made from.
    __aicore__ inline Verdict CountAgain() {
        routing_.Fetch();
        SyncFunc<HardEvent::MTE2_S>();
        return Count();
    }

    // A single plan of UB for the whole op, because a new plan would have to wait for stores under way.
    __aicore__ inline void BuffInit() {
        MOE_PHASE(exchange_.stamps(), BuffInit);
        TPipe& pipe = exchange_.pipe();
        exchange_.BoardInit();
        exchange_.LoadPeers();
        RoutingInit();
        if (!triples_) bounds_.Init(pipe, *info_, args_.expandIdx, args_.workspace, exchange_.core());
        match_.Init(pipe, *info_);
        return_.Init(exchange_, args_, *tiling_, rowBytes_);
        rows_.Init(exchange_, waiter_, *info_, args_.expandX, args_.expandIdx, rowBytes_);
        sum_.Init(pipe, *tiling_, args_, rows_, exchange_.core());
    }
    // A core counts the tokens that it sums. Of the cores that sum parts of the same token, the core with its
    // first part counts it.
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        const uint32_t parts = tiling_->partsPerToken, items = info_->batch * parts;
        const uint32_t first = PartBegin(items, exchange_.core(), info_->cores);
        routing_.ShareTokens(CeilDiv(first, parts),
                             CeilDiv(PartBegin(items, exchange_.core() + 1, info_->cores), parts));
    }
    __aicore__ inline Verdict Count() {
        Verdict mine = routing_.Count();
        if (routing_.MayOverflow()) {
            Verdict recheck;
            recheck.code = kRecheck;
            Worsen(mine, recheck);
        }
        if (!triples_) bounds_.Store(routing_);
        return mine;
    }
    // Every core gets all totals, so that the messages of all cores carry the same error, or none.
    __aicore__ inline void CountAll() {
        exchange_.RecheckTogether();
        routing_.AccumulateShare(sum_.queue(), sum_.room(), 0, info_->experts);
        exchange_.Fail(routing_.Place());
    }
    // While the messages are under way: every core finds the places of its first tokens; core 0 gets this
    // rank's totals, which the counts in the messages must equal, and checks expand_idx where there are no triples.
    __aicore__ inline void SumBuffInit() {
        sum_.Fetch(routing_);
        if (exchange_.core() == 0) {
            routing_.AccumulateShare(sum_.queue(), sum_.room(), 0, info_->experts);
            if (!triples_) mine_ = bounds_.CheckAll(sum_.queue(), sum_.room(), routing_);
        }
        if (triples_) routing_.AccumulateBefore(sum_.queue(), sum_.room());
        sum_.Prepare(routing_);
    }
    __aicore__ inline bool SumRows() {
        MOE_PHASE(exchange_.stamps(), SumRows);
        if (mine_.code == kOk) sum_.Begin(routing_);
        const bool good = exchange_.core() != 0 || Judge();
        exchange_.Tell(Verdict());
        if (!good) {
            sum_.Drop();
            return false;
        }
        sum_.Run(routing_);
        const bool allGood = exchange_.Hear();
        AscendC::PipeBarrier<PIPE_ALL>();
        return allGood;
    }
    __aicore__ inline bool Judge() {
        Worsen(mine_, JudgeMessages(exchange_, *info_, routing_, waiter_, match_));
        exchange_.Fail(mine_);
        return exchange_.verdict().code == kOk;
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
    Verdict mine_;           // core 0: of the checks of expand_idx and of the counts in the messages
    uint32_t rowBytes_ = 0;  // of a row on its way
    bool triples_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_COMBINE_H
