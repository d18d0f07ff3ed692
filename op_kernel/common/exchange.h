// The frame that dispatch and combine share: entry (epoch, sticky aborts), status exchange, leaving on
// failure.
#ifndef ASCEND_MOE_DISTRIBUTE_EXCHANGE_H
#define ASCEND_MOE_DISTRIBUTE_EXCHANGE_H

#include "rdma.h"
#include "report.h"
#include "segments.h"
#include "wait.h"

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
        context_.Init(AscendC::GetHcclContext<0>(), info);
        const ContextMismatch mismatch = context_.Check();
        if (mismatch.field != kContextFieldCount) {
            Verdict verdict;
            verdict.code = kContextMismatch;
            verdict.source = info.rank;
            verdict.reporter = info.rank;
            verdict.detail0 = mismatch.field;
            verdict.detail1 = mismatch.ours;
            verdict.detail2 = mismatch.theirs;
            report_.Init(context_, info, op, 0, record);
            if (core_ == 0) report_.Write(pipe, verdict, sender_, link_, nullptr);
            return false;
        }
        word_.Init(context_);
        epoch_ = NextEpoch(word_.Read());
        config_.Init(info, op);
        sender_.Init(context_, info, epoch_);
        report_.Init(context_, info, op, epoch_, record);
        return true;
    }
    // On an A2 context core 0 talks to HCCL's server, from entry to exit whatever happens between.
    __aicore__ inline void OpenLink(GM_ADDR tiling, const MoeDistributeMc2Head& head) {
        if (info_->contextKind == kContextA2 && core_ == 0) link_.Open(context_.address(), tiling, head);
    }
    __aicore__ inline void CloseLink() { link_.Close(); }
    __aicore__ inline void BoardInit() { board_.Init(*pipe_, workspace_, core_, info_->cores); }

    // First meeting of the cores: what core 0 finds in the abort blocks, and every core's own verdict. False:
    // the communicator has failed before, leave without touching a window.
    __aicore__ inline bool Open(Verdict mine) {
        if (core_ == 0) {
            const Verdict abort = LookForAborts();
            if (abort.code != kOk) mine = abort;
        }
        return Agree(mine);
    }
    // What lies in the abort blocks. A core that fills the own half before the cores have met looks first:
    // after a failure peers may still be reading there.
    __aicore__ inline Verdict LookForAborts() {
        AbortWatch aborts;
        aborts.Init(*pipe_, context_);
        Verdict abort;
        aborts.Look(abort);
        return abort;
    }
    __aicore__ inline bool Agree(const Verdict& mine) {
        verdict_ = board_.Meet(0, mine);
        return TakeEpoch();
    }
    // then.Met() is what begins before the verdicts are read.
    template <typename Then>
    __aicore__ inline bool AgreeThen(const Verdict& mine, Then& then) {
        verdict_ = board_.MeetThen(0, mine, then);
        return TakeEpoch();
    }

    // Sends this rank's message to the core's share of the peers. counts.Rows(d, i) is asked when there is no
    // error.
    // `rowBytes`: of one row, as far peers get them.
    template <typename Counts>
    __aicore__ inline void SetStatus(Counts& counts, uint32_t rowBytes) {
        SendMessages(counts, rowBytes, FirstPeer(), Senders());
    }
    // Runs say that the rows lie in the lent area.
    __aicore__ inline void SetLent(uint32_t blocks) {
        config_.phase = kPhaseLent;
        lentBlocks_ = blocks;
    }
    // Before the cores have met: what this core's first messages say if none of them has an error.
    template <typename Counts>
    __aicore__ inline void PrepareMessages(Counts& counts) {
        if (FirstPeer() >= info_->world) return;
        MessagesInit();
        for (uint32_t i = FirstPeer(); i < info_->world && prepared_ < MessagesInUb(*info_); i += Senders()) {
            BeginMessage(prepared_);
            FillMessage(counts, prepared_++, PeerAfter(i));
        }
    }
    // To the first of the peers after this rank, and every `step`th after that.
    template <typename Counts>
    __aicore__ inline void SendMessages(Counts& counts, uint32_t rowBytes, uint32_t first, uint32_t step) {
        MOE_PHASE("SetStatus");
        const uint32_t bytes = StatusMessageBytes(config_.counts), ring = MessagesInUb(*info_);
        if (prepared_ == 0) MessagesInit();
        if (Failed()) prepared_ = 0;
        pipe_->InitBuffer(itemBuf_, kBlock);
        for (uint32_t i = first, sent = 0; i < info_->world; i += step, ++sent) {
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
            if (sender_.servers().Far(peer)) PutItem(peer, static_cast<uint64_t>(rows) * rowBytes, bytes);
        }
        // Direct goes on at once: its messages stay in UB until the plan that they are in ends.
        if (ring == 1) sender_.Flush();
        if (info_->transport == kTransportRdma) PostItems();
    }

    // Waits for this core's share of the sources; arrived(source, message) sees each good message. Then all
    // cores meet.
    template <typename Arrived>
    __aicore__ inline bool WaitStatus(Arrived& arrived) {
        MOE_PHASE("WaitStatus");
        const uint32_t first = PartBegin(info_->world, core_, info_->cores);
        const uint32_t count = PartBegin(info_->world, core_ + 1, info_->cores) - first;
        StatusWaiter waiter;
        waiter.Init(*pipe_, context_, sender_.servers(), *info_, config_, epoch_, first, count);
        Verdict mine = verdict_;
        Worsen(mine, waiter.Wait());
        if (mine.code == kOk || mine.code == kRoutingMismatch) {
            for (uint32_t i = 0; i < count; ++i) Worsen(mine, arrived.Arrived(first + i, waiter.Message(i)));
        }
        verdict_ = board_.Meet(2, mine);
        return verdict_.code == kOk;
    }

    // Direct: every core waits for all sources, and no meeting follows; see FailWatch. With `kHashesLater`
    // core 0 owes CheckCountsHashes().
    template <bool kHashesLater = false, typename Arrived>
    __aicore__ inline bool WaitForAll(StatusWaiter& waiter, Arrived& arrived) {
        MOE_PHASE("WaitStatus");
        FailWatch fail;
        fail.Init(*pipe_, context_, epoch_);
        waiter.Init(*pipe_, context_, sender_.servers(), *info_, config_, epoch_, 0, info_->world);
        waiter.MatchAll(*pipe_, config_, epoch_, kHashesLater);
        Verdict found;
        if (core_ == 0) {
            found = waiter.Wait();
            if (found.code != kOk) fail.Post(found.code);
        } else {
            found = waiter.Follow(fail);
        }
        Worsen(verdict_, found);
        if (verdict_.code == kOk || verdict_.code == kRoutingMismatch) {
            for (uint32_t s = 0; s < info_->world; ++s)
                Worsen(verdict_, arrived.Arrived(s, waiter.Message(s)));
        }
        return verdict_.code == kOk;
    }

    // Core 0, while lists or rows are under way: the hashes that WaitForAll has left.
    __aicore__ inline bool CheckCountsHashes(StatusWaiter& waiter) {
        Worsen(verdict_, waiter.JudgeHashes());
        return verdict_.code == kOk || verdict_.code == kRoutingMismatch;
    }

    __aicore__ inline void MeetAfterSend(const Verdict& mine) {
        sender_.Flush();
        Verdict all = verdict_;
        Worsen(all, mine);
        verdict_ = board_.Meet(1, all);
    }
    // All cores have asked for a second, exact count, and make it together.
    __aicore__ inline void RecheckTogether() { verdict_ = Verdict(); }
    __aicore__ inline void Fail(const Verdict& verdict) { Worsen(verdict_, verdict); }
    __aicore__ inline void Report() {
        if (core_ == 0) report_.Write(*pipe_, verdict_, sender_, link_, Items(kAbortItemList));
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
    // This rank's own window: row 0 of `source`'s region, and the half as a whole.
    __aicore__ inline GM_ADDR Region(uint32_t source) const {
        return context_.data(info_->rank) +
               RegionOffset(context_.data_bytes(), info_->world, Parity(epoch_), source) + sender_.rows_at();
    }
    __aicore__ inline GM_ADDR Half() const { return HalfOf(info_->rank); }
    // The half of this epoch of any rank: direct reads those of its peers.
    __aicore__ inline GM_ADDR HalfOf(uint32_t rank) const {
        return context_.data(rank) + HalfOffset(context_.data_bytes(), Parity(epoch_));
    }

private:
    __aicore__ inline bool TakeEpoch() {
        if (verdict_.code >= kFirstFatal) return false;
        // From here on this epoch is taken, and no block of it has left yet.
        if (core_ == 0) word_.Publish(epoch_);
        return true;
    }
    // Whether messages say that there is an error, and nothing else.
    __aicore__ inline bool Failed() const {
        return verdict_.code != kOk && verdict_.code != kRoutingMismatch;
    }
    // Peers are shared by all cores; but in direct, where cores are many, by those that have no epoch to
    // publish first.
    __aicore__ inline uint32_t Senders() const {
        const bool others = info_->algorithm == kAlgorithmDirect && info_->cores >= kManyCores;
        return info_->cores - (others ? 1 : 0);
    }
    __aicore__ inline uint32_t FirstPeer() const {
        if (Senders() == info_->cores) return core_;
        return core_ == 0 ? info_->world : core_ - 1;
    }
    __aicore__ inline void MessagesInit() {
        pipe_->InitBuffer(messageBuf_, MessagesInUb(*info_) * StatusMessageBytes(config_.counts));
    }
    // Start with the next rank, so that not all ranks fall on rank 0 first.
    __aicore__ inline uint32_t PeerAfter(uint32_t i) const { return (info_->rank + 1 + i) % info_->world; }
    __aicore__ inline LocalTensor<uint32_t> MessageAt(uint32_t at) {
        return messageBuf_.Get<uint32_t>()[at * (StatusMessageBytes(config_.counts) / kWordBytes)];
    }
    // All of a message that is the same for every peer.
    __aicore__ inline void BeginMessage(uint32_t at) {
        StatusWriter& writer = writers_[at];
        writer.Init(MessageAt(at), *info_, config_, epoch_);
        writer.SetError(Failed() ? verdict_ : Verdict());
        if (!Failed() && config_.phase == kPhaseLent) writer.SetPlace(lentBlocks_, info_->lentGeneration);
        writer.ClearTail();
    }
    // The rest. Returns how many rows it is about.
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

    // BatchWrite lists of this launch: a block an item, so that each core stores those of its own peers.
    __aicore__ inline GM_ADDR Items(uint32_t list) const {
        return workspace_ + ItemsOffset(info_->cores, info_->experts, info_->world, info_->localExperts) +
               static_cast<uint64_t>(list) * info_->world * kBlock;
    }
    __aicore__ inline void PutItem(uint32_t peer, uint64_t rowBytes, uint32_t runBytes) {
        LocalTensor<uint64_t> words = itemBuf_.Get<uint64_t>();
        SyncFunc<HardEvent::MTE3_S>();
        WindowSender::SetItem(words, sender_.ItemOf(peer, rowBytes, runBytes));
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint64_t> list;
        list.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(Items(0)),
                             static_cast<uint64_t>(info_->world) * kItemWords);
        const uint32_t at = sender_.servers().FarIndex(peer);
        AscendC::DataCopy(list[static_cast<uint64_t>(at) * kItemWords], words, kItemWords);
    }
    // All cores have staged rows, messages and items; core 0 hands the list to the server.
    __aicore__ inline void PostItems() {
        AscendC::SyncAll<true>();
        if (core_ == 0) link_.Post(Items(0), sender_.servers().FarCount());
    }

    static constexpr uint32_t kItemWords = kBlock / sizeof(uint64_t);
    static constexpr uint32_t kWordBytes = sizeof(uint32_t);
    static_assert(sizeof(BatchItem) == kBlock, "an item is a block");
    TPipe* pipe_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR workspace_ = nullptr;
    WindowContext context_;
    EpochWord word_;
    StatusConfig config_;
    WindowSender sender_;
    RdmaLink link_;
    FailureReport report_;
    VerdictBoard board_;
    StatusWriter writers_[kMostMessagesInUb];
    UbBuf messageBuf_, itemBuf_;
    Verdict verdict_;
    uint32_t core_ = 0;
    uint32_t epoch_ = 0;
    uint32_t lentBlocks_ = 0;
    uint32_t prepared_ = 0;  // messages that are in UB already
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_EXCHANGE_H
