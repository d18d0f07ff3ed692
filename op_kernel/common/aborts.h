// How a wait ends before its time: abort blocks that other ranks have posted, the local abort flag of the own rank's
// cores, and the notes in which ranks of other servers ask for a rank that is missing.
#ifndef ASCEND_MOE_COMMON_ABORTS_H
#define ASCEND_MOE_COMMON_ABORTS_H

#include "send.h"
#include "status.h"

namespace moe {

// Looks at messages, or at the cores of the own rank, for one look at aborts.
#ifdef TWIN_POLL_SLEEPS  // until something has changed, which may be an abort
constexpr uint32_t kLooksAnAbort = 1;
#else
constexpr uint32_t kLooksAnAbort = 16;
#endif

// Abort blocks of this rank's state area, many in one contiguous read. In a wait core 0 alone reads them, and calls the
// other cores by the fail block; when its time is over, or it is called, every core reads them for itself, so that all
// give the same reason.
//
// An abort block of the next op does not end this one: its source has completed this op, for which it had a message of
// every rank. So it has sent its own, and each of the others has begun to send theirs and will complete that, or is
// found missing by itself. The next op finds the block when it begins.
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
    // Between servers, in a wait: Look also finds notes of other algorithms, where there is no abort.
    __aicore__ inline void TakeNotes(uint32_t algorithm) { algorithm_ = algorithm; }
    // And from this cycle on notes that accuse this rank.
    __aicore__ inline void AnswerFrom(int64_t cycle) { answerFrom_ = cycle; }
    // True: there is an abort block of this op or one before; `verdict` is that of the lowest source rank. Or kNoted,
    // or kAccused.
    __aicore__ inline bool Look(Verdict& verdict) {
        noted_ = 0;
        turns_ = kMostTurns;
        Verdict note;
        for (uint32_t first = 0; first < world_; first += kAbortsAtOnce) {
            if (LookAt(first, Min(kAbortsAtOnce, world_ - first), verdict, note)) return true;
        }
        if (note.code == kOk && turns_ < kMostTurns && AscendC::GetSystemCycle() >= answerFrom_) note.code = kAccused;
        if (note.code != kOk) verdict = note;
        return note.code != kOk;
    }
    // After Look: so many turns this rank may wait for an answer; fewer where it is accused.
    __aicore__ inline uint32_t turns() const { return turns_; }
    // After Look has found no abort: whether every other rank has told in a note that it is in this op, or in the next
    // one; else which is the first that has not.
    __aicore__ inline bool AllNoted() const { return noted_ == world_; }
    __aicore__ inline uint32_t missing() const { return noted_; }

private:
    // `note`: of the first rank that runs another algorithm in this op.
    __aicore__ inline void TakeNote(const LocalTensor<uint32_t>& words, uint32_t at, uint32_t source, Verdict& note) {
        const uint32_t epoch = words.GetValue(at + kNtEpoch), algorithm = words.GetValue(at + kNtAlgorithm);
        const bool whole = words.GetValue(at + kNtMagic) == kNoteMagic && words.GetValue(at + kNtMark) == epoch;
        const bool here = source == rank_ || (whole && (epoch == epoch_ || epoch == NextEpoch(epoch_)));
        if (here && noted_ == source) ++noted_;
        if (here && source != rank_ && words.GetValue(at + kNtAccused) == rank_ + 1)
            turns_ = Max(1, Min(turns_, Min(words.GetValue(at + kNtTurns), kMostTurns) - 1));
        if (!whole || epoch != epoch_ || algorithm == algorithm_ || note.code != kOk) return;
        note.code = kNoted;
        note.source = source;
        note.reporter = rank_;
        note.detail0 = kFieldAlgorithm;
        note.detail1 = algorithm_;
        note.detail2 = algorithm;
    }
    __aicore__ inline bool LookAt(uint32_t first, uint32_t count, Verdict& verdict, Verdict& note) {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(words, blocks_[first * kBlockWords], count * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t at = i * kBlockWords, source = first + i;
            const uint32_t magic = words.GetValue(at + kAbMagic);
            if (algorithm_ != 0 && (magic == kNoteMagic || source == rank_)) TakeNote(words, at, source, note);
            if (magic != kAbortMagic || words.GetValue(at + kAbMark) != kAbortMagic) continue;
            if (words.GetValue(at + kAbEpoch) == NextEpoch(epoch_)) {
                if (noted_ == source) ++noted_;
                continue;
            }
            verdict = Verdict();
            verdict.code = words.GetValue(at + kAbCode);
            verdict.source = words.GetValue(at + kAbCulprit);
            verdict.reporter = words.GetValue(at + kAbReporter);
            verdict.detail0 = words.GetValue(at + kAbDetail0);
            verdict.detail1 = words.GetValue(at + kAbDetail1);
            // A damaged abort block is a failure too: its source has given up, or its memory is wrong.
            if (verdict.code < kFirstFatal || verdict.code > kKernelFault || verdict.source >= world_ ||
                verdict.reporter >= world_) {
                verdict.detail0 = kAbortBlockIndex;
                verdict.detail1 = verdict.code;
                verdict.code = kCorruptStatus;
                verdict.source = source;
                verdict.reporter = rank_;
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
    uint32_t algorithm_ = 0;  // 0: nobody asks for notes
    uint32_t noted_ = 0;      // this many first ranks
    uint32_t turns_ = kMostTurns;
    int64_t answerFrom_ = 0;
};

// The fail block of this rank's own state area. In direct every core waits for all messages, and the cores do
// not meet afterwards. They agree without a meeting, because:
// - A good message stays until this rank's next op but one: its source writes to the same place again only
//   after it has the message that this rank sends in the next op. So all cores accept what one core has
//   accepted.
// - Collective errors are words of good messages: every core that has seen all messages has the same worst
//   error.
// - Only core 0 looks at the clock and at the abort blocks, and calls a message corrupt. When it gives up, it
//   writes the reason into the fail block, and the other cores leave with that reason. If core 0 has seen all
//   messages, it does not give up, and the other cores will see them too.
// - Only core 0 checks the hashes, and in combine whether the counts are those of this rank's own ids. The
//   other cores accept messages that are right in all other words. A core that had seen all messages before
//   core 0 gave up still copies or sums its rows. That is harmless: dispatch's counts, which core 0 writes, say that
//   there are none, and combine's cores write zeros over their sums when they hear of it (Exchange::Hear). Such a core
//   never reads outside the areas that unchecked words are about.
class FailWatch {
public:
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, uint32_t epoch) {
        epoch_ = epoch;
        block_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) + kFailOffset),
                               kBlockWords);
        pipe.InitBuffer(buf_, kFailWatchBytes);
    }
    __aicore__ inline void Post(uint32_t code) {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        words.SetValue(kFbMagic, FailWord(epoch_));
        words.SetValue(kFbEpoch, epoch_);
        words.SetValue(kFbCode, code);
        for (uint32_t w = kFbCode + 1; w < kBlockWords; ++w) words.SetValue(w, 0);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(block_, words, kBlockWords);
    }
    // kOk while core 0 has not given up.
    __aicore__ inline uint32_t Look() {
        const LocalTensor<uint32_t> words = Load();
        return words.GetValue(kFbMagic) == FailWord(epoch_) ? words.GetValue(kFbCode) : kOk;
    }
    // Whether an op of this rank has failed for good.
    __aicore__ inline bool FailedBefore() {
        const LocalTensor<uint32_t> words = Load();
        return words.GetValue(kFbMagic) == FailWord(words.GetValue(kFbEpoch)) && words.GetValue(kFbCode) >= kFirstFatal;
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

// Between servers, core 0: tells all other ranks which algorithm this rank runs in this op, once.
class Notes {
public:
    __aicore__ inline void Init(WindowSender& sender, RdmaLink& link, const MoeDistributeInfo& info, uint32_t epoch,
                                GM_ADDR list) {
        sender_ = &sender;
        link_ = &link;
        info_ = &info;
        epoch_ = epoch;
        list_ = list;
    }
    // In each plan of UB where it may send.
    __aicore__ inline void BuffInit(TPipe& pipe) { pipe.InitBuffer(buf_, NotesBytes(*info_)); }
    __aicore__ inline void Begin(int64_t now) { begun_ = now; }
    // After each look in vain.
    __aicore__ inline void Look() {
        if (AscendC::GetSystemCycle() - begun_ > static_cast<int64_t>(info_->deadlineCycles / kNoteShare)) Send();
    }
    __aicore__ inline void Send() {
        if (!sent_) Put(0, 0);
    }
    // Asks a rank that this one misses whom it misses itself.
    __aicore__ inline void Accuse(uint32_t rank, uint32_t turns) { Put(rank + 1, turns); }

private:
    __aicore__ inline void Put(uint32_t accused, uint32_t turns) {
        sent_ = true;
        LocalTensor<uint32_t> note = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t w = 0; w < kBlockWords; ++w) note.SetValue(w, 0);
        note.SetValue(kNtMagic, kNoteMagic);
        note.SetValue(kNtEpoch, epoch_);
        note.SetValue(kNtAlgorithm, info_->algorithm);
        note.SetValue(kNtAccused, accused);
        note.SetValue(kNtTurns, turns);
        note.SetValue(kNtMark, epoch_);
        SyncFunc<HardEvent::S_MTE3>();
        sender_->StageAbort(note);
        uint32_t count = 0;
        for (uint32_t peer = 0; peer < info_->world; ++peer) {
            if (peer == info_->rank) continue;
            if (!sender_->servers().Far(peer)) {
                sender_->PutAbort(peer, note);
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
    int64_t begun_ = 0;
    uint32_t epoch_ = 0;
    bool sent_ = false;
};

// Core 0 of window, while it waits for the other cores, each of which waits for a share of the sources: calls them when
// there is an abort, or a note. If all of them have their messages nevertheless, the op is right, and the next op finds
// the abort.
class AbortCaller {
public:
    // `notes`: nullptr where it has none to send.
    __aicore__ inline AbortCaller(AbortWatch& aborts, FailWatch& fail, Notes* notes)
        : aborts_(&aborts), fail_(&fail), notes_(notes) {}
    // After a look in vain.
    __aicore__ inline void operator()() {
        if (notes_ != nullptr) notes_->Look();
        if (called_ || ++looks_ % kLooksAnAbort != 0) return;
        Verdict abort;
        called_ = aborts_->Look(abort);
        if (called_) fail_->Post(abort.code);
    }

private:
    AbortWatch* aborts_;
    FailWatch* fail_;
    Notes* notes_;
    uint32_t looks_ = 0;
    bool called_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_ABORTS_H
