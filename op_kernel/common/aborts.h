// What ends a wait early: abort blocks of other ranks, this rank's local abort flag, and the hints by which ranks of
// other servers ask for a missing rank; and the waits for aborts and hints themselves.
#ifndef ASCEND_MOE_COMMON_ABORTS_H
#define ASCEND_MOE_COMMON_ABORTS_H

#include "send.h"
#include "status.h"

namespace moe {

// Polls of messages, or of this rank's cores, per poll of the aborts.
#ifdef TWIN_POLL_SLEEPS  // after so many, until something has changed, which may be an abort
__aicore__ inline uint32_t LooksAnAbort() { return TWIN_POLL_SLEEPS; }
#else
__aicore__ inline uint32_t LooksAnAbort() { return 16; }
#endif

// Polls the abort blocks in this rank's state area, many per read. During a wait only core 0 reads them and signals the
// other cores through the local abort flag. When its deadline has passed or it was signaled, every core reads them
// itself, so all report the same reason.
//
// An abort block of the next op does not end this op: its source has completed this op, so it had a message from every
// rank. Each of those ranks can complete this op or is detected as missing on its own. The next op reads the block when
// it begins.
class AbortWatch {
public:
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, uint32_t epoch) {
        epoch_ = epoch;
        world_ = context.world();
        rank_ = context.rank();
        blocks_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) + kAbortOffset),
                                world_ * kBlockWords);
        pipe.InitBuffer(buf_, AbortBytes(world_));
    }
    // Between servers, during a wait: Look also finds hints about other algorithms if there is no abort.
    __aicore__ inline void TakeHints(uint32_t algorithm) { algorithm_ = algorithm; }
    // From this cycle on, Look also finds hints that accuse this rank.
    __aicore__ inline void AnswerFrom(int64_t cycle) { answerFrom_ = cycle; }
    // Returns true if there is an abort block of this op or an earlier one; `status` is that of the lowest source rank,
    // or kHinted or kAccused.
    __aicore__ inline bool Look(OpStatus& status) {
        hinted_ = 0;
        turns_ = kMostTurns;
        OpStatus hint;
        for (uint32_t first = 0; first < world_; first += kAbortsAtOnce) {
            if (LookAt(first, Min(kAbortsAtOnce, world_ - first), status, hint)) return true;
        }
        if (hint.code == kOk && turns_ < kMostTurns && AscendC::GetSystemCycle() >= answerFrom_) hint.code = kAccused;
        if (hint.code != kOk) status = hint;
        return hint.code != kOk;
    }
    // After Look: the number of turns this rank may wait for an answer; fewer if it is accused.
    __aicore__ inline uint32_t turns() const { return turns_; }
    // After Look without an abort: whether every other rank has sent a hint of this op or the next; otherwise the first
    // rank that has not.
    __aicore__ inline bool AllHinted() const { return hinted_ == world_; }
    __aicore__ inline uint32_t missing() const { return hinted_; }

private:
    // `hint`: from the first rank that runs another algorithm in this op.
    __aicore__ inline void TakeHint(const LocalTensor<uint32_t>& words, uint32_t at, uint32_t source, OpStatus& hint) {
        const uint32_t epoch = words.GetValue(at + kHtEpoch), algorithm = words.GetValue(at + kHtAlgorithm);
        const bool whole = words.GetValue(at + kHtMagic) == kHintMagic && words.GetValue(at + kHtTag) == epoch;
        const bool here = source == rank_ || (whole && (epoch == epoch_ || epoch == NextEpoch(epoch_)));
        if (here && hinted_ == source) ++hinted_;
        if (here && source != rank_ && words.GetValue(at + kHtAccused) == rank_ + 1)
            turns_ = Max(1, Min(turns_, Min(words.GetValue(at + kHtTurns), kMostTurns) - 1));
        if (!whole || epoch != epoch_ || algorithm == algorithm_ || hint.code != kOk) return;
        hint.code = kHinted;
        hint.source = source;
        hint.reporter = rank_;
        hint.detail0 = kFieldAlgorithm;
        hint.detail1 = algorithm_;
        hint.detail2 = algorithm;
    }
    __aicore__ inline bool LookAt(uint32_t first, uint32_t count, OpStatus& status, OpStatus& hint) {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(words, blocks_[first * kBlockWords], count * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t at = i * kBlockWords, source = first + i;
            const uint32_t magic = words.GetValue(at + kAbMagic);
            if (algorithm_ != 0 && (magic == kHintMagic || source == rank_)) TakeHint(words, at, source, hint);
            if (magic != kAbortMagic || words.GetValue(at + kAbTag) != kAbortMagic) continue;
            if (words.GetValue(at + kAbEpoch) == NextEpoch(epoch_)) {
                if (hinted_ == source) ++hinted_;
                continue;
            }
            status = OpStatus();
            status.code = words.GetValue(at + kAbCode);
            status.source = words.GetValue(at + kAbCulprit);
            status.reporter = words.GetValue(at + kAbReporter);
            status.detail0 = words.GetValue(at + kAbDetail0);
            status.detail1 = words.GetValue(at + kAbDetail1);
            // A corrupted abort block is a failure too: its source has given up, or its memory is bad.
            if (status.code < kFirstFatal || status.code > kKernelFault || status.source >= world_ ||
                status.reporter >= world_) {
                status.detail0 = kAbortBlockIndex;
                status.detail1 = status.code;
                status.code = kCorruptStatus;
                status.source = source;
                status.reporter = rank_;
            }
            return true;
        }
        return false;
    }

    GlobalTensor<uint32_t> blocks_;
    UbBuf buf_;
    uint32_t world_ = 0;
    uint32_t rank_ = 0;
    uint32_t epoch_ = 0;
    uint32_t algorithm_ = 0;  // 0: hints are not read
    uint32_t hinted_ = 0;     // number of leading ranks
    uint32_t turns_ = kMostTurns;
    int64_t answerFrom_ = 0;
};

