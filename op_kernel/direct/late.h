// Late blocks: where rows come in stages, blocks of their own tell of those after the first, and a reader
// awaits them before it goes on to what has not come yet.
#ifndef ASCEND_MOE_DISTRIBUTE_LATE_H
#define ASCEND_MOE_DISTRIBUTE_LATE_H

#include "../common/wait.h"

namespace moe {

// How far this rank's rows are: its copying cores say so to others of the rank, and those to the peers. A
// block that leaves behind rows takes its time, and a core has only so many on their way: it is not for
// copying cores to wait for them, nor for one core to send all.
class StageSender {
public:
    // UB: a block a stage, what copying cores and core 0 send. The last `cores` copy.
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, const MoeDistributeInfo& info,
                                uint32_t epoch, uint32_t cores) {
        context_ = &context;
        epoch_ = epoch;
        deadline_ = static_cast<int64_t>(info.deadlineCycles);
        first_ = info.cores - cores;
        cores_ = cores;
        pipe.InitBuffer(buf_, (kStages - 1) * kBlock);
        pipe.InitBuffer(copiedBuf_, cores * kBlock);
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        for (uint32_t stage = 1, at = 0; stage < kStages; ++stage, at += kBlockWords) {
            words.SetValue(at + kLbMagic, LateWord(epoch));
            words.SetValue(at + kLbEpoch, epoch);
            words.SetValue(at + kLbStage, stage);
            words.SetValue(at + kLbSource, context.rank());
            for (uint32_t w = kLbSource + 1; w < kBlockWords; ++w) words.SetValue(at + w, 0);
        }
    }
    // A copying core: its share of the stage is there before its block is.
    __aicore__ inline void Copied(uint32_t core, uint32_t stage) {
        SyncFunc<HardEvent::S_MTE3>();
        if constexpr (!IsMutant(Mutant::kCopiedBeforeStored)) AscendC::PipeBarrier<PIPE_MTE3>();
        Put(context_->rank(), CopiedOffset(context_->world(), core), stage);
    }
    // One of `parts` cores that tell a share of the peers, when all shares of the stage are there.
    __aicore__ inline void Announce(uint32_t part, uint32_t parts, uint32_t stage) {
        const int64_t start = AscendC::GetSystemCycle();
        while (!AllCopied(stage)) {
            // Then nobody is told, and core 0 finds this rank's own late block missing.
            if (AscendC::GetSystemCycle() - start > deadline_) return;
            MOE_POLL_HINT();
        }
        SyncFunc<HardEvent::S_MTE3>();
        const uint32_t parity = StatusHalf(Parity(epoch_)), world = context_->world();
        const uint32_t end = PartBegin(world, part + 1, parts);
        for (uint32_t i = PartBegin(world, part, parts); i < end; ++i) {
            const uint32_t peer = (context_->rank() + 1 + i) % world;
            Put(peer, LateOffset(world, parity, context_->rank()), stage);
        }
    }

private:
    __aicore__ inline void Put(uint32_t rank, uint64_t offset, uint32_t stage) {
        GlobalTensor<uint32_t> block;
        block.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context_->state(rank) + offset),
                              kBlockWords);
        AscendC::DataCopy(block, buf_.Get<uint32_t>()[(stage - 1) * kBlockWords], kBlockWords);
    }
    __aicore__ inline bool AllCopied(uint32_t stage) {
        if constexpr (IsMutant(Mutant::kAnnouncedBeforeCopied)) return true;
        GlobalTensor<uint32_t> blocks;
        blocks.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context_->state(context_->rank()) +
                                                                  CopiedOffset(context_->world(), first_)),
                               cores_ * kBlockWords);
        const LocalTensor<uint32_t> words = copiedBuf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(words, blocks, cores_ * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t at = 0; at < cores_ * kBlockWords; at += kBlockWords) {
            if (words.GetValue(at + kLbMagic) != LateWord(epoch_) || words.GetValue(at + kLbStage) < stage)
                return false;
        }
        return true;
    }

    const WindowContext* context_ = nullptr;
    UbBuf buf_, copiedBuf_;
    uint32_t epoch_ = 0;
    int64_t deadline_ = 0;
    uint32_t first_ = 0;
    uint32_t cores_ = 0;
};

// Core 0 waits for those of all ranks whose runs say that they follow.
class LateWaiter {
public:
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, const MoeDistributeInfo& info,
                                uint32_t epoch) {
        info_ = &info;
        epoch_ = epoch;
        blocks_.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) +
                                               LateOffset(info.world, StatusHalf(Parity(epoch)), 0)),
            info.world * kBlockWords);
        pipe.InitBuffer(buf_, info.world * kBlock);
    }
    __aicore__ inline Verdict Wait(StatusWaiter& runs, uint32_t stage) {
        Patience patience;
        patience.Begin(runs.aborts(), *info_);
        Verdict worst;
        for (uint32_t next = Next(runs, 0); next < info_->world;) {
            Load();
            while (next < info_->world && Judge(next, stage, worst)) next = Next(runs, next + 1);
            if (worst.code != kOk || next == info_->world) break;
            if (patience.Ends(next, worst)) break;
        }
        return worst;
    }
    static __aicore__ inline bool Owes(const LocalTensor<uint32_t>& run) {
        return PhaseOf(run.GetValue(kH0OpPhase)) == kPhaseStaged;
    }

private:
    // The first source from `source` on that owes one.
    __aicore__ inline uint32_t Next(StatusWaiter& runs, uint32_t source) {
        while (source < info_->world && !Owes(runs.Run(source))) ++source;
        return source;
    }
    __aicore__ inline void Load() {
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(buf_.Get<uint32_t>(), blocks_, info_->world * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline uint32_t Word(uint32_t source, uint32_t word) {
        return buf_.Get<uint32_t>().GetValue(source * kBlockWords + word);
    }
    __aicore__ inline bool OfThisEpoch(uint32_t source) {
        if constexpr (IsMutant(Mutant::kLateOfAnyEpoch)) return Word(source, kLbMagic) != 0;
        return Word(source, kLbMagic) == LateWord(epoch_);
    }
    // Whether it is there. What no late block of this communicator can be is an error.
    __aicore__ inline bool Judge(uint32_t source, uint32_t stage, Verdict& verdict) {
        uint32_t odd = Word(source, kLbMagic);
        if (OfThisEpoch(source)) {
            const uint32_t said = Word(source, kLbStage);
            if (Word(source, kLbEpoch) == epoch_ && Word(source, kLbSource) == source && said < kStages)
                return said >= stage || IsMutant(Mutant::kLateOfAnyStage);
            odd = said;
        } else if (IsEarlierLate(odd, epoch_)) {
            return false;
        }
        verdict = InvalidOf(*info_, kCorruptStatus, kLateBlockIndex, odd);
        verdict.source = source;
        return false;
    }

    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<uint32_t> blocks_;
    UbBuf buf_;
    uint32_t epoch_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_LATE_H
