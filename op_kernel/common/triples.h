// The triples (source rank, token, k) of a core's share of expand_x in combine, a chunk at a time, checked.
#ifndef ASCEND_MOE_COMMON_TRIPLES_H
#define ASCEND_MOE_COMMON_TRIPLES_H

#include "segments.h"

namespace moe {

// In direct readers count positions again instead of reading triples, so the rows must be in dispatch's order: the
// triples of a segment are of its source, in ascending order of (token, k). Window takes rows in any order.
class TripleReader {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx) {
        info_ = &info;
        expandIdx_ = expandIdx;
        pipe.InitBuffer(buf_, kTripleReaderBytes);
    }
    // Rows [begin, end) are this core's share. Begins to load their first triples, before the copies of rows.
    __aicore__ inline void Begin(uint32_t begin, uint32_t end) {
        next_ = begin;
        end_ = end;
        if (next_ == end_) return;
        loaded_ = GetTPipePtr()->AllocEventID<HardEvent::MTE2_S>();
        Load();
        AscendC::SetFlag<HardEvent::MTE2_S>(loaded_);
        loading_ = true;
    }
    // Only ends the load that Begin has started.
    __aicore__ inline void Drop() {
        if (!loading_) return;
        loading_ = false;
        AscendC::WaitFlag<HardEvent::MTE2_S>(loaded_);
        GetTPipePtr()->ReleaseEventID<HardEvent::MTE2_S>(loaded_);
    }
    // Goes to the next chunk of the share, rows [first(), stop()). False: none is left, or a triple of it is wrong;
    // then `verdict` is the first such. `counts` are right.
    __aicore__ inline bool Next(ReturnCounts& counts, Verdict& verdict) {
        if (next_ == end_) return false;
        if (loading_) {
            Drop();
            slot_ = counts.Find(next_);
        } else {
            SyncFunc<HardEvent::S_MTE2>();
            Load();
            SyncFunc<HardEvent::MTE2_S>();
        }
        first_ = next_;
        next_ += Chunk();
        before_ = first_ == 0 ? 0 : kTripleWords;
        const Verdict found = Check(counts);
        Worsen(verdict, found);
        return found.code == kOk;
    }
    __aicore__ inline uint32_t first() const { return first_; }
    __aicore__ inline uint32_t stop() const { return next_; }
    // Word `word` of the triple of a row of the chunk.
    __aicore__ inline uint32_t Word(uint32_t row, uint32_t word) {
        const uint32_t at = before_ + (row - first_) * kTripleWords + word;
        return static_cast<uint32_t>(buf_.Get<int32_t>().GetValue(at));
    }

private:
    __aicore__ inline uint32_t Chunk() const { return Min(kTripleRows, end_ - next_); }
    // The row before the chunk comes with it, where there is one: order goes across chunks and cores.
    __aicore__ inline void Load() {
        const uint32_t before = next_ == 0 ? 0 : 1, words = (Chunk() + before) * kTripleWords;
        GlobalTensor<int32_t> assist;
        assist.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(expandIdx_) + static_cast<uint64_t>(next_ - before) * kTripleWords,
            words);
        CopyIn(buf_.Get<int32_t>(), assist, words);
    }
    __aicore__ inline int32_t PairBefore() {
        if (before_ == 0) return 0;
        // Another core checks this triple: until then its words are anything.
        const LocalTensor<int32_t> triple = buf_.Get<int32_t>();
        return static_cast<int32_t>(static_cast<uint32_t>(triple.GetValue(1)) * info_->topK +
                                    static_cast<uint32_t>(triple.GetValue(2)));
    }
    __aicore__ inline Verdict Check(ReturnCounts& counts) {
        const uint32_t limits[kTripleWords] = {info_->world, info_->maxBatch, info_->topK};
        uint32_t start = counts.Start(slot_), end = counts.End(slot_);
        int32_t before = PairBefore();
        for (uint32_t row = first_; row < next_; ++row) {
            uint32_t value[kTripleWords];
            for (uint32_t w = 0; w < kTripleWords; ++w) {
                value[w] = Word(row, w);
                if (value[w] >= limits[w]) return InvalidOf(*info_, kInvalidTriple, row * 4 + w, value[w]);
            }
            if (info_->algorithm != kAlgorithmDirect) continue;
            while (end <= row) {
                start = end;
                end = counts.End(++slot_);
            }
            const int32_t pair = static_cast<int32_t>(value[1] * info_->topK + value[2]);
            if (value[0] != slot_ % info_->world || (row != start && before >= pair))
                return InvalidOf(*info_, kInvalidTriple, row * 4 + kTripleOrder, static_cast<uint32_t>(pair));
            before = pair;
        }
        return Verdict();
    }

    UbBuf buf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR expandIdx_ = nullptr;
    AscendC::TEventID loaded_ = 0;
    bool loading_ = false;
    uint32_t first_ = 0;   // rows of the chunk
    uint32_t next_ = 0;    // those after it
    uint32_t end_ = 0;     // of the share
    uint32_t before_ = 0;  // words of the row before the chunk
    uint32_t slot_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_TRIPLES_H
