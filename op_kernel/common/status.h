// Status messages: every rank sends one to every peer in every op, with its configuration, its error if any, and
// numbers of rows. Contains the writer, the reader that checks one message, and the comparison of all messages at once.
#ifndef ASCEND_MOE_COMMON_STATUS_H
#define ASCEND_MOE_COMMON_STATUS_H

#include "core_barrier.h"

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

// The hash of a count block covers the configuration, the source, the place of registered rows and the counts, so that
// a flipped bit is never taken for a count. `hash`: of all but the counts; `at`: first word of the block.
__aicore__ inline uint32_t HashCounts(uint32_t hash, const LocalTensor<uint32_t>& message, uint32_t at) {
    for (uint32_t i = 0; i < kCountsPerBlock; ++i) hash = HashMix(hash, message.GetValue(at + kCbCounts + i));
    return hash;
}

// Writes messages into UB: the fixed words once, counts and error per destination.
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
        message_.SetValue(h1 + kH1OpPhase, OpPhase(config.op, config.phase, kHeader1Id));
        message_.SetValue(h1 + kH1Types, config.types);
        message_.SetValue(h1 + kH1Contract, config.contract);
        message_.SetValue(h1 + kH1Tag, epoch);
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            message_.SetValue(at + kCbEpoch, epoch);
            message_.SetValue(at + kCbOpPhase, OpPhase(config.op, config.phase, b * kCountsPerBlock));
            message_.SetValue(at + kCbTag, epoch);
        }
        hash_ = HashMix(config.hash, info.rank);
        algorithm_ = config.algorithm;
    }
    // Call last: the hashes cover the counts.
    __aicore__ inline void SetCountsHashes() {
        for (uint32_t b = 0; b < CountBlocks(counts_); ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            message_.SetValue(at + kCbHash, HashCounts(hash_, message_, at));
        }
    }
    // kPhaseRegistered: where the rows lie, in blocks from the start of the registered area, and that memory's
    // generation.
    __aicore__ inline void SetPlace(uint32_t blocks, uint32_t generation) {
        message_.SetValue(kBlockWords + kH1Detail0, blocks);
        message_.SetValue(kBlockWords + kH1Detail1, generation);
        hash_ = HashMix(HashMix(hash_, blocks), generation);
    }
    __aicore__ inline void SetError(const OpStatus& status) {
        message_.SetValue(kBlockWords + kH1Code, CodeWord(algorithm_, status.code));
        message_.SetValue(kBlockWords + kH1Detail0, status.detail0);
        message_.SetValue(kBlockWords + kH1Detail1, status.detail1);
    }
    // Rows of local expert i; from L on, the start of local expert i - L's rows.
    __aicore__ inline void SetCount(uint32_t i, uint32_t value) { message_.SetValue(CountWord(i), value); }
    // Unused counts of the last block are zero.
    __aicore__ inline void ClearUnused() {
        for (uint32_t i = counts_; i < CountBlocks(counts_) * kCountsPerBlock; ++i) SetCount(i, 0);
    }
    static __aicore__ inline uint32_t CountWord(uint32_t i) { return kHeaderBlocks * kBlockWords + WordOfCounts(i); }
    // The same, relative to the first count block.
    static __aicore__ inline uint32_t WordOfCounts(uint32_t i) {
        return i / kCountsPerBlock * kBlockWords + kCbCounts + i % kCountsPerBlock;
    }

private:
    LocalTensor<uint32_t> message_;
    uint32_t counts_ = 0;
    uint32_t hash_ = 0;
    uint32_t algorithm_ = 0;
};

// Checks one message in UB.
class StatusReader {
public:
    enum Arrival : uint32_t { kPending, kArrived };

    __aicore__ inline void Init(const MoeDistributeInfo& info, const StatusConfig& config, uint32_t epoch) {
        info_ = &info;
        config_ = config;
        epoch_ = epoch;
    }

