// Phases 5 and 7 of direct combine: the weighted sum of a token's K rows in fp32, multiply then add, k
// ascending, one cast at the end. Without expert_scales nothing is multiplied. The rows lie in other ranks' memory, so
// many parts of rows load at a time, in groups of sumGroup. Calls: Init, Fetch, Prepare, Begin, Run; or Drop instead of
// Run.
#ifndef ASCEND_MOE_DIRECT_SUM_H
#define ASCEND_MOE_DIRECT_SUM_H

#include "../common/weighted_sum.h"
#include "rows.h"

namespace moe {

template <typename XType>
class DirectSum {
public:
    using Queue = AscendC::TQue<AscendC::QuePosition::VECIN, kMaxSumGroups>;

    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling,
                                const CombineArguments& arguments, ReturnedRows& rows, uint32_t core) {
        tiling_ = &tiling;
        info_ = &tiling.info;
        args_ = &arguments;
        rows_ = &rows;
        rowBytes_ = static_cast<uint32_t>(info_->hidden * sizeof(XType));
        scales_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.expertScales), info_->batch * info_->topK);
        const uint32_t items = info_->batch * tiling.partsPerToken;
        item_ = PartBegin(items, core, info_->cores);
        end_ = PartBegin(items, core + 1, info_->cores);
        const uint32_t elements = tiling.partElements;
        pieceBytes_ = static_cast<uint32_t>(elements * sizeof(XType));
        groups_ = tiling.sumRing / tiling.sumGroup;
        room_ = SumGroupBytes(info_->experts, tiling.sumGroup, pieceBytes_);
        pipe.InitBuffer(scaleBuf_, kChunkPairs * sizeof(float));
        const uint32_t entries = SumEntries(info_->topK);
        pipe.InitBuffer(addressBuf_, entries * sizeof(uint64_t));
        pipe.InitBuffer(weightBuf_, entries * sizeof(float));
        pipe.InitBuffer(countBuf_, kChunkPairs / info_->topK * sizeof(int32_t));
        pipe.InitBuffer(queue_, static_cast<uint8_t>(groups_), room_);
        sum_.Init(pipe, elements);
    }
    // The queue that rows load into. Before Begin other steps may use it. Its tensors hold `room` int32.
    __aicore__ inline Queue& queue() { return queue_; }
    __aicore__ inline uint32_t room() const { return room_ / sizeof(int32_t); }
    // Begins to load ids, weights and positions of the first chunk of tokens; they do not depend on other
    // ranks.
    __aicore__ inline void Fetch(RoutingTable& routing) {
        if (item_ < end_) FetchChunk(routing, item_ / tiling_->partsPerToken);
    }
    // Waits for them and finds the positions.
    __aicore__ inline void Prepare(RoutingTable& routing) {
        if (item_ == end_) return;
        SyncFunc<HardEvent::MTE2_S>();
        if (info_->triples != 0 && item_ % tiling_->partsPerToken != 0) routing.GiveBack(token_);
        rows_->Place(routing, token_, tokens_);
    }
    // When all messages have come: begins to load the first rows.
    __aicore__ inline void Begin(RoutingTable& routing) {
        if (item_ < end_) BeginChunk(routing);
    }
    // Ends the loads that Begin has started, and uses none of them.
    __aicore__ inline void Drop() {
        while (waiting_ > 0) {
            group_ = TakeGroup();
            queue_.FreeTensor(group_);
        }
    }
    // Sums this core's share of the items (token, part of H).
    __aicore__ inline void Run(RoutingTable& routing) {
        while (item_ < end_) {
            SumChunk(routing);
            if (item_ == end_) break;
            FetchChunk(routing, item_ / tiling_->partsPerToken);
            SyncFunc<HardEvent::MTE2_S>();
            rows_->Place(routing, token_, tokens_);
            BeginChunk(routing);
        }
    }