// The local abort flag in this rank's state area. In direct, every core waits for all messages and no core barrier
// follows. The cores agree without one because:
// - A valid message stays until this rank's next op but one: its source writes there again only after it has this
//   rank's message of the next op. So every core accepts what one core has accepted.
// - Collective errors are words of valid messages: every core that has all messages finds the same worst error.
// - Only core 0 checks the clock and the abort blocks, and reports corrupted messages. If it gives up, it writes the
//   reason into the local abort flag and the other cores return it. If core 0 has all messages, it does not give up,
//   and the other cores will have them too.
// - Only core 0 checks the hashes and, in combine, the counts against this rank's own ids. The other cores accept
//   messages whose other words are right. A core that had all messages before core 0 gave up still copies or sums its
//   rows. This is harmless: core 0 writes zero counts in dispatch, and the cores of combine overwrite their sums with
//   zeros (Exchange::WaitAfterSums). Such a core never reads outside the areas that unchecked words refer to.
class LocalAbortFlag {
public:
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, uint32_t epoch) {
        epoch_ = epoch;
        block_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) + kLocalAbortOffset),
                               kBlockWords);
        pipe.InitBuffer(buf_, kLocalAbortFlagBytes);
    }
    __aicore__ inline void Post(uint32_t code) {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        words.SetValue(kLaMagic, LocalAbortWord(epoch_));
        words.SetValue(kLaEpoch, epoch_);
        words.SetValue(kLaCode, code);
        for (uint32_t w = kLaCode + 1; w < kBlockWords; ++w) words.SetValue(w, 0);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(block_, words, kBlockWords);
    }
    // Returns kOk unless core 0 has given up.
    __aicore__ inline uint32_t Look() {
        const LocalTensor<uint32_t> words = Load();
        return words.GetValue(kLaMagic) == LocalAbortWord(epoch_) ? words.GetValue(kLaCode) : kOk;
    }
    // Whether an earlier op of this rank has failed fatally.
    __aicore__ inline bool FailedBefore() {
        const LocalTensor<uint32_t> words = Load();
        return words.GetValue(kLaMagic) == LocalAbortWord(words.GetValue(kLaEpoch)) &&
               words.GetValue(kLaCode) >= kFirstFatal;
    }

private:
    __aicore__ inline LocalTensor<uint32_t> Load() {
        const LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(words, block_, kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        return words;
    }
    GlobalTensor<uint32_t> block_;
    UbBuf buf_;
    uint32_t epoch_ = 0;
};

// Between servers, core 0: sends all other ranks the algorithm that this rank runs in this op, once.
class AlgorithmHints {
public:
    __aicore__ inline void Init(WindowSender& sender, RdmaLink& link, const MoeDistributeInfo& info, uint32_t epoch,
                                GM_ADDR list) {
        sender_ = &sender;
        link_ = &link;
        info_ = &info;
        epoch_ = epoch;
        list_ = list;
    }
    // Call in each UB layout that may send hints.
    __aicore__ inline void BuffInit(TPipe& pipe) { pipe.InitBuffer(buf_, HintsBytes(*info_)); }
    __aicore__ inline void Begin(int64_t now) { start_ = now; }
    // Call after each unsuccessful poll.
    __aicore__ inline void Look() {
        if (AscendC::GetSystemCycle() - start_ > static_cast<int64_t>(info_->deadlineCycles / kHintShare)) Send();
    }
    __aicore__ inline void Send() {
        if (!sent_) Put(0, 0);
    }
    // Asks a missing rank which rank it is missing itself.
    __aicore__ inline void Accuse(uint32_t rank, uint32_t turns) { Put(rank + 1, turns); }

private:
    __aicore__ inline void Put(uint32_t accused, uint32_t turns) {
        sent_ = true;
        LocalTensor<uint32_t> hint = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t w = 0; w < kBlockWords; ++w) hint.SetValue(w, 0);
        hint.SetValue(kHtMagic, kHintMagic);
        hint.SetValue(kHtEpoch, epoch_);
        hint.SetValue(kHtAlgorithm, info_->algorithm);
        hint.SetValue(kHtAccused, accused);
        hint.SetValue(kHtTurns, turns);
        hint.SetValue(kHtTag, epoch_);
        SyncFunc<HardEvent::S_MTE3>();
        sender_->StageAbort(hint);
        uint32_t count = 0;
        for (uint32_t peer = 0; peer < info_->world; ++peer) {
            if (peer == info_->rank) continue;
            if (!sender_->servers().InterNode(peer)) {
                sender_->PutAbort(peer, hint);
                continue;
            }
            const LocalTensor<uint64_t> item = buf_.Get<uint64_t>()[kBlock / sizeof(uint64_t)];
            SyncFunc<HardEvent::MTE3_S>();
            WindowSender::SetItem(item, sender_->AbortItemOf(peer));
            SyncFunc<HardEvent::S_MTE3>();
            StoreWords(list_ + static_cast<uint64_t>(count++) * kBlock, item.ReinterpretCast<uint32_t>(), kBlock);
        }
        sender_->Flush();
        link_->Post(list_, count);
    }

    WindowSender* sender_ = nullptr;
    RdmaLink* link_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR list_ = nullptr;
    UbBuf buf_;
    int64_t start_ = 0;
    uint32_t epoch_ = 0;
    bool sent_ = false;
};

