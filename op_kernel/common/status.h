// Status messages: every rank sends one to every peer in every op. It carries the configuration, an error if
// there is one, and the numbers of rows. Here are the writer, the reader that judges one message, and the
// comparison of all messages at once.
#ifndef ASCEND_MOE_COMMON_STATUS_H
#define ASCEND_MOE_COMMON_STATUS_H

#include "verdict.h"

namespace moe {

// The configuration words of a message, equal on all ranks of a correct call.
struct StatusConfig {
    uint32_t op = 0;
    uint32_t types = 0;
    uint32_t algorithm = 0;
    uint32_t contract = 0;
    uint32_t hash = 0;
    uint32_t phase = kPhaseFinal;  // of this rank's own messages
    uint32_t counts = 0;           // of a message

    __aicore__ inline void Init(const MoeDistributeInfo& info, uint32_t opCode) {
        op = opCode;
        counts = MessageCounts(info.algorithm, opCode, info.localExperts);
        phase = info.algorithm == kAlgorithmDirect ? kPhasePublished : kPhaseFinal;
        types = TypesWord(info.xType, info.wireType, info.quantMode, info.hasScales,
                          op == kOpDispatch ? info.hasWeights : 0, info.rowUnit);
        algorithm = info.algorithm;
        contract = ContractWord(info.contract, info.globalBsGiven != 0, info.windowMiB);
        hash = 2166136261u;
        hash = HashMix(hash, info.hidden);
        hash = HashMix(hash, info.topK);
        hash = HashMix(hash, info.experts);
        hash = HashMix(hash, info.maxBatch);
        hash = HashMix(hash, types);
        hash = HashMix(hash, algorithm);
        hash = HashMix(hash, contract);
    }
};

// The hash of a count block covers the configuration, the source, the place of lent rows and the counts, so that a
// turned bit is never taken for a number of rows. `hash`: of all but the counts; `at`: the first word of the block.
__aicore__ inline uint32_t HashCounts(uint32_t hash, const LocalTensor<uint32_t>& message, uint32_t at) {
    for (uint32_t i = 0; i < kCountsPerBlock; ++i) hash = HashMix(hash, message.GetValue(at + kCbCounts + i));
    return hash;
}

// Writes messages into UB. The fixed words are written once, counts and error per destination.
class StatusWriter {
public:
    __aicore__ inline void Init(const LocalTensor<uint32_t>& message, const MoeDistributeInfo& info,
                                const StatusConfig& config, uint32_t epoch) {
        message_ = message;
        counts_ = config.counts;
        const uint32_t blocks = CountBlocks(counts_);
        message_.SetValue(kH0Magic, HeaderWord(epoch));
        message_.SetValue(kH0OpPhase, OpPhase(config.op, config.phase, blocks));
        message_.SetValue(kH0Source, info.rank);
        message_.SetValue(kH0Hidden, info.hidden);
        message_.SetValue(kH0TopK, info.topK);
        message_.SetValue(kH0Experts, info.experts);
        message_.SetValue(kH0MaxBatch, info.maxBatch);
        message_.SetValue(kH0Epoch, epoch);
        const uint32_t h1 = kBlockWords;
        message_.SetValue(h1 + kH1Epoch, epoch);
        message_.SetValue(h1 + kH1OpPhase, OpPhase(config.op, config.phase, kHeader1Tail));
        message_.SetValue(h1 + kH1Types, config.types);
        message_.SetValue(h1 + kH1Contract, config.contract);
        message_.SetValue(h1 + kH1Mark, epoch);
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            message_.SetValue(at + kCbEpoch, epoch);
            message_.SetValue(at + kCbOpPhase, OpPhase(config.op, config.phase, b * kCountsPerBlock));
            message_.SetValue(at + kCbMark, epoch);
        }
        hash_ = HashMix(config.hash, info.rank);
        algorithm_ = config.algorithm;
    }
    // Last, when the counts are in: their blocks' hashes cover them.
    __aicore__ inline void SetCountsHashes() {
        for (uint32_t b = 0; b < CountBlocks(counts_); ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            message_.SetValue(at + kCbHash, HashCounts(hash_, message_, at));
        }
    }
    // kPhaseLent: where the rows lie, in blocks after the begin of the lent area, and the generation of that
    // memory.
    __aicore__ inline void SetPlace(uint32_t blocks, uint32_t generation) {
        message_.SetValue(kBlockWords + kH1Detail0, blocks);
        message_.SetValue(kBlockWords + kH1Detail1, generation);
        hash_ = HashMix(HashMix(hash_, blocks), generation);
    }
    __aicore__ inline void SetError(const Verdict& verdict) {
        message_.SetValue(kBlockWords + kH1Code, CodeWord(algorithm_, verdict.code));
        message_.SetValue(kBlockWords + kH1Detail0, verdict.detail0);
        message_.SetValue(kBlockWords + kH1Detail1, verdict.detail1);
    }
    // Rows of local expert i; from L on, where those of local expert i - L begin.
    __aicore__ inline void SetCount(uint32_t i, uint32_t value) { message_.SetValue(CountWord(i), value); }
    // Unused counts of the last block are zero.
    __aicore__ inline void ClearTail() {
        for (uint32_t i = counts_; i < CountBlocks(counts_) * kCountsPerBlock; ++i) SetCount(i, 0);
    }
    static __aicore__ inline uint32_t CountWord(uint32_t i) { return kHeaderBlocks * kBlockWords + WordOfCounts(i); }
    // The same, from the first count block on.
    static __aicore__ inline uint32_t WordOfCounts(uint32_t i) {
        return i / kCountsPerBlock * kBlockWords + kCbCounts + i % kCountsPerBlock;
    }

private:
    LocalTensor<uint32_t> message_;
    uint32_t counts_ = 0;
    uint32_t hash_ = 0;
    uint32_t algorithm_ = 0;
};

