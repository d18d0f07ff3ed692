// V2's triples, as combine's algorithm "direct" checks them: readers count positions again, so that a
// segment's triples must be its source's, in ascending order.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURN_TRIPLES_H
#define ASCEND_MOE_DISTRIBUTE_RETURN_TRIPLES_H

#include "return_counts.h"

namespace moe {

constexpr uint32_t kTripleRows = 512;  // triples in UB at a time

class TripleCheck {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx) {
        info_ = &info;
        expandIdx_ = expandIdx;
        pipe.InitBuffer(buf_, PaddedInts((kTripleRows + 1) * kTripleWords) * sizeof(int32_t));
    }
    // Rows [begin, end) are this core's share; the first of them are on their way then, ahead of whatever is
    // copied next.
    __aicore__ inline void Begin(uint32_t begin, uint32_t end) {
        row_ = begin;
        end_ = end;
        if (row_ == end_) return;
        loaded_ = GetTPipePtr()->AllocEventID<HardEvent::MTE2_S>();
        Load();
        AscendC::SetFlag<HardEvent::MTE2_S>(loaded_);
    }
    // The first wrong one of the share, if `counts` can be trusted.
    __aicore__ inline Verdict Run(ReturnCounts& counts, bool trusted) {
        Verdict verdict;
        if (row_ == end_) return verdict;
        AscendC::WaitFlag<HardEvent::MTE2_S>(loaded_);
        GetTPipePtr()->ReleaseEventID<HardEvent::MTE2_S>(loaded_);
        if (!trusted) return verdict;
        slot_ = counts.Find(row_);
        verdict = CheckChunk(counts);
        for (row_ += Chunk(); verdict.code == kOk && row_ < end_; row_ += Chunk()) {
            SyncFunc<HardEvent::S_MTE2>();
            Load();
            SyncFunc<HardEvent::MTE2_S>();
            verdict = CheckChunk(counts);
        }
        return verdict;
    }

private:
    __aicore__ inline uint32_t Chunk() const { return Min(kTripleRows, end_ - row_); }
    // The row before the chunk comes with it, where there is one: order goes across chunks and cores.
    __aicore__ inline uint32_t Before() const { return row_ == 0 ? 0 : 1; }
    __aicore__ inline void Load() {
        const uint32_t words = (Chunk() + Before()) * kTripleWords;
        GlobalTensor<int32_t> assist;
        assist.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx_) +
                                   static_cast<uint64_t>(row_ - Before()) * kTripleWords,
                               words);
        CopyIn(buf_.Get<int32_t>(), assist, words);
    }
    __aicore__ inline int32_t PairOf(const LocalTensor<int32_t>& triple, uint32_t at) const {
        return triple.GetValue(at + 1) * static_cast<int32_t>(info_->topK) + triple.GetValue(at + 2);
    }
    __aicore__ inline Verdict CheckChunk(ReturnCounts& counts) {
        LocalTensor<int32_t> triple = buf_.Get<int32_t>();
        const uint32_t limits[kTripleWords] = {info_->world, info_->maxBatch, info_->topK};
        uint32_t at = Before() * kTripleWords, start = counts.Start(slot_), stop = counts.End(slot_);
        int32_t before = at == 0 ? 0 : PairOf(triple, 0);
        for (uint32_t row = row_; row < row_ + Chunk(); ++row, at += kTripleWords) {
            uint32_t value[kTripleWords];
            for (uint32_t w = 0; w < kTripleWords; ++w) {
                value[w] = static_cast<uint32_t>(triple.GetValue(at + w));
                if (value[w] >= limits[w]) return InvalidOf(*info_, kInvalidTriple, row * 4 + w, value[w]);
            }
            while (stop <= row) {
                start = stop;
                stop = counts.End(++slot_);
            }
            const int32_t pair = static_cast<int32_t>(value[1] * info_->topK + value[2]);
            if (value[0] != slot_ % info_->world || (row != start && before >= pair)) {
                return InvalidOf(*info_, kInvalidTriple, row * 4 + kTripleOrder, static_cast<uint32_t>(pair));
            }
            before = pair;
        }
        return Verdict();
    }

    UbBuf buf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR expandIdx_ = nullptr;
    AscendC::TEventID loaded_ = 0;
    uint32_t row_ = 0;
    uint32_t end_ = 0;
    uint32_t slot_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURN_TRIPLES_H
