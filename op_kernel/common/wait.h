// Waiting for other ranks. Every wait has a deadline, looks once more after it, and returns a verdict. It never
// leaves the kernel by itself.
#ifndef ASCEND_MOE_COMMON_WAIT_H
#define ASCEND_MOE_COMMON_WAIT_H

#include "status.h"
#include "send.h"

namespace moe {

// Abort blocks of this rank's state area, one contiguous read.
class AbortWatch {
public:
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context) {
        world_ = context.world();
        rank_ = context.rank();
        blocks_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) + kAbortOffset),
                                world_ * kBlockWords);
        pipe.InitBuffer(buf_, world_ * kBlock);
    }
    // True: there is an abort block; `verdict` is that of the lowest source rank.
    __aicore__ inline bool Look(Verdict& verdict) {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(words, blocks_, world_ * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t source = 0; source < world_; ++source) {
            const uint32_t at = source * kBlockWords;
            if (words.GetValue(at + kAbMagic) != kAbortMagic || words.GetValue(at + kAbMark) != kAbortMagic) continue;
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

private:
    GlobalTensor<uint32_t> blocks_;
    UbBuf buf_;
    uint32_t world_ = 0;
    uint32_t rank_ = 0;
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
        pipe.InitBuffer(buf_, kBlock);
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
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(words, block_, kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        return words.GetValue(kFbMagic) == FailWord(epoch_) ? words.GetValue(kFbCode) : kOk;
    }

private:
    GlobalTensor<uint32_t> block_;
    UbBuf buf_;
    uint32_t epoch_ = 0;
};

// Waits for the status messages of a contiguous range of source ranks: those of this server in the state
// area, those of others behind the rows that they came with.
class StatusWaiter {
public:
    // UB: `count` messages of this shape, and the abort blocks.
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context, const ServerMap& servers,
                                const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch,
                                uint32_t first, uint32_t count) {
        info_ = &info;
        servers_ = servers;
        context_ = &context;
        parity_ = Parity(epoch);
        first_ = first;
        count_ = count;
        messageWords_ = StatusMessageBytes(config.counts) / sizeof(uint32_t);
        strideBytes_ = StatusStride(info.world);
        reader_.Init(info, config, epoch);
        aborts_.Init(pipe, context);
        messages_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) +
                                                                     StatusOffset(info.world, Parity(epoch), 0)),
                                  static_cast<uint64_t>(info.world) * strideBytes_ / sizeof(uint32_t));
        if (count > 0) pipe.InitBuffer(buf_, count * messageWords_ * sizeof(uint32_t));
    }
    // Direct, after Init: Wait() then compares all messages at once by vector instructions, and word by word
    // only if one differs; if all are as expected, it leaves the hashes to JudgeHashes(). A launch of a
    // single core compares word by word.
    __aicore__ inline void MatchAll(TPipe& pipe, const StatusConfig& config, uint32_t epoch) {
        matching_ = info_->cores > 1;
        nextToHash_ = count_;
        if (matching_) match_.Init(pipe, *info_, config, epoch, count_);
    }
    // Whether the last comparison found all messages as expected: match() then has their counts.
    __aicore__ inline bool alike() const { return matching_ && match_.alike(); }
    __aicore__ inline MessageMatch& match() { return match_; }

    // Returns kOk, the worst collective error of the messages, or a fatal one. On a timeout `source` is the
    // first rank that is missing.
    __aicore__ inline Verdict Wait() {
        Verdict worst;
        const int64_t start = AscendC::GetSystemCycle();
        uint32_t next = 0, looks = 0;
        bool lastLook = false;
        odd_ = false;
        while (next < count_) {
            const uint32_t before = next;
            Load(next);
            next = matching_ ? Match(next, worst) : Advance(next, count_, worst);
            if (worst.code >= kFirstFatal || next == count_) break;
            if (matching_ && next != before) continue;  // it has judged a message: the next may be there
            Verdict abort;
            const bool expired = AscendC::GetSystemCycle() - start > static_cast<int64_t>(info_->deadlineCycles);
            // Aborts are rare, and a look at them takes as long as one at the messages.
            const bool aborted = (expired || looks++ % kLooksAnAbort == 0) && aborts_.Look(abort);
            if (lastLook) {
                // What was missing before is still missing after a fresh look.
                if (!aborted) {
                    abort.code = kCommTimeout;
                    abort.source = first_ + next;
                    abort.reporter = info_->rank;
                }
                return abort;
            }
            lastLook = aborted || expired;
            odd_ = expired;  // what is odd then will not become right
            if (!lastLook) {
                MOE_POLL_HINT();
            }
        }
        return worst;
    }

    // Checks the counts hashes that Wait() has left. `rowsKnown`: the numbers of rows are right.
    __aicore__ inline Verdict JudgeHashes(bool rowsKnown) {
        Verdict worst;
        for (; nextToHash_ < count_; ++nextToHash_) {
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
        while (next < count_) {
            Load(0);
            const MessageMatch::Arrival seen = match_.Look(Message(0));
            if (seen == MessageMatch::kExpected) return Verdict();
            if (seen == MessageMatch::kUnexpected) next = Advance(next, count_, worst);
            if (next == count_) break;
            Verdict given;
            given.code = fail.Look();
            if (given.code != kOk) return given;
            MOE_POLL_HINT();
        }
        return worst;
    }

    __aicore__ inline uint32_t words() const { return messageWords_; }
    // The message of a source of the range, as last loaded.
    __aicore__ inline LocalTensor<uint32_t> Message(uint32_t index) {
        return buf_.Get<uint32_t>()[static_cast<uint32_t>(index * messageWords_)];
    }

private:
#ifdef TWIN_POLL_SLEEPS  // until something has changed, which may be an abort
    static constexpr uint32_t kLooksAnAbort = 1;
#else
    static constexpr uint32_t kLooksAnAbort = 16;
#endif

    __aicore__ inline void Load(uint32_t from) {
        SyncFunc<HardEvent::S_MTE2>();
        if (info_->transport == kTransportMemory) {
            LoadNear(first_ + from, first_ + count_);
        } else {
            LoadNear(Max(first_ + from, servers_.begin()), Min(first_ + count_, servers_.end()));
            for (uint32_t rank = first_ + from; rank < first_ + count_; ++rank) {
                if (servers_.Far(rank)) LoadFar(rank);
            }
        }
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline void LoadNear(uint32_t begin, uint32_t end) {
        if (begin >= end) return;
        const uint32_t bytes = messageWords_ * sizeof(uint32_t);
        const DataCopyExtParams params{static_cast<uint16_t>(end - begin), bytes, strideBytes_ - bytes, 0, 0};
        const DataCopyPadExtParams<uint32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(Message(begin - first_),
                             messages_[static_cast<uint64_t>(begin) * strideBytes_ / sizeof(uint32_t)], params, pad);
    }
    __aicore__ inline void LoadFar(uint32_t rank) {
        GlobalTensor<uint32_t> message;
        message.SetGlobalBuffer(FarMessage(*context_, parity_, rank), messageWords_);
        AscendC::DataCopy(Message(rank - first_), message, messageWords_);
    }
    // Compares all messages at once. While some are missing, judges one message a look: so a bad message is
    // found soon, and the core is not busy with the others when the last message comes.
    __aicore__ inline uint32_t Match(uint32_t next, Verdict& worst) {
        const MessageMatch::Arrival seen = match_.Look(Message(0));
        if (seen != MessageMatch::kExpected)
            return Advance(next, seen == MessageMatch::kMissing ? next + 1 : count_, worst);
        nextToHash_ = next;
        return count_;
    }
    __aicore__ inline uint32_t Advance(uint32_t next, uint32_t end, Verdict& worst) {
        for (; next < end; ++next) {
            Verdict verdict;
            if (reader_.Judge(Message(next), first_ + next, servers_.Far(first_ + next), odd_, verdict) ==
                StatusReader::kPending)
                break;
            Worsen(worst, verdict);
            if (worst.code >= kFirstFatal) break;
        }
        return next;
    }

    GlobalTensor<uint32_t> messages_;
    UbBuf buf_;
    AbortWatch aborts_;
    StatusReader reader_;
    MessageMatch match_;
    ServerMap servers_;
    const WindowContext* context_ = nullptr;
    uint32_t parity_ = 0;
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t first_ = 0;
    uint32_t count_ = 0;
    uint32_t messageWords_ = 0;
    uint32_t strideBytes_ = 0;
    uint32_t nextToHash_ = 0;  // the first message whose hashes are still to be checked
    bool odd_ = false;         // whether words that are none of a message make it corrupt
    bool matching_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_WAIT_H
