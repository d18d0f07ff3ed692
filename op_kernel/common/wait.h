// Waiting for other ranks. Every wait has a deadline, looks once more after it, and returns a verdict. It never
// leaves the kernel by itself.
#ifndef ASCEND_MOE_COMMON_WAIT_H
#define ASCEND_MOE_COMMON_WAIT_H

#include "status.h"
#include "send.h"

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

// Where performance_info is given: adds to its element of each source the microseconds from the begin of the wait until
// the core first saw that source's message. What never came counts until the wait has ended.
class WaitTimes {
public:
    // `times`: performance_info [W] int64, of which this core keeps `count` from `first` on.
    __aicore__ inline void Init(TPipe& pipe, GM_ADDR times, uint32_t epoch, uint32_t first, uint32_t count) {
        count_ = count;
        epoch_ = epoch;
        if (count == 0) return;
        const WaitTimesUb ub(count);
        pipe.InitBuffer(seenBuf_, ub.seen);
        pipe.InitBuffer(sumBuf_, ub.sums);
        times_.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(times + static_cast<uint64_t>(first) * 2 * sizeof(uint32_t)), count * 2);
        for (uint32_t i = 0; i < count; ++i) seenBuf_.Get<uint32_t>().SetValue(i, kUnseen);
    }
    __aicore__ inline bool given() const { return count_ != 0; }
    __aicore__ inline void Begin(int64_t now) { begun_ = now; }
    // `message`: of the source at `index` of the range, as last loaded.
    __aicore__ inline void Look(uint32_t index, const LocalTensor<uint32_t>& message) {
        LocalTensor<uint32_t> seen = seenBuf_.Get<uint32_t>();
        if (seen.GetValue(index) == kUnseen && message.GetValue(kH0Magic) == HeaderWord(epoch_))
            seen.SetValue(index, Micros());
    }
    __aicore__ inline void Store() {
        LocalTensor<uint32_t> seen = seenBuf_.Get<uint32_t>(), sums = sumBuf_.Get<uint32_t>();
        const uint32_t end = Micros();
        CopyIn(sums, times_, 2 * count_);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count_; ++i) {
            const uint32_t low = sums.GetValue(2 * i);
            const uint32_t sum = low + (seen.GetValue(i) == kUnseen ? end : seen.GetValue(i));
            sums.SetValue(2 * i, sum);
            if (sum < low) sums.SetValue(2 * i + 1, sums.GetValue(2 * i + 1) + 1);
        }
        SyncFunc<HardEvent::S_MTE3>();
        CopyOut(times_, sums, 2 * count_);
    }

private:
    static constexpr uint32_t kUnseen = 0xFFFFFFFFu;

    __aicore__ inline uint32_t Micros() const {
        return static_cast<uint32_t>(static_cast<uint64_t>(AscendC::GetSystemCycle() - begun_) / kCyclesPerMicro);
    }

    GlobalTensor<uint32_t> times_;  // low and high words
    UbBuf seenBuf_, sumBuf_;
    int64_t begun_ = 0;
    uint32_t count_ = 0;
    uint32_t epoch_ = 0;
};

// Hierarchy: which messages a rank waits for. The place of a rank of this server is in the state area, always.
enum class Awaited : uint32_t {
    kOwn,       // not hierarchy: of the rank itself
    kRecords,   // dispatch, first wait: of the rank (s, i): what the rank of server s with this lane sends to rank i
                // here
    kRelayed,   // dispatch, second: its own, which the rank of this server with its lane has relayed
    kReturned,  // combine, first: of the rank (s, i): what rank i here sends to the rank of server s with this lane
    kSums       // combine, second: its own, which the rank of its server with this lane has relayed
};

__aicore__ inline uint32_t LevelOf(Awaited awaited) {
    return awaited == Awaited::kOwn ? 0 : awaited == Awaited::kRecords || awaited == Awaited::kReturned ? 1 : 2;
}

