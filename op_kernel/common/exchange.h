// What dispatch and combine do with other ranks and with the other cores of their rank. In split mode the first launch
// returns after SetStatus (Sent). An op calls, in this order:
//   Enter                    the link to HCCL's server on A2; context and epoch
//   BarrierInit, Open        first core barrier; direct: LookForFailure, then Agree
//   BarrierAfterSend         second core barrier; none in direct combine and with roles
//   SetStatus                a status message to every rank
//   WaitStatus               third core barrier; direct: WaitForAll and CheckCountsHashes, no core barrier; combine
//                            then calls ArriveBeforeSums and WaitAfterSums
//   Report (after a failure), Exit (always)
#ifndef ASCEND_MOE_COMMON_EXCHANGE_H
#define ASCEND_MOE_COMMON_EXCHANGE_H

#include "contexts.h"
#include "report.h"
#include "status_wait.h"

namespace moe {

// Cycle counts at which a core began each phase of its launch. If disabled, a phase costs one test of a tiling word.

class PhaseTimestamps {
public:
    __aicore__ inline void Init(const MoeDistributeInfo& info) {
        info_ = &info;
        if (info.timestamps == 0) return;
        count_ = 0;
        for (uint32_t w = 0; w < kStCycles - kStPhases; ++w) phases_[w] = 0;
        Begin(kInLaunch);
    }
    // Timestamps that do not fit are dropped, except the end.
    __aicore__ inline void Begin(Phase phase) {
        if (info_->timestamps == 0 || count_ + (phase != kAtEnd ? 1 : 0) >= kMostTimestamps) return;
        cycles_[count_] = static_cast<uint32_t>(AscendC::GetSystemCycle());
        phases_[count_ / kTimestampsOfWord] |= static_cast<uint32_t>(phase) << count_ % kTimestampsOfWord * 8;
        ++count_;
    }
    // At the end of the launch: waits for all pipes, resets UB, and stores the timestamps.
    __aicore__ inline void Store(TPipe& pipe, const WindowContext& context, uint32_t op, uint32_t epoch,
                                 uint32_t core) {
        AscendC::PipeBarrier<PIPE_ALL>();
        Begin(kAtEnd);
        pipe.Reset();
        UbBuf buf;
        pipe.InitBuffer(buf, kTimestampWords * sizeof(uint32_t));
        LocalTensor<uint32_t> words = buf.Get<uint32_t>();
        words.SetValue(kStTag, TimestampTag(epoch));
        words.SetValue(kStCount, count_ | info_->algorithm << 8);
        for (uint32_t w = kStPhases; w < kStCycles; ++w) words.SetValue(w, phases_[w - kStPhases]);
        for (uint32_t i = 0; i < kMostTimestamps; ++i) words.SetValue(kStCycles + i, i < count_ ? cycles_[i] : 0);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context.state(info_->rank) + TimestampsOffset(info_->world, op, core)),
            kTimestampWords);
        AscendC::DataCopy(target, words, kTimestampWords);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t count_ = 0;
    uint32_t phases_[kStCycles - kStPhases];
    uint32_t cycles_[kMostTimestamps];
};

