// The frame that dispatch and combine share: entry (epoch, sticky aborts), status exchange, leaving on
// failure.
#ifndef ASCEND_MOE_DISTRIBUTE_EXCHANGE_H
#define ASCEND_MOE_DISTRIBUTE_EXCHANGE_H

#include "moe_distribute_report.h"
#include "moe_distribute_segments.h"
#include "moe_distribute_wait.h"

namespace moe {

class Exchange {
public:
    // False when the context is not the one this tiling was made for; core 0 has then left the record.
    __aicore__ inline bool Enter(TPipe& pipe, const MoeDistributeInfo& info, uint32_t op, GM_ADDR workspace,
                                 GM_ADDR record) {
        pipe_ = &pipe;
        info_ = &info;
        workspace_ = workspace;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        context_.Init(AscendC::GetHcclContext<0>());
        if (!context_.Matches(info)) {
            Verdict verdict;
            verdict.code = kContextMismatch;
            verdict.reporter = info.rank;
            report_.Init(context_, info, op, 0, record);
            if (core_ == 0) report_.Write(pipe, verdict);
            return false;
        }
        word_.Init(context_);
        epoch_ = NextEpoch(word_.Read());
        if constexpr (IsMutant(Mutant::kPublishEpochTooEarly)) {
            if (core_ + 1 == info.cores) word_.Publish(epoch_);
        }
        config_.Init(info, op);
        sender_.Init(context_, epoch_);
        report_.Init(context_, info, op, epoch_, record);
        return true;
    }
    __aicore__ inline void BoardInit() { board_.Init(*pipe_, workspace_, core_, info_->cores); }

    // First meeting of the cores: what core 0 finds in the abort blocks, and every core's own verdict. False:
    // the communicator has failed before, leave without touching a window.
    __aicore__ inline bool Open(Verdict mine) {
        if (core_ == 0) {
            AbortWatch aborts;
            aborts.Init(*pipe_, context_);
            Verdict abort;
            if (aborts.Look(abort)) {
                mine = abort;
            }
        }
        verdict_ = board_.Meet(0, mine);
        if (verdict_.code >= kFirstFatal) return false;
        // From here on this epoch is taken, and no block of it has left yet.
        if constexpr (IsMutant(Mutant::kEveryCorePublishes)) {
            word_.Publish(epoch_);
        } else if constexpr (!IsMutant(Mutant::kPublishEpochTooEarly)) {
            if (core_ == 0) word_.Publish(epoch_);
        }
        return true;
    }

    // Sends this rank's run to the core's share of the peers. counts(d, l) is asked when there is no error.
    template <typename Counts>
    __aicore__ inline void SetStatus(Counts& counts) {
        const uint32_t bytes = StatusRunBytes(info_->localExperts);
        UbBuf runBuf;
        pipe_->InitBuffer(runBuf, bytes);
        LocalTensor<uint32_t> run = runBuf.Get<uint32_t>();
        StatusWriter writer;
        writer.Init(run, *info_, config_, epoch_);
        const bool failed = verdict_.code != kOk && verdict_.code != kRoutingMismatch;
        Verdict none;
        writer.SetError(failed ? verdict_ : none);
        writer.ClearTail();
        uint32_t first = core_, step = info_->cores;
        if constexpr (IsMutant(Mutant::kNoSyncBeforeFlags)) {
            first = core_ + 1 == info_->cores ? 0 : info_->world;
            step = 1;
        }
        for (uint32_t i = first; i < info_->world; i += step) {
            // Start with the next rank, so that not all ranks fall on rank 0 first.
            const uint32_t peer = (info_->rank + 1 + i) % info_->world;
            if (!failed) counts.Select(peer);
            if constexpr (!IsMutant(Mutant::kRunRewrittenBeforeSent)) SyncFunc<HardEvent::MTE3_S>();
            for (uint32_t l = 0; l < info_->localExperts; ++l)
                writer.SetCount(l, failed ? 0 : counts.Rows(peer, l));
            writer.Seal();
            if constexpr (IsMutant(Mutant::kSkipFlagWhenZeroRows)) {
                if (!failed && counts.Rows(peer, 0) == 0) continue;
            }
            if constexpr (!IsMutant(Mutant::kRunSentBeforeWritten)) SyncFunc<HardEvent::S_MTE3>();
            sender_.PutStatus(peer, run, bytes);
        }
        sender_.Flush();
    }

    // Waits for this core's share of the sources; arrived(source, run) sees each good run. Then all cores
    // meet.
    template <typename Arrived>
    __aicore__ inline bool WaitStatus(Arrived& arrived) {
        const uint32_t first = PartBegin(info_->world, core_, info_->cores);
        uint32_t count = PartBegin(info_->world, core_ + 1, info_->cores) - first;
        if constexpr (IsMutant(Mutant::kSkipWaitWhenZeroRows)) {
            while (count > 0 && !arrived.Awaits(first + count - 1)) --count;
        }
        StatusWaiter waiter;
        waiter.Init(*pipe_, context_, *info_, config_, epoch_, first, count);
        Verdict mine = verdict_;
        Worsen(mine, waiter.Wait());
        if (mine.code == kOk || mine.code == kRoutingMismatch) {
            for (uint32_t i = 0; i < count; ++i) Worsen(mine, arrived.Arrived(first + i, waiter.Run(i)));
        }
        verdict_ = board_.Meet<IsMutant(Arrived::kUnmet)>(2, mine);
        return verdict_.code == kOk;
    }

    __aicore__ inline void MeetAfterSend(const Verdict& mine) {
        if constexpr (!IsMutant(Mutant::kNoDrainBeforeFlags)) sender_.Flush();
        Verdict all = verdict_;
        Worsen(all, mine);
        verdict_ = board_.Meet<IsMutant(Mutant::kNoSyncBeforeFlags)>(1, all);
    }
    __aicore__ inline void Fail(const Verdict& verdict) { Worsen(verdict_, verdict); }
    __aicore__ inline void Report() {
        if (core_ == 0) report_.Write(*pipe_, verdict_);
    }
    // Gives the UB back; plans after this start from nothing.
    __aicore__ inline void NextPlan() {
        AscendC::PipeBarrier<PIPE_ALL>();
        pipe_->Reset();
        BoardInit();
    }

    __aicore__ inline TPipe& pipe() { return *pipe_; }
    __aicore__ inline const WindowContext& context() const { return context_; }
    __aicore__ inline WindowSender& sender() { return sender_; }
    __aicore__ inline const Verdict& verdict() const { return verdict_; }
    __aicore__ inline uint32_t core() const { return core_; }
    __aicore__ inline uint32_t epoch() const { return epoch_; }
    // This rank's own window: region of `source`, and the half as a whole.
    __aicore__ inline GM_ADDR Region(uint32_t source) const {
        return context_.data(info_->rank) +
               RegionOffset(context_.data_bytes(), info_->world, RowHalf(Parity(epoch_)), source);
    }
    __aicore__ inline GM_ADDR Half() const {
        return context_.data(info_->rank) + HalfOffset(context_.data_bytes(), RowHalf(Parity(epoch_)));
    }

private:
    TPipe* pipe_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR workspace_ = nullptr;
    WindowContext context_;
    EpochWord word_;
    StatusConfig config_;
    WindowSender sender_;
    FailureReport report_;
    VerdictBoard board_;
    Verdict verdict_;
    uint32_t core_ = 0;
    uint32_t epoch_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_EXCHANGE_H