// Judges one message in UB.
class StatusReader {
public:
    enum Arrival : uint32_t { kPending, kArrived };

    __aicore__ inline void Init(const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch) {
        info_ = &info;
        config_ = config;
        epoch_ = epoch;
    }

    // kArrived with kOk in `verdict`: every block carries this epoch and the counts are within capacity. Words
    // that nobody can have sent are waited on, because a block may be half written; at the last look (`odd`)
    // they are corrupt. The message of a far rank (another server) lies among rows, where anything may have
    // been before it: there they are never judged.
    __aicore__ inline Arrival Judge(const LocalTensor<uint32_t>& message, uint32_t source, bool far, bool odd,
                                    Verdict& verdict) const {
        Verdict found;
        if (!Complete(message, source, found)) {
            if (!odd || far || found.code == kOk) return kPending;
        } else {
            JudgeWords(message, source, found);
            if (found.code == kCorruptStatus && !odd) return kPending;
        }
        verdict = found;
        return kArrived;
    }
    // Checks the counts hashes of a message whose fixed words are known to be right. `rowsKnown`: its rows are, too.
    __aicore__ inline Verdict JudgeCountsHashes(const LocalTensor<uint32_t>& message, uint32_t source,
                                                bool rowsKnown) const {
        Verdict verdict;
        const uint32_t blocks = CountBlocks(config_.counts);
        const bool rowsOnly = config_.counts == info_->localExperts;
        const uint32_t first = !rowsKnown ? 0 : rowsOnly ? blocks : info_->localExperts / kCountsPerBlock;
        if (first == blocks) return verdict;
        const uint32_t hash = HashBefore(message, source);
        const LocalTensor<uint64_t> pairs = message.ReinterpretCast<uint64_t>();
        uint64_t rows = 0;
        for (uint32_t b = first; b < blocks; ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            uint32_t countsHash = hash;
            for (uint32_t i = 0; i < kCountsPerBlock; i += 2) {
                const uint64_t pair = pairs.GetValue((at + kCbCounts + i) / 2);
                const uint32_t low = static_cast<uint32_t>(pair), high = static_cast<uint32_t>(pair >> 32);
                countsHash = HashMix(HashMix(countsHash, low), high);
                if (OfRows(b, i)) rows += low;
                if (OfRows(b, i + 1)) rows += high;
            }
            if (message.GetValue(at + kCbHash) == countsHash && rows <= info_->capacity) continue;
            JudgeCounts(message, source, verdict);
            break;
        }
        return verdict;
    }

private:
    // What the words of a complete message say, into `verdict`.
    __aicore__ inline void JudgeWords(const LocalTensor<uint32_t>& message, uint32_t source, Verdict& verdict) const {
        if (message.GetValue(kH0Source) != source) return Corrupt(verdict, source, 0, message.GetValue(kH0Source));
        const uint32_t opPhase = message.GetValue(kH0OpPhase), op = opPhase >> 24, phase = PhaseOf(opPhase);
        if ((op != kOpDispatch && op != kOpCombine) || !Allowed(message, op, phase)) {
            return Corrupt(verdict, source, 0, opPhase);
        }
        if (message.GetValue(kBlockWords + kH1OpPhase) != OpPhase(op, phase, kHeader1Tail)) {
            return Corrupt(verdict, source, 1, message.GetValue(kBlockWords + kH1OpPhase));
        }
        if (CompareConfig(message, source, verdict)) return;
        // Bits of these words that belong to no field of CompareConfig.
        const uint32_t types = message.GetValue(kBlockWords + kH1Types);
        const uint32_t contract = message.GetValue(kBlockWords + kH1Contract);
        if (types != config_.types) return Corrupt(verdict, source, 1, types);
        if (contract != config_.contract) return Corrupt(verdict, source, 1, contract);
        const uint32_t code = message.GetValue(kBlockWords + kH1Code) & 0xFFu;
        if (code == kOk) return JudgeCounts(message, source, verdict);
        if (code > kInvalidTriple) return Corrupt(verdict, source, 1, code);
        verdict.code = code;
        verdict.source = source;
        verdict.detail0 = message.GetValue(kBlockWords + kH1Detail0);
        verdict.detail1 = message.GetValue(kBlockWords + kH1Detail1);
    }
    __aicore__ inline uint32_t AlgorithmOf(const LocalTensor<uint32_t>& message) const {
        return message.GetValue(kBlockWords + kH1Code) >> 8;
    }
    // A rank that runs another algorithm may send any phase: CompareConfig then names the mismatch.
    __aicore__ inline bool Allowed(const LocalTensor<uint32_t>& message, uint32_t op, uint32_t phase) const {
        if (AlgorithmOf(message) == config_.algorithm) return IsPhaseOf(info_->algorithm, op, phase);
        return phase >= kPhaseFinal && phase <= kPhaseLent;
    }
    // Hierarchy: ops of window leave places untouched that the next op of hierarchy reads.
    __aicore__ inline bool Stale(uint32_t seen) const {
        if (IsStale(seen, epoch_)) return true;
        return info_->algorithm == kAlgorithmHierarchy && (epoch_ - seen) % 2 == 0 && epoch_ - seen < kMostOpsBetween;
    }
    // Whether both halves of all blocks that this rank reads carry this epoch. If not, `odd` names the first
    // that carries neither this epoch nor what may have been there before; kOk: there is none.
    __aicore__ inline bool Complete(const LocalTensor<uint32_t>& message, uint32_t source, Verdict& odd) const {
        bool complete = true;
        uint32_t blocks = 1;
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t at = b * kBlockWords, key = b == 0 ? kStatusMagic : 0;
            const uint32_t first = message.GetValue(at + kFirstMark), last = message.GetValue(at + kLastMark);
            const bool firstHere = first == (epoch_ ^ key), lastHere = last == epoch_;
            complete = complete && firstHere && lastHere;
            if (odd.code == kOk && !firstHere && first != 0 && !Stale(first ^ key)) Corrupt(odd, source, b, first);
            if (odd.code == kOk && !lastHere && !Stale(last)) Corrupt(odd, source, b, last);
            // The first half of header 0 says how many there are.
            if (b == 0 && firstHere)
                blocks = kHeaderBlocks + Min(message.GetValue(kH0OpPhase) & 0xFFFFu, CountBlocks(config_.counts));
        }
        return complete;
    }
    __aicore__ inline void Corrupt(Verdict& verdict, uint32_t source, uint32_t block, uint32_t word) const {
        Verdict found;
        found.code = kCorruptStatus;
        found.source = source;
        found.detail0 = block;
        found.detail1 = word;
        found.reporter = info_->rank;
        verdict = found;
    }

    // Whether a count is a number of rows; direct combine also sends where rows begin.
    __aicore__ inline bool OfRows(uint32_t block, uint32_t i) const {
        return block * kCountsPerBlock + i < info_->localExperts;
    }
    // The hash of the words before the counts of a block.
    __aicore__ inline uint32_t HashBefore(const LocalTensor<uint32_t>& message, uint32_t source) const {
        const uint32_t hash = HashMix(config_.hash, source);
        if (PhaseOf(message.GetValue(kH0OpPhase)) != kPhaseLent) return hash;
        return HashMix(HashMix(hash, message.GetValue(kBlockWords + kH1Detail0)),
                       message.GetValue(kBlockWords + kH1Detail1));
    }
    __aicore__ inline void JudgeCounts(const LocalTensor<uint32_t>& message, uint32_t source, Verdict& verdict) const {
        const uint32_t blocks = CountBlocks(config_.counts), phase = PhaseOf(message.GetValue(kH0OpPhase));
        if ((message.GetValue(kH0OpPhase) & 0xFFFFu) != blocks) {
            return Corrupt(verdict, source, 0, message.GetValue(kH0OpPhase));
        }
        const uint32_t hash = HashBefore(message, source);
        uint64_t rows = 0;
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            if (message.GetValue(at + kCbOpPhase) != OpPhase(config_.op, phase, b * kCountsPerBlock)) {
                return Corrupt(verdict, source, kHeaderBlocks + b, message.GetValue(at + kCbOpPhase));
            }
            if (message.GetValue(at + kCbHash) != HashCounts(hash, message, at)) {
                return Corrupt(verdict, source, kHeaderBlocks + b, message.GetValue(at + kCbHash));
            }
            for (uint32_t i = 0; i < kCountsPerBlock; ++i) {
                const uint32_t count = message.GetValue(at + kCbCounts + i);
                if (OfRows(b, i)) rows += count;
                if (rows > info_->capacity) return Corrupt(verdict, source, kHeaderBlocks + b, count);
            }
        }
    }

    __aicore__ inline bool Differs(uint32_t field, uint32_t ours, uint32_t theirs, uint32_t source,
                                   Verdict& verdict) const {
        if (ours == theirs) return false;
        Verdict found;
        found.code = kConfigMismatch;
        found.source = source;
        found.detail0 = field;
        found.detail1 = ours;
        found.detail2 = theirs;
        found.reporter = info_->rank;
        verdict = found;
        return true;
    }

    // True when the peer has another configuration; the first field that differs is named.
    __aicore__ inline bool CompareConfig(const LocalTensor<uint32_t>& message, uint32_t source, Verdict& v) const {
        const uint32_t types = message.GetValue(kBlockWords + kH1Types);
        const uint32_t contract = message.GetValue(kBlockWords + kH1Contract);
        const uint32_t global = contract >> 8 & 0xFF, ourGlobal = config_.contract >> 8 & 0xFF;
        const uint32_t maxBatch = message.GetValue(kH0MaxBatch);
        return Differs(kFieldOp, config_.op, message.GetValue(kH0OpPhase) >> 24, source, v) ||
               Differs(kFieldWindow, config_.contract >> 16, contract >> 16, source, v) ||
               Differs(kFieldContract, config_.contract & 0xFF, contract & 0xFF, source, v) ||
               Differs(kFieldHidden, info_->hidden, message.GetValue(kH0Hidden), source, v) ||
               Differs(kFieldTopK, info_->topK, message.GetValue(kH0TopK), source, v) ||
               Differs(kFieldExperts, info_->experts, message.GetValue(kH0Experts), source, v) ||
               Differs(kFieldGlobalBs, ourGlobal * info_->maxBatch * info_->world, global * maxBatch * info_->world,
                       source, v) ||
               Differs(kFieldMaxBatch, info_->maxBatch, maxBatch, source, v) ||
               Differs(kFieldType, config_.types & 0xFF, types & 0xFF, source, v) ||
               Differs(kFieldQuant, config_.types >> 16 & 0xFF, types >> 16 & 0xFF, source, v) ||
               Differs(kFieldScales, config_.types >> 24 & 1, types >> 24 & 1, source, v) ||
               Differs(kFieldWeights, config_.types >> 25 & 1, types >> 25 & 1, source, v) ||
               Differs(kFieldAlgorithm, config_.algorithm, AlgorithmOf(message), source, v) ||
               Differs(kFieldRowUnit, RowUnitOf(config_.types), RowUnitOf(types), source, v);
    }

    static constexpr uint32_t kMostOpsBetween = 1u << 20;
    const MoeDistributeInfo* info_ = nullptr;
    StatusConfig config_;
    uint32_t epoch_ = 0;
};

