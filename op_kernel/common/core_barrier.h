// The core barrier: the cores of a rank exchange their statuses and agree on the worst.
#ifndef ASCEND_MOE_COMMON_CORE_BARRIER_H
#define ASCEND_MOE_COMMON_CORE_BARRIER_H

#include "core_group.h"

namespace moe {

struct OpStatus {
    uint32_t code = kOk;
    uint32_t source = 0;  // the rank it is about
    uint32_t detail0 = 0;
    uint32_t detail1 = 0;
    uint32_t detail2 = 0;
    uint32_t reporter = 0;  // of a fatal one: the rank that detected it
};

// A status of this rank about its own inputs.
__aicore__ inline OpStatus InvalidOf(const MoeDistributeInfo& info, uint32_t code, uint32_t where, uint32_t value) {
    OpStatus status;
    status.code = code;
    status.source = info.rank;
    status.reporter = info.rank;
    status.detail0 = where;
    status.detail1 = value;
    return status;
}

// Between the cores of a rank, in direct combine: an owner may get more rows than its capacity, so all cores must count
// exactly.
constexpr uint32_t kRecheck = kFirstFatal - 1;

// Between the cores of a rank, between servers: a rank runs another algorithm, so no more messages come.
constexpr uint32_t kHinted = kFirstFatal - 2;
// Within a wait: a rank that waits for this one has given up. This rank gives up too and names the rank it is missing.
constexpr uint32_t kAccused = kFirstFatal - 3;

constexpr uint32_t kBatchesDiffer = 33;  // a severity

// A lower number is worse: fatal errors, then configuration mismatches, other collective errors, and mismatches only
// this rank sees. On a tie the lowest rank wins; for batches the largest, because global_bs must cover it. So all
// cores, and with a common cause all ranks, choose the same status. Mismatched counts precede a mismatch of expand_idx,
// because ids or masks that differ cause both. Core 0, which reports, detects a missing row only after it has found all
// counts right.
__aicore__ inline uint32_t Severity(const OpStatus& status) {
    if (status.code >= kFirstFatal) return status.code - kFirstFatal;
    if (status.code == kHinted) return 31;
    if (status.code == kConfigMismatch) return status.detail0 == kFieldMaxBatch ? kBatchesDiffer : 32;
    if (status.code == kRoutingMismatch) return (status.detail0 & kMismatchIndex) != 0 ? 65 : 64;
    if (status.code == kRecheck) return 80;
    return status.code == kOk ? 96 : 48;
}
__aicore__ inline bool Worse(const OpStatus& one, const OpStatus& other) {
    const uint32_t severity = Severity(one);
    if (severity != Severity(other)) return severity < Severity(other);
    if (severity == kBatchesDiffer && one.detail2 != other.detail2) return one.detail2 > other.detail2;
    return one.source < other.source;
}
__aicore__ inline void Worsen(OpStatus& status, const OpStatus& other) {
    if (Worse(other, status)) status = other;
}

// A core's block with this epoch says that the core has arrived and its earlier stores are visible. SyncAll is used in
// addition only if it is faster. Barriers have no deadline: the cores of a launch run together, and each arrives after
// waits that have one.
class CoreBarrier {
public:
    // `tag`: CoreBarrierTag of this launch. `kind`: kBarrierByBlocks or kBarrierBySyncAll, which needs `sync`.
    __aicore__ inline void Init(TPipe& pipe, GM_ADDR state, uint32_t world, uint32_t tag, uint32_t core, uint32_t cores,
                                uint32_t kind = kBarrierByBlocks, RankSync* sync = nullptr) {
        blocks_ = state + CoreBarrierOffset(world, 0);
        tag_ = tag;
        core_ = core;
        cores_ = cores;
        kind_ = kind;
        sync_ = sync;
        lanes_ = CoreBarrierLanes(cores);
        pipe.InitBuffer(buf_, CoreBarrierBytes(cores));
        if (cores == 1) return;
        // The words that a poll compares with; they also pad the lanes after the last core's block.
        AscendC::Duplicate(buf_.Get<int32_t>()[kBlockWords], static_cast<int32_t>(tag_),
                           static_cast<int32_t>(2 * lanes_));
        SyncFunc<HardEvent::V_MTE2>();
    }
    // Drains this core's stores, waits for all cores and returns their worst status. Calls idle() after each
    // unsuccessful poll.
    __aicore__ inline OpStatus ArriveAndWait(uint32_t round, const OpStatus& mine) {
        return ArriveAndWait(round, mine, Idle());
    }
    template <typename Idler>
    __aicore__ inline OpStatus ArriveAndWait(uint32_t round, const OpStatus& mine, Idler&& idle) {
        AscendC::PipeBarrier<PIPE_ALL>();
        if (cores_ == 1) return mine;
        Post(Row(round), buf_.Get<uint32_t>(), mine);
        if (kind_ == kBarrierBySyncAll) {
            AscendC::PipeBarrier<PIPE_ALL>();
            sync_->Wait();  // the first poll finds all blocks
        } else {
            MOE_CORE_BARRIER();
        }
        return Await(Row(round), idle);
    }
    // The two parts of a barrier, each once after the last full barrier of a launch. Arrive does not wait and does not
    // drain: it only publishes the status.
    __aicore__ inline void Arrive(uint32_t round, const OpStatus& mine) {
        if (cores_ == 1) return;
        Post(Row(round), buf_.Get<uint32_t>()[(CoreBarrierBytes(cores_) - kBlock) / kBlock * kBlockWords], mine);
    }
    __aicore__ inline OpStatus Wait(uint32_t round) { return cores_ == 1 ? OpStatus() : Await(Row(round), Idle()); }

private:
    struct Idle {
        __aicore__ inline void operator()() const {}
    };
    __aicore__ inline GlobalTensor<uint32_t> Row(uint32_t round) const {
        GlobalTensor<uint32_t> row;
        row.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(blocks_ + round * kMaxCores * kBlock),
                            cores_ * kBlockWords);
        return row;
    }
    template <typename Idler>
    __aicore__ inline OpStatus Await(const GlobalTensor<uint32_t>& row, Idler&& idle) {
        while (!Look(row)) {
            idle();
            MOE_POLL_HINT();
        }
        return fine_ ? OpStatus() : Worst();
    }
    static constexpr uint32_t kTags = 0x81818181u, kAllWords = 0xFFFFFFFFu;  // bits of four blocks