// Waits for the status messages of a contiguous range of source ranks: those of this server in the state
// area, those of others behind the rows that they came with. Where InitAll takes them in parts, each part is waited for
// after the one before, and only Kept() of its messages stays.
class StatusWaiter {
public:
    // UB: `count` messages of this shape, and the abort blocks.
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, const ServerMap& servers,
                                const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch,
                                uint32_t first, uint32_t count) {
        info_ = &info;
        servers_ = servers;
        context_ = &context;
        deadline_ = static_cast<int64_t>(info.deadlineCycles);
        parity_ = Parity(epoch);
        first_ = first;
        count_ = count;
        messageWords_ = StatusMessageBytes(config.counts) / sizeof(uint32_t);
        strideBytes_ = StatusStride(info.world);
        reader_.Init(info, config, epoch);
        aborts_.Init(pipe, context, epoch);
        messages_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) +
                                                                     StatusOffset(info.world, Parity(epoch), 0)),
                                  static_cast<uint64_t>(info.world) * strideBytes_ / sizeof(uint32_t));
        atOnce_ = stop_ = count;
        if (count > 0) pipe.InitBuffer(buf_, StatusWaiterUb(info, config.counts, count).messages);
    }
    // Hierarchy, after Init.
    __aicore__ inline void WaitFor(Awaited awaited) {
        awaited_ = awaited;
        if (awaited == Awaited::kRelayed) servers_.InitNear(info_->world);
        // A rank that relays has then given up first, and says which rank it missed.
        if (LevelOf(awaited) == 2) deadline_ += kCyclesPerSecond;
    }
    // Between servers: a message with rows counts as there when all blocks of its item are. `rowBytes`: of a row.
    __aicore__ inline void WaitForBlocks(TPipe& pipe, uint32_t rowBytes, uint32_t epoch) {
        rowBytes_ = rowBytes;
        flags_.Init(pipe, *info_, epoch);
        flags_.InitBits(pipe, *info_);
    }
    // Between servers: what other ranks tell of their algorithm. `notes`: nullptr on a core that sends none.
    __aicore__ inline void Heed(Notes* notes) {
        aborts_.TakeNotes(info_->algorithm);
        notes_ = notes;
    }
    // A core that looks at aborts when core 0 calls it.
    __aicore__ inline void ListenTo(FailWatch& fail) { fail_ = &fail; }
    __aicore__ inline AbortWatch& aborts() { return aborts_; }
    // Direct, in place of Init, for all ranks: Wait() then compares messages together by vector instructions, and word
    // by word only if one differs; if all are as expected, it leaves the hashes to JudgeHashes(). A launch of a
    // single core compares word by word.
    __aicore__ inline void InitAll(TPipe& pipe, const WindowContext& context, const ServerMap& servers,
                                   const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch) {
        const uint32_t together = MessagesAtOnce(info.world, info.cores, config.counts);
        Init(pipe, context, servers, info, config, epoch, 0, together);
        count_ = info.world;
        firstKept_ = FirstKeptBlock(info.world, info.cores, config.counts, info.localExperts);
        keptWords_ = KeptBytes(info.world, info.cores, config.counts, info.localExperts) / sizeof(uint32_t);
        if (InParts()) pipe.InitBuffer(keptBuf_, StatusWaiterUb(info, config.counts).kept);
        matching_ = info.cores > 1;
        nextToHash_ = count_;
        if (matching_) match_.Init(pipe, info, config, epoch, together);
    }
    // InitAll: whether all messages have been as expected: SegmentScan may then use Counts().
    __aicore__ inline bool alike() const { return matching_ && match_.alike(); }
    // Of all sources, in rows of words() from block FirstKeptBlock() of it on. Values below 0 or above the capacity
    // are cut to that range, so that a core that has not checked the hashes may use them as sizes.
    __aicore__ inline LocalTensor<int32_t> Counts() {
        if (!InParts()) return match_.Counts();
        const LocalTensor<int32_t> counts = keptBuf_.Get<int32_t>();
        const int32_t words = static_cast<int32_t>(count_ * keptWords_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(counts, counts, static_cast<int32_t>(0), words);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(counts, counts, static_cast<int32_t>(info_->capacity), words);
        return counts;
    }

    // After Init or InitAll, on the one core that keeps the times of these sources. `times`: performance_info.
    __aicore__ inline void Measure(TPipe& pipe, GM_ADDR times, uint32_t epoch) {
        times_.Init(pipe, times, epoch, first_, count_);
    }

    // Returns kOk, the worst collective error of the messages, or a fatal one. On a timeout `source` is the
    // first rank that is missing.
    __aicore__ inline Verdict Wait() {
        const int64_t start = AscendC::GetSystemCycle();
        times_.Begin(start);
        aborts_.AnswerFrom(start + deadline_ / kNoteShare);
        if (notes_ != nullptr) notes_->Begin(start);
        Verdict verdict = WaitSince(start);
        if (verdict.code >= kFirstFatal && verdict.reporter == info_->rank)
            verdict.detail0 = AtLevel(verdict.detail0, LevelOf(awaited_));
        if (times_.given()) times_.Store();
        return verdict;
    }

    // Checks the counts hashes that Wait() has left. `rowsKnown`: the numbers of rows are right. Messages of parts are
    // loaded anew: a good message stays (see FailWatch).
    __aicore__ inline Verdict JudgeHashes(bool rowsKnown) {
        Verdict worst;
        if (InParts()) nextToHash_ = 0;
        for (; nextToHash_ < count_; ++nextToHash_) {
            if (InParts() && nextToHash_ % atOnce_ == 0) {
                SetPart(nextToHash_);
                Load(nextToHash_);
            }
            Worsen(worst, reader_.JudgeCountsHashes(Message(nextToHash_), first_ + nextToHash_, rowsKnown));
            if (worst.code >= kFirstFatal) break;
        }
        return worst;
    }

    // Wait() for the cores other than 0: returns the worst collective error of the messages, or the reason
    // for which core 0 gave up. These cores have no last look, so no message is fatal to them.
    __aicore__ inline Verdict Follow(FailWatch& fail) {
        Verdict worst;
        uint32_t next = 0;
        for (BeginPart(0); next < count_;) {
            Load(part_);
            const MessageMatch::Arrival seen = match_.Look(Message(part_));
            if (seen == MessageMatch::kExpected) next = stop_;
            if (seen == MessageMatch::kUnexpected) next = Advance(next, stop_, worst);
            if (next == stop_) {
                EndPart();
                continue;
            }
            Verdict given;
            given.code = fail.Look();
            if (given.code != kOk) return given;
            MOE_POLL_HINT();
        }
        return worst;
    }

    // The message of a source of the range, or of the part, as last loaded.
    __aicore__ inline LocalTensor<uint32_t> Message(uint32_t index) {
        return buf_.Get<uint32_t>()[static_cast<uint32_t>((index - part_) * messageWords_)];
    }
    // InitAll, when all messages have come: the count blocks, and header 1, of a source's message. Those of the next
    // source lie words() further.
    __aicore__ inline LocalTensor<uint32_t> CountsOf(uint32_t source) { return Kept(source, kHeaderBlocks); }
    __aicore__ inline LocalTensor<uint32_t> Header1Of(uint32_t source) { return Kept(source, 1); }
    __aicore__ inline uint32_t words() const { return keptWords_; }

private:
    __aicore__ inline bool Told(bool forItself, Verdict& abort) {
        if (fail_ != nullptr && !forItself) return fail_->Look() != kOk;
        return aborts_.Look(abort);
    }
    __aicore__ inline Verdict WaitSince(int64_t start) {
        Verdict worst;
        uint32_t next = 0, looks = 0;
        bool lastLook = false;
        odd_ = false;
        for (BeginPart(0); next < count_;) {
            const uint32_t before = next;
            Load(next);
            if (times_.given()) {
                for (uint32_t i = next; i < stop_; ++i) times_.Look(i, Message(i));
            }
            next = matching_ ? Match(next, worst) : Advance(next, stop_, worst);
            if (worst.code >= kFirstFatal) break;
            if (next == stop_) EndPart();
            if (next == count_) break;
            if (matching_ && next != before) continue;  // it has judged a message: the next may be there
            Verdict abort;
            const bool expired = AscendC::GetSystemCycle() - start > deadline_;
            // Aborts are rare, and a look at them takes as long as one at the messages.
            const bool last = expired || lastLook;
            const bool aborted = (last || looks++ % kLooksAnAbort == 0) && Told(last, abort);
            if (lastLook) {
                // What was missing before is still missing after a fresh look.
                if (!aborted || abort.code == kAccused) {
                    abort.code = kCommTimeout;
                    abort.source = CulpritOf(first_ + next);
                    abort.reporter = info_->rank;
                }
                return abort;
            }
            lastLook = aborted || expired;
            odd_ = expired;  // what is odd then will not become right
            if (!lastLook) {
                if (notes_ != nullptr) notes_->Look();
                MOE_POLL_HINT();
            }
        }
        return worst;
    }
    __aicore__ inline bool InParts() const { return atOnce_ < count_; }
    __aicore__ inline LocalTensor<uint32_t> Kept(uint32_t source, uint32_t block) {
        const LocalTensor<uint32_t> words = InParts() ? keptBuf_.Get<uint32_t>() : buf_.Get<uint32_t>();
        return words[source * keptWords_ + (block - firstKept_) * kBlockWords];
    }
    // A part is the sources from `first` on that are in UB together.
    __aicore__ inline void SetPart(uint32_t first) {
        part_ = first;
        stop_ = Min(first + atOnce_, count_);
    }
    __aicore__ inline void BeginPart(uint32_t first) {
        SetPart(first);
        if (InParts()) match_.Take(first, stop_ - first);
    }
    // All messages of the part have come. Keeps of them what is used later, and begins the next part.
    __aicore__ inline void EndPart() {
        if (!InParts()) return;
        const uint32_t blocks = messageWords_ / kBlockWords, kept = keptWords_ / kBlockWords;
        const AscendC::DataCopyParams params(Pieces(stop_ - part_), Narrow<uint16_t, kMostPieces>(kept),
                                             Narrow<uint16_t, kMostPieces>(blocks - kept), 0);
        AscendC::DataCopy(keptBuf_.Get<uint32_t>()[part_ * keptWords_], Message(part_)[firstKept_ * kBlockWords],
                          params);
        if (stop_ == count_) {
            SyncFunc<HardEvent::V_S>();
        } else {
            SyncFunc<HardEvent::V_MTE2>();
            BeginPart(stop_);
        }
    }
    // The messages of the part, from source `from` on.
    __aicore__ inline void Load(uint32_t from) {
        SyncFunc<HardEvent::S_MTE2>();
        if (info_->transport == kTransportMemory) {
            LoadNear(first_ + from, first_ + stop_);
        } else {
            LoadNear(Max(first_ + from, servers_.begin()), Min(first_ + stop_, servers_.end()));
            for (uint32_t rank = first_ + from; rank < first_ + stop_; ++rank) {
                if (servers_.Far(rank)) LoadFar(rank);
            }
        }
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline void LoadNear(uint32_t begin, uint32_t end) {
        if (begin >= end) return;
        const uint32_t bytes = messageWords_ * sizeof(uint32_t);
        const DataCopyExtParams params{Pieces(end - begin), bytes, strideBytes_ - bytes, 0, 0};
        const DataCopyPadExtParams<uint32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(Message(begin - first_),
                             messages_[static_cast<uint64_t>(begin) * strideBytes_ / sizeof(uint32_t)], params, pad);
    }
    __aicore__ inline void LoadFar(uint32_t rank) {
        GlobalTensor<uint32_t> message;
        message.SetGlobalBuffer(PlaceOf(rank), messageWords_);
        AscendC::DataCopy(Message(rank - first_), message, messageWords_);
    }
    // Where the message of a far rank's place lies, who has written it, and who has failed if it does not come.
    __aicore__ inline __gm__ uint32_t* PlaceOf(uint32_t rank) const {
        if (awaited_ == Awaited::kRecords || awaited_ == Awaited::kSums)
            return RelayedMessage(*context_, *info_, parity_, Server(*info_, rank), Lane(*info_, rank));
        return FarMessage(*context_, parity_, rank);
    }
    __aicore__ inline uint32_t SourceOf(uint32_t rank) const {
        if (awaited_ == Awaited::kRecords && servers_.Far(rank))
            return Server(*info_, rank) * info_->nearRanks + Lane(*info_, info_->rank);
        if (awaited_ == Awaited::kReturned && servers_.Far(rank)) return servers_.begin() + Lane(*info_, rank);
        return rank;
    }
    __aicore__ inline uint32_t CulpritOf(uint32_t rank) const {
        const uint32_t server = Server(*info_, rank), mine = Server(*info_, info_->rank);
        if (server == mine) return rank;
        if (awaited_ == Awaited::kRelayed) return mine * info_->nearRanks + Lane(*info_, rank);
        if (awaited_ == Awaited::kSums) return server * info_->nearRanks + Lane(*info_, info_->rank);
        return SourceOf(rank);
    }
    // Compares all messages of the part at once. While some are missing, judges one message a look: so a bad message is
    // found soon, and the core is not busy with the others when the last message comes.
    __aicore__ inline uint32_t Match(uint32_t next, Verdict& worst) {
        const MessageMatch::Arrival seen = match_.Look(Message(part_));
        if (seen != MessageMatch::kExpected)
            return Advance(next, seen == MessageMatch::kMissing ? next + 1 : stop_, worst);
        nextToHash_ = next;
        return stop_;
    }
    __aicore__ inline uint32_t Advance(uint32_t next, uint32_t end, Verdict& worst) {
        for (; next < end; ++next) {
            Verdict verdict;
            if (reader_.Judge(Message(next), SourceOf(first_ + next), servers_.Far(first_ + next), odd_, verdict) ==
                StatusReader::kPending)
                break;
            if (rowBytes_ != 0 && verdict.code == kOk && !BlocksCome(next)) break;
            Worsen(worst, verdict);
            if (worst.code >= kFirstFatal) break;
        }
        return next;
    }

    __aicore__ inline bool BlocksCome(uint32_t index) {
        const uint32_t source = first_ + index;
        if (!servers_.Far(source)) return true;
        const LocalTensor<uint32_t> message = Message(index);
        uint64_t rows = 0;
        for (uint32_t i = 0; i < info_->localExperts; ++i) rows += message.GetValue(StatusWriter::CountWord(i));
        return flags_.Come(reinterpret_cast<GM_ADDR>(FarMessage(*context_, parity_, source)),
                           FlaggedBlocks(rows * rowBytes_));
    }

    GlobalTensor<uint32_t> messages_;
    UbBuf buf_, keptBuf_;
    AbortWatch aborts_;
    WaitTimes times_;
    StatusReader reader_;
    BlockFlags flags_;
    uint32_t rowBytes_ = 0;  // 0: nobody looks at flags
    MessageMatch match_;
    ServerMap servers_;
    const WindowContext* context_ = nullptr;
    uint32_t parity_ = 0;
    const MoeDistributeInfo* info_ = nullptr;
    int64_t deadline_ = 0;
    Awaited awaited_ = Awaited::kOwn;
    uint32_t first_ = 0;
    uint32_t count_ = 0;
    uint32_t atOnce_ = 0;           // sources of a part
    uint32_t part_ = 0, stop_ = 0;  // this part: [part_, stop_)
    uint32_t messageWords_ = 0;
    uint32_t firstKept_ = 0, keptWords_ = 0;  // of a message: block, words
    uint32_t strideBytes_ = 0;
    uint32_t nextToHash_ = 0;  // the first message whose hashes are still to be checked
    bool odd_ = false;         // whether words that are none of a message make it corrupt
    bool matching_ = false;
    FailWatch* fail_ = nullptr;
    Notes* notes_ = nullptr;
};

// Core 0, between servers, when the deadline has passed: accuses the rank that is missed, which may wait for another
// one as this rank does, and takes its abort for the answer. Nobody answers for a rank that has stopped.
class Accuser {
public:
    // Returns `missed`, or what a rank that knows better has said.
    __aicore__ inline Verdict Ask(TPipe& pipe, const WindowContext& context, const MoeDistributeInfo& info,
                                  uint32_t epoch, Notes& notes, const Verdict& missed) {
        const int64_t share = static_cast<int64_t>(info.deadlineCycles / kTurnShare);
        const int64_t turn = share < kCyclesPerSecond ? share : kCyclesPerSecond;
        AbortWatch watch;
        watch.Init(pipe, context, epoch);
        watch.TakeNotes(info.algorithm);
        notes.BuffInit(pipe);
        Verdict found;
        watch.Look(found);
        uint32_t turns = watch.turns();
        if (found.code < kFirstFatal) notes.Accuse(missed.source, turns);
        for (int64_t end = AscendC::GetSystemCycle() + turns * turn; found.code < kFirstFatal; watch.Look(found)) {
            const int64_t now = AscendC::GetSystemCycle();
            if (now > end) return missed;
            if (watch.turns() < turns) {  // accused since, or by a rank that has fewer turns itself
                turns = watch.turns();
                notes.Accuse(missed.source, turns);
                end = end < now + turns * turn ? end : now + turns * turn;
            }
            MOE_POLL_HINT();
        }
        return found;
    }
};

// Core 0, after a note of another algorithm: waits until every rank has told that it is in this op. So all leave it
// together, none of them reads an op before it any more, and the communicator works on.
class NoteWaiter {
public:
    __aicore__ inline Verdict Wait(TPipe& pipe, const WindowContext& context, const MoeDistributeInfo& info,
                                   uint32_t epoch, Notes& notes) {
        AbortWatch watch;
        watch.Init(pipe, context, epoch);
        watch.TakeNotes(info.algorithm);
        notes.BuffInit(pipe);
        notes.Send();
        const int64_t start = AscendC::GetSystemCycle();
        for (bool late = false;; late = Expired(info, start)) {
            Verdict found;
            watch.Look(found);
            if (watch.AllNoted()) return Verdict();
            if (found.code >= kFirstFatal) return found;
            if (late) {
                Verdict missed;
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

#endif  // ASCEND_MOE_COMMON_WAIT_H
