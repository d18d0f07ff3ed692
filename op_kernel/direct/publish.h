// Phases 2 and 3 of direct combine: publishes the rows of expand_x in the own ping-pong buffer, and checks
// ep_send_counts and the source indices, or expand_idx if there are none.
#ifndef ASCEND_MOE_DIRECT_PUBLISH_H
#define ASCEND_MOE_DIRECT_PUBLISH_H

#include "../common/inputs.h"
#include "../common/quantize.h"

namespace moe {

// Checks expand_idx without an extra core barrier. In phase 3 each core stores the largest position of every expert
// among its pairs, [cores][E] int32 in the workspace. In phase 5 core 0 compares the maxima with the totals: a position
// must be below its expert's total.
class IndexBounds {
public:
    // UB: expand_idx of a chunk, and a row of all experts.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx, GM_ADDR workspace,
                                uint32_t core) {
        info_ = &info;
        core_ = core;
        expandIdx_ = expandIdx;
        lanes_ = PaddedInts(info.experts);
        bounds_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace + BoundsOffset(info)),
                                static_cast<uint64_t>(info.cores) * lanes_);
        rows_.Init(workspace + BoundsOffset(info), lanes_, info.cores);
        const IndexBoundsUb ub(info);
        pipe.InitBuffer(indexBuf_, ub.index);
        pipe.InitBuffer(largestBuf_, ub.experts);
    }
    // Stores the largest positions of this core's share. A negative position counts as INT32_MAX.
    __aicore__ inline void Store(RoutingTable& routing) {
        GlobalTensor<int32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx_), info_->batch * info_->topK);
        LocalTensor<int32_t> index = indexBuf_.Get<int32_t>(), largest = largestBuf_.Get<int32_t>();
        AscendC::Duplicate(largest, kNone, static_cast<int32_t>(lanes_));
        SyncFunc<HardEvent::V_S>();
        for (uint32_t at = routing.begin(); at < routing.end(); at += kChunkPairs) {
            const uint32_t count = Min(kChunkPairs, routing.end() - at);
            routing.pairs().Load(at, count);
            CopyIn(index, source[at], count);
            SyncFunc<HardEvent::MTE2_S>();
            for (uint32_t i = 0; i < count; ++i) {
                const int32_t id = routing.pairs().Id(i, (at + i) / info_->topK);
                if (!routing.pairs().Routed(id)) continue;
                const int32_t given = index.GetValue(i), position = given < 0 ? kLargest : given;
                if (position > largest.GetValue(id)) largest.SetValue(id, position);
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(bounds_[static_cast<uint64_t>(core_) * lanes_], largest, lanes_);
    }
    // After all cores have stored; `routing` must have the totals of all experts. Returns the first position that is
    // too large.
    template <typename Queue>
    __aicore__ inline OpStatus CheckAll(Queue& queue, uint32_t room, RoutingTable& routing) {
        LocalTensor<int32_t> largest = largestBuf_.Get<int32_t>();
        AscendC::Duplicate(largest, kNone, static_cast<int32_t>(lanes_));
        rows_.template Fold<true>(queue, room, largest, 0, info_->experts, 0, info_->cores);
        SyncFunc<HardEvent::V_S>();
        for (uint32_t e = 0; e < info_->experts; ++e) {
            const int32_t position = largest.GetValue(e);
            if (position == kNone || static_cast<uint32_t>(position) < routing.Total(static_cast<int32_t>(e))) continue;
            return CheckIndex(*info_, expandIdx_, routing, 0, info_->batch * info_->topK, indexBuf_.Get<int32_t>());
        }
        return OpStatus();
    }

private:
    static constexpr int32_t kNone = -1, kLargest = 0x7FFFFFFF;
    GlobalTensor<int32_t> bounds_;
    CoreRows rows_;
    UbBuf indexBuf_, largestBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR expandIdx_ = nullptr;
    uint32_t core_ = 0;
    uint32_t lanes_ = 0;
};

