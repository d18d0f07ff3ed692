// What combine, algorithm "direct", leaves in the own half: the rows of expand_x as they lie, but for this
// rank's own, and unless they lie in the lent area. Where each source rank's rows of each local expert begin
// is in its run. Where cores are many the copy goes on while peers read: of every row the head is there when
// the runs leave, and some cores copy the rest, each for its share of the peers, whom it tells by a late
// block.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURN_H
#define ASCEND_MOE_DISTRIBUTE_RETURN_H

#include "return_triples.h"
#include "row_copy.h"

namespace moe {

constexpr uint64_t kCopyUnit = 512;  // bytes: cores share a copy in pieces of this

class RowReturn {
public:
    // UB: the counts, triples, chunks of rows.
    __aicore__ inline void Init(Exchange& exchange, const CombineArguments& arguments,
                                const MoeDistributeCombineTiling& tiling, uint32_t rowBytes) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        rowBytes_ = rowBytes;
        copyCores_ = tiling.copyCores;
        TPipe& pipe = exchange.pipe();
        counts_.Init(pipe, *info_);
        if (info_->triples != 0) triples_.Init(pipe, *info_, arguments.expandIdx);
        copies_ = CopiesStages(tiling, exchange.core());
        const uint32_t chunk = ReturnChunkBytes(rowBytes, tiling.sendRows);
        const uint32_t group =
            SumGroupBytes(info_->experts, tiling.sumGroup, tiling.partElements * (rowBytes / info_->hidden));
        copy_.Init(pipe, ReturnRing(tiling, copies_, group, chunk), chunk, rowBytes);
    }
    // The counts are on their way then.
    __aicore__ inline void Load() { counts_.Load(args_->epSendCounts); }
    // They are there. Rows are copied from here on, while the scalar unit goes on.
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
    // Wrong counts or triples are the verdict; then nobody reads what this rank leaves.
    __aicore__ inline Verdict Check() {
        Verdict verdict = counts_.Check();
        if (info_->triples != 0 && possible_) Worsen(verdict, triples_.Run(counts_, verdict.code == kOk));
        return verdict;
    }
    // This core's share. The rows are one piece of memory here and there: cores share its bytes, whatever the
    // row they belong to.
    __aicore__ inline void StoreRows() {
        copy_.Between(args_->expandX, exchange_->OwnHalf());
        const uint32_t units = static_cast<uint32_t>((bytes_ + kCopyUnit - 1) / kCopyUnit);
        const uint64_t begin = PartBegin(units, exchange_->core(), info_->cores) * kCopyUnit;
        const uint64_t whole = PartBegin(units, exchange_->core() + 1, info_->cores) * kCopyUnit;
        const uint64_t end = whole < bytes_ ? whole : bytes_;
        uint32_t expert = 0;
        for (uint64_t at = begin, stop = 0; NextPiece(at, stop, end, expert); at = stop)
            copy_.Bytes(at, stop);
    }
    // After the runs have left: this core's share of the other stages, where rows come so.
    __aicore__ inline void StoreStages() {
        if (!staged_ || !copies_ || exchange_->Failed()) return;
        MOE_PHASE("StoreStages");
        const uint32_t part = exchange_->core() + copyCores_ - info_->cores;
        for (uint32_t stage = 1; stage < kStages; ++stage) {
            StoreColumns(part, copyCores_, Column(stage - 1), Column(stage));
            exchange_->Copied(stage);
        }
    }
    // For the status runs: rows of a local expert that go back to `peer`, then where those begin.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t i) {
        if (i >= info_->localExperts) return counts_.Start((i - info_->localExperts) * info_->world + peer);
        const uint32_t slot = i * info_->world + peer;
        return counts_.End(slot) - counts_.Start(slot);
    }

private:
    // Where they are, or in the own half.
    __aicore__ inline void Publish() {
        if (IsLent()) {
            exchange_->SetLent(
                static_cast<uint32_t>((args_->expandX - exchange_->context().lent(info_->rank)) / kBlock));
            bytes_ = 0;
        } else if (copyCores_ != 0) {
            staged_ = true;
            exchange_->SetStaged();
            copy_.Between(args_->expandX, exchange_->OwnHalf());
            StoreColumns(exchange_->core(), info_->cores, 0, Column(0));
        } else if constexpr (!IsMutant(Mutant::kRowsAfterRuns)) {
            StoreRows();
        }
    }
    // Of a part of the rows.
    __aicore__ inline void StoreColumns(uint32_t part, uint32_t parts, uint32_t column, uint32_t columnEnd) {
        const uint32_t rows = static_cast<uint32_t>(bytes_ / rowBytes_);
        const uint64_t begin = static_cast<uint64_t>(PartBegin(rows, part, parts)) * rowBytes_;
        const uint64_t end = static_cast<uint64_t>(PartBegin(rows, part + 1, parts)) * rowBytes_;
        uint32_t expert = 0;
        for (uint64_t at = begin, stop = 0; NextPiece(at, stop, end, expert); at = stop) {
            const uint32_t row = static_cast<uint32_t>(at / rowBytes_);
            copy_.Columns(row, static_cast<uint32_t>(stop / rowBytes_) - row, column, columnEnd);
        }
    }
    // Where a stage ends, in bytes of a row.
    __aicore__ inline uint32_t Column(uint32_t stage) const {
        return StageEnd(info_->hidden, stage) * (rowBytes_ / info_->hidden);
    }
    // [at, stop) becomes the next piece of [at, end) that holds none of this rank's own rows; false: there is
    // none. Counts that nobody has checked yet leave out something else, of this core's share.
    __aicore__ inline bool NextPiece(uint64_t& at, uint64_t& stop, uint64_t end, uint32_t& expert) {
        for (; expert < info_->localExperts; ++expert) {
            const uint32_t slot = expert * info_->world + info_->rank;
            const uint64_t own = static_cast<uint64_t>(counts_.Start(slot)) * rowBytes_;
            if (own > at) {
                stop = own < end ? own : end;
                return at < end;
            }
            const uint64_t after = static_cast<uint64_t>(counts_.End(slot)) * rowBytes_;
            at = at < after ? after : at;
        }
        stop = end;
        return at < end;
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
    RowCopy copy_;
    uint64_t bytes_ = 0;  // to copy, of all cores
    uint32_t rowBytes_ = 0;
    uint32_t copyCores_ = 0;
    bool possible_ = false;  // so many rows
    bool copies_ = false;    // this core, what comes after the first stage
    bool staged_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURN_H
