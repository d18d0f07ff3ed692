// Whether the status messages of a range are all there and say what a message of this op has to say, by
// vector instructions: word by word, W messages take the scalar unit tens of microseconds.
#ifndef ASCEND_MOE_DISTRIBUTE_RUN_MATCH_H
#define ASCEND_MOE_DISTRIBUTE_RUN_MATCH_H

#include "../common/status.h"

namespace moe {

class MessageMatch {
public:
    // kExpected: every block of every message is of this epoch, and all its words but those that the hash
    // covers are as expected. kUnexpected: all of this epoch, some word is another. Either way the messages
    // have come.
    enum Arrival : uint32_t { kMissing, kUnexpected, kExpected };

    // For `count` messages, those of the ranks from 0 on.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, const StatusConfig& config,
                                uint32_t epoch, uint32_t count) {
        count_ = count;
        blocks_ = StatusMessageBytes(config.counts) / kBlock;
        words_ = count * blocks_ * kBlockWords;
        capacity_ = static_cast<int32_t>(info.capacity);
        pipe.InitBuffer(patternBuf_, blocks_ * kBlock);
        pipe.InitBuffer(sourceBuf_, MatchSourceBytes(count));
        pipe.InitBuffer(wordBuf_, words_ * sizeof(int32_t));
        pipe.InitBuffer(reduceBuf_, MatchReduceBytes(words_));
        NumberSources();
        StatusWriter writer;
        writer.Init(patternBuf_.Get<uint32_t>(), info, config, epoch);
        writer.SetError(Verdict());
    }

    // The messages in UB, loaded by MTE2. On kExpected their counts are in Counts().
    __aicore__ inline Arrival Look(const LocalTensor<uint32_t>& messages) {
        SyncFunc<HardEvent::MTE2_V>();
        const LocalTensor<int32_t> words = messages.ReinterpretCast<int32_t>();
        alike_ = false;
        Clear();
        Compare(words, {kFixedOfHeader0, kFixedOfHeader1, kFixedOfCounts});
        CompareSources(words);
        if (Differs()) {
            Clear();
            Compare(words, {1u, 1u, 1u});
            return Differs() ? kMissing : kUnexpected;
        }
        TakeCounts(words);
        alike_ = true;
        return kExpected;
    }
    __aicore__ inline bool alike() const { return alike_; }
    // A row of blocks a source as in its message, all words zero that are not counts. No count is below 0 or
    // above the capacity, so that a core that has not checked the hashes may go by them.
    __aicore__ inline LocalTensor<int32_t> Counts() { return wordBuf_.Get<int32_t>(); }
    // From one row to the next.
    __aicore__ inline uint32_t RowWords() const { return blocks_ * kBlockWords; }

private:
    static constexpr uint32_t kLaneBlocks = 8;  // of a repeat
    // Of each block the words that are the same in the messages of all ranks, and those that name the source.
    static constexpr uint32_t kFixedOfHeader0 = 0xFFu & ~(1u << kH0Source);
    static constexpr uint32_t kFixedOfHeader1 = 0xFFu & ~(1u << kH1Detail0 | 1u << kH1Detail1);
    static constexpr uint32_t kFixedOfCounts = 1u << kCbEpoch | 1u << kCbOpPhase;
    struct BlockLanes {
        uint32_t header0, header1, counts;
    };

    // A bit a lane of the repeat that begins with `block`.
    __aicore__ inline uint64_t MaskOf(const BlockLanes& lanes, uint32_t block) const {
        uint64_t mask = 0;
        for (uint32_t b = 0; b < kLaneBlocks && block + b < blocks_; ++b) {
            const uint32_t of = block + b == 0   ? lanes.header0
                                : block + b == 1 ? lanes.header1
                                                 : lanes.counts;
            mask |= static_cast<uint64_t>(of) << (b * kBlockWords);
        }
        return mask;
    }
    // Calls on all messages together, where the stride from one to the next is one that a repeat can have.
    __aicore__ inline uint32_t MessagesAtOnce() const { return blocks_ <= 255 ? count_ : 1; }
    __aicore__ inline uint8_t MessageStride() const {
        return static_cast<uint8_t>(MessagesAtOnce() > 1 ? blocks_ : 0);
    }

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
            for (uint32_t message = 0; message < count_; message += MessagesAtOnce()) {
                const uint32_t at = (message * blocks_ + block) * kBlockWords;
                AscendC::Sub(to[at], messages[at], pattern[block * kBlockWords], mask,
                             static_cast<uint8_t>(MessagesAtOnce()), strides);
            }
        }
    }
    __aicore__ inline void CompareSources(const LocalTensor<int32_t>& messages) {
        const LocalTensor<int32_t> to = wordBuf_.Get<int32_t>(), source = sourceBuf_.Get<int32_t>();
        const AscendC::BinaryRepeatParams strides(1, 1, 0, MessageStride(), MessageStride(), 1);
        for (uint32_t block = 0; block < blocks_; block += kLaneBlocks) {
            uint64_t mask[2] = {MaskOf({1u << kH0Source, 0, 1u << kCbSource}, block), 0};
            for (uint32_t message = 0; message < count_; message += MessagesAtOnce()) {
                const uint32_t at = (message * blocks_ + block) * kBlockWords;
                AscendC::Sub(to[at], messages[at], source[message * kBlockWords], mask,
                             static_cast<uint8_t>(MessagesAtOnce()), strides);
            }
        }
    }
    // All words that were compared are zero here now, and so are the others.
    __aicore__ inline void TakeCounts(const LocalTensor<int32_t>& messages) {
        const LocalTensor<int32_t> counts = Counts();
        const AscendC::UnaryRepeatParams strides(1, 1, MessageStride(), MessageStride());
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t block = 0; block < blocks_; block += kLaneBlocks) {
            uint64_t mask[2] = {MaskOf({0, 0, 0xF0u}, block), 0};
            for (uint32_t message = 0; message < count_; message += MessagesAtOnce()) {
                const uint32_t at = (message * blocks_ + block) * kBlockWords;
                AscendC::Maxs(counts[at], messages[at], static_cast<int32_t>(0), mask,
                              static_cast<uint8_t>(MessagesAtOnce()), strides);
            }
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(counts, counts, capacity_, static_cast<int32_t>(words_));
    }
    // Whether any word is not zero. Of zeros it leaves zeros.
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
        AscendC::Brcb(source, number, static_cast<uint8_t>(padded / kBlockWords), {1, 8});
    }

    UbBuf patternBuf_, sourceBuf_, wordBuf_, reduceBuf_;
    uint32_t count_ = 0;
    uint32_t blocks_ = 0;  // of a message
    uint32_t words_ = 0;   // of all messages
    int32_t capacity_ = 0;
    bool alike_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RUN_MATCH_H