class Exchange {
public:
    // Reads the context and the epoch. Returns false if the context does not match the tiling; core 0 has then written
    // the error record. `performance`: performance_info, if info.measures. `tiling`: in GM; `head`: this core's copy of
    // its head.
    __aicore__ inline bool Enter(TPipe& pipe, const MoeDistributeInfo& info, uint32_t op, const CoreGroup& group,
                                 GM_ADDR workspace, GM_ADDR performance, GM_ADDR record, GM_ADDR tiling,
                                 const MoeDistributeMc2Head& head) {
        timestamps_.Init(info);
        pipe_ = &pipe;
        performance_ = performance;
        info_ = &info;
        core_ = group.core;
        sync_.Init(group, info.cores);
        context_.Init(group.context, info);
        if (sync_.one_card()) {
            link_.CopyItems();
        } else {
            link_.Open(context_, core_, tiling, head);
        }
        const ContextMismatch mismatch = context_.Check();
        if (mismatch.field != kContextFieldCount) {
            OpStatus status = InvalidOf(info, kContextMismatch, mismatch.field, mismatch.ours);
            status.detail2 = mismatch.theirs;
            report_.Init(context_, info, op, 0, record);
            if (core_ == 0) report_.Write(pipe, status, sender_, link_, nullptr);
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
        if (SendsHints()) hints_.Init(sender_, link_, info, epoch_, items_.hints());
        return true;
    }
    // The end of every launch, whatever Enter returned: on A2 HCCL's server waits for it.
    __aicore__ inline void Exit() {
        if (info_->timestamps != 0 && entered_) timestamps_.Store(*pipe_, context_, config_.op, epoch_, core_);
        link_.Close();
    }
    __aicore__ inline void BarrierInit() {
        const uint32_t tag = CoreBarrierTag(epoch_, info_->part == kPartFinish) ^ barrierTag_;
        barrier_.Init(*pipe_, context_.state(info_->rank), info_->world, tag, core_, info_->cores, info_->coreBarrier,
                      &sync_);
    }

    // ---- the first core barrier ----

    // Core 0 polls the abort blocks, then all cores agree on the worst of their statuses `mine`. Returns false on a
    // fatal status: the communicator has failed before, and the caller must not touch a window. With a collective error
    // the op goes on, and its status messages carry the error.
    __aicore__ inline bool Open(OpStatus mine) {
        if (core_ == 0) {
            const OpStatus abort = LookForAborts();
            if (abort.code != kOk) mine = abort;
        }
        return Agree(mine);
    }
    // The failure in the abort blocks, or kOk. In indexed window combine every core polls, because rows leave before
    // the core barrier, and the memory of a lost rank may be gone.
    __aicore__ inline OpStatus LookForAborts() {
        AbortWatch aborts;
        aborts.Init(*pipe_, context_, epoch_);
        OpStatus abort;
        aborts.Look(abort);
        return abort;
    }
    // Direct: call before a core writes into this rank's ping-pong buffer, which peers may still read if an op of this
    // rank has failed. Core 0 polls the abort blocks; the other cores read what core 0 has left of such an op and
    // return a status below core 0's. A later abort need not stop the write: this rank has had all messages of the
    // previous op, so nobody reads this op's ping-pong buffer any more.
    __aicore__ inline OpStatus LookForFailure() {
        if (core_ == 0) return LookForAborts();
        LocalAbortFlag localAbort;
        localAbort.Init(*pipe_, context_, epoch_);
        OpStatus failure;
        if (!localAbort.FailedBefore()) return failure;
        failure.code = kKernelFault;
        failure.source = info_->world;
        return failure;
    }
    // The core barrier alone; returns the same as Open.
    __aicore__ inline bool Agree(const OpStatus& mine) {
        status_ = barrier_.ArriveAndWait(0, mine);
        return TakeEpoch();
    }
    // Direct combine: the worst status was kRecheck. Every core drops it and counts the rows exactly.
    __aicore__ inline void RecheckTogether() { status_ = OpStatus(); }
    // Merges a status of this core into the agreed status.
    __aicore__ inline void Fail(const OpStatus& status) { Worsen(status_, status); }
    // The second core barrier: all rows, or lists, of this rank have left. Agrees on the worst of the statuses so far
    // and `mine`.
    __aicore__ inline void BarrierAfterSend(const OpStatus& mine) { BarrierAt(1, mine); }
    // Hierarchy, after so many waits and before the next UB layout: the barriers' rounds start again.
    __aicore__ inline void BeginAfterWait(uint32_t waits) { barrierTag_ = WaitTag(waits); }
    // Hierarchy: replaces the status by an earlier one, so that messages do not carry an error of another rank. Returns
    // the present one.
    __aicore__ inline OpStatus ReplaceStatus(const OpStatus& status) {
        const OpStatus present = status_;
        status_ = status;
        return present;
    }
    __aicore__ inline void BarrierAt(uint32_t round, const OpStatus& mine) {
        sender_.Flush();
        OpStatus all = status_;
        Worsen(all, mine);
        status_ = barrier_.ArriveAndWait(round, all);
    }

    // ---- status messages ----

    // Direct combine: the messages announce rows in this rank's registered area, `blocks` blocks of 32 bytes from its
    // start.
    __aicore__ inline void SetRegistered(uint32_t blocks) {
        config_.phase = kPhaseRegistered;
        registeredBlocks_ = blocks;
    }
    // Direct combine, before the core barrier: fills this core's first messages. SetStatus refills them if a core has
    // an error.
    template <typename Counts>
    __aicore__ inline void PrepareMessages(Counts& counts) {
        if (FirstPeer() >= info_->world) return;
        MessagesInit();
        for (uint32_t i = FirstPeer(); i < info_->world && prepared_ < MessagesInUb(*info_); i += Senders()) {
            BeginMessage(prepared_);
            FillMessage(counts, prepared_++, PeerAfter(i));
        }
    }
    // Sends this rank's messages to the core's share of the peers. Without an error it calls counts.Select(peer), then
    // counts.Rows(peer, i) for each count i of the message. `rowBytes`: bytes of a row in the item to another server.
    template <typename Counts>
    __aicore__ inline void SetStatus(Counts& counts, uint32_t rowBytes, const ServerPass& pass = ServerPass()) {
        MOE_PHASE(timestamps_, SetStatus);
        const uint32_t bytes = StatusMessageBytes(config_.counts), ring = MessagesInUb(*info_);
        if (prepared_ == 0) MessagesInit();
        if (Failed()) prepared_ = 0;
        items_.BuffInit(*pipe_, *info_, epoch_);
        for (uint32_t i = FirstPeer(), sent = 0; i < info_->world; i += Senders()) {
            const uint32_t peer = PeerAfter(i), at = sent % ring;
            const bool interNode = sender_.servers().InterNode(peer);
            // The message to itself, by which reports know that this rank has sent, is in the first pass.
            if (info_->algorithm == kAlgorithmHierarchy &&
                !(peer == info_->rank ? pass.first <= 1 && pass.last > 1 : pass.Has(*info_, Server(*info_, peer))))
                continue;
            uint32_t rows = 0;
            if (sent >= prepared_) {
                if (sent < ring) BeginMessage(at);
                if (!Failed()) counts.Select(peer);
                if (sent >= ring || ring == 1) SyncFunc<HardEvent::MTE3_S>();
                rows = FillMessage(counts, at, peer);
            }
            SyncFunc<HardEvent::S_MTE3>();
            sender_.PutStatus(peer, MessageAt(at), bytes);
            if (interNode && info_->algorithm != kAlgorithmHierarchy)
                items_.Put(peer, static_cast<uint64_t>(rows) * rowBytes, bytes);
            ++sent;
        }
        // Direct does not wait for its stores: the messages stay in UB until the UB layout ends.
        if (ring == 1) sender_.Flush();
        if (info_->transport == kTransportRdma && info_->algorithm != kAlgorithmHierarchy)
            PostItems(sender_.servers().InterNodeCount());
    }
    // When all cores have staged rows, messages and items, core 0 posts `count` items of the list.
    __aicore__ inline void PostItems(uint32_t count, uint32_t first = 0) {
        sync_.Wait();
        if (core_ == 0) link_.Post(items_.address() + static_cast<uint64_t>(first) * kBlock, count);
    }

    // Whether this launch is over: a send launch without an error. With an error it waits like a whole op, because
    // peers may still read what this rank's next op would overwrite.
    __aicore__ inline bool Sent() {
        if (info_->part != kPartSend || status_.code != kOk) return false;
        AscendC::PipeBarrier<PIPE_ALL>();
        return true;
    }

    // Window: waits for the messages of this core's share of the sources and, if all are good, calls
    // arrived.Arrived(source, message) for each. The third core barrier follows. Returns whether no core has an error.
    // `rowBytes`: as in SetStatus. Hierarchy: `awaited`: which messages; a source is then the rank of a place; `pass`:
    // of which servers' places.
    template <typename Arrived>
    __aicore__ inline bool WaitStatus(Arrived& arrived, uint32_t rowBytes, Awaited awaited = Awaited::kOwn,
                                      const ServerPass& pass = ServerPass()) {
        MOE_PHASE(timestamps_, WaitStatus);
        const uint32_t first = PartBegin(info_->world, core_, info_->cores);
        const uint32_t count = PartBegin(info_->world, core_ + 1, info_->cores) - first;
        StatusWaiter waiter;
        LocalAbortFlag localAbort;
        localAbort.Init(*pipe_, context_, epoch_);
        waiter.Init(*pipe_, context_, sender_.servers(), *info_, config_, epoch_, first, count);
        if (awaited != Awaited::kOwn) waiter.WaitFor(awaited, pass);
        // During a SyncAll core 0 could signal nobody, so every core polls the aborts.
        const bool calls = info_->coreBarrier == kBarrierByBlocks && info_->cores > 1;
        if (calls && core_ != 0) waiter.ListenTo(localAbort);
        if (info_->measures != 0) waiter.Measure(*pipe_, performance_, epoch_);
        if (info_->rdmaFlags != 0) waiter.WaitForBlocks(*pipe_, rowBytes, epoch_);
        AlgorithmHints* const hints = core_ == 0 && SendsHints() ? &hints_ : nullptr;
        if (SendsHints()) {
            hints_.BuffInit(*pipe_);
            waiter.Heed(hints);
        }
        OpStatus mine = status_;
        Worsen(mine, waiter.Wait());
        if (mine.code == kOk || mine.code == kRoutingMismatch) {
            for (uint32_t i = 0; i < count; ++i) {
                if (waiter.Awaits(i)) Worsen(mine, arrived.Arrived(first + i, waiter.Message(i)));
            }
        }
        const uint32_t round = awaited == Awaited::kSums ? 0 : 2;  // the previous barrier had another one
        if (calls && core_ == 0) {
            status_ = barrier_.ArriveAndWait(round, mine, AbortCaller(waiter.aborts(), localAbort, hints));
        } else {
            status_ = barrier_.ArriveAndWait(round, mine);
        }
        // A message may report the mismatch before a hint does. Ranks that wait for messages that are never sent need
        // hints anyway.
        const bool apart = status_.code == kConfigMismatch && status_.detail0 == kFieldAlgorithm && SendsHints();
        if (status_.code == kHinted || apart) LeaveTogether();
        return status_.code == kOk;
    }
    // Whether no rank expects more of this op: after a fatal error, or if ranks run different algorithms.
    __aicore__ inline bool Over() const { return left_ || status_.code >= kFirstFatal; }
    // Direct: every core waits for all sources' messages, and no core barrier follows (see LocalAbortFlag). Core 0 must
    // call CheckCountsHashes() afterwards.
    __aicore__ inline bool WaitForAll(StatusWaiter& waiter) {
        MOE_PHASE(timestamps_, WaitStatus);
        LocalAbortFlag localAbort;
        localAbort.Init(*pipe_, context_, epoch_);
        waiter.InitAll(*pipe_, context_, sender_.servers(), *info_, config_, epoch_);
        if (info_->measures != 0 && core_ == 0) waiter.Measure(*pipe_, performance_, epoch_);
        if (core_ == 0) {
            const OpStatus status = waiter.Wait();
            if (status.code != kOk) localAbort.Post(status.code);
            Worsen(status_, status);
        } else {
            Worsen(status_, waiter.Follow(localAbort));
        }
        return status_.code == kOk;
    }
    // Combine after WaitForAll: no core barrier precedes the sums. Each core publishes its status once, also before it
    // leaves, and waits for the others' after its sums, so a failure that core 0 or a single core detects late still
    // leaves zeros in all of x.
    __aicore__ inline void ArriveBeforeSums(const OpStatus& mine) {
        Fail(mine);
        barrier_.Arrive(2, core_ == 0 ? status_ : mine);
    }
    // Returns false if a core has failed.
    __aicore__ inline bool WaitAfterSums() {
        Fail(barrier_.Wait(2));
        return status_.code == kOk;
    }
    // Core 0, while its first loads are in flight: checks the hashes that WaitForAll has skipped. `rowsKnown`: the
    // numbers of rows are known to be right.
    __aicore__ inline bool CheckCountsHashes(StatusWaiter& waiter, bool rowsKnown) {
        Worsen(status_, waiter.JudgeHashes(rowsKnown));
        return status_.code == kOk || status_.code == kRoutingMismatch;
    }

    __aicore__ inline void Report() {
        if (core_ != 0) return;
        context_.ForgetPeers();
        if (SendsHints() && status_.code == kCommTimeout && status_.reporter == info_->rank)
            status_ = Accuser().Ask(*pipe_, context_, *info_, epoch_, hints_, status_);
        report_.Write(*pipe_, status_, sender_, link_, items_.aborts());
        if (status_.code < kFirstFatal) return;
        LocalAbortFlag localAbort;
        localAbort.Init(*pipe_, context_, epoch_);
        localAbort.Post(status_.code);
        AscendC::PipeBarrier<PIPE_ALL>();
    }
    // For UB layouts that store or load other ranks' rows.
    __aicore__ inline void LoadPeers() { context_.LoadPeers(*pipe_, *info_); }
    // Waits for all pipes and frees UB; later buffers belong to a new UB layout.
    __aicore__ inline void NextPlan() {
        AscendC::PipeBarrier<PIPE_ALL>();
        pipe_->Reset();
        context_.ForgetPeers();
        BarrierInit();
    }

    __aicore__ inline TPipe& pipe() { return *pipe_; }
    __aicore__ inline const WindowContext& context() const { return context_; }
    __aicore__ inline const StatusConfig& config() const { return config_; }
    __aicore__ inline GM_ADDR items() const { return items_.address(); }
    __aicore__ inline WindowSender& sender() { return sender_; }
    __aicore__ inline PhaseTimestamps& timestamps() { return timestamps_; }
    __aicore__ inline const OpStatus& status() const { return status_; }
    __aicore__ inline uint32_t core() const { return core_; }
    __aicore__ inline uint32_t epoch() const { return epoch_; }
    // Row 0 of `source`'s region in this rank's own ping-pong buffer.
    __aicore__ inline GM_ADDR Region(uint32_t source) const {
        return context_.data(info_->rank) +
               RegionOffset(context_.data_bytes(), info_->regions, Parity(epoch_), source) + sender_.rows_at();
    }
    // Loads `count` rows from row `row` of `source`'s region on; a row has `stride` bytes in UB.
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
    __aicore__ inline GM_ADDR PingPong() const { return PingPongOf(info_->rank); }
    // Any rank's ping-pong buffer of this epoch: direct reads its peers'.
    __aicore__ inline GM_ADDR PingPongOf(uint32_t rank) const {
        return context_.data(rank) + PingPongOffset(context_.data_bytes(), Parity(epoch_));
    }

    // Whether messages carry an error and no rows.
    __aicore__ inline bool Failed() const { return status_.code != kOk && status_.code != kRoutingMismatch; }

private:
    // Between servers each algorithm waits where the other sends nothing.
    __aicore__ inline bool SendsHints() const { return info_->transport == kTransportRdma; }
    // Ranks run different algorithms: they synchronize by hints, and all raise the mismatch.
    __aicore__ inline void LeaveTogether() {
        left_ = true;
        barrierTag_ ^= kHintedTag;
        NextPlan();
        OpStatus found = status_;
        found.code = kConfigMismatch;
        if (core_ == 0) Worsen(found, HintWaiter().Wait(*pipe_, context_, *info_, epoch_, hints_));
        status_ = barrier_.ArriveAndWait(1, found);
    }
    __aicore__ inline bool TakeEpoch() {
        // From here on this epoch is taken; none of its blocks has left yet. A failed op takes its epoch too, or the
        // finish of a failed send, which may already be queued, would find the previous op's messages.
        if (core_ == 0) word_.Publish(epoch_);
        return status_.code < kFirstFatal;
    }
    // Number of cores that send messages. From kManyCores on core 0 sends none if it must publish the epoch and prepare
    // its checks at that time.
    __aicore__ inline uint32_t Senders() const {
        const bool busy =
            info_->algorithm == kAlgorithmDirect || (config_.op == kOpCombine && info_->sourceIndices != 0);
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
    // Words that are the same for every peer.
    __aicore__ inline void BeginMessage(uint32_t at) {
        StatusWriter& writer = writers_[at];
        writer.Init(MessageAt(at), *info_, config_, epoch_);
        writer.SetError(Failed() ? status_ : OpStatus());
        if (!Failed() && config_.phase == kPhaseRegistered)
            writer.SetPlace(registeredBlocks_, info_->registeredGeneration);
        writer.ClearUnused();
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
    AlgorithmHints hints_;
    FailureReport report_;
    CoreBarrier barrier_;
    RankSync sync_;
    StatusWriter writers_[kMostMessagesInUb];
    UbBuf messageBuf_;
    OpStatus status_;
    uint32_t core_ = 0;
    uint32_t epoch_ = 0;
    uint32_t barrierTag_ = 0;
    uint32_t registeredBlocks_ = 0;
    uint32_t prepared_ = 0;  // messages already filled
    bool entered_ = false;
    bool left_ = false;
    PhaseTimestamps timestamps_;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_EXCHANGE_H
