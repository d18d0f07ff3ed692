// MoeDistributeCombine, algorithm "direct": every rank publishes the rows of its experts in its own half, or
// where they are when that is its lent area. The ranks whose tokens they are read them there and sum.
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 1     | RowReturn::Begin    | all: a share | expand_x [A][H],       | own half: the rows as    |
//       |                     | of the bytes | ep_send_counts [L*W]   | they lie in expand_x,    |
//       |                     |              | int32                  | without this rank's own; |
//       |                     |              |                        | nothing when lent        |
// 2     | Count,              | all: a share | expert_ids [BS][K]     | workspace: histograms    | cores of
//       | RowReturn::Check,   | of the       | int32; V1: expand_idx  | [cores][E] int32; V1:    | the rank,
//       | PrepareMessages     | tokens       | [BS*K] int32, V2:      | largest positions        | once
//       |                     |              | triples [A][3] int32   | [cores][E] int32         |
// 3     | SetStatus           | all: a share | ep_send_counts         | a status message to      |
//       |                     | of the peers |                        | every rank: rows of each |
//       |                     |              |                        | local expert, and where  |
//       |                     |              |                        | they begin               |
// 4     | SumBuffInit         | all          | histograms,            | nothing                  |
//       |                     |              | expert_scales [BS][K]  |                          |
//       |                     |              | fp32                   |                          |
// 5     | WaitForAll          | all: all     | status messages, fail  | core 0: the fail block,  | all ranks
//       |                     | sources      | block; core 0: abort   | when it gives up         |
//       |                     |              | blocks                 |                          |
// 6     | SumRows             | all: a share | rows in the owners'    | x [BS][H]                |
//       |                     | of (token,   | halves or lent areas,  |                          |
//       |                     | part of H)   | own rows in expand_x,  |                          |
//       |                     |              | shared_expert_x        |                          |
//       |                     |              | [BS][H]                |                          |
#ifndef ASCEND_MOE_DIRECT_COMBINE_H
#define ASCEND_MOE_DIRECT_COMBINE_H

#include "sum.h"
#include "rows.h"
#include "publish.h"

namespace moe {

template <typename XType>
class MoeDistributeDirectCombine {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        triples_ = info_->triples != 0;
        rowBytes_ = static_cast<uint32_t>(info_->hidden * sizeof(XType));
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (!exchange_.Enter(pipe, *info_, kOpCombine, args_.workspace, args_.errorRecord)) return;
        BuffInit();
        return_.Load();
        routing_.Fetch();
        Verdict mine = exchange_.LookForAborts();
        if (mine.code == kOk) {
            SyncFunc<HardEvent::MTE2_S>();
            if (triples_) return_.Begin();
            mine = Count();
            if (!triples_) return_.Begin();  // whose loads would go before those of expand_idx
            Worsen(mine, return_.Check());
            if (mine.code == kOk) exchange_.PrepareMessages(return_);
        }
        if (!exchange_.Agree(mine)) {
            Leave();
            return;
        }
        if (exchange_.verdict().code == kRecheck) CountAll();
        exchange_.SetStatus(return_, rowBytes_);
        SumBuffInit();
        if (!exchange_.WaitForAll(waiter_) || !SumRows()) Leave();
    }

private:
    // One plan of UB for the whole op: nobody waits for stores under way to give UB back.
    __aicore__ inline void BuffInit() {
        MOE_PHASE("BuffInit");
        TPipe& pipe = exchange_.pipe();
        exchange_.BoardInit();
        RoutingInit();
        if (!triples_) bounds_.Init(pipe, *info_, args_.expandIdx, args_.workspace, exchange_.core());
        return_.Init(exchange_, args_, *tiling_, rowBytes_);
        rows_.Init(exchange_, waiter_, *info_, args_.expandX, args_.expandIdx, rowBytes_);
        sum_.Init(pipe, *tiling_, args_, rows_, exchange_.core());
    }
    // A core counts the tokens that it sums, but for one that it shares with the core before it.
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace,
                      exchange_.core());
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
    // Every core has all totals, so that all messages say the same.
    __aicore__ inline void CountAll() {
        exchange_.RecheckTogether();
        routing_.Accumulate();
        exchange_.Fail(routing_.Place());
    }
    // While the messages are on their way: the first tokens' places, and on core 0 what all messages have to
    // say.
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
        MOE_PHASE("SumRows");
        if (mine_.code == kOk) sum_.Begin(routing_);
        if (exchange_.core() == 0 && !Judge()) {
            sum_.Drop();
            return false;
        }
        sum_.Run(routing_);
        AscendC::PipeBarrier<PIPE_ALL>();
        return true;
    }
    // Core 0, while its first rows are under way: what the other cores go by without asking, see FailWatch.
    __aicore__ inline bool Judge() {
        if (exchange_.CheckCountsHashes(waiter_)) {
            for (uint32_t source = 0; source < info_->world; ++source)
                Worsen(mine_, CompareCounts(*info_, routing_, source, waiter_.Message(source)));
        }
        exchange_.Fail(mine_);
        return exchange_.verdict().code == kOk;
    }

    // After a failure: the record, and zeros, but for cores that sum because they do not know of it.
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
    IndexBounds bounds_;
    RowReturn return_;
    ReturnedRows rows_;
    DirectSum<XType> sum_;
    StatusWaiter waiter_;
    Verdict mine_;  // of core 0 on what the messages have to say
    uint32_t rowBytes_ = 0;
    bool triples_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_COMBINE_H
