// Phase 6 of window combine: the weighted sum of a token's K rows in fp32, multiply then add, k ascending,
// one cast at the end. Without expert_scales nothing is multiplied. Rows come through a queue of sumRing parts.
#ifndef ASCEND_MOE_WINDOW_SUM_H
#define ASCEND_MOE_WINDOW_SUM_H

#include "../common/routing.h"
#include "../common/weighted_sum.h"

namespace moe {

struct TokenSumPlan {
    GM_ADDR expertScales;
    GM_ADDR sharedExpertX;
    GM_ADDR x;
};

// Where a pair's row lies in this rank's own window. V1: packed in the region of the expert's rank, at the
// rank's earlier rows for that owner plus expand_idx. With triples: in slot token * K + k of the half, with a mark that
// says whether it has come.
class WindowRows {
public:
    // `half`: of this epoch, at row 0 of its first region; `regionBytes`: of one source rank in it.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx, uint32_t rowBytes,
                                GM_ADDR half, uint64_t regionBytes, uint32_t epoch) {
        info_ = &info;
        mark_ = static_cast<uint64_t>(SlotMark(epoch)) << 32 | SlotMark(epoch);
        rowBytes_ = rowBytes;
        half_ = half;
        regionBytes_ = regionBytes;
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        pipe.InitBuffer(indexBuf_, kChunkPairs * (info.triples != 0 ? kBlock : sizeof(int32_t)));
    }
    // Begins to load expand_idx, or the marks, of a chunk of pairs; the caller waits for MTE2.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        if (info_->triples == 0) {
            CopyIn(indexBuf_.Get<int32_t>(), index_[begin], count);
            return;
        }
        GlobalTensor<int32_t> marks;
        const uint64_t first = static_cast<uint64_t>(begin) * SlotBytes(rowBytes_) + rowBytes_;
        marks.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(half_ + first),
                              static_cast<uint64_t>(count) * SlotBytes(rowBytes_) / sizeof(int32_t));
        const DataCopyExtParams params{static_cast<uint16_t>(count), kBlock, rowBytes_, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(indexBuf_.Get<int32_t>(), marks, params, pad);
    }
    // Whether the row of pair `i` of the chunk is of this op. In V1 counts and expand_idx say that it is.
    __aicore__ inline bool Arrived(uint32_t i) {
        return info_->triples == 0 || indexBuf_.Get<uint64_t>().GetValue(i * (kBlock / sizeof(uint64_t))) == mark_;
    }
    __aicore__ inline void Place(RoutingTable&, uint32_t, uint32_t) {}
    // Where the row of pair `i` of the chunk begins.
    __aicore__ inline GM_ADDR Address(RoutingTable& routing, int32_t id, uint32_t token, uint32_t k, uint32_t i) {
        if (info_->triples != 0) return half_ + (static_cast<uint64_t>(token) * info_->topK + k) * SlotBytes(rowBytes_);
        const uint32_t owner = static_cast<uint32_t>(id) / info_->localExperts;
        const int32_t row = routing.Prefix(id) + indexBuf_.Get<int32_t>().GetValue(i);
        return half_ + owner * regionBytes_ + RowOffsetBytes(row, rowBytes_);
    }

private:
    GlobalTensor<int32_t> index_;
    UbBuf indexBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR half_ = nullptr;
    uint64_t regionBytes_ = 0;
    uint64_t mark_ = 0;
    uint32_t rowBytes_ = 0;
};

