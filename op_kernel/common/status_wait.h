// Waits for status messages of other ranks. Every wait has a deadline, polls once more after it, and returns a status.
#ifndef ASCEND_MOE_COMMON_STATUS_WAIT_H
#define ASCEND_MOE_COMMON_STATUS_WAIT_H

#include "aborts.h"

namespace moe {

// With performance_info: adds to each source's element the microseconds from the start of the wait until this core
// first saw that source's message; until the end of the wait if it never came.
class WaitTimes {
public:
    // `times`: performance_info [W] int64, of which this core updates `count` elements from `first` on.
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
    __aicore__ inline void Begin(int64_t now) { start_ = now; }
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
        return static_cast<uint32_t>(static_cast<uint64_t>(AscendC::GetSystemCycle() - start_) / kCyclesPerMicro);
    }

    GlobalTensor<uint32_t> times_;  // low and high words
    UbBuf seenBuf_, sumBuf_;
    int64_t start_ = 0;
    uint32_t count_ = 0;
    uint32_t epoch_ = 0;
};

// Hierarchy: which messages a rank waits for. Ranks of this server always use the state area.
enum class Awaited : uint32_t {
    kOwn,       // not hierarchy: of the rank itself
    kRecords,   // dispatch, first wait: of the rank (s, i): what the rank of server s with the same local rank sends to
                // rank i here
    kRelayed,   // dispatch, second: its own, which the rank of this server with the same local rank has relayed
    kReturned,  // combine, first: of the rank (s, i): what rank i here sends to the rank of server s with this local
                // rank; a wait for each pass
    kSums       // combine, last: its own, which the rank of its server with the same local rank has relayed
};

__aicore__ inline uint32_t LevelOf(Awaited awaited) {
    return awaited == Awaited::kOwn ? 0 : awaited == Awaited::kRelayed || awaited == Awaited::kSums ? 2 : 1;
}

