// What dispatch and combine of both algorithms do with the other ranks, and with the other cores of their
// rank. An op in two launches ends the first after SetStatus (Sent). An op calls, in this order:
//   Enter                     the link to HCCL's server on A2; context and epoch
//   BoardInit, Open           first meeting; direct: LookForFailure, then Agree
//   MeetAfterSend             second meeting; none in direct combine and with roles
//   SetStatus                 a status message to every rank
//   WaitStatus                third meeting; direct: WaitForAll and CheckCountsHashes, no meeting. Combine then calls
//                             Tell before it sums, and Hear after it
//   Report (after a failure), Exit (always)
#ifndef ASCEND_MOE_COMMON_EXCHANGE_H
#define ASCEND_MOE_COMMON_EXCHANGE_H

#include "contexts.h"
#include "report.h"
#include "wait.h"

namespace moe {

// When a core began each phase of its launch, by its own clock: for whoever asks where the time of an op goes on an
// NPU. Off, a phase costs the look at one word of the tiling, and no instruction of any pipe.

class PhaseStamps {
public:
    __aicore__ inline void Init(const MoeDistributeInfo& info) {
        info_ = &info;
        if (info.stamps == 0) return;
        count_ = 0;
        for (uint32_t w = 0; w < kStCycles - kStPhases; ++w) phases_[w] = 0;
        Begin(kInLaunch);
    }
    // What comes after the last stamp that fits is left out, but for the end.
    __aicore__ inline void Begin(Phase phase) {
        if (info_->stamps == 0 || count_ + (phase != kAtEnd ? 1 : 0) >= kMostStamps) return;
        cycles_[count_] = static_cast<uint32_t>(AscendC::GetSystemCycle());
        phases_[count_ / kStampsOfWord] |= static_cast<uint32_t>(phase) << count_ % kStampsOfWord * 8;
        ++count_;
    }
    // The end of the launch: waits for all pipes, resets UB, and stores the stamps.
    __aicore__ inline void Store(TPipe& pipe, const WindowContext& context, uint32_t op, uint32_t epoch,
                                 uint32_t core) {
        AscendC::PipeBarrier<PIPE_ALL>();
        Begin(kAtEnd);
        pipe.Reset();
        UbBuf buf;
        pipe.InitBuffer(buf, kStampWords * sizeof(uint32_t));
        LocalTensor<uint32_t> words = buf.Get<uint32_t>();
        words.SetValue(kStMark, StampMark(epoch));
        words.SetValue(kStCount, count_ | info_->algorithm << 8);
        for (uint32_t w = kStPhases; w < kStCycles; ++w) words.SetValue(w, phases_[w - kStPhases]);
        for (uint32_t i = 0; i < kMostStamps; ++i) words.SetValue(kStCycles + i, i < count_ ? cycles_[i] : 0);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context.state(info_->rank) + StampsOffset(info_->world, op, core)),
            kStampWords);
        AscendC::DataCopy(target, words, kStampWords);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t count_ = 0;
    uint32_t phases_[kStCycles - kStPhases];
    uint32_t cycles_[kMostStamps];
};

class Exchange {
public:
    // Reads the context and the epoch. False: the context is not the one that this tiling was made for; core
    // 0 has then written the error record. `performance`: performance_info, if info.measures. `tiling`: in GM, `head`:
    // of its copy in this core.
    __aicore__ inline bool Enter(TPipe& pipe, const MoeDistributeInfo& info, uint32_t op, GM_ADDR workspace,
                                 GM_ADDR performance, GM_ADDR record, GM_ADDR tiling,
                                 const MoeDistributeMc2Head& head) {
        stamps_.Init(info);
        pipe_ = &pipe;
        performance_ = performance;
        info_ = &info;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        context_.Init(AscendC::GetHcclContext<0>(), info);
        link_.Open(context_, core_, tiling, head);
        const ContextMismatch mismatch = context_.Check();
        if (mismatch.field != kContextFieldCount) {
            Verdict verdict = InvalidOf(info, kContextMismatch, mismatch.field, mismatch.ours);
            verdict.detail2 = mismatch.theirs;
            report_.Init(context_, info, op, 0, record);
            if (core_ == 0) report_.Write(pipe, verdict, sender_, link_, nullptr);
            return false;
        }
        word_.Init(pipe, context_);
        epoch_ = word_.Read();
        if (info.part != kPartFinish) epoch_ = NextEpoch(epoch_);
        config_.Init(info, op);
        entered_ = true;
        sender_.Init(context_, info, op, epoch_);
        items_.Init(sender_, info, workspace);
        report_.Init(context_, info, op, epoch_, record);
        if (Noting()) notes_.Init(sender_, link_, info, epoch_, items_.notes());
        return true;
    }
    // The end of every launch, whatever Enter has found: on A2 HCCL's server waits for it.
    __aicore__ inline void Exit() {
        if (info_->stamps != 0 && entered_) stamps_.Store(*pipe_, context_, config_.op, epoch_, core_);
        link_.Close();
    }
    __aicore__ inline void BoardInit() {
        const uint32_t mark = VerdictMark(epoch_, info_->part == kPartFinish) ^ meetingMark_;
        board_.Init(*pipe_, context_.state(info_->rank), info_->world, mark, core_, info_->cores, info_->meeting);
    }