private:
    static constexpr uint32_t kShared = 0x10000;  // flag in a token's count: a row of shared_expert_x follows

    __aicore__ inline void FetchChunk(RoutingTable& routing, uint32_t token) {
        const uint32_t last = (end_ - 1) / tiling_->partsPerToken;
        token_ = token;
        tokens_ = Min(kChunkPairs / info_->topK, last + 1 - token);
        const uint32_t begin = token * info_->topK, count = tokens_ * info_->topK;
        routing.pairs().Keep(begin, count);
        rows_->Load(begin, count);
        if (info_->hasWeights != 0) CopyIn(scaleBuf_.Get<float>(), scales_[begin], count);
    }

    // Lists the addresses and weights of a token's rows.
    __aicore__ inline void List(RoutingTable& routing, uint32_t token) {
        const uint32_t inChunk = token - token_, base = inChunk * (info_->topK + 1);
        LocalTensor<uint64_t> address = addressBuf_.Get<uint64_t>();
        LocalTensor<float> weight = weightBuf_.Get<float>();
        bool active = false;
        uint32_t count = 0;
        for (uint32_t k = 0, i = inChunk * info_->topK; k < info_->topK; ++k, ++i) {
            const int32_t id = routing.pairs().Id(i, token);
            active = active || id != kInactive;
            if (!routing.pairs().Routed(id)) continue;
            address.SetValue(base + count, reinterpret_cast<uint64_t>(rows_->Address(id, i)));
            if (info_->hasWeights != 0) weight.SetValue(base + count, scaleBuf_.Get<float>().GetValue(i));
            ++count;
        }
        listed_ = count;
        if (active && tiling_->hasSharedExpertX != 0) {
            const uint64_t at = static_cast<uint64_t>(token) * rowBytes_;
            address.SetValue(base + count, reinterpret_cast<uint64_t>(args_->sharedExpertX + at));
            ++listed_;
            count |= kShared;
        }
        countBuf_.Get<uint32_t>().SetValue(inChunk, count);
    }

    // ---- loads, ahead of the sums ----
    __aicore__ inline void BeginChunk(RoutingTable& routing) {
        stop_ = Min(end_, (token_ + tokens_) * tiling_->partsPerToken);
        loadItem_ = item_;
        loadRow_ = used_ = 0;
        List(routing, token_);
        for (uint32_t g = 0; g < groups_; ++g) LoadGroup(routing);
    }
    // Goes to the next row to load, of this item or a later one. False: none is left in the chunk.
    __aicore__ inline bool FindPiece(RoutingTable& routing) {
        while (loadItem_ < stop_ && loadRow_ == listed_) {
            ++loadItem_;
            loadRow_ = 0;
            if (loadItem_ < stop_ && loadItem_ % tiling_->partsPerToken == 0)
                List(routing, loadItem_ / tiling_->partsPerToken);
        }
        return loadItem_ < stop_;
    }
    __aicore__ inline void LoadGroup(RoutingTable& routing) {
        if (!FindPiece(routing)) return;
        LocalTensor<int8_t> group = queue_.template AllocTensor<int8_t>();
        for (uint32_t n = 0; n < tiling_->sumGroup && FindPiece(routing); ++n, ++loadRow_) {
            const uint32_t inChunk = loadItem_ / tiling_->partsPerToken - token_;
            const uint32_t part = loadItem_ % tiling_->partsPerToken;
            const uint64_t address = addressBuf_.Get<uint64_t>().GetValue(inChunk * (info_->topK + 1) + loadRow_);
            GlobalTensor<int8_t> piece;
            piece.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(address + part * static_cast<uint64_t>(pieceBytes_)),
                                  Bytes(part));
            AscendC::DataCopy(group[n * pieceBytes_], piece, Bytes(part));
        }
        queue_.EnQue(group);
        ++waiting_;
    }
    __aicore__ inline LocalTensor<int8_t> TakeGroup() {
        --waiting_;
        return queue_.template DeQue<int8_t>();
    }
    __aicore__ inline uint32_t Elements(uint32_t part) const {
        return Min(tiling_->partElements, info_->hidden - part * tiling_->partElements);
    }
    __aicore__ inline uint32_t Bytes(uint32_t part) const {
        return static_cast<uint32_t>(Elements(part) * sizeof(XType));
    }

    // ---- sums ----
    __aicore__ inline void SumChunk(RoutingTable& routing) {
        for (; item_ < stop_; ++item_) SumItem(routing);
        if (used_ != 0) queue_.FreeTensor(group_);
    }
    __aicore__ inline void SumItem(RoutingTable& routing) {
        const uint32_t token = item_ / tiling_->partsPerToken, part = item_ % tiling_->partsPerToken;
        const uint32_t base = (token - token_) * (info_->topK + 1);
        const uint32_t count = countBuf_.Get<uint32_t>().GetValue(token - token_);
        const uint32_t routed = count & (kShared - 1);
        const bool weighted = info_->hasWeights != 0;
        sum_.Begin(Elements(part));
        for (uint32_t row = 0; row < routed; ++row)
            AddRow(routing, weighted ? weightBuf_.Get<float>().GetValue(base + row) : 1.0f, weighted);
        if (count != routed) AddRow(routing, 1.0f, false);
        sum_.Store(args_->x + static_cast<uint64_t>(token) * rowBytes_ + part * static_cast<uint64_t>(pieceBytes_));
    }
    // Adds the next row in the order of the loads. A group whose rows are all added makes room for another.
    __aicore__ inline void AddRow(RoutingTable& routing, float weight, bool weighted) {
        if (used_ == 0) group_ = TakeGroup();
        sum_.Add(group_[used_ * pieceBytes_].template ReinterpretCast<XType>(), weight, weighted);
        if (++used_ < tiling_->sumGroup) return;
        queue_.FreeTensor(group_);
        used_ = 0;
        LoadGroup(routing);
    }

    const MoeDistributeCombineTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    const CombineArguments* args_ = nullptr;
    ReturnedRows* rows_ = nullptr;
    GlobalTensor<float> scales_;
    Queue queue_;
    WeightedSum<XType> sum_;
    UbBuf scaleBuf_, addressBuf_, weightBuf_, countBuf_;
    LocalTensor<int8_t> group_;        // being summed
    uint32_t used_ = 0;                // rows of it
    uint32_t groups_ = 0;              // loaded at a time
    uint32_t waiting_ = 0;             // loaded, not yet summed
    uint32_t room_ = 0;                // bytes of one
    uint32_t item_ = 0, end_ = 0;      // the share that is left
    uint32_t stop_ = 0;                // of it, in the chunk
    uint32_t token_ = 0, tokens_ = 0;  // of the chunk
    uint32_t loadItem_ = 0, loadRow_ = 0;
    uint32_t listed_ = 0;  // rows of the token that is being loaded
    uint32_t rowBytes_ = 0;
    uint32_t pieceBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_SUM_H
