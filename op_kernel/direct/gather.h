// Phase 7 of direct dispatch (GatherRows): copies a core's share of expand_x, by the sources' lists, from their
// ping-pong buffers into expand_x, dynamic_scales and the source indices. Calls: Init, Begin, Start, Finish.
// WeightGather copies expert_scales.
#ifndef ASCEND_MOE_DIRECT_GATHER_H
#define ASCEND_MOE_DIRECT_GATHER_H

#include "../common/outputs.h"
#include "../common/exchange.h"

namespace moe {

class DirectGather {
public:
    __aicore__ inline void Init(Exchange& exchange, const DispatchArguments& arguments,
                                const MoeDistributeDispatchTiling& tiling, bool quantized, bool rowAPair) {
        exchange_ = &exchange;
        args_ = &arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        quantized_ = quantized;
        pairsOfRow_ = rowAPair ? 1 : info_->topK;
        rowStride_ = DispatchRowStride(info_->hidden, WireSize(*info_), quantized, 0);
        rowStep_ = RowStep(*info_, rowStride_);
        publishedRows_ = info_->maxBatch * info_->topK / pairsOfRow_;
        rowsOffset_ = PublishedRowsOffset(info_->world, info_->capacity);
        const DirectGatherUb ub(tiling, rowStride_);
        exchange.pipe().InitBuffer(listBuf_, ub.lists);
        if (ub.sourceIndices != 0) exchange.pipe().InitBuffer(sourceIndexBuf_, ub.sourceIndices);
        exchange.pipe().InitBuffer(queue_, Ring(ub.ring), ub.chunk);
    }

    // Starts to load the list entries of this core's share.
    __aicore__ inline void Begin(SegmentTable& segments) {
        segments_ = &segments;
        const uint32_t rows = Min(segments.Rows(), info_->expandRows);
        begin_ = PartBegin(rows, exchange_->core(), info_->cores);
        end_ = PartBegin(rows, exchange_->core() + 1, info_->cores);
        if (begin_ == end_) return;
        firstSlot_ = lastSlot_ = segments.Seek(begin_);
        listed_ = LoadLists(lastSlot_, begin_, end_);
    }
    __aicore__ inline void Start() {}
    // The share is contiguous. Each rank starts at another place in it, so that not all ranks read the same source
    // first.
    __aicore__ inline void Finish() {
        if (begin_ == end_) return;
        const uint32_t middle = begin_ + PartBegin(end_ - begin_, info_->rank, info_->world);
        if (listed_ == end_) {
            AwaitLists({firstSlot_, begin_, end_});
            GatherListed(middle, end_);
            GatherListed(begin_, middle);
        } else {
            AscendC::PipeBarrier<PIPE_MTE2>();  // the loads of Begin() are in the way
            GatherRange(segments_->Seek(middle), middle, end_);
            GatherRange(firstSlot_, begin_, middle);
        }
    }

private:
    // Rows [begin, end) of expand_x whose list entries are in UB; the first of them is in segment `slot`.
    struct Loaded {
        uint32_t slot, begin, end;
    };
    // The rows of one segment among them.
    struct Piece {
        uint32_t slot, begin, end;
        uint32_t at;  // place of their entries in UB; the entries of a piece begin on a block
    };
    __aicore__ inline Piece FirstPiece(const Loaded& loaded) {
        return PieceFrom(loaded.slot, loaded.begin, loaded.end, 0);
    }
    __aicore__ inline Piece NextPiece(const Piece& piece, uint32_t end) {
        return PieceFrom(piece.slot, piece.end, end, piece.at + PaddedInts(piece.end - piece.begin));
    }
    // Empty from `end` on.
    __aicore__ inline Piece PieceFrom(uint32_t slot, uint32_t row, uint32_t end, uint32_t at) {
        if (row >= end) return {slot, end, end, at};
        uint32_t last = segments_->End(slot);
        while (last <= row) last = segments_->End(++slot);
        return {slot, row, Min(last, Min(end, row + kListInts - at)), at};
    }