    __aicore__ inline void Post(const GlobalTensor<uint32_t>& row, LocalTensor<uint32_t> block, const OpStatus& mine) {
        block.SetValue(kBrTag, tag_);
        block.SetValue(kBrCode, tag_ ^ mine.code);
        block.SetValue(kBrSource, tag_ ^ mine.source);
        block.SetValue(kBrDetail0, tag_ ^ mine.detail0);
        block.SetValue(kBrDetail1, tag_ ^ mine.detail1);
        block.SetValue(kBrDetail2, tag_ ^ mine.detail2);
        block.SetValue(kBrReporter, tag_ ^ mine.reporter);
        block.SetValue(kBrLast, tag_);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(row[core_ * kBlockWords], block, kBlockWords);
    }
    // Returns whether all cores have arrived; fine_ then says whether none has an error.
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
            if ((equal & kTags) != kTags) return false;
            fine_ = fine_ && equal == kAllWords;
        }
        return true;
    }
    __aicore__ inline OpStatus Worst() {
        const LocalTensor<uint32_t> all = buf_.Get<uint32_t>()[kBlockWords];
        OpStatus worst;
        for (uint32_t at = 0; at < cores_ * kBlockWords; at += kBlockWords) {
            OpStatus other;
            other.code = all.GetValue(at + kBrCode) ^ tag_;
            other.source = all.GetValue(at + kBrSource) ^ tag_;
            other.detail0 = all.GetValue(at + kBrDetail0) ^ tag_;
            other.detail1 = all.GetValue(at + kBrDetail1) ^ tag_;
            other.detail2 = all.GetValue(at + kBrDetail2) ^ tag_;
            other.reporter = all.GetValue(at + kBrReporter) ^ tag_;
            if (other.code != kOk) Worsen(worst, other);
        }
        return worst;
    }

    UbBuf buf_;
    GM_ADDR blocks_ = nullptr;
    uint32_t tag_ = 0;
    uint32_t core_ = 0;
    uint32_t cores_ = 1;
    uint32_t kind_ = kBarrierByBlocks;
    RankSync* sync_ = nullptr;
    uint32_t lanes_ = 0;
    bool fine_ = true;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_CORE_BARRIER_H