    // Returns kArrived with kOk in `status` if every block carries this epoch and the counts are within capacity. Words
    // that nobody can have sent are waited on, because a block may be half written; at the last poll (`odd`) they are
    // corrupt. An inter-node rank's message lies among rows, where any bytes may have been before: it is never called
    // corrupt.
    __aicore__ inline Arrival Judge(const LocalTensor<uint32_t>& message, uint32_t source, bool interNode, bool odd,
                                    OpStatus& status) const {
        OpStatus found;
        if (!Complete(message, source, found)) {
            if (!odd || interNode || found.code == kOk) return kPending;
        } else {
            JudgeWords(message, source, found);
            if (found.code == kCorruptStatus && !odd) return kPending;
        }
        status = found;
        return kArrived;
    }
    // Checks the hashes of a message whose fixed words are right. `rowsKnown`: its numbers of rows are right, too.
    __aicore__ inline OpStatus JudgeCountsHashes(const LocalTensor<uint32_t>& message, uint32_t source,
                                                 bool rowsKnown) const {
        OpStatus status;
        const uint32_t blocks = CountBlocks(config_.counts);
        const bool rowsOnly = config_.counts == info_->localExperts;
        const uint32_t first = !rowsKnown ? 0 : rowsOnly ? blocks : info_->localExperts / kCountsPerBlock;
        if (first == blocks) return status;
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
            JudgeCounts(message, source, status);
            break;
        }
        return status;
    }

