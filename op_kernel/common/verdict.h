// How the cores of one rank meet and agree: each posts a verdict, waits for those of all, and takes the worst.
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
    uint32_t reporter = 0;  // of a fatal one: the rank that found it
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

// The same, between servers: a rank runs another algorithm, as its note says, so no more messages come.
constexpr uint32_t kNoted = kFirstFatal - 2;
// In a wait alone: a rank that misses this one has given up waiting. This rank gives up too, and names whom it misses.
constexpr uint32_t kAccused = kFirstFatal - 3;

constexpr uint32_t kBatchesDiffer = 33;  // a severity

// The worst verdict has the least number: fatal errors, then a configuration mismatch, the other collective
// errors, and the mismatches that only this rank sees. Of equals the lowest rank's counts, of batches the largest,
// because global_bs has to hold it. So all cores, and if the cause is common all ranks, choose the same verdict.
// A mismatch of counts goes before a mismatch of expand_idx, because ids or masks that differ cause both. Core 0, which
// reports, sees no row that has not come before it has found all counts right.
__aicore__ inline uint32_t Severity(const Verdict& verdict) {
    if (verdict.code >= kFirstFatal) return verdict.code - kFirstFatal;
    if (verdict.code == kNoted) return 31;
    if (verdict.code == kConfigMismatch) return verdict.detail0 == kFieldMaxBatch ? kBatchesDiffer : 32;
    if (verdict.code == kRoutingMismatch) return (verdict.detail0 & kMismatchIndex) != 0 ? 65 : 64;
    if (verdict.code == kRecheck) return 80;
    return verdict.code == kOk ? 96 : 48;
}
__aicore__ inline bool Worse(const Verdict& one, const Verdict& other) {
    const uint32_t severity = Severity(one);
    if (severity != Severity(other)) return severity < Severity(other);
    if (severity == kBatchesDiffer && one.detail2 != other.detail2) return one.detail2 > other.detail2;
    return one.source < other.source;
}
__aicore__ inline void Worsen(Verdict& verdict, const Verdict& other) {
    if (Worse(other, verdict)) verdict = other;
}