// `Rows` has the members of WindowRows.
template <typename XType, typename Rows>
class TokenSum {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling, const TokenSumPlan& plan,
                                Rows& rows) {
        tiling_ = &tiling;
        info_ = &tiling.info;
        plan_ = plan;
        rows_ = &rows;
        rowBytes_ = static_cast<uint32_t>(info_->hidden * sizeof(XType));
        const uint32_t pairs = info_->batch * info_->topK;
        scales_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(plan.expertScales), pairs);
        pipe.InitBuffer(scaleBuf_, kChunkPairs * sizeof(float));
        const uint32_t elements = tiling.partElements;
        pipe.InitBuffer(inQueue_, static_cast<uint8_t>(tiling.sumRing),
                        static_cast<uint32_t>(elements * sizeof(XType)));
        sum_.Init(pipe, elements);
    }

    // The share of core `core` of `cores` of the (token, part of H) items. Calls told.Tell once, with the first pair of
    // the share whose row has not come, or kOk: before it stores the last sum, so that the others hear of it soon.
    template <typename Told>
    __aicore__ inline void Run(RoutingTable& routing, uint32_t core, uint32_t cores, Told& told) {
        const uint32_t parts = tiling_->partsPerToken;
        const uint32_t items = info_->batch * parts;
        const uint32_t end = PartBegin(items, core + 1, cores);
        const uint32_t chunkTokens = kChunkPairs / info_->topK;
        uint32_t item = PartBegin(items, core, cores);
        if (item == end) told.Tell(missing_);
        while (item < end) {
            const uint32_t first = item / parts;
            const uint32_t tokens = Min(chunkTokens, (end - 1) / parts + 1 - first);
            LoadChunk(routing, first, tokens);
            for (; item < end && item / parts < first + tokens; ++item) {
                AddRows(routing, item / parts, item / parts - first, item % parts);
                if (item + 1 == end) told.Tell(missing_);
                sum_.Store(plan_.x + static_cast<uint64_t>(item / parts) * rowBytes_ + Column(item % parts));
            }
        }
    }

private:
    __aicore__ inline void Miss(uint32_t expert, uint32_t token, uint32_t k) {
        if (missing_.code != kOk) return;
        missing_ = InvalidOf(*info_, kRoutingMismatch, kMismatchRow | expert, token);
        missing_.detail2 = k;
    }
    __aicore__ inline void LoadChunk(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        const uint32_t begin = token * info_->topK, count = tokens * info_->topK;
        routing.pairs().Keep(begin, count);
        rows_->Load(begin, count);
        if (info_->hasWeights != 0) CopyIn(scaleBuf_.Get<float>(), scales_[begin], count);
        SyncFunc<HardEvent::MTE2_S>();
        rows_->Place(routing, token, tokens);
    }

    __aicore__ inline uint64_t Column(uint32_t part) const {
        return part * static_cast<uint64_t>(tiling_->partElements) * sizeof(XType);
    }
    __aicore__ inline void AddRows(RoutingTable& routing, uint32_t token, uint32_t inChunk, uint32_t part) {
        const uint32_t begin = part * tiling_->partElements;
        const uint32_t elements = Min(tiling_->partElements, info_->hidden - begin);
        const uint64_t column = Column(part);
        sum_.Begin(elements);
        bool active = false;
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const uint32_t i = inChunk * info_->topK + k;
            const int32_t id = routing.pairs().Id(i, token);
            active = active || id != kInactive;
            if (!routing.pairs().Routed(id)) continue;
            if (!rows_->Arrived(i)) {
                Miss(static_cast<uint32_t>(id), token, k);
                continue;
            }
            const bool weighted = info_->hasWeights != 0;
            AddRow(rows_->Address(routing, id, token, k, i) + column, elements,
                   weighted ? scaleBuf_.Get<float>().GetValue(i) : 1.0f, weighted);
        }
        if (active && tiling_->hasSharedExpertX != 0) {
            AddRow(plan_.sharedExpertX + static_cast<uint64_t>(token) * rowBytes_ + column, elements, 1.0f, false);
        }
    }

    __aicore__ inline void AddRow(GM_ADDR address, uint32_t elements, float weight, bool weighted) {
        const uint32_t bytes = static_cast<uint32_t>(elements * sizeof(XType));
        GlobalTensor<int8_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(address), bytes);
        LocalTensor<int8_t> row = inQueue_.template AllocTensor<int8_t>();
        AscendC::DataCopy(row, source, bytes);
        inQueue_.EnQue(row);
        row = inQueue_.template DeQue<int8_t>();
        sum_.Add(row.template ReinterpretCast<XType>(), weight, weighted);
        inQueue_.FreeTensor(row);
    }

    GlobalTensor<float> scales_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    WeightedSum<XType> sum_;
    UbBuf scaleBuf_;
    Rows* rows_ = nullptr;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    TokenSumPlan plan_;
    Verdict missing_;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_SUM_H