// Compares many status messages with the expected words by vector instructions, because word by word they take the
// scalar unit tens of microseconds.
class MessageMatch {
public:
    // kExpected: every block of every message is of this epoch, and all its words but those that the hash
    // covers are as expected. kUnexpected: all of this epoch, some word is another. Either way the messages
    // have come.
    enum Arrival : uint32_t { kMissing, kUnexpected, kExpected };

    // For `count` messages at a time, those of the ranks from 0 on first.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch,
                                uint32_t count) {
        count_ = count;
        all_ = count == info.world;
        blocks_ = StatusMessageBytes(config.counts) / kBlock;
        words_ = count * blocks_ * kBlockWords;
        capacity_ = static_cast<int32_t>(info.capacity);
        const MessageMatchUb ub(count, config.counts);
        pipe.InitBuffer(patternBuf_, ub.pattern);
        pipe.InitBuffer(sourceBuf_, ub.sources);
        pipe.InitBuffer(wordBuf_, ub.words);
        pipe.InitBuffer(reduceBuf_, ub.reduce);
        NumberSources();
        StatusWriter writer;
        writer.Init(patternBuf_.Get<uint32_t>(), info, config, epoch);
        writer.SetError(Verdict());
    }

    // The next messages are those of the `count` ranks from `first` on.
    __aicore__ inline void Take(uint32_t first, uint32_t count) {
        count_ = count;
        words_ = count * blocks_ * kBlockWords;
        if (first == first_) return;
        const LocalTensor<int32_t> source = sourceBuf_.Get<int32_t>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(source, source, static_cast<int32_t>(first) - static_cast<int32_t>(first_),
                      static_cast<int32_t>(count * kBlockWords));
        first_ = first;
    }
    // `messages`: in UB, loaded by MTE2. After kExpected of all ranks' messages together their counts are in Counts().
    __aicore__ inline Arrival Look(const LocalTensor<uint32_t>& messages) {
        SyncFunc<HardEvent::MTE2_V>();
        const LocalTensor<int32_t> words = messages.ReinterpretCast<int32_t>();
        alike_ = false;
        Clear();
        Compare(words, {kFixedOfHeader0, kFixedOfHeader1, kFixedOfCounts});
        CompareSources(words);
        if (Differs()) {
            Clear();
            Compare(words, {kMarks, kMarks, kMarks});
            return Differs() ? kMissing : kUnexpected;
        }
        if (all_) TakeCounts(words);
        alike_ = true;
        return kExpected;
    }
    __aicore__ inline bool alike() const { return alike_; }
    // [sources][words of a message]: the counts at their places, all other words zero. Counts below 0 or
    // above the capacity are cut to that range, so that a core that has not checked the hashes may use them
    // as sizes.
    __aicore__ inline LocalTensor<int32_t> Counts() { return wordBuf_.Get<int32_t>(); }