// Waits for the status messages of a contiguous range of source ranks: intra-node ones in the state area, inter-node
// ones after their rows. If InitAll splits them into parts, the parts are awaited one after the other, and only
// Stored() stays of their messages.
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
    __aicore__ inline void WaitFor(Awaited awaited, const ServerPass& pass) {
        awaited_ = awaited;
        pass_ = pass;
        if (awaited == Awaited::kRelayed) servers_.InitIntraNode(info_->world);
        // A relaying rank then gives up first and names the rank it missed.
        if (LevelOf(awaited) == 2) deadline_ += kCyclesPerSecond;
    }
    // Between servers: a message with rows has arrived when all blocks of its item have. `rowBytes`: of a row.
    __aicore__ inline void WaitForBlocks(TPipe& pipe, uint32_t rowBytes, uint32_t epoch) {
        rowBytes_ = rowBytes;
        flags_.Init(pipe, *info_, epoch);
        flags_.InitBits(pipe, *info_);
    }
    // Between servers: reads other ranks' algorithm hints. `hints`: nullptr on a core that sends none.
    __aicore__ inline void Heed(AlgorithmHints* hints) {
        aborts_.TakeHints(info_->algorithm);
        hints_ = hints;
    }
    // For a core that polls aborts only when core 0 signals it.
    __aicore__ inline void ListenTo(LocalAbortFlag& localAbort) { localAbort_ = &localAbort; }
    __aicore__ inline AbortWatch& aborts() { return aborts_; }
    // Direct, instead of Init, for all ranks: Wait() compares messages together by vector instructions, and word by
    // word only if one differs; if all are as expected, it leaves the hashes to JudgeHashes(). A launch of one core
    // compares word by word.
    __aicore__ inline void InitAll(TPipe& pipe, const WindowContext& context, const ServerMap& servers,
                                   const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch) {
        const uint32_t together = MessagesAtOnce(info.world, info.cores, config.counts);
        Init(pipe, context, servers, info, config, epoch, 0, together);
        count_ = info.world;
        firstStored_ = FirstStoredBlock(info.world, info.cores, config.counts, info.localExperts);
        storedWords_ = StoredBytes(info.world, info.cores, config.counts, info.localExperts) / sizeof(uint32_t);
        if (InParts()) pipe.InitBuffer(storedBuf_, StatusWaiterUb(info, config.counts).stored);
        matching_ = info.cores > 1;
        nextToHash_ = count_;
        if (matching_) match_.Init(pipe, info, config, epoch, together);
    }
    // After InitAll: whether all messages were as expected; SegmentScan may then use Counts().
    __aicore__ inline bool alike() const { return matching_ && match_.alike(); }
    // Counts of all sources, in rows of words() from block FirstStoredBlock() on. Values are clamped to 0 .. capacity,
    // so that a core that has not checked the hashes may use them as sizes.
    __aicore__ inline LocalTensor<int32_t> Counts() {
        if (!InParts()) return match_.Counts();
        const LocalTensor<int32_t> counts = storedBuf_.Get<int32_t>();
        const int32_t words = static_cast<int32_t>(count_ * storedWords_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(counts, counts, static_cast<int32_t>(0), words);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(counts, counts, static_cast<int32_t>(info_->capacity), words);
        return counts;
    }

    // After Init or InitAll, on the one core that measures these sources. `times`: performance_info.
    __aicore__ inline void Measure(TPipe& pipe, GM_ADDR times, uint32_t epoch) {
        times_.Init(pipe, times, epoch, first_, count_);
    }
    // Hierarchy: whether this wait is for the source at `index`.
    __aicore__ inline bool Awaits(uint32_t index) const {
        return awaited_ != Awaited::kReturned || pass_.Has(*info_, Server(*info_, first_ + index));
    }

    // Returns kOk, the worst collective error of the messages, or a fatal one. On a timeout `source` is the first
    // missing rank.
    __aicore__ inline OpStatus Wait() {
        const int64_t start = AscendC::GetSystemCycle();
        times_.Begin(start);
        aborts_.AnswerFrom(start + deadline_ / kHintShare);
        if (hints_ != nullptr) hints_->Begin(start);
        OpStatus status = WaitSince(start);
        if (status.code >= kFirstFatal && status.reporter == info_->rank)
            status.detail0 = AtLevel(status.detail0, LevelOf(awaited_));
        if (times_.given()) times_.Store();
        return status;
    }

    // Checks the hashes that Wait() has skipped. `rowsKnown`: the numbers of rows are right. Parts are loaded again: a
    // valid message stays (see LocalAbortFlag).
    __aicore__ inline OpStatus JudgeHashes(bool rowsKnown) {
        OpStatus worst;
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

    // Wait() for cores other than 0: returns the worst collective error of the messages, or the reason why core 0 gave
    // up. These cores have no last poll, so no message is fatal to them.
    __aicore__ inline OpStatus Follow(LocalAbortFlag& localAbort) {
        OpStatus worst;
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
            OpStatus given;
            given.code = localAbort.Look();
            if (given.code != kOk) return given;
            MOE_POLL_HINT();
        }
        return worst;
    }

    // The message of a source of the range, or of the part, as last loaded.
    __aicore__ inline LocalTensor<uint32_t> Message(uint32_t index) {
        return buf_.Get<uint32_t>()[static_cast<uint32_t>((index - part_) * messageWords_)];
    }
    // After InitAll and the wait: a source's count blocks, and header 1. The next source's are words() further.
    __aicore__ inline LocalTensor<uint32_t> CountsOf(uint32_t source) { return Stored(source, kHeaderBlocks); }
    __aicore__ inline LocalTensor<uint32_t> Header1Of(uint32_t source) { return Stored(source, 1); }
    __aicore__ inline uint32_t words() const { return storedWords_; }

private:
    __aicore__ inline bool ReportedAbort(bool forItself, OpStatus& abort) {
        if (localAbort_ != nullptr && !forItself) return localAbort_->Look() != kOk;
        return aborts_.Look(abort);
    }
    __aicore__ inline OpStatus WaitSince(int64_t start) {
        OpStatus worst;
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
            if (matching_ && next != before) continue;  // judged a message: the next may be there
            OpStatus abort;
            const bool expired = AscendC::GetSystemCycle() - start > deadline_;
            // Aborts are rare, and polling them costs as much as polling the messages.
            const bool last = expired || lastLook;
            const bool aborted = (last || looks++ % LooksAnAbort() == 0) && ReportedAbort(last, abort);
            if (lastLook) {
                // What was missing is still missing after another poll.
                if (!aborted || abort.code == kAccused) {
                    abort.code = kCommTimeout;
                    abort.source = CulpritOf(first_ + next);
                    abort.reporter = info_->rank;
                }
                return abort;
            }
            lastLook = aborted || expired;
            odd_ = expired;  // unexpected words will not become right any more
            if (!lastLook) {
                if (hints_ != nullptr) hints_->Look();
                MOE_POLL_HINT();
            }
        }
        return worst;
    }
    __aicore__ inline bool InParts() const { return atOnce_ < count_; }
    __aicore__ inline LocalTensor<uint32_t> Stored(uint32_t source, uint32_t block) {
        const LocalTensor<uint32_t> words = InParts() ? storedBuf_.Get<uint32_t>() : buf_.Get<uint32_t>();
        return words[source * storedWords_ + (block - firstStored_) * kBlockWords];
    }
    // A part: the sources from `first` on that are in UB together.
    __aicore__ inline void SetPart(uint32_t first) {
        part_ = first;
        stop_ = Min(first + atOnce_, count_);
    }
    __aicore__ inline void BeginPart(uint32_t first) {
        SetPart(first);
        if (InParts()) match_.Take(first, stop_ - first);
    }
    // All messages of the part have arrived: stores what is used later, and begins the next part.
    __aicore__ inline void EndPart() {
        if (!InParts()) return;
        const uint32_t blocks = messageWords_ / kBlockWords, stored = storedWords_ / kBlockWords;
        const AscendC::DataCopyParams params(Pieces(stop_ - part_), Narrow<uint16_t, kMostPieces>(stored),
                                             Narrow<uint16_t, kMostPieces>(blocks - stored), 0);
        AscendC::DataCopy(storedBuf_.Get<uint32_t>()[part_ * storedWords_], Message(part_)[firstStored_ * kBlockWords],
                          params);
        if (stop_ == count_) {
            SyncFunc<HardEvent::V_S>();
        } else {
            SyncFunc<HardEvent::V_MTE2>();
            BeginPart(stop_);
        }
    }
    // Loads the messages of the part, from source `from` on.
    __aicore__ inline void Load(uint32_t from) {
        SyncFunc<HardEvent::S_MTE2>();
        if (info_->transport == kTransportMemory) {
            LoadIntraNode(first_ + from, first_ + stop_);
        } else {
            LoadIntraNode(Max(first_ + from, servers_.begin()), Min(first_ + stop_, servers_.end()));
            for (uint32_t rank = first_ + from; rank < first_ + stop_; ++rank) {
                if (servers_.InterNode(rank)) LoadInterNode(rank);
            }
        }
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline void LoadIntraNode(uint32_t begin, uint32_t end) {
        if (begin >= end) return;
        const uint32_t bytes = messageWords_ * sizeof(uint32_t);
        const DataCopyExtParams params{Pieces(end - begin), bytes, strideBytes_ - bytes, 0, 0};
        const DataCopyPadExtParams<uint32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(Message(begin - first_),
                             messages_[static_cast<uint64_t>(begin) * strideBytes_ / sizeof(uint32_t)], params, pad);
    }
    __aicore__ inline void LoadInterNode(uint32_t rank) {
        GlobalTensor<uint32_t> message;
        message.SetGlobalBuffer(PlaceOf(rank), messageWords_);
        AscendC::DataCopy(Message(rank - first_), message, messageWords_);
    }
    // Where an inter-node rank's message lies, who wrote it, and who has failed if it does not come.
    __aicore__ inline __gm__ uint32_t* PlaceOf(uint32_t rank) const {
        if (awaited_ == Awaited::kRecords || awaited_ == Awaited::kSums)
            return RelayedMessage(*context_, *info_, parity_, Server(*info_, rank), LocalRank(*info_, rank));
        return InterNodeMessage(*context_, parity_, rank);
    }
    __aicore__ inline uint32_t SourceOf(uint32_t rank) const {
        if (awaited_ == Awaited::kRecords && servers_.InterNode(rank))
            return Server(*info_, rank) * info_->intraNodeRanks + LocalRank(*info_, info_->rank);
        if (awaited_ == Awaited::kReturned && servers_.InterNode(rank))
            return servers_.begin() + LocalRank(*info_, rank);
        return rank;
    }
    __aicore__ inline uint32_t CulpritOf(uint32_t rank) const {
        const uint32_t server = Server(*info_, rank), mine = Server(*info_, info_->rank);
        if (server == mine) return rank;
        if (awaited_ == Awaited::kRelayed) return mine * info_->intraNodeRanks + LocalRank(*info_, rank);
        if (awaited_ == Awaited::kSums) return server * info_->intraNodeRanks + LocalRank(*info_, info_->rank);
        return SourceOf(rank);
    }
    // Compares all messages of the part at once. While some are missing, checks one message per poll: a bad message is
    // found early, and the core is not busy with the others when the last message comes.
    __aicore__ inline uint32_t Match(uint32_t next, OpStatus& worst) {
        const MessageMatch::Arrival seen = match_.Look(Message(part_));
        if (seen != MessageMatch::kExpected)
            return Advance(next, seen == MessageMatch::kMissing ? next + 1 : stop_, worst);
        nextToHash_ = next;
        return stop_;
    }
    __aicore__ inline uint32_t Advance(uint32_t next, uint32_t end, OpStatus& worst) {
        for (; next < end; ++next) {
            if (!Awaits(next)) continue;
            OpStatus status;
            if (reader_.Judge(Message(next), SourceOf(first_ + next), servers_.InterNode(first_ + next), odd_,
                              status) == StatusReader::kPending)
                break;
            if (rowBytes_ != 0 && status.code == kOk && !BlocksCome(next)) break;
            Worsen(worst, status);
            if (worst.code >= kFirstFatal) break;
        }
        return next;
    }

    __aicore__ inline bool BlocksCome(uint32_t index) {
        const uint32_t source = first_ + index;
        if (!servers_.InterNode(source)) return true;
        const LocalTensor<uint32_t> message = Message(index);
        uint64_t rows = 0;
        for (uint32_t i = 0; i < info_->localExperts; ++i) rows += message.GetValue(StatusWriter::CountWord(i));
        return flags_.Come(reinterpret_cast<GM_ADDR>(InterNodeMessage(*context_, parity_, source)),
                           FlaggedBlocks(rows * rowBytes_));
    }

    GlobalTensor<uint32_t> messages_;
    UbBuf buf_, storedBuf_;
    AbortWatch aborts_;
    WaitTimes times_;
    StatusReader reader_;
    BlockFlags flags_;
    uint32_t rowBytes_ = 0;  // 0: flags are not checked
    MessageMatch match_;
    ServerMap servers_;
    const WindowContext* context_ = nullptr;
    uint32_t parity_ = 0;
    const MoeDistributeInfo* info_ = nullptr;
    int64_t deadline_ = 0;
    Awaited awaited_ = Awaited::kOwn;
    ServerPass pass_;
    uint32_t first_ = 0;
    uint32_t count_ = 0;
    uint32_t atOnce_ = 0;           // sources of a part
    uint32_t part_ = 0, stop_ = 0;  // this part: [part_, stop_)
    uint32_t messageWords_ = 0;
    uint32_t firstStored_ = 0, storedWords_ = 0;  // of a message: block, words
    uint32_t strideBytes_ = 0;
    uint32_t nextToHash_ = 0;  // first message whose hashes are still to be checked
    bool odd_ = false;         // whether unexpected words make a message corrupt
    bool matching_ = false;
    LocalAbortFlag* localAbort_ = nullptr;
    AlgorithmHints* hints_ = nullptr;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_STATUS_WAIT_H