// A meeting needs no SyncAll, and has one only where that is faster: a block that carries this epoch says that its core
// has come, and that what the core has stored before is there. No wait of a meeting has a deadline, because the cores
// of a launch run together, and each comes to every meeting after waits that have one.
class VerdictBoard {
public:
    // `mark`: VerdictMark of this launch. `meeting`: kMeetByBlocks or kMeetBySyncAll.
    __aicore__ inline void Init(TPipe& pipe, GM_ADDR state, uint32_t world, uint32_t mark, uint32_t core,
                                uint32_t cores, uint32_t meeting = kMeetByBlocks) {
        board_ = state + VerdictOffset(world, 0);
        mark_ = mark;
        core_ = core;
        cores_ = cores;
        meeting_ = meeting;
        lanes_ = VerdictLanes(cores);
        pipe.InitBuffer(buf_, VerdictBytes(cores));
        if (cores == 1) return;
        // What a look compares with, and what the lanes behind the last core's have.
        AscendC::Duplicate(buf_.Get<int32_t>()[kBlockWords], static_cast<int32_t>(mark_),
                           static_cast<int32_t>(2 * lanes_));
        SyncFunc<HardEvent::V_MTE2>();
    }
    // Drains this core's own stores, meets the others, and returns the worst verdict of all. Calls idle() after each
    // look in vain.
    __aicore__ inline Verdict Meet(uint32_t round, const Verdict& mine) { return Meet(round, mine, Idle()); }
    template <typename Idler>
    __aicore__ inline Verdict Meet(uint32_t round, const Verdict& mine, Idler&& idle) {
        AscendC::PipeBarrier<PIPE_ALL>();
        if (cores_ == 1) return mine;
        Post(Row(round), buf_.Get<uint32_t>(), mine);
        if (meeting_ == kMeetBySyncAll) {
            AscendC::PipeBarrier<PIPE_ALL>();
            AscendC::SyncAll<true>();  // the first look finds all blocks
        } else {
            MOE_MEETING();
        }
        return Await(Row(round), idle);
    }
    // The same in two halves, of which the first waits for nobody and drains nothing: only the verdict is told. Each
    // once after the last meeting of a launch. A launch of a single core has nobody to tell.
    __aicore__ inline void Tell(uint32_t round, const Verdict& mine) {
        if (cores_ == 1) return;
        Post(Row(round), buf_.Get<uint32_t>()[(VerdictBytes(cores_) - kBlock) / kBlock * kBlockWords], mine);
    }
    __aicore__ inline Verdict Hear(uint32_t round) { return cores_ == 1 ? Verdict() : Await(Row(round), Idle()); }

private:
    struct Idle {
        __aicore__ inline void operator()() const {}
    };
    __aicore__ inline GlobalTensor<uint32_t> Row(uint32_t round) const {
        GlobalTensor<uint32_t> row;
        row.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(board_ + round * kMaxCores * kBlock),
                            cores_ * kBlockWords);
        return row;
    }
    template <typename Idler>
    __aicore__ inline Verdict Await(const GlobalTensor<uint32_t>& row, Idler&& idle) {
        while (!Look(row)) {
            idle();
            MOE_POLL_HINT();
        }
        return fine_ ? Verdict() : Worst();
    }
    static constexpr uint32_t kMarks = 0x81818181u, kAllWords = 0xFFFFFFFFu;  // bits of four blocks

    __aicore__ inline void Post(const GlobalTensor<uint32_t>& row, LocalTensor<uint32_t> block, const Verdict& mine) {
        block.SetValue(kVbMark, mark_);
        block.SetValue(kVbCode, mark_ ^ mine.code);
        block.SetValue(kVbSource, mark_ ^ mine.source);
        block.SetValue(kVbDetail0, mark_ ^ mine.detail0);
        block.SetValue(kVbDetail1, mark_ ^ mine.detail1);
        block.SetValue(kVbDetail2, mark_ ^ mine.detail2);
        block.SetValue(kVbReporter, mark_ ^ mine.reporter);
        block.SetValue(kVbLast, mark_);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(row[core_ * kBlockWords], block, kBlockWords);
    }
    // Whether all cores have come; then fine_ says whether none of them has an error.
    __aicore__ inline bool Look(const GlobalTensor<uint32_t>& row) {
        const LocalTensor<uint32_t> all = buf_.Get<uint32_t>()[kBlockWords];
        const LocalTensor<uint8_t> bits = buf_.Get<uint8_t>()[(kBlockWords + 2 * lanes_) * sizeof(uint32_t)];
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(all, row, cores_ * kBlockWords);
        SyncFunc<HardEvent::MTE2_V>();
        AscendC::Compare(bits, all.ReinterpretCast<int32_t>(), all[lanes_].ReinterpretCast<int32_t>(),
                         AscendC::CMPMODE::EQ, lanes_);
        SyncFunc<HardEvent::V_S>();
        const LocalTensor<uint32_t> words = bits.ReinterpretCast<uint32_t>();
        fine_ = true;
        for (uint32_t i = 0; i < lanes_ / 32; ++i) {
            const uint32_t equal = words.GetValue(i);
            if ((equal & kMarks) != kMarks) return false;
            fine_ = fine_ && equal == kAllWords;
        }
        return true;
    }
    __aicore__ inline Verdict Worst() {
        const LocalTensor<uint32_t> all = buf_.Get<uint32_t>()[kBlockWords];
        Verdict worst;
        for (uint32_t at = 0; at < cores_ * kBlockWords; at += kBlockWords) {
            Verdict other;
            other.code = all.GetValue(at + kVbCode) ^ mark_;
            other.source = all.GetValue(at + kVbSource) ^ mark_;
            other.detail0 = all.GetValue(at + kVbDetail0) ^ mark_;
            other.detail1 = all.GetValue(at + kVbDetail1) ^ mark_;
            other.detail2 = all.GetValue(at + kVbDetail2) ^ mark_;
            other.reporter = all.GetValue(at + kVbReporter) ^ mark_;
            if (other.code != kOk) Worsen(worst, other);
        }
        return worst;
    }

    UbBuf buf_;
    GM_ADDR board_ = nullptr;
    uint32_t mark_ = 0;
    uint32_t core_ = 0;
    uint32_t cores_ = 1;
    uint32_t meeting_ = kMeetByBlocks;
    uint32_t lanes_ = 0;
    bool fine_ = true;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_VERDICT_H
