// Direct dispatch's last step: this core's share of the received rows, read from the halves of their sources
// as their lists say, into expand_x, dynamic_scales and the triples.
#ifndef ASCEND_MOE_DISTRIBUTE_DIRECT_GATHER_H
#define ASCEND_MOE_DISTRIBUTE_DIRECT_GATHER_H

#include "moe_distribute_dispatch_outputs.h"
#include "moe_distribute_exchange.h"

namespace moe {

constexpr uint32_t kListInts = 512;  // list entries in UB at a time; a piece of a list takes whole blocks

class DirectGather {
public:
    __aicore__ inline void Init(Exchange& exchange, const DispatchArguments& arguments,
                                const MoeDistributeDispatchTiling& tiling, bool quantised, bool rowAPair) {
        exchange_ = &exchange;
        args_ = &arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        quantised_ = quantised;
        pairsOfRow_ = rowAPair ? 1 : info_->topK;
        rowStride_ = DispatchRowStride(info_->hidden, WireSize(), quantised, false);
        publishedRows_ = info_->maxBatch * info_->topK / pairsOfRow_;
        rowsOffset_ = PublishedRowsOffset(info_->world, info_->capacity);
        exchange.pipe().InitBuffer(listBuf_, kListInts * sizeof(int32_t));
        if (info_->triples != 0)
            exchange.pipe().InitBuffer(tripleBuf_, kListInts * kTripleWords * sizeof(int32_t));
        exchange.pipe().InitBuffer(queue_, static_cast<uint8_t>(tiling.copyRing),
                                   tiling.copyRows * rowStride_);
    }

    // The share is contiguous; where in it a rank begins is its own, so that not all ranks read the same
    // source first.
    __aicore__ inline void Run(SegmentTable& segments) {
        rows_ = Min(segments.Rows(), info_->expandRows);
        const uint32_t begin = PartBegin(rows_, exchange_->core(), info_->cores);
        const uint32_t end = PartBegin(rows_, exchange_->core() + 1, info_->cores);
        if (begin == end) return;
        const uint32_t middle = begin + PartBegin(end - begin, info_->rank, info_->world);
        uint32_t slot = segments.Seek(begin), next = slot;
        if (LoadLists(segments, next, begin, end) == end) {
            GatherListed(segments, {slot, begin, end}, middle, end);
            GatherListed(segments, {slot, begin, end}, begin, middle);
            if (info_->triples != 0) StoreTriples(segments, {slot, begin, end});
        } else {
            GatherRange(segments, segments.Seek(middle), middle, end);
            GatherRange(segments, slot, begin, middle);
        }
    }

private:
    __aicore__ inline uint32_t WireSize() const { return info_->wireType == kTypeInt8 ? 1 : XSize(); }
    __aicore__ inline uint32_t XSize() const { return info_->xType == kTypeFp32 ? 4 : 2; }

    // Rows whose list entries are in UB, the first of them in `slot`.
    struct Loaded {
        uint32_t slot, begin, end;
    };
    // The rows of one segment among them.
    struct Piece {
        uint32_t slot, begin, end;
        uint32_t at;  // of their entries in UB; those of the next piece begin with a block
    };
    static __aicore__ inline Piece FirstPiece(SegmentTable& segments, const Loaded& loaded) {
        return PieceFrom(segments, loaded.slot, loaded.begin, loaded.end, 0);
    }
    static __aicore__ inline Piece NextPiece(SegmentTable& segments, const Piece& piece, uint32_t end) {
        return PieceFrom(segments, piece.slot, piece.end, end,
                         piece.at + PaddedInts(piece.end - piece.begin));
    }
    // Empty from `end` on.
    static __aicore__ inline Piece PieceFrom(SegmentTable& segments, uint32_t slot, uint32_t row,
                                             uint32_t end, uint32_t at) {
        if (row >= end) return {slot, end, end, at};
        uint32_t last = segments.End(slot);
        while (last <= row) last = segments.End(++slot);
        return {slot, row, Min(last, Min(end, row + kListInts - at)), at};
    }