    __aicore__ inline void GatherRange(uint32_t slot, uint32_t begin, uint32_t end) {
        for (uint32_t row = begin; row < end;) {
            Loaded loaded = {slot, row, end};
            row = loaded.end = LoadLists(slot, row, end);
            AwaitLists(loaded);
            GatherListed(loaded.begin, loaded.end);
        }
    }
    // Starts to load the list entries of rows from `row` on, as many pieces as UB holds. Returns the row after them;
    // `slot` becomes the segment of the last piece.
    __aicore__ inline uint32_t LoadLists(uint32_t& slot, uint32_t row, uint32_t end) {
        const uint64_t mine = info_->rank * ListBytes(info_->capacity);
        SyncFunc<HardEvent::S_MTE2>();
        Piece piece = FirstPiece({slot, row, end});
        while (piece.begin < piece.end) {
            const uint32_t count = piece.end - piece.begin;
            const uint32_t first =
                static_cast<uint32_t>(segments_->Offset(piece.slot)) + piece.begin - segments_->Start(piece.slot);
            GlobalTensor<int32_t> list;
            list.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(exchange_->PingPongOf(piece.slot % info_->world) + mine) +
                    Min(first, info_->capacity - count),
                count);
            CopyIn(listBuf_.Get<int32_t>()[piece.at], list, count);
            slot = piece.slot;
            row = piece.end;
            piece = NextPiece(piece, end);
        }
        return row;
    }
    __aicore__ inline void AwaitLists(const Loaded& loaded) {
        loaded_ = loaded;
        owesSourceIndices_ = info_->sourceIndices != 0;
        SyncFunc<HardEvent::MTE2_S>();
    }
    // Stores the source indices of all loaded rows, after the first rows have started to load.
    __aicore__ inline void StoreSourceIndices() {
        LocalTensor<int32_t> list = listBuf_.Get<int32_t>(), sourceIndex = sourceIndexBuf_.Get<int32_t>();
        const uint32_t count = loaded_.end - loaded_.begin;
        owesSourceIndices_ = false;
        if (storedSourceIndices_) SyncFunc<HardEvent::MTE3_S>();
        storedSourceIndices_ = true;
        uint32_t word = 0;
        for (Piece piece = FirstPiece(loaded_); piece.begin < piece.end; piece = NextPiece(piece, loaded_.end)) {
            const int32_t source = static_cast<int32_t>(piece.slot % info_->world);
            for (uint32_t i = 0; i < piece.end - piece.begin; ++i, word += kSourceIndexWords) {
                const uint32_t pair = static_cast<uint32_t>(list.GetValue(piece.at + i));
                sourceIndex.SetValue(word, source);
                sourceIndex.SetValue(word + 1, static_cast<int32_t>(pair / info_->topK));
                sourceIndex.SetValue(word + 2, static_cast<int32_t>(pair % info_->topK));
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) +
                                   static_cast<uint64_t>(loaded_.begin) * kSourceIndexWords,
                               count * kSourceIndexWords);
        CopyOut(target, sourceIndex, count * kSourceIndexWords);
    }

    // Gathers the loaded rows in [from, to), chunk by chunk. Rows of a chunk are consecutive in expand_x, whatever
    // their sources.
    __aicore__ inline void GatherListed(uint32_t from, uint32_t to) {
        if (from == to) return;
        chunkRow_ = from;
        filled_ = 0;
        for (Piece piece = FirstPiece(loaded_); piece.begin < Min(piece.end, to);
             piece = NextPiece(piece, loaded_.end)) {
            if (piece.end <= from) continue;
            const uint32_t skipped = from > piece.begin ? from - piece.begin : 0;
            GatherPiece(piece.slot, piece.at + skipped, Min(piece.end, to) - piece.begin - skipped);
        }
        if (filled_ != 0) StoreChunk();
    }
    __aicore__ inline void GatherPiece(uint32_t slot, uint32_t at, uint32_t count) {
        GM_ADDR rows = exchange_->PingPongOf(slot % info_->world) + rowsOffset_;
        uint32_t first = RowOf(at);
        for (uint32_t i = 0; i < count;) {
            if (filled_ == 0) chunk_ = queue_.template AllocTensor<int8_t>();
            const uint32_t room = Min(tiling_->copyRows - filled_, count - i);
            uint32_t run = 1, next = 0;  // rows that are consecutive at their source
            for (; i + run < count; ++run) {
                next = RowOf(at + i + run);
                if (run == room || next != first + run) break;
            }
            LoadChunk(rows + static_cast<uint64_t>(first) * rowStep_, run);
            i += run;
            first = next;
            if (filled_ == tiling_->copyRows) StoreChunk();
        }
    }
    // Core 0 may not have checked the list yet: the row is clamped to its source's rows.
    __aicore__ inline uint32_t RowOf(uint32_t at) {
        const uint32_t pair = static_cast<uint32_t>(listBuf_.Get<int32_t>().GetValue(at));
        return Min(pair / pairsOfRow_, publishedRows_ - 1);
    }
    __aicore__ inline void LoadChunk(GM_ADDR from, uint32_t count) {
        LoadRows(chunk_[filled_ * rowStride_], from, rowStride_, rowStep_, count);
        filled_ += count;
    }
    __aicore__ inline void StoreChunk() {
        queue_.EnQue(chunk_);
        chunk_ = queue_.template DeQue<int8_t>();
        StoreField(args_->expandX, chunkRow_, chunk_, info_->hidden * WireSize(*info_), rowStride_, filled_);
        if (quantized_) {
            StoreField(args_->dynamicScales, chunkRow_, chunk_[PayloadBytes(info_->hidden, WireSize(*info_))],
                       sizeof(float), rowStride_, filled_);
        }
        queue_.FreeTensor(chunk_);
        chunkRow_ += filled_;
        filled_ = 0;
        if (owesSourceIndices_) StoreSourceIndices();
    }

