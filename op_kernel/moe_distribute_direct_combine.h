// MoeDistributeCombine, algorithm "direct": every rank leaves the rows of its experts in its own half, or
// where they are when that is its lent area; whose tokens they are reads them there and sums.
#ifndef ASCEND_MOE_DISTRIBUTE_DIRECT_COMBINE_H
#define ASCEND_MOE_DISTRIBUTE_DIRECT_COMBINE_H

#include "moe_distribute_index_bounds.h"
#include "moe_distribute_return.h"
#include "moe_distribute_returned_rows.h"
#include "moe_distribute_sum.h"

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
        Verdict mine = exchange_.LookForAborts();
        if (mine.code == kOk) {
            mine = routing_.Count();
            if (!triples_) bounds_.Store(routing_);
            Worsen(mine, return_.Run());
        }
        if (!exchange_.Agree(mine)) {
            Leave();
            return;
        }
        if (exchange_.core() == 0) Announce();
        if constexpr (IsMutant(Mutant::kStartsAfterRuns)) return_.StoreStarts();
        SumBuffInit();
        if (!exchange_.WaitForAll(waiter_, *this)) {
            Leave();
            return;
        }
        SumRows();
    }
    __aicore__ inline Verdict Arrived(uint32_t source, const LocalTensor<uint32_t>& run) {
        rows_.SetBase(source, run);
        return CompareCounts(*info_, routing_, source, run);
    }

private:
    // UB plan 1: routing tables, what goes back, and core 0's runs.
    __aicore__ inline void BuffInit() {
        MOE_PHASE("BuffInit");
        exchange_.BoardInit();
        RoutingInit();
        if (!triples_)
            bounds_.Init(exchange_.pipe(), *info_, args_.expandIdx, args_.workspace, exchange_.core());
        return_.Init(exchange_, args_, *tiling_, rowBytes_);
    }
    // A core counts the tokens that it sums, but for one that it shares with the core before it.
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace,
                      exchange_.core());
        const uint32_t parts = tiling_->partsPerToken, items = info_->batch * parts;
        firstItem_ = PartBegin(items, exchange_.core(), info_->cores);
        routing_.ShareTokens(CeilDiv(firstItem_, parts),
                             CeilDiv(PartBegin(items, exchange_.core() + 1, info_->cores), parts));
    }

    // Core 0 has published the epoch, and sends all runs: the cores do not meet again.
    __aicore__ inline void Announce() {
        routing_.Accumulate();
        exchange_.Fail(routing_.Place());
        exchange_.SendRuns(return_, rowBytes_, 0, 1);
    }

    // UB plan 2, from here to the end: routing tables, all runs, the rows' places, the sums.
    __aicore__ inline void SumBuffInit() {
        exchange_.NextPlan();
        RoutingInit();
        routing_.Accumulate();
        exchange_.Fail(routing_.Place());
        if (!triples_) {
            bounds_.Init(exchange_.pipe(), *info_, args_.expandIdx, args_.workspace, exchange_.core());
            exchange_.Fail(bounds_.Check(routing_));
        }
        rows_.Init(exchange_, *info_, args_.expandIdx, rowBytes_);
    }
    __aicore__ inline void SumRows() {
        MOE_PHASE("SumRows");
        rows_.LoadStarts();
        if (triples_ && firstItem_ % tiling_->partsPerToken != 0)
            routing_.GiveBack(firstItem_ / tiling_->partsPerToken);
        TokenSum<XType, ReturnedRows> sum;
        const TokenSumPlan plan = {args_.expertScales, args_.sharedExpertX, args_.x};
        sum.Init(exchange_.pipe(), *tiling_, plan, rows_);
        sum.Run(routing_, exchange_.core());
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    // After a failure: zeros, and the record.
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
    StatusWaiter waiter_;
    uint32_t firstItem_ = 0;
    uint32_t rowBytes_ = 0;
    bool triples_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_DIRECT_COMBINE_H