    // ---- the first meeting of the cores ----

    // Core 0 looks at the abort blocks, then all cores agree on the worst of their verdicts `mine`. False:
    // that is fatal, because the communicator has failed before; the caller leaves without touching a window.
    // A collective error gives true: the op goes on, and its status messages carry the error.
    __aicore__ inline bool Open(Verdict mine) {
        if (core_ == 0) {
            const Verdict abort = LookForAborts();
            if (abort.code != kOk) mine = abort;
        }
        return Agree(mine);
    }
    // The failure that the abort blocks tell, or kOk. Window combine with slots: every core looks, because rows leave
    // for other ranks before the cores meet, and the memory of a lost rank may be gone.
    __aicore__ inline Verdict LookForAborts() {
        AbortWatch aborts;
        aborts.Init(*pipe_, context_, epoch_);
        Verdict abort;
        aborts.Look(abort);
        return abort;
    }
    // Direct: before a core writes into its rank's half, where peers may still read when an op of this rank has failed.
    // Core 0 looks at the abort blocks, for all; the others at what core 0 has left of such an op, and what they return
    // then is less than what core 0 finds. An abort that has come since keeps no core from writing: this rank has had
    // all messages of the op before, so nobody reads any more what lies in the half of this op.
    __aicore__ inline Verdict LookForFailure() {
        if (core_ == 0) return LookForAborts();
        FailWatch fail;
        fail.Init(*pipe_, context_, epoch_);
        Verdict failure;
        if (!fail.FailedBefore()) return failure;
        failure.code = kKernelFault;
        failure.source = info_->world;
        return failure;
    }
    // The meeting alone; result as of Open.
    __aicore__ inline bool Agree(const Verdict& mine) {
        verdict_ = board_.Meet(0, mine);
        return TakeEpoch();
    }
    // Direct combine: the worst verdict was kRecheck. Every core drops it and counts the rows exactly.
    __aicore__ inline void RecheckTogether() { verdict_ = Verdict(); }
    // Adds a verdict of this core to the agreed verdict.
    __aicore__ inline void Fail(const Verdict& verdict) { Worsen(verdict_, verdict); }
    // The second meeting: after it the rows, or lists, of all cores of this rank have left. Agrees on the
    // worst of the verdicts so far and `mine`.
    __aicore__ inline void MeetAfterSend(const Verdict& mine) { MeetAt(1, mine); }
    // Hierarchy, after the third meeting and before the next plan of UB: meetings begin anew.
    __aicore__ inline void BeginSecondLevel() { meetingMark_ = kSecondLevelMark; }
    __aicore__ inline void MeetAt(uint32_t round, const Verdict& mine) {
        sender_.Flush();
        Verdict all = verdict_;
        Worsen(all, mine);
        verdict_ = board_.Meet(round, all);
    }

    // ---- status messages ----