private:
    static constexpr uint32_t kLaneBlocks = 8;  // of a repeat
    // Of each block the words that are the same in the messages of all ranks.
    static constexpr uint32_t kFixedOfHeader0 = 0xFFu & ~(1u << kH0Source);
    static constexpr uint32_t kFixedOfHeader1 = 0xFFu & ~(1u << kH1Detail0 | 1u << kH1Detail1);
    static constexpr uint32_t kFixedOfCounts = 1u << kCbEpoch | 1u << kCbOpPhase | 1u << kCbMark;
    static constexpr uint32_t kCountLanes = 0xFu << kCbCounts;
    static constexpr uint32_t kMarks = 1u << kFirstMark | 1u << kLastMark;
    struct BlockLanes {
        uint32_t header0, header1, counts;
    };

    // A bit a lane of the repeat that begins with `block`.
    __aicore__ inline uint64_t MaskOf(const BlockLanes& lanes, uint32_t block) const {
        uint64_t mask = 0;
        for (uint32_t b = 0; b < kLaneBlocks && block + b < blocks_; ++b) {
            const uint32_t of = block + b == 0 ? lanes.header0 : block + b == 1 ? lanes.header1 : lanes.counts;
            mask |= static_cast<uint64_t>(of) << (b * kBlockWords);
        }
        return mask;
    }
    // Calls on all messages together, where the stride from one to the next is one that a repeat can have.
    __aicore__ inline uint32_t OfACall() const { return blocks_ <= kMostRepeats ? count_ : 1; }
    __aicore__ inline uint8_t MessageStride() const { return Repeats(OfACall() > 1 ? blocks_ : 0); }

    // The scalar unit has written the pattern, and has read what it wanted to know.
    __aicore__ inline void Clear() {
        SyncFunc<HardEvent::S_V>();
        AscendC::Duplicate(wordBuf_.Get<int32_t>(), static_cast<int32_t>(0), words_);
        AscendC::PipeBarrier<PIPE_V>();
    }
    __aicore__ inline void Compare(const LocalTensor<int32_t>& messages, const BlockLanes& lanes) {
        const LocalTensor<int32_t> to = wordBuf_.Get<int32_t>(), pattern = patternBuf_.Get<int32_t>();
        const AscendC::BinaryRepeatParams strides(1, 1, 1, MessageStride(), MessageStride(), 0);
        for (uint32_t block = 0; block < blocks_; block += kLaneBlocks) {
            uint64_t mask[2] = {MaskOf(lanes, block), 0};
            for (uint32_t message = 0; message < count_; message += OfACall()) {
                const uint32_t at = (message * blocks_ + block) * kBlockWords;
                AscendC::Sub(to[at], messages[at], pattern[block * kBlockWords], mask, Repeats(OfACall()), strides);
            }
        }
    }
    __aicore__ inline void CompareSources(const LocalTensor<int32_t>& messages) {
        const LocalTensor<int32_t> to = wordBuf_.Get<int32_t>(), source = sourceBuf_.Get<int32_t>();
        const AscendC::BinaryRepeatParams strides(1, 1, 0, MessageStride(), MessageStride(), 1);
        uint64_t mask[2] = {1ull << kH0Source, 0};
        for (uint32_t message = 0; message < count_; message += OfACall()) {
            const uint32_t at = message * blocks_ * kBlockWords;
            AscendC::Sub(to[at], messages[at], source[message * kBlockWords], mask, Repeats(OfACall()), strides);
        }
    }
    // All words of the comparison are zero when this is called.
    __aicore__ inline void TakeCounts(const LocalTensor<int32_t>& messages) {
        const LocalTensor<int32_t> counts = Counts();
        const AscendC::UnaryRepeatParams strides(1, 1, MessageStride(), MessageStride());
        for (uint32_t block = 0; block < blocks_; block += kLaneBlocks) {
            uint64_t mask[2] = {MaskOf({0, 0, kCountLanes}, block), 0};
            for (uint32_t message = 0; message < count_; message += OfACall()) {
                const uint32_t at = (message * blocks_ + block) * kBlockWords;
                AscendC::Maxs(counts[at], messages[at], static_cast<int32_t>(0), mask, Repeats(OfACall()), strides);
            }
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(counts, counts, capacity_, static_cast<int32_t>(words_));
    }
    // Whether any word is not zero. It changes the words, but zeros stay zeros.
    __aicore__ inline bool Differs() {
        LocalTensor<float> value = wordBuf_.Get<float>(), result = reduceBuf_.Get<float>();
        const int32_t count = static_cast<int32_t>(words_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(value, wordBuf_.Get<int32_t>(), AscendC::RoundMode::CAST_RINT, words_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(value, value, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceMax(result, value, result[kBlockWords], count, false);
        SyncFunc<HardEvent::V_S>();
        return result.GetValue(0) != 0.0f;
    }
    // A block a source, all of whose words are its rank.
    __aicore__ inline void NumberSources() {
        LocalTensor<int32_t> source = sourceBuf_.Get<int32_t>();
        const uint32_t padded = static_cast<uint32_t>(CeilTo(count_, kBlockWords));
        LocalTensor<int32_t> number = source[padded * kBlockWords];
        AscendC::CreateVecIndex(number, static_cast<int32_t>(0), padded);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(source, number, Repeats(padded / kBlockWords), {1, 8});
    }

    UbBuf patternBuf_, sourceBuf_, wordBuf_, reduceBuf_;
    uint32_t first_ = 0, count_ = 0;  // ranks
    uint32_t blocks_ = 0;             // of a message
    uint32_t words_ = 0;              // of count_ messages
    int32_t capacity_ = 0;
    bool all_ = false;  // the messages of all ranks come together
    bool alike_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_STATUS_H