// Publishes the rows of expand_x: copies them into the own ping-pong buffer in the same order, except the rows of this
// rank's own tokens. Copies nothing if expand_x lies in the registered area. With kQuant all rows are stored there as
// codes, in the same order. The message to a source says where its rows of each local expert begin.
constexpr uint32_t kCopyUnit = 512;  // bytes: unit in which cores share a copy

template <typename XType, bool kQuant>
class RowReturn {
public:
    // UB: the counts, source indices, chunks of rows.
    __aicore__ inline void Init(Exchange& exchange, const CombineArguments& arguments,
                                const MoeDistributeCombineTiling& tiling, uint32_t rowBytes) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        const RowReturnUb ub(tiling, rowBytes, sizeof(XType));
        chunkBytes_ = ub.chunk;
        chunkRows_ = tiling.sendRows;
        rowBytes_ = rowBytes;
        rowStep_ = RowStep(*info_, rowBytes);
        TPipe& pipe = exchange.pipe();
        counts_.Init(pipe, *info_);
        if (info_->sourceIndices != 0) sourceIndices_.Init(pipe, *info_, arguments.expandIdx);
        if constexpr (kQuant) {
            loader_.Init(pipe, tiling, arguments.expandX, rowBytes_);
        } else {
            pipe.InitBuffer(queue_, Ring(ub.ring), chunkBytes_);
        }
    }
    // Starts to load the counts.
    __aicore__ inline void Load() { counts_.Load(args_->epSendCounts); }
    // Requires the counts in UB. Queues the copies of rows, which run while the scalar unit goes on.
    __aicore__ inline void Begin() {
        MOE_PHASE(exchange_->timestamps(), ReturnRows);
        uint32_t rows = 0;
        possible_ = counts_.Total(rows);
        if (!possible_) return;
        if (info_->sourceIndices != 0) {
            sourceIndices_.Begin(PartBegin(rows, exchange_->core(), info_->cores),
                                 PartBegin(rows, exchange_->core() + 1, info_->cores));
        }
        rows_ = rows;
        bytes_ = static_cast<uint64_t>(rows) * rowBytes_;
        Publish();
    }
    // Returns a wrong count or source index. The messages then carry the error, and nobody reads the copied rows.
    __aicore__ inline OpStatus Check() {
        OpStatus status = counts_.Check();
        if (info_->sourceIndices == 0 || !possible_) return status;
        if (status.code != kOk) {
            sourceIndices_.Drop();
            return status;
        }
        while (sourceIndices_.Next(counts_, status)) {
        }
        return status;
    }
    // Stores this core's share of the rows as codes, this rank's own too, which are rounded like all others.
    __aicore__ inline void StoreCommQuantRows() {
        const uint32_t end = PartBegin(rows_, exchange_->core() + 1, info_->cores);
        uint32_t row = PartBegin(rows_, exchange_->core(), info_->cores);
        for (uint32_t count = 0; row < end; row += count) {
            count = Min(chunkRows_, end - row);
            loader_.Load(row, count);
            const LocalTensor<int8_t> chunk = loader_.Take();
            moe::StoreRows(exchange_->PingPong() + static_cast<uint64_t>(row) * rowStep_, chunk, rowBytes_, rowStep_,
                           count);
            loader_.Free(chunk);
        }
    }
    // Copies this core's share: of bytes if rows are contiguous on both sides, otherwise of rows.
    __aicore__ inline void StoreRows() {
        const uint64_t bytes = bytes_, unit = Contiguous() ? kCopyUnit : rowBytes_;
        const uint32_t units = static_cast<uint32_t>((bytes + unit - 1) / unit);
        const uint64_t begin = PartBegin(units, exchange_->core(), info_->cores) * unit;
        const uint64_t whole = PartBegin(units, exchange_->core() + 1, info_->cores) * unit;
        const uint64_t end = whole < bytes ? whole : bytes;
        uint32_t expert = 0;
        for (uint64_t at = begin; at < end;) {
            // Copies up to this rank's own rows of the next local expert, then continues after them. The counts are not
            // checked yet: wrong counts only make this core skip other bytes of its share.
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
            const uint32_t count = ChunkAt(at, stop);
            GlobalTensor<int8_t> from;
            from.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(args_->expandX + at), count);
            LocalTensor<int8_t> chunk = queue_.template AllocTensor<int8_t>();
            AscendC::DataCopy(chunk, from, count);
            queue_.EnQue(chunk);
            chunk = queue_.template DeQue<int8_t>();
            StoreChunk(at, chunk, count);
            queue_.FreeTensor(chunk);
            at += count;
        }
    }
    // For the status messages: rows of a local expert that return to `peer`, then where those begin.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t i) {
        if (i >= info_->localExperts) return counts_.Start((i - info_->localExperts) * info_->world + peer);
        const uint32_t slot = i * info_->world + peer;
        return counts_.End(slot) - counts_.Start(slot);
    }