private:
    // Checks the words of a complete message.
    __aicore__ inline void JudgeWords(const LocalTensor<uint32_t>& message, uint32_t source, OpStatus& status) const {
        if (message.GetValue(kH0Source) != source) return Corrupt(status, source, 0, message.GetValue(kH0Source));
        const uint32_t opPhase = message.GetValue(kH0OpPhase), op = opPhase >> 24, phase = PhaseOf(opPhase);
        if ((op != kOpDispatch && op != kOpCombine) || !Allowed(message, op, phase)) {
            return Corrupt(status, source, 0, opPhase);
        }
        if (message.GetValue(kBlockWords + kH1OpPhase) != OpPhase(op, phase, kHeader1Id)) {
            return Corrupt(status, source, 1, message.GetValue(kBlockWords + kH1OpPhase));
        }
        if (CompareConfig(message, source, status)) return;
        // Bits of these words that belong to no field of CompareConfig.
        const uint32_t types = message.GetValue(kBlockWords + kH1Types);
        const uint32_t contract = message.GetValue(kBlockWords + kH1Contract);
        if (types != config_.types) return Corrupt(status, source, 1, types);
        if (contract != config_.contract) return Corrupt(status, source, 1, contract);
        const uint32_t code = message.GetValue(kBlockWords + kH1Code) & 0xFFu;
        if (code == kOk) return JudgeCounts(message, source, status);
        if (code > kInvalidSourceIndex) return Corrupt(status, source, 1, code);
        status.code = code;
        status.source = source;
        status.detail0 = message.GetValue(kBlockWords + kH1Detail0);
        status.detail1 = message.GetValue(kBlockWords + kH1Detail1);
    }
    __aicore__ inline uint32_t AlgorithmOf(const LocalTensor<uint32_t>& message) const {
        return message.GetValue(kBlockWords + kH1Code) >> 8;
    }
    // A rank that runs another algorithm may send any phase; CompareConfig then names the mismatch.
    __aicore__ inline bool Allowed(const LocalTensor<uint32_t>& message, uint32_t op, uint32_t phase) const {
        if (AlgorithmOf(message) == config_.algorithm) return IsPhaseOf(info_->algorithm, op, phase);
        return phase >= kPhaseFinal && phase <= kPhaseRegistered;
    }
    // Hierarchy: ops of window do not touch places that the next op of hierarchy reads.
    __aicore__ inline bool Stale(uint32_t seen) const {
        if (IsStale(seen, epoch_)) return true;
        return info_->algorithm == kAlgorithmHierarchy && (epoch_ - seen) % 2 == 0 && epoch_ - seen < kMostOpsBetween;
    }
    // Whether both ends of all blocks that this rank reads carry this epoch. Otherwise `odd` names the first that
    // carries neither this epoch nor one that may have been there before; kOk: there is none.
    __aicore__ inline bool Complete(const LocalTensor<uint32_t>& message, uint32_t source, OpStatus& odd) const {
        bool complete = true;
        uint32_t blocks = 1;
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t at = b * kBlockWords, key = b == 0 ? kStatusMagic : 0;
            const uint32_t first = message.GetValue(at + kFirstTag), last = message.GetValue(at + kLastTag);
            const bool firstHere = first == (epoch_ ^ key), lastHere = last == epoch_;
            complete = complete && firstHere && lastHere;
            if (odd.code == kOk && !firstHere && first != 0 && !Stale(first ^ key)) Corrupt(odd, source, b, first);
            if (odd.code == kOk && !lastHere && !Stale(last)) Corrupt(odd, source, b, last);
            // The first half of header 0 contains their number.
            if (b == 0 && firstHere)
                blocks = kHeaderBlocks + Min(message.GetValue(kH0OpPhase) & 0xFFFFu, CountBlocks(config_.counts));
        }
        return complete;
    }
    __aicore__ inline void Corrupt(OpStatus& status, uint32_t source, uint32_t block, uint32_t word) const {
        OpStatus found;
        found.code = kCorruptStatus;
        found.source = source;
        found.detail0 = block;
        found.detail1 = word;
        found.reporter = info_->rank;
        status = found;
    }

    // Whether a count is a number of rows; direct combine also sends where rows begin.
    __aicore__ inline bool OfRows(uint32_t block, uint32_t i) const {
        return block * kCountsPerBlock + i < info_->localExperts;
    }
    // The hash of the words before the counts of a block.
    __aicore__ inline uint32_t HashBefore(const LocalTensor<uint32_t>& message, uint32_t source) const {
        const uint32_t hash = HashMix(config_.hash, source);
        if (PhaseOf(message.GetValue(kH0OpPhase)) != kPhaseRegistered) return hash;
        return HashMix(HashMix(hash, message.GetValue(kBlockWords + kH1Detail0)),
                       message.GetValue(kBlockWords + kH1Detail1));
    }
    __aicore__ inline void JudgeCounts(const LocalTensor<uint32_t>& message, uint32_t source, OpStatus& status) const {
        const uint32_t blocks = CountBlocks(config_.counts), phase = PhaseOf(message.GetValue(kH0OpPhase));
        if ((message.GetValue(kH0OpPhase) & 0xFFFFu) != blocks) {
            return Corrupt(status, source, 0, message.GetValue(kH0OpPhase));
        }
        const uint32_t hash = HashBefore(message, source);
        uint64_t rows = 0;
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t at = (kHeaderBlocks + b) * kBlockWords;
            if (message.GetValue(at + kCbOpPhase) != OpPhase(config_.op, phase, b * kCountsPerBlock)) {
                return Corrupt(status, source, kHeaderBlocks + b, message.GetValue(at + kCbOpPhase));
            }
            if (message.GetValue(at + kCbHash) != HashCounts(hash, message, at)) {
                return Corrupt(status, source, kHeaderBlocks + b, message.GetValue(at + kCbHash));
            }
            for (uint32_t i = 0; i < kCountsPerBlock; ++i) {
                const uint32_t count = message.GetValue(at + kCbCounts + i);
                if (OfRows(b, i)) rows += count;
                if (rows > info_->capacity) return Corrupt(status, source, kHeaderBlocks + b, count);
            }
        }
    }

    __aicore__ inline bool Differs(uint32_t field, uint32_t ours, uint32_t theirs, uint32_t source,
                                   OpStatus& status) const {
        if (ours == theirs) return false;
        OpStatus found;
        found.code = kConfigMismatch;
        found.source = source;
        found.detail0 = field;
        found.detail1 = ours;
        found.detail2 = theirs;
        found.reporter = info_->rank;
        status = found;
        return true;
    }

    // Returns true if the peer's configuration differs, and names the first field that does.
    __aicore__ inline bool CompareConfig(const LocalTensor<uint32_t>& message, uint32_t source, OpStatus& v) const {
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
               Differs(kFieldRowUnit, TypesRowUnit(config_.types), TypesRowUnit(types), source, v);
    }

    static constexpr uint32_t kMostOpsBetween = 1u << 20;
    const MoeDistributeInfo* info_ = nullptr;
    StatusConfig config_;
    uint32_t epoch_ = 0;
};

