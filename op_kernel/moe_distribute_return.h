// What combine, algorithm "direct", leaves in the own half: the rows of expand_x as they lie, unless they lie
// in the lent area, and where each source's rows of each local expert begin.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURN_H
#define ASCEND_MOE_DISTRIBUTE_RETURN_H

#include "moe_distribute_combine_inputs.h"

namespace moe {

constexpr uint32_t kTripleRows = 512;  // triples in UB at a time
constexpr uint64_t kCopyUnit = 512;    // bytes: cores share a copy in pieces of this

class RowReturn {
public:
    // UB: ep_send_counts or triples, this core's lines of the table, two chunks of rows.
    __aicore__ inline void Init(Exchange& exchange, const CombineArguments& arguments,
                                const MoeDistributeCombineTiling& tiling, uint32_t rowBytes) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        chunkBytes_ = tiling.sendRows * rowBytes;
        rowBytes_ = rowBytes;
        TPipe& pipe = exchange.pipe();
        segments_.Init(pipe, *info_);
        const uint32_t triples = info_->triples != 0 ? (kTripleRows + 1) * kTripleWords : 0;
        pipe.InitBuffer(tripleBuf_, PaddedInts(Max(segments_.slots(), triples)) * sizeof(int32_t));
        pipe.InitBuffer(startBuf_, CeilDiv(info_->world, info_->cores) * StartsBytes(info_->localExperts));
        pipe.InitBuffer(queue_, 2, chunkBytes_);
    }
    // Wrong counts or triples are the verdict; then nobody reads what this rank leaves.
    __aicore__ inline Verdict Run() {
        MOE_PHASE("ReturnRows");
        const Verdict verdict =
            LoadSegments(*info_, args_->epSendCounts, tripleBuf_.Get<int32_t>(), segments_);
        if (verdict.code != kOk) return verdict;
        if constexpr (!IsMutant(Mutant::kStartsAfterRuns)) StoreStarts();
        const uint64_t bytes = static_cast<uint64_t>(segments_.Rows()) * rowBytes_;
        if (IsLent(bytes)) {
            exchange_->SetLent(
                static_cast<uint32_t>((args_->expandX - exchange_->context().lent(info_->rank)) / kBlock));
        } else {
            CopyRows(bytes);
        }
        return info_->triples != 0 ? CheckTriples() : Verdict();
    }
    // This core's share of the lines, one a source rank.
    __aicore__ inline void StoreStarts() {
        const uint32_t begin = PartBegin(info_->world, exchange_->core(), info_->cores);
        const uint32_t end = PartBegin(info_->world, exchange_->core() + 1, info_->cores);
        if (begin == end) return;
        const uint32_t lanes = StartsBytes(info_->localExperts) / sizeof(int32_t);
        LocalTensor<int32_t> starts = startBuf_.Get<int32_t>();
        for (uint32_t s = begin, at = 0; s < end; ++s) {
            for (uint32_t l = 0; l < lanes; ++l, ++at) {
                const bool used = l < info_->localExperts;
                starts.SetValue(at, used ? static_cast<int32_t>(segments_.Start(l * info_->world + s)) : 0);
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int32_t> table;
        table.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(exchange_->OwnHalf()) + begin * lanes,
                              (end - begin) * lanes);
        AscendC::DataCopy(table, starts, (end - begin) * lanes);
    }
    // Rows that go back to `peer`, for the status runs.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t localExpert) {
        const uint32_t slot = localExpert * info_->world + peer;
        return segments_.End(slot) - segments_.Start(slot);
    }

private:
    __aicore__ inline bool IsLent(uint64_t bytes) const {
        const WindowContext& context = exchange_->context();
        const uint64_t at = reinterpret_cast<uint64_t>(args_->expandX);
        const uint64_t begin = reinterpret_cast<uint64_t>(context.lent(info_->rank));
        return info_->lentGeneration != 0 && at >= begin && at + bytes <= begin + context.lent_bytes() &&
               (at - begin) % kBlock == 0 && bytes != 0;
    }
    // The rows are one piece of memory here and there: cores share its bytes, whatever the row they belong
    // to.
    __aicore__ inline void CopyRows(uint64_t bytes) {
        GM_ADDR to = exchange_->OwnHalf() + ReturnedRowsOffset(info_->world, info_->localExperts);
        const uint32_t units = static_cast<uint32_t>((bytes + kCopyUnit - 1) / kCopyUnit);
        const uint64_t begin = PartBegin(units, exchange_->core(), info_->cores) * kCopyUnit;
        const uint64_t whole = PartBegin(units, exchange_->core() + 1, info_->cores) * kCopyUnit;
        const uint64_t end = whole < bytes ? whole : bytes;
        for (uint64_t at = begin; at < end;) {
            const uint64_t left = end - at;
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

    // V2: readers count positions again, so that a segment's triples must be its source's, in ascending
    // order.
    __aicore__ inline Verdict CheckTriples() {
        const uint32_t end = PartBegin(segments_.Rows(), exchange_->core() + 1, info_->cores);
        uint32_t row = PartBegin(segments_.Rows(), exchange_->core(), info_->cores);
        if (row == end) return Verdict();
        uint32_t slot = segments_.Find(row);
        while (row < end) {
            const uint32_t count = Min(kTripleRows, end - row);
            const Verdict verdict = CheckChunk(slot, row, count);
            if (verdict.code != kOk) return verdict;
            row += count;
        }
        return Verdict();
    }
    // With the row before the chunk, where there is one: order goes across chunks and cores.
    __aicore__ inline Verdict CheckChunk(uint32_t& slot, uint32_t row, uint32_t count) {
        const uint32_t before = row == 0 ? 0 : 1;
        GlobalTensor<int32_t> assist;
        assist.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) +
                                   static_cast<uint64_t>(row - before) * kTripleWords,
                               (count + before) * kTripleWords);
        LocalTensor<int32_t> triple = tripleBuf_.Get<int32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        CopyIn(triple, assist, (count + before) * kTripleWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t at = (before + i) * kTripleWords;
            const Verdict verdict = CheckTriple(*info_, triple, at, row + i);
            if (verdict.code != kOk) return verdict;
            while (segments_.End(slot) <= row + i) ++slot;
            const bool first = segments_.Start(slot) == row + i;
            const int32_t pair = PairOf(triple, at);
            if (static_cast<uint32_t>(triple.GetValue(at)) != slot % info_->world ||
                (!first && PairOf(triple, at - kTripleWords) >= pair)) {
                return InvalidOf(*info_, kInvalidTriple, (row + i) * 4 + kTripleOrder,
                                 static_cast<uint32_t>(pair));
            }
        }
        return Verdict();
    }
    __aicore__ inline int32_t PairOf(const LocalTensor<int32_t>& triple, uint32_t at) const {
        return triple.GetValue(at + 1) * static_cast<int32_t>(info_->topK) + triple.GetValue(at + 2);
    }

    Exchange* exchange_ = nullptr;
    const CombineArguments* args_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    SegmentTable segments_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    UbBuf tripleBuf_, startBuf_;
    uint32_t chunkBytes_ = 0;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURN_H