// Core 0 of window while it waits for the other cores, which wait for their shares of the sources: signals them when
// there is an abort or a hint. If they have all their messages anyway, the op succeeds, and the next op finds the
// abort.
class AbortCaller {
public:
    // `hints`: nullptr if none are sent.
    __aicore__ inline AbortCaller(AbortWatch& aborts, LocalAbortFlag& localAbort, AlgorithmHints* hints)
        : aborts_(&aborts), localAbort_(&localAbort), hints_(hints) {}
    // Call after an unsuccessful poll.
    __aicore__ inline void operator()() {
        if (hints_ != nullptr) hints_->Look();
        if (called_ || ++looks_ % LooksAnAbort() != 0) return;
        OpStatus abort;
        called_ = aborts_->Look(abort);
        if (called_) localAbort_->Post(abort.code);
    }

private:
    AbortWatch* aborts_;
    LocalAbortFlag* localAbort_;
    AlgorithmHints* hints_;
    uint32_t looks_ = 0;
    bool called_ = false;
};

// Core 0, between servers, after the deadline: accuses the missing rank, which may be waiting for another one, and
// takes its abort as the answer. A rank that has stopped does not answer.
class Accuser {
public:
    // Returns `missed`, or the abort of a rank that knows the cause.
    __aicore__ inline OpStatus Ask(TPipe& pipe, const WindowContext& context, const MoeDistributeInfo& info,
                                   uint32_t epoch, AlgorithmHints& hints, const OpStatus& missed) {
        const int64_t share = static_cast<int64_t>(info.deadlineCycles / kTurnShare);
        const int64_t turn = share < kCyclesPerSecond ? share : kCyclesPerSecond;
        AbortWatch watch;
        watch.Init(pipe, context, epoch);
        watch.TakeHints(info.algorithm);
        hints.BuffInit(pipe);
        OpStatus found;
        watch.Look(found);
        uint32_t turns = watch.turns();
        if (found.code < kFirstFatal) hints.Accuse(missed.source, turns);
        for (int64_t end = AscendC::GetSystemCycle() + turns * turn; found.code < kFirstFatal; watch.Look(found)) {
            const int64_t now = AscendC::GetSystemCycle();
            if (now > end) return missed;
            if (watch.turns() < turns) {  // accused since, or by a rank with fewer turns
                turns = watch.turns();
                hints.Accuse(missed.source, turns);
                end = end < now + turns * turn ? end : now + turns * turn;
            }
            MOE_POLL_HINT();
        }
        return found;
    }
};

// Core 0, after a hint about another algorithm: waits until every rank has sent a hint of this op. All ranks then leave
// it together, none still reads an earlier op, and the communicator stays usable.
class HintWaiter {
public:
    __aicore__ inline OpStatus Wait(TPipe& pipe, const WindowContext& context, const MoeDistributeInfo& info,
                                    uint32_t epoch, AlgorithmHints& hints) {
        AbortWatch watch;
        watch.Init(pipe, context, epoch);
        watch.TakeHints(info.algorithm);
        hints.BuffInit(pipe);
        hints.Send();
        const int64_t start = AscendC::GetSystemCycle();
        for (bool late = false;; late = Expired(info, start)) {
            OpStatus found;
            watch.Look(found);
            if (watch.AllHinted()) return OpStatus();
            if (found.code >= kFirstFatal) return found;
            if (late) {
                OpStatus missed;
                missed.code = kCommTimeout;
                missed.source = watch.missing();
                missed.reporter = info.rank;
                return missed;
            }
            MOE_POLL_HINT();
        }
    }

private:
    __aicore__ inline bool Expired(const MoeDistributeInfo& info, int64_t start) const {
        return AscendC::GetSystemCycle() - start > static_cast<int64_t>(info.deadlineCycles);
    }
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_ABORTS_H
