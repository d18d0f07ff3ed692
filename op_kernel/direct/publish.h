// Phases 2 and 3 of direct combine, the rank that publishes: checks ep_send_counts and the triples (V2), and
// copies expand_x into the own half.
#ifndef ASCEND_MOE_DIRECT_PUBLISH_H
#define ASCEND_MOE_DIRECT_PUBLISH_H

#include "../common/inputs.h"

namespace moe {

// V2: checks the triples. Readers count positions again instead of reading triples, so the rows must be in
// dispatch's order: the triples of a segment must be of its source, in ascending order of (token, k).
constexpr uint32_t kTripleRows = 512;  // triples in UB at a time

class TripleCheck {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx) {
        info_ = &info;
        expandIdx_ = expandIdx;
        pipe.InitBuffer(buf_, PaddedInts((kTripleRows + 1) * kTripleWords) * sizeof(int32_t));
    }
    // Rows [begin, end) are this core's share. Begins to load their first triples, before the copies of rows.
    __aicore__ inline void Begin(uint32_t begin, uint32_t end) {
        row_ = begin;
        end_ = end;
        if (row_ == end_) return;
        loaded_ = GetTPipePtr()->AllocEventID<HardEvent::MTE2_S>();
        Load();
        AscendC::SetFlag<HardEvent::MTE2_S>(loaded_);
    }
    // The verdict is the first wrong triple of the share. Wrong counts (not `trusted`): only ends the load.
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
        assist.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(expandIdx_) + static_cast<uint64_t>(row_ - Before()) * kTripleWords,
            words);
        CopyIn(buf_.Get<int32_t>(), assist, words);
    }
    __aicore__ inline int32_t PairOf(const LocalTensor<int32_t>& triple, uint32_t at) const {
        // Another core checks this triple: until then its words are anything.
        const uint32_t token = static_cast<uint32_t>(triple.GetValue(at + 1));
        return static_cast<int32_t>(token * info_->topK + static_cast<uint32_t>(triple.GetValue(at + 2)));
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

// Publishes the rows of expand_x: copies them into the own half at the same offsets, without the rows of this
// rank's own tokens. Copies nothing if expand_x lies in the lent area. The message to a source says where its
// rows of each local expert begin.
constexpr uint64_t kCopyUnit = 512;  // bytes: cores share a copy in pieces of this

class RowReturn {
public:
    // UB: the counts, triples, chunks of rows.
    __aicore__ inline void Init(Exchange& exchange, const CombineArguments& arguments,
                                const MoeDistributeCombineTiling& tiling, uint32_t rowBytes) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        chunkBytes_ = ReturnChunkBytes(rowBytes, tiling.sendRows);
        rowBytes_ = rowBytes;
        TPipe& pipe = exchange.pipe();
        counts_.Init(pipe, *info_);
        if (info_->triples != 0) triples_.Init(pipe, *info_, arguments.expandIdx);
        pipe.InitBuffer(queue_, static_cast<uint8_t>(tiling.returnRing), chunkBytes_);
    }
    // Begins to load the counts.
    __aicore__ inline void Load() { counts_.Load(args_->epSendCounts); }
    // The counts must have arrived. Queues the copies of rows; they run while the scalar unit goes on.
    __aicore__ inline void Begin() {
        MOE_PHASE("ReturnRows");
        uint32_t rows = 0;
        possible_ = counts_.Total(rows);
        if (!possible_) return;
        if (info_->triples != 0) {
            triples_.Begin(PartBegin(rows, exchange_->core(), info_->cores),
                           PartBegin(rows, exchange_->core() + 1, info_->cores));
        }
        bytes_ = static_cast<uint64_t>(rows) * rowBytes_;
        Publish();
    }
    // The verdict is a wrong count or triple. The messages then carry the error, and nobody reads the copied
    // rows.
    __aicore__ inline Verdict Check() {
        Verdict verdict = counts_.Check();
        if (info_->triples != 0 && possible_) Worsen(verdict, triples_.Run(counts_, verdict.code == kOk));
        return verdict;
    }
    // Copies this core's share. The rows are contiguous here and there, so the cores share bytes, not rows.
    __aicore__ inline void StoreRows() {
        GM_ADDR to = exchange_->Half();
        const uint64_t bytes = bytes_;
        const uint32_t units = static_cast<uint32_t>((bytes + kCopyUnit - 1) / kCopyUnit);
        const uint64_t begin = PartBegin(units, exchange_->core(), info_->cores) * kCopyUnit;
        const uint64_t whole = PartBegin(units, exchange_->core() + 1, info_->cores) * kCopyUnit;
        const uint64_t end = whole < bytes ? whole : bytes;
        uint32_t expert = 0;
        for (uint64_t at = begin; at < end;) {
            // Copies up to this rank's own rows of the next local expert, then continues after them. The
            // counts are not checked yet: wrong counts only make this core leave out other bytes of its
            // share.
            uint64_t stop = end;
            if (expert < info_->localExperts) {
                const uint32_t slot = expert * info_->world + info_->rank;
                const uint64_t own = static_cast<uint64_t>(counts_.Start(slot)) * rowBytes_;
                if (own <= at) {
                    const uint64_t after = static_cast<uint64_t>(counts_.End(slot)) * rowBytes_;
                    at = at < after ? after : at;
                    ++expert;
                    continue;
                }
                stop = own < end ? own : end;
            }
            const uint64_t left = stop - at;
            const uint32_t count = left < chunkBytes_ ? static_cast<uint32_t>(left) : chunkBytes_;
            GlobalTensor<int8_t> from, target;
            from.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(args_->expandX + at), count);
            target.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(to + at), count);
            LocalTensor<int8_t> chunk = queue_.template AllocTensor<int8_t>();
            AscendC::DataCopy(chunk, from, count);
            queue_.EnQue(chunk);
            chunk = queue_.template DeQue<int8_t>();
            AscendC::DataCopy(target, chunk, count);
            queue_.FreeTensor(chunk);
            at += count;
        }
    }
    // For the status messages: rows of a local expert that go back to `peer`, then where those begin.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t i) {
        if (i >= info_->localExperts) return counts_.Start((i - info_->localExperts) * info_->world + peer);
        const uint32_t slot = i * info_->world + peer;
        return counts_.End(slot) - counts_.Start(slot);
    }

private:
    // In place if lent, else into the own half.
    __aicore__ inline void Publish() {
        if (IsLent()) {
            exchange_->SetLent(
                static_cast<uint32_t>((args_->expandX - exchange_->context().lent(info_->rank)) / kBlock));
            bytes_ = 0;
        } else {
            StoreRows();
        }
    }
    __aicore__ inline bool IsLent() const {
        const WindowContext& context = exchange_->context();
        const uint64_t at = reinterpret_cast<uint64_t>(args_->expandX);
        const uint64_t begin = reinterpret_cast<uint64_t>(context.lent(info_->rank));
        return info_->lentGeneration != 0 && at >= begin && at + bytes_ <= begin + context.lent_bytes() &&
               (at - begin) % kBlock == 0 && bytes_ != 0;
    }

    Exchange* exchange_ = nullptr;
    const CombineArguments* args_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    ReturnCounts counts_;
    TripleCheck triples_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    uint64_t bytes_ = 0;  // to copy, of all cores
    uint32_t chunkBytes_ = 0;
    uint32_t rowBytes_ = 0;
    bool possible_ = false;  // so many rows
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_PUBLISH_H