    // Direct combine: the messages will say that this rank's rows lie in its lent area, `blocks` blocks of 32
    // bytes after its begin.
    __aicore__ inline void SetLent(uint32_t blocks) {
        config_.phase = kPhaseLent;
        lentBlocks_ = blocks;
    }
    // Direct combine, before the cores have met: fills this core's first messages. SetStatus fills them again
    // if a core has an error.
    template <typename Counts>
    __aicore__ inline void PrepareMessages(Counts& counts) {
        if (FirstPeer() >= info_->world) return;
        MessagesInit();
        for (uint32_t i = FirstPeer(); i < info_->world && prepared_ < MessagesInUb(*info_); i += Senders()) {
            BeginMessage(prepared_);
            FillMessage(counts, prepared_++, PeerAfter(i));
        }
    }
    // Sends this rank's messages to the core's share of the peers. If there is no error, it calls
    // counts.Select(peer) and then counts.Rows(peer, i) for each count i of the message. `rowBytes`: bytes of
    // a row in the item to a rank of another server.
    template <typename Counts>
    __aicore__ inline void SetStatus(Counts& counts, uint32_t rowBytes) {
        MOE_PHASE(stamps_, SetStatus);
        const uint32_t bytes = StatusMessageBytes(config_.counts), ring = MessagesInUb(*info_);
        if (prepared_ == 0) MessagesInit();
        if (Failed()) prepared_ = 0;
        items_.BuffInit(*pipe_, *info_, epoch_);
        for (uint32_t i = FirstPeer(), sent = 0; i < info_->world; i += Senders(), ++sent) {
            const uint32_t peer = PeerAfter(i), at = sent % ring;
            uint32_t rows = 0;
            if (sent >= prepared_) {
                if (sent < ring) BeginMessage(at);
                if (!Failed()) counts.Select(peer);
                if (sent >= ring || ring == 1) SyncFunc<HardEvent::MTE3_S>();
                rows = FillMessage(counts, at, peer);
            }
            SyncFunc<HardEvent::S_MTE3>();
            sender_.PutStatus(peer, MessageAt(at), bytes);
            if (sender_.servers().Far(peer) && info_->algorithm != kAlgorithmHierarchy)
                items_.Put(peer, static_cast<uint64_t>(rows) * rowBytes, bytes);
        }
        // Direct does not wait for its stores: the messages stay in UB until the plan of UB ends.
        if (ring == 1) sender_.Flush();
        if (info_->transport == kTransportRdma && info_->algorithm != kAlgorithmHierarchy)
            PostItems(sender_.servers().FarCount());
    }
    // When all cores have staged rows, messages and items, core 0 posts the first `count` items of the list.
    __aicore__ inline void PostItems(uint32_t count) {
        AscendC::SyncAll<true>();
        if (core_ == 0) link_.Post(items_.address(), count);
    }

    // Whether this launch is over: it was to send alone, and has no error. With an error it waits as a whole op does,
    // because peers may still read what the next op of this rank would overwrite.
    __aicore__ inline bool Sent() {
        if (info_->part != kPartSend || verdict_.code != kOk) return false;
        AscendC::PipeBarrier<PIPE_ALL>();
        return true;
    }

    // Window: waits for the messages of this core's share of the sources, and if all are good calls
    // arrived.Arrived(source, message) for each. Then the cores meet for the third time. True: no core has an
    // error. `rowBytes`: as of SetStatus. `awaited`: hierarchy: which messages; a source is then the rank of a place.
    template <typename Arrived>
    __aicore__ inline bool WaitStatus(Arrived& arrived, uint32_t rowBytes, Awaited awaited = Awaited::kOwn) {
        MOE_PHASE(stamps_, WaitStatus);
        const uint32_t first = PartBegin(info_->world, core_, info_->cores);
        const uint32_t count = PartBegin(info_->world, core_ + 1, info_->cores) - first;
        StatusWaiter waiter;
        FailWatch fail;
        fail.Init(*pipe_, context_, epoch_);
        waiter.Init(*pipe_, context_, sender_.servers(), *info_, config_, epoch_, first, count);
        if (awaited != Awaited::kOwn) waiter.WaitFor(awaited);
        // In a SyncAll core 0 could call nobody: there every core looks at aborts.
        const bool calls = info_->meeting == kMeetByBlocks && info_->cores > 1;
        if (calls && core_ != 0) waiter.ListenTo(fail);
        if (info_->measures != 0) waiter.Measure(*pipe_, performance_, epoch_);
        if (info_->rdmaFlags != 0) waiter.WaitForBlocks(*pipe_, rowBytes, epoch_);
        Notes* const notes = core_ == 0 && Noting() ? &notes_ : nullptr;
        if (Noting()) {
            notes_.BuffInit(*pipe_);
            waiter.Heed(notes);
        }
        Verdict mine = verdict_;
        Worsen(mine, waiter.Wait());
        if (mine.code == kOk || mine.code == kRoutingMismatch) {
            for (uint32_t i = 0; i < count; ++i) Worsen(mine, arrived.Arrived(first + i, waiter.Message(i)));
        }
        if (calls && core_ == 0) {
            verdict_ = board_.Meet(2, mine, AbortCaller(waiter.aborts(), fail, notes));
        } else {
            verdict_ = board_.Meet(2, mine);
        }
        // A message may say it sooner than a note. Ranks that wait for messages that nobody sends need notes all the
        // same.
        const bool apart = verdict_.code == kConfigMismatch && verdict_.detail0 == kFieldAlgorithm && Noting();
        if (verdict_.code == kNoted || apart) LeaveTogether();
        return verdict_.code == kOk;
    }
    // Whether no rank expects anything more of this op: after a fatal error, or where ranks run different algorithms.
    __aicore__ inline bool Over() const { return left_ || verdict_.code >= kFirstFatal; }
    // Direct: every core waits for the messages of all sources, and no meeting follows; FailWatch says why
    // that is enough. Core 0 must call CheckCountsHashes() afterwards.
    __aicore__ inline bool WaitForAll(StatusWaiter& waiter) {
        MOE_PHASE(stamps_, WaitStatus);
        FailWatch fail;
        fail.Init(*pipe_, context_, epoch_);
        waiter.InitAll(*pipe_, context_, sender_.servers(), *info_, config_, epoch_);
        if (info_->measures != 0 && core_ == 0) waiter.Measure(*pipe_, performance_, epoch_);
        if (core_ == 0) {
            const Verdict verdict = waiter.Wait();
            if (verdict.code != kOk) fail.Post(verdict.code);
            Worsen(verdict_, verdict);
        } else {
            Worsen(verdict_, waiter.Follow(fail));
        }
        return verdict_.code == kOk;
    }
    // Combine that waits by WaitForAll: the cores do not meet before they sum. Each tells its verdict as soon as it has
    // one, and hears the others after its sums: so a failure that core 0 finds late, or one core alone, leaves zeros in
    // all of x. `mine`: found by this core. Every core tells once, also before it leaves.
    __aicore__ inline void Tell(const Verdict& mine) {
        Fail(mine);
        board_.Tell(2, core_ == 0 ? verdict_ : mine);
    }
    // False: a core has failed.
    __aicore__ inline bool Hear() {
        Fail(board_.Hear(2));
        return verdict_.code == kOk;
    }
    // Core 0, while its first loads are under way: compares the hashes that WaitForAll has left out. `rowsKnown`: the
    // numbers of rows are known to be right.
    __aicore__ inline bool CheckCountsHashes(StatusWaiter& waiter, bool rowsKnown) {
        Worsen(verdict_, waiter.JudgeHashes(rowsKnown));
        return verdict_.code == kOk || verdict_.code == kRoutingMismatch;
    }

