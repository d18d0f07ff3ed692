// What dispatch of window and hierarchy do when rows and messages have come: the messages stay in the workspace, the
// rows of the own window become expand_x and the outputs beside it, ordered by (local expert, source rank, flat
// (token, k)).
#ifndef ASCEND_MOE_COMMON_ARRIVED_H
#define ASCEND_MOE_COMMON_ARRIVED_H

#include "exchange.h"
#include "outputs.h"

namespace moe {

// Each core stores the messages of its sources in the workspace, [W] messages, so that later every core has the counts
// of all sources.
class MessageKeeper {
public:
    __aicore__ inline void Init(const MoeDistributeInfo& info, GM_ADDR workspace) {
        words_ = StatusMessageBytes(info.localExperts) / static_cast<uint32_t>(sizeof(int32_t));
        messages_.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(workspace + CountsOffset(info.cores, info.experts)),
            static_cast<uint64_t>(info.world) * words_);
    }
    __aicore__ inline Verdict Arrived(uint32_t source, const LocalTensor<uint32_t>& message) {
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(messages_[static_cast<uint64_t>(source) * words_], message, words_);
        return Verdict();
    }
    __aicore__ inline const GlobalTensor<uint32_t>& messages() const { return messages_; }
    __aicore__ inline uint32_t words() const { return words_; }

private:
    GlobalTensor<uint32_t> messages_;
    uint32_t words_ = 0;
};

// Those of all sources, loaded into UB: their counts.
struct KeptCounts {
    LocalTensor<int32_t> values;
    uint32_t words;
    __aicore__ inline int32_t operator()(uint32_t source, uint32_t localExpert) const {
        return values.GetValue(source * words + StatusWriter::CountWord(localExpert));
    }
};

// The rows of the own window, in phase LocalWindowCopy. A row has `stride` bytes, of which `tailBytes` at the end are
// its tail.
template <bool kQuant>
class ArrivedRows {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling,
                                uint32_t stride, uint32_t tailBytes) {
        args_ = &arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        stride_ = stride;
        tailOffset_ = stride - tailBytes;
    }
    // UB: the segment table, all counts, and copyRing chunks of window rows. `counts`: core 0 stores them.
    __aicore__ inline void Copy(Exchange& exchange, const MessageKeeper& keeper, DispatchCounts& counts) {
        MOE_PHASE(exchange.stamps(), LocalWindowCopy);
        exchange.NextPlan();
        SegmentTable segments;
        segments.Init(exchange.pipe(), *info_);
        const CopyOutUb ub(*tiling_, stride_);
        UbBuf messagesBuf;
        exchange.pipe().InitBuffer(messagesBuf, ub.messages);
        KeptCounts kept = {messagesBuf.Get<int32_t>(), keeper.words()};
        AscendC::DataCopy(messagesBuf.Get<uint32_t>(), keeper.messages(), info_->world * keeper.words());
        if (SegmentScan::Suits(*info_) && info_->transport == kTransportMemory) {
            SegmentScan scan;
            scan.Init(exchange.pipe(), *info_, keeper.words(), 0);
            SyncFunc<HardEvent::MTE2_V>();
            scan.Run(kept.values, segments);
        } else {
            SyncFunc<HardEvent::MTE2_S>();
            segments.FromCounts(kept);
        }
        if (info_->transport == kTransportRdma) segments.AlignEnd();
        exchange.pipe().InitBuffer(copyQueue_, Ring(ub.ring), ub.chunk);
        CopyRows(exchange, segments);
        if (exchange.core() == 0) counts.Store(exchange.pipe(), segments);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    // This core's share of expand_x is contiguous. A chunk ends where its segment (local expert, source)
    // ends, because the next segment lies in another region of the window.
    __aicore__ inline void CopyRows(Exchange& exchange, SegmentTable& segments) {
        const uint32_t begin = PartBegin(segments.Rows(), exchange.core(), info_->cores);
        const uint32_t end = PartBegin(segments.Rows(), exchange.core() + 1, info_->cores);
        if (begin == end) return;
        uint32_t slot = segments.Seek(begin);
        for (uint32_t row = begin; row < end;) {
            while (segments.End(slot) <= row) ++slot;
            const uint32_t count = Min(tiling_->copyRows, Min(end, segments.End(slot)) - row);
            const int32_t at = segments.Offset(slot) + static_cast<int32_t>(row - segments.Start(slot));
            CopyChunk(exchange, slot % info_->world, at, row, count);
            row += count;
        }
    }
    __aicore__ inline void CopyChunk(Exchange& exchange, uint32_t source, int32_t windowRow, uint32_t row,
                                     uint32_t count) {
        LocalTensor<int8_t> chunk = copyQueue_.template AllocTensor<int8_t>();
        exchange.LoadRows(chunk, source, windowRow, stride_, count);
        copyQueue_.EnQue(chunk);
        chunk = copyQueue_.template DeQue<int8_t>();
        const uint32_t size = WireSize(*info_), rowBytes = info_->hidden * size;
        StoreField(args_->expandX, row, chunk, rowBytes, stride_, count);
        if (kQuant)
            StoreField(args_->dynamicScales, row, chunk[PayloadBytes(info_->hidden, size)], sizeof(float), stride_,
                       count);
        if (info_->triples != 0)
            StoreField(args_->expandIdx, row, chunk[tailOffset_], kTripleWords * sizeof(int32_t), stride_, count);
        if (info_->hasWeights != 0)
            StoreField(args_->expandScales, row, chunk[stride_ - kBlock], sizeof(float), stride_, count);
        copyQueue_.FreeTensor(chunk);
    }

    const DispatchArguments* args_ = nullptr;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    uint32_t stride_ = 0;
    uint32_t tailOffset_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_ARRIVED_H