    __aicore__ inline void GatherRange(SegmentTable& segments, uint32_t slot, uint32_t begin, uint32_t end) {
        for (uint32_t row = begin; row < end;) {
            Loaded loaded = {slot, row, end};
            row = loaded.end = LoadLists(segments, slot, row, end);
            GatherListed(segments, loaded, loaded.begin, loaded.end);
            if (info_->triples != 0) StoreTriples(segments, loaded);
        }
    }
    // As many pieces as UB holds, in flight together. Returns the row after them, and `slot` of the last.
    __aicore__ inline uint32_t LoadLists(SegmentTable& segments, uint32_t& slot, uint32_t row, uint32_t end) {
        const uint64_t mine = info_->rank * ListBytes(info_->capacity);
        SyncFunc<HardEvent::S_MTE2>();
        Piece piece = FirstPiece(segments, {slot, row, end});
        while (piece.begin < piece.end) {
            const uint32_t count = piece.end - piece.begin;
            const uint32_t first =
                static_cast<uint32_t>(segments.Offset(piece.slot)) + piece.begin - segments.Start(piece.slot);
            GlobalTensor<int32_t> list;
            list.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(exchange_->HalfOf(piece.slot % info_->world) + mine) +
                    Min(first, info_->capacity - count),
                count);
            CopyIn(listBuf_.Get<int32_t>()[piece.at], list, count);
            slot = piece.slot;
            row = piece.end;
            piece = NextPiece(segments, piece, end);
        }
        if constexpr (!IsMutant(Mutant::kListReadBeforeLoaded)) SyncFunc<HardEvent::MTE2_S>();
        return row;
    }
    __aicore__ inline void StoreTriples(SegmentTable& segments, const Loaded& loaded) {
        LocalTensor<int32_t> list = listBuf_.Get<int32_t>(), triple = tripleBuf_.Get<int32_t>();
        const uint32_t count = loaded.end - loaded.begin;
        SyncFunc<HardEvent::MTE3_S>();
        uint32_t word = 0;
        for (Piece piece = FirstPiece(segments, loaded); piece.begin < piece.end;
             piece = NextPiece(segments, piece, loaded.end)) {
            const int32_t source = static_cast<int32_t>(piece.slot % info_->world);
            for (uint32_t i = 0; i < piece.end - piece.begin; ++i, word += kTripleWords) {
                const uint32_t pair = static_cast<uint32_t>(list.GetValue(piece.at + i));
                triple.SetValue(word, source);
                triple.SetValue(word + 1, static_cast<int32_t>(pair / info_->topK));
                triple.SetValue(word + 2, static_cast<int32_t>(pair % info_->topK));
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) +
                                   static_cast<uint64_t>(loaded.begin) * kTripleWords,
                               count * kTripleWords);
        CopyOut(target, triple, count * kTripleWords);
    }

    // Those of the loaded rows that are in [from, to), chunk by chunk: a chunk's rows are consecutive in
    // expand_x, whatever their sources.
    __aicore__ inline void GatherListed(SegmentTable& segments, const Loaded& loaded, uint32_t from,
                                        uint32_t to) {
        if (from == to) return;
        chunkRow_ = from;
        filled_ = 0;
        for (Piece piece = FirstPiece(segments, loaded); piece.begin < Min(piece.end, to);
             piece = NextPiece(segments, piece, loaded.end)) {
            if (piece.end <= from) continue;
            const uint32_t skipped = from > piece.begin ? from - piece.begin : 0;
            GatherPiece(piece.slot, piece.at + skipped, Min(piece.end, to) - piece.begin - skipped);
        }
        if (filled_ != 0) StoreChunk();
    }
    __aicore__ inline void GatherPiece(uint32_t slot, uint32_t at, uint32_t count) {
        GM_ADDR rows = exchange_->HalfOf(slot % info_->world) + rowsOffset_;
        uint32_t first = RowOf(at);
        for (uint32_t i = 0; i < count;) {
            if (filled_ == 0) chunk_ = queue_.template AllocTensor<int8_t>();
            const uint32_t room = Min(tiling_->copyRows - filled_, count - i);
            uint32_t run = 1, next = 0;  // rows that follow each other at their source
            for (; i + run < count; ++run) {
                next = RowOf(at + i + run);
                if (run == room || next != first + run) break;
            }
            LoadRows(rows + static_cast<uint64_t>(first) * rowStride_, run);
            i += run;
            first = next;
            if (filled_ == tiling_->copyRows) StoreChunk();
        }
    }
    // Of a list that nobody has checked yet too: never a row that its source has no place for.
    __aicore__ inline uint32_t RowOf(uint32_t at) {
        const uint32_t pair = static_cast<uint32_t>(listBuf_.Get<int32_t>().GetValue(at));
        return Min(pair / pairsOfRow_, publishedRows_ - 1);
    }
    __aicore__ inline void LoadRows(GM_ADDR from, uint32_t count) {
        GlobalTensor<int8_t> source;
        const uint32_t bytes = count * rowStride_;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(from), bytes);
        AscendC::DataCopy(chunk_[filled_ * rowStride_], source, bytes);
        filled_ += count;
    }
    __aicore__ inline void StoreChunk() {
        queue_.EnQue(chunk_);
        chunk_ = queue_.template DeQue<int8_t>();
        StoreField(args_->expandX, chunkRow_, chunk_, info_->hidden * WireSize(), rowStride_, filled_);
        if (quantised_) {
            StoreField(args_->dynamicScales, chunkRow_, chunk_[PayloadBytes(info_->hidden, WireSize())],
                       sizeof(float), rowStride_, filled_);
        }
        queue_.FreeTensor(chunk_);
        chunkRow_ += filled_;
        filled_ = 0;
    }

    Exchange* exchange_ = nullptr;
    const DispatchArguments* args_ = nullptr;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    LocalTensor<int8_t> chunk_;
    UbBuf listBuf_, tripleBuf_;
    uint64_t rowsOffset_ = 0;
    uint32_t pairsOfRow_ = 1;
    uint32_t rowStride_ = 0;
    uint32_t rows_ = 0;
    uint32_t publishedRows_ = 0;
    uint32_t chunkRow_ = 0;
    uint32_t filled_ = 0;
    bool quantised_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_DIRECT_GATHER_H
