// How the cores of one rank agree: each posts a verdict, all pass a SyncAll, each reads all and takes the
// worst.
#ifndef ASCEND_MOE_COMMON_VERDICT_H
#define ASCEND_MOE_COMMON_VERDICT_H

#include "base.h"

namespace moe {

struct Verdict {
    uint32_t code = kOk;
    uint32_t source = 0;  // the rank it is about
    uint32_t detail0 = 0;
    uint32_t detail1 = 0;
    uint32_t detail2 = 0;
    uint32_t reporter = 0;  // the rank that found it
};

// A verdict of this rank about its own inputs.
__aicore__ inline Verdict InvalidOf(const MoeDistributeInfo& info, uint32_t code, uint32_t where, uint32_t value) {
    Verdict verdict;
    verdict.code = code;
    verdict.source = info.rank;
    verdict.reporter = info.rank;
    verdict.detail0 = where;
    verdict.detail1 = value;
    return verdict;
}

// Between the cores of a rank only, in direct combine: a core has seen that an owner may get more rows than
// its capacity, so all cores have to count exactly.
constexpr uint32_t kRecheck = kFirstFatal - 1;

// The worst verdict has the least number: fatal errors, then a configuration mismatch, the other collective
// errors, and the mismatches that only this rank sees. Of equals the lowest rank's counts. So all cores, and
// if the cause is common all ranks, choose the same verdict. A mismatch of counts goes before a mismatch of
// expand_idx, because ids or masks that differ cause both.
__aicore__ inline uint32_t Severity(const Verdict& verdict) {
    if (verdict.code >= kFirstFatal) return verdict.code - kFirstFatal;
    if (verdict.code == kConfigMismatch) return 32;
    if (verdict.code == kRoutingMismatch) return (verdict.detail0 & kMismatchIndex) != 0 ? 65 : 64;
    if (verdict.code == kRecheck) return 80;
    return verdict.code == kOk ? 96 : 48;
}
__aicore__ inline void Worsen(Verdict& verdict, const Verdict& other) {
    const uint32_t ours = Severity(verdict), theirs = Severity(other);
    if (theirs < ours || (theirs == ours && other.source < verdict.source)) verdict = other;
}

class VerdictBoard {
public:
    struct NothingMore {
        __aicore__ inline void Met() {}
    };
    // UB: one block to post, then one a core to read.
    __aicore__ inline void Init(TPipe& pipe, GM_ADDR workspace, uint32_t core, uint32_t cores) {
        core_ = core;
        cores_ = cores;
        board_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(workspace), kVerdictRounds * cores * kBlockWords);
        pipe.InitBuffer(buf_, (cores + 1) * kBlock);
    }
    // Drains this core's own stores, meets the others, and returns the worst verdict of all.
    __aicore__ inline Verdict Meet(uint32_t round, const Verdict& mine) {
        SyncFunc<HardEvent::MTE3_S>();
        NothingMore then;
        return MeetThen(round, mine, then);
    }
    // As Meet, but this core's stores drain together with its verdict. Calls then.Met() when all cores have
    // met, before this core reads their verdicts.
    template <typename Then>
    __aicore__ inline Verdict MeetThen(uint32_t round, const Verdict& mine, Then& then) {
        LocalTensor<uint32_t> block = buf_.Get<uint32_t>();
        block.SetValue(0, mine.code);
        block.SetValue(1, mine.source);
        block.SetValue(2, mine.detail0);
        block.SetValue(3, mine.detail1);
        block.SetValue(4, mine.detail2);
        block.SetValue(5, mine.reporter);
        block.SetValue(6, 0u);
        block.SetValue(7, 0u);
        SyncFunc<HardEvent::S_MTE3>();
        const GlobalTensor<uint32_t> row = board_[static_cast<uint64_t>(round) * cores_ * kBlockWords];
        AscendC::DataCopy(row[static_cast<uint64_t>(core_) * kBlockWords], block, kBlockWords);
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        then.Met();
        LocalTensor<uint32_t> all = buf_.Get<uint32_t>()[kBlockWords];
        AscendC::DataCopy(all, row, cores_ * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        Verdict worst;
        for (uint32_t i = 0; i < cores_; ++i) {
            const uint32_t at = i * kBlockWords;
            if (all.GetValue(at) == kOk) continue;
            Verdict other;
            other.code = all.GetValue(at);
            other.source = all.GetValue(at + 1);
            other.detail0 = all.GetValue(at + 2);
            other.detail1 = all.GetValue(at + 3);
            other.detail2 = all.GetValue(at + 4);
            other.reporter = all.GetValue(at + 5);
            Worsen(worst, other);
        }
        return worst;
    }

private:
    GlobalTensor<uint32_t> board_;
    UbBuf buf_;
    uint32_t core_ = 0;
    uint32_t cores_ = 1;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_VERDICT_H