    __aicore__ inline void Report() {
        if (core_ != 0) return;
        context_.ForgetPeers();
        if (Noting() && verdict_.code == kCommTimeout && verdict_.reporter == info_->rank)
            verdict_ = Accuser().Ask(*pipe_, context_, *info_, epoch_, notes_, verdict_);
        report_.Write(*pipe_, verdict_, sender_, link_, items_.aborts());
        if (verdict_.code < kFirstFatal) return;
        FailWatch fail;
        fail.Init(*pipe_, context_, epoch_);
        fail.Post(verdict_.code);
        AscendC::PipeBarrier<PIPE_ALL>();
    }
    // For plans of UB in which rows of other ranks are stored or loaded.
    __aicore__ inline void LoadPeers() { context_.LoadPeers(*pipe_, *info_); }
    // Waits for all pipes and gives all of UB back. Buffers made after this belong to a new plan of UB.
    __aicore__ inline void NextPlan() {
        AscendC::PipeBarrier<PIPE_ALL>();
        pipe_->Reset();
        context_.ForgetPeers();
        BoardInit();
    }

    __aicore__ inline TPipe& pipe() { return *pipe_; }
    __aicore__ inline const WindowContext& context() const { return context_; }
    __aicore__ inline const StatusConfig& config() const { return config_; }
    __aicore__ inline GM_ADDR items() const { return items_.address(); }
    __aicore__ inline WindowSender& sender() { return sender_; }
    __aicore__ inline PhaseStamps& stamps() { return stamps_; }
    __aicore__ inline const Verdict& verdict() const { return verdict_; }
    __aicore__ inline uint32_t core() const { return core_; }
    __aicore__ inline uint32_t epoch() const { return epoch_; }
    // In this rank's own half: row 0 of `source`'s region, and the half as a whole.
    __aicore__ inline GM_ADDR Region(uint32_t source) const {
        return context_.data(info_->rank) +
               RegionOffset(context_.data_bytes(), info_->regions, Parity(epoch_), source) + sender_.rows_at();
    }
    // Loads `count` rows from number `row` of `source`'s region on, which have `stride` bytes in UB.
    __aicore__ inline void LoadRows(const LocalTensor<int8_t>& rows, uint32_t source, int32_t row, uint32_t stride,
                                    uint32_t count) const {
        const uint32_t step = RowStep(*info_, stride);
        GM_ADDR place = Region(source) + RowPlace(row, step, info_->rdmaFlags != 0);
        if (info_->rdmaFlags != 0) {
            LoadFlagged(rows, place, count * stride);
        } else {
            moe::LoadRows(rows, place, stride, step, count);
        }
    }
    __aicore__ inline GM_ADDR Half() const { return HalfOf(info_->rank); }
    // The half of this epoch of any rank: direct reads those of its peers.
    __aicore__ inline GM_ADDR HalfOf(uint32_t rank) const {
        return context_.data(rank) + HalfOffset(context_.data_bytes(), Parity(epoch_));
    }