// Compares many messages with the expected words by vector instructions; word by word this takes the scalar unit tens
// of microseconds.
class MessageMatch {
public:
    // kExpected: every block of every message has this epoch and, except for what the hash covers, the expected words.
    // kUnexpected: all have this epoch, some word differs. In both cases the messages have arrived.
    enum Arrival : uint32_t { kMissing, kUnexpected, kExpected };

    // For `count` messages at a time, first those of ranks 0 and up.
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
        writer.SetError(OpStatus());
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
    // `messages`: in UB, loaded by MTE2. After kExpected for all ranks together, Counts() contains their counts.
    __aicore__ inline Arrival Look(const LocalTensor<uint32_t>& messages) {
        SyncFunc<HardEvent::MTE2_V>();
        const LocalTensor<int32_t> words = messages.ReinterpretCast<int32_t>();
        alike_ = false;
        Clear();
        Compare(words, {kFixedOfHeader0, kFixedOfHeader1, kFixedOfCounts});
        CompareSources(words);
        if (Differs()) {
            Clear();
            Compare(words, {kTags, kTags, kTags});
            return Differs() ? kMissing : kUnexpected;
        }
        if (all_) TakeCounts(words);
        alike_ = true;
        return kExpected;
    }
    __aicore__ inline bool alike() const { return alike_; }
    // [sources][words of a message]: the counts at their places, all other words zero. Counts are clamped to 0 ..
    // capacity, so that a core that has not checked the hashes may use them as sizes.
    __aicore__ inline LocalTensor<int32_t> Counts() { return wordBuf_.Get<int32_t>(); }

private:
    static constexpr uint32_t kLaneBlocks = 8;  // of a repeat
    // For each block the words that are the same in all ranks' messages.
    static constexpr uint32_t kFixedOfHeader0 = 0xFFu & ~(1u << kH0Source);
    static constexpr uint32_t kFixedOfHeader1 = 0xFFu & ~(1u << kH1Detail0 | 1u << kH1Detail1);
    static constexpr uint32_t kFixedOfCounts = 1u << kCbEpoch | 1u << kCbOpPhase | 1u << kCbTag;
    static constexpr uint32_t kCountLanes = 0xFu << kCbCounts;
    static constexpr uint32_t kTags = 1u << kFirstTag | 1u << kLastTag;
    struct BlockLanes {
        uint32_t header0, header1, counts;
    };

    // One bit per lane of the repeat that begins with `block`.
    __aicore__ inline uint64_t MaskOf(const BlockLanes& lanes, uint32_t block) const {
        uint64_t mask = 0;
        for (uint32_t b = 0; b < kLaneBlocks && block + b < blocks_; ++b) {
            const uint32_t of = block + b == 0 ? lanes.header0 : block + b == 1 ? lanes.header1 : lanes.counts;
            mask |= static_cast<uint64_t>(of) << (b * kBlockWords);
        }
        return mask;
    }
    // Messages per call: all, if a repeat can have the stride from one to the next.
    __aicore__ inline uint32_t OfACall() const { return blocks_ <= kMostRepeats ? count_ : 1; }
    __aicore__ inline uint8_t MessageStride() const { return Repeats(OfACall() > 1 ? blocks_ : 0); }

    // The scalar unit has written the pattern and has read the result.
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
    // Requires all words of the comparison to be zero.
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
    // Whether any word is not zero. Overwrites the words; zeros stay zeros.
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
    // One block per source, filled with its rank.
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
    bool all_ = false;  // all ranks' messages come together
    bool alike_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_STATUS_H
