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
        const uint32_t begin = PartBegin(segments.Rows(), exchange_->core(), info_->cores);
        const uint32_t end = PartBegin(segments.Rows(), exchange_->core() + 1, info_->cores);
        const uint32_t middle = begin + PartBegin(end - begin, info_->rank, info_->world);
        GatherRange(segments, middle, end);
        GatherRange(segments, begin, middle);
    }

private:
    __aicore__ inline uint32_t WireSize() const { return info_->wireType == kTypeInt8 ? 1 : XSize(); }
    __aicore__ inline uint32_t XSize() const { return info_->xType == kTypeFp32 ? 4 : 2; }

    __aicore__ inline void GatherRange(SegmentTable& segments, uint32_t begin, uint32_t end) {
        if (begin == end) return;
        uint32_t slot = segments.Find(begin);
        for (uint32_t row = begin; row < end;) {
            const uint32_t first = row, firstSlot = slot;
            row = LoadLists(segments, slot, row, end);
            if (info_->triples != 0) StoreTriples(segments, firstSlot, first, row);
            GatherListed(segments, firstSlot, first, row);
        }
    }
    // Of the piece of a list that begins with `row`: its rows as far as `room` entries of UB go.
    __aicore__ inline uint32_t Piece(SegmentTable& segments, uint32_t slot, uint32_t row, uint32_t end,
                                     uint32_t room) const {
        return Min(Min(end, segments.End(slot)) - row, room);
    }
    // As many pieces as UB holds, in flight together. Returns the row after them.
    __aicore__ inline uint32_t LoadLists(SegmentTable& segments, uint32_t& slot, uint32_t row, uint32_t end) {
        const uint64_t mine = info_->rank * ListBytes(info_->capacity);
        SyncFunc<HardEvent::S_MTE2>();
        for (uint32_t used = 0; row < end && used < kListInts;) {
            while (segments.End(slot) <= row) ++slot;
            const uint32_t count = Piece(segments, slot, row, end, kListInts - used);
            const uint32_t at = static_cast<uint32_t>(segments.Offset(slot)) + row - segments.Start(slot);
            GlobalTensor<int32_t> list;
            list.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(exchange_->HalfOf(slot % info_->world) + mine) + at, count);
            CopyIn(listBuf_.Get<int32_t>()[used], list, count);
            used += PaddedInts(count);
            row += count;
        }
        if constexpr (!IsMutant(Mutant::kListReadBeforeLoaded)) SyncFunc<HardEvent::MTE2_S>();
        return row;
    }
    __aicore__ inline void StoreTriples(SegmentTable& segments, uint32_t slot, uint32_t row, uint32_t end) {
        LocalTensor<int32_t> list = listBuf_.Get<int32_t>(), triple = tripleBuf_.Get<int32_t>();
        const uint32_t first = row, count = end - row;
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t used = 0, word = 0; row < end;) {
            while (segments.End(slot) <= row) ++slot;
            const uint32_t piece = Piece(segments, slot, row, end, kListInts - used);
            for (uint32_t i = 0; i < piece; ++i, word += kTripleWords) {
                const uint32_t pair = static_cast<uint32_t>(list.GetValue(used + i));
                triple.SetValue(word, static_cast<int32_t>(slot % info_->world));
                triple.SetValue(word + 1, static_cast<int32_t>(pair / info_->topK));
                triple.SetValue(word + 2, static_cast<int32_t>(pair % info_->topK));
            }
            used += PaddedInts(piece);
            row += piece;
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) + static_cast<uint64_t>(first) * kTripleWords,
            count * kTripleWords);
        CopyOut(target, triple, count * kTripleWords);
    }

    // The rows that the loaded pieces list, chunk by chunk: a chunk's rows are consecutive in expand_x,
    // whatever their sources.
    __aicore__ inline void GatherListed(SegmentTable& segments, uint32_t slot, uint32_t row, uint32_t end) {
        LocalTensor<int32_t> list = listBuf_.Get<int32_t>();
        chunkRow_ = row;
        filled_ = 0;
        for (uint32_t used = 0; row < end;) {
            while (segments.End(slot) <= row) ++slot;
            const uint32_t piece = Piece(segments, slot, row, end, kListInts - used);
            GM_ADDR rows = exchange_->HalfOf(slot % info_->world) + rowsOffset_;
            for (uint32_t i = 0; i < piece;) {
                const uint32_t first = static_cast<uint32_t>(list.GetValue(used + i)) / pairsOfRow_;
                if (filled_ == 0) chunk_ = queue_.template AllocTensor<int8_t>();
                const uint32_t room = Min(tiling_->copyRows - filled_, piece - i);
                uint32_t run = 1;  // rows that follow each other at their source
                while (run < room &&
                       static_cast<uint32_t>(list.GetValue(used + i + run)) / pairsOfRow_ == first + run)
                    ++run;
                LoadRows(rows + static_cast<uint64_t>(first) * rowStride_, run);
                i += run;
                if (filled_ == tiling_->copyRows) StoreChunk();
            }
            used += PaddedInts(piece);
            row += piece;
        }
        if (filled_ != 0) StoreChunk();
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
    uint32_t chunkRow_ = 0;
    uint32_t filled_ = 0;
    bool quantised_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_DIRECT_GATHER_H