private:
    __aicore__ inline bool Contiguous() const { return rowStep_ == rowBytes_; }
    // Bytes of the chunk of expand_x that begins at `at`: whole rows if rows have gaps in the ping-pong buffer, or one
    // row if that is longer than a chunk.
    __aicore__ inline uint32_t ChunkAt(uint64_t at, uint64_t stop) const {
        uint32_t most = chunkBytes_;
        if (!Contiguous() && rowBytes_ > chunkBytes_)
            most = Min(chunkBytes_, rowBytes_ - static_cast<uint32_t>(at % rowBytes_));
        return stop - at < most ? static_cast<uint32_t>(stop - at) : most;
    }
    __aicore__ inline void StoreChunk(uint64_t at, const LocalTensor<int8_t>& chunk, uint32_t count) {
        GM_ADDR to = exchange_->PingPong() + at;
        if (!Contiguous()) to += at / rowBytes_ * (rowStep_ - rowBytes_);
        if (Contiguous() || count < rowBytes_) {
            GlobalTensor<int8_t> target;
            target.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(to), count);
            AscendC::DataCopy(target, chunk, count);
        } else {
            moe::StoreRows(to, chunk, rowBytes_, rowStep_, count / rowBytes_);
        }
    }
    // In place if registered, otherwise into the own ping-pong buffer.
    __aicore__ inline void Publish() {
        if constexpr (kQuant) {
            StoreCommQuantRows();
            return;
        }
        if (IsRegistered()) {
            exchange_->SetRegistered(
                static_cast<uint32_t>((args_->expandX - exchange_->context().registered(info_->rank)) / kBlock));
            bytes_ = 0;
        } else {
            StoreRows();
        }
    }
    __aicore__ inline bool IsRegistered() const {
        const WindowContext& context = exchange_->context();
        const uint64_t at = reinterpret_cast<uint64_t>(args_->expandX);
        const uint64_t begin = reinterpret_cast<uint64_t>(context.registered(info_->rank));
        return info_->registeredGeneration != 0 && at >= begin && at + bytes_ <= begin + context.registered_bytes() &&
               (at - begin) % kBlock == 0 && bytes_ != 0;
    }

    Exchange* exchange_ = nullptr;
    const CombineArguments* args_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    ReturnCounts counts_;
    SourceIndexReader sourceIndices_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    ReturnLoader<XType, kQuant> loader_;
    uint64_t bytes_ = 0;  // to copy, by all cores
    uint32_t rows_ = 0;
    uint32_t chunkRows_ = 0;
    uint32_t chunkBytes_ = 0;
    uint32_t rowBytes_ = 0;  // of a row in flight,
    uint32_t rowStep_ = 0;   // and from row to row in the ping-pong buffer
    bool possible_ = false;  // whether there can be so many rows
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_PUBLISH_H
