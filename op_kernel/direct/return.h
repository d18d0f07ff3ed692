// What combine, algorithm "direct", leaves in the own half: the rows of expand_x as they lie, but for this
// rank's own, and unless they lie in the lent area. Where each source rank's rows of each local expert begin
// is in its message.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURN_H
#define ASCEND_MOE_DISTRIBUTE_RETURN_H

#include "return_triples.h"

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
        chunkBytes_ = ReturnChunkBytes(rowBytes, tiling.sendRows);
        rowBytes_ = rowBytes;
        TPipe& pipe = exchange.pipe();
        counts_.Init(pipe, *info_);
        if (info_->triples != 0) triples_.Init(pipe, *info_, arguments.expandIdx);
        pipe.InitBuffer(queue_, static_cast<uint8_t>(tiling.returnRing), chunkBytes_);
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
        GM_ADDR to = exchange_->Half();
        const uint64_t bytes = bytes_;
        const uint32_t units = static_cast<uint32_t>((bytes + kCopyUnit - 1) / kCopyUnit);
        const uint64_t begin = PartBegin(units, exchange_->core(), info_->cores) * kCopyUnit;
        const uint64_t whole = PartBegin(units, exchange_->core() + 1, info_->cores) * kCopyUnit;
        const uint64_t end = whole < bytes ? whole : bytes;
        uint32_t expert = 0;
        for (uint64_t at = begin; at < end;) {
            // Up to this rank's own rows of a local expert, and on after them. Counts that nobody has checked
            // yet leave out something else, of this core's share.
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
    // Where they are, or in the own half.
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

#endif  // ASCEND_MOE_DISTRIBUTE_RETURN_H