    // Whether messages carry an error, and no rows.
    __aicore__ inline bool Failed() const { return verdict_.code != kOk && verdict_.code != kRoutingMismatch; }

private:
    // Between servers each algorithm waits where the other sends nothing.
    __aicore__ inline bool Noting() const { return info_->transport == kTransportRdma; }
    // Ranks run different algorithms. They meet by their notes, and all of them raise it.
    __aicore__ inline void LeaveTogether() {
        left_ = true;
        meetingMark_ ^= kNotedMark;
        NextPlan();
        Verdict found = verdict_;
        found.code = kConfigMismatch;
        if (core_ == 0) Worsen(found, NoteWaiter().Wait(*pipe_, context_, *info_, epoch_, notes_));
        verdict_ = board_.Meet(0, found);
    }
    __aicore__ inline bool TakeEpoch() {
        // From here on this epoch is taken, and no block of it has left yet. A failed op takes its epoch, too: else the
        // finish of a failed send, which may be queued already, would find the messages of the op before.
        if (core_ == 0) word_.Publish(epoch_);
        return verdict_.code < kFirstFatal;
    }
    // How many cores send messages. With kManyCores or more core 0 sends none where it has to publish the epoch, and
    // to prepare its judgement, at that time.
    __aicore__ inline uint32_t Senders() const {
        const bool busy = info_->algorithm == kAlgorithmDirect || (config_.op == kOpCombine && info_->triples != 0);
        return info_->cores - (busy && info_->cores >= kManyCores ? 1 : 0);
    }
    __aicore__ inline uint32_t FirstPeer() const {
        if (Senders() == info_->cores) return core_;
        return core_ == 0 ? info_->world : core_ - 1;
    }
    // Starts with the next rank, so that not all ranks send to rank 0 first.
    __aicore__ inline uint32_t PeerAfter(uint32_t i) const { return (info_->rank + 1 + i) % info_->world; }
    __aicore__ inline void MessagesInit() { pipe_->InitBuffer(messageBuf_, SentMessagesBytes(*info_, config_.counts)); }
    __aicore__ inline LocalTensor<uint32_t> MessageAt(uint32_t at) {
        return messageBuf_.Get<uint32_t>()[at * (StatusMessageBytes(config_.counts) / kWordBytes)];
    }
    // The words that are the same for every peer.
    __aicore__ inline void BeginMessage(uint32_t at) {
        StatusWriter& writer = writers_[at];
        writer.Init(MessageAt(at), *info_, config_, epoch_);
        writer.SetError(Failed() ? verdict_ : Verdict());
        if (!Failed() && config_.phase == kPhaseLent) writer.SetPlace(lentBlocks_, info_->lentGeneration);
        writer.ClearTail();
    }
    // The counts and their hashes. Returns the number of rows.
    template <typename Counts>
    __aicore__ inline uint32_t FillMessage(Counts& counts, uint32_t at, uint32_t peer) {
        uint32_t rows = 0;
        for (uint32_t i = 0; i < config_.counts; ++i) {
            const uint32_t count = Failed() ? 0 : counts.Rows(peer, i);
            writers_[at].SetCount(i, count);
            if (i < info_->localExperts) rows += count;
        }
        writers_[at].SetCountsHashes();
        return rows;
    }

    static constexpr uint32_t kWordBytes = sizeof(uint32_t);
    TPipe* pipe_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR performance_ = nullptr;
    WindowContext context_;
    EpochWord word_;
    StatusConfig config_;
    WindowSender sender_;
    ItemList items_;
    RdmaLink link_;
    Notes notes_;
    FailureReport report_;
    VerdictBoard board_;
    StatusWriter writers_[kMostMessagesInUb];
    UbBuf messageBuf_;
    Verdict verdict_;
    uint32_t core_ = 0;
    uint32_t epoch_ = 0;
    uint32_t meetingMark_ = 0;
    uint32_t lentBlocks_ = 0;
    uint32_t prepared_ = 0;  // messages that are filled already
    bool entered_ = false;
    bool left_ = false;
    PhaseStamps stamps_;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_EXCHANGE_H