    Exchange* exchange_ = nullptr;
    const DispatchArguments* args_ = nullptr;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    LocalTensor<int8_t> chunk_;
    UbBuf listBuf_, sourceIndexBuf_;
    uint64_t rowsOffset_ = 0;
    uint32_t pairsOfRow_ = 1;
    uint32_t rowStride_ = 0;  // of a row in UB,
    uint32_t rowStep_ = 0;    // and in the window
    SegmentTable* segments_ = nullptr;
    Loaded loaded_ = {};
    uint32_t begin_ = 0, end_ = 0;  // this core's share
    uint32_t firstSlot_ = 0, lastSlot_ = 0;
    uint32_t listed_ = 0;  // the row after those whose entries Begin() loads
    uint32_t publishedRows_ = 0;
    uint32_t chunkRow_ = 0;
    uint32_t filled_ = 0;
    bool quantized_ = false;
    bool owesSourceIndices_ = false;
    bool storedSourceIndices_ = false;
};

// If dispatch was given expert_scales: copies the weight of each row of the share from its source's ping-pong buffer to
// expand_scales. Reads the lists again, because SharedRowGather has them in another order.
class WeightGather {
public:
    __aicore__ inline void Init(Exchange& exchange, const DispatchArguments& arguments, const MoeDistributeInfo& info,
                                uint64_t weightsOffset) {
        exchange_ = &exchange;
        info_ = &info;
        weightsOffset_ = weightsOffset;
        output_ = arguments.expandScales;
        const WeightGatherUb ub;
        exchange.pipe().InitBuffer(listBuf_, ub.lists);
        exchange.pipe().InitBuffer(weightBuf_, ub.weights);
    }
    __aicore__ inline void Run(SegmentTable& segments) {
        const uint32_t rows = Min(segments.Rows(), info_->expandRows);
        const uint32_t end = PartBegin(rows, exchange_->core() + 1, info_->cores);
        uint32_t row = PartBegin(rows, exchange_->core(), info_->cores);
        if (row == end) return;
        for (uint32_t slot = segments.Seek(row); row < end;) {
            while (segments.End(slot) <= row) ++slot;
            const uint32_t count = Min(kWeightRows, Min(end, segments.End(slot)) - row);
            const uint32_t first = static_cast<uint32_t>(segments.Offset(slot)) + row - segments.Start(slot);
            GatherChunk(slot % info_->world, Min(first, info_->capacity - count), row, count);
            row += count;
        }
    }

private:
    __aicore__ inline void GatherChunk(uint32_t source, uint32_t first, uint32_t row, uint32_t count) {
        LocalTensor<int32_t> entry = listBuf_.Get<int32_t>();
        LocalTensor<float> weight = weightBuf_.Get<float>();
        GM_ADDR pingPong = exchange_->PingPongOf(source);
        const uint32_t pairs = info_->maxBatch * info_->topK;
        GlobalTensor<int32_t> list;
        list.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(pingPong + info_->rank * ListBytes(info_->capacity)) + first, count);
        SyncFunc<HardEvent::S_MTE2>();
        SyncFunc<HardEvent::MTE3_MTE2>();
        CopyIn(entry, list, count);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count; ++i) {
            GlobalTensor<float> from;
            const uint32_t pair = Min(static_cast<uint32_t>(entry.GetValue(i)), pairs - 1);
            from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(pingPong + weightsOffset_) + pair, 1);
            CopyIn(weight[i * kBlockWords], from, 1);
        }
        SyncFunc<HardEvent::MTE2_MTE3>();
        StoreField(output_, row, weight.ReinterpretCast<int8_t>(), sizeof(float), kBlock, count);
    }

    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR output_ = nullptr;
    UbBuf listBuf_, weightBuf_;
    uint64_t weightsOffset_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_GATHER_H
