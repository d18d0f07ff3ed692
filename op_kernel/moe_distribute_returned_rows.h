// Where the rows of this rank's pairs lie when combine runs "direct": in the halves, or the lent areas, of
// their experts' ranks, each of which says in its half where this rank's rows of an expert begin.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H
#define ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H

#include "moe_distribute_combine_inputs.h"

namespace moe {

class ReturnedRows {
public:
    __aicore__ inline void Init(Exchange& exchange, const MoeDistributeInfo& info, GM_ADDR expandIdx,
                                uint32_t rowBytes) {
        exchange_ = &exchange;
        info_ = &info;
        rowBytes_ = rowBytes;
        lanes_ = StartsBytes(info.localExperts) / sizeof(int32_t);
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        exchange.pipe().InitBuffer(baseBuf_,
                                   static_cast<uint32_t>(CeilTo(info.world * sizeof(uint64_t), kBlock)));
        exchange.pipe().InitBuffer(startBuf_, info.world * StartsBytes(info.localExperts));
        exchange.pipe().InitBuffer(positionBuf_, kChunkPairs * sizeof(int32_t));
    }
    // Row 0 of an owner's rows, as its run says.
    __aicore__ inline void SetBase(uint32_t owner, const LocalTensor<uint32_t>& run) {
        GM_ADDR base = exchange_->HalfOf(owner) + ReturnedRowsOffset(info_->world, info_->localExperts);
        const bool lent = PhaseOf(run.GetValue(kH0OpPhase)) == kPhaseLent;
        if (lent && !IsMutant(Mutant::kLentAsPublished)) {
            base = exchange_->context().lent(owner) +
                   static_cast<uint64_t>(run.GetValue(kBlockWords + kH1Detail0)) * kBlock;
        }
        baseBuf_.Get<uint64_t>().SetValue(owner, reinterpret_cast<uint64_t>(base));
    }
    // This rank's line of every owner's table.
    __aicore__ inline void LoadStarts() {
        for (uint32_t i = 0; i < info_->world; ++i) {
            const uint32_t owner = (info_->rank + i) % info_->world;
            GlobalTensor<int32_t> line;
            line.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(exchange_->HalfOf(owner) +
                                                  info_->rank * StartsBytes(info_->localExperts)),
                lanes_);
            AscendC::DataCopy(startBuf_.Get<int32_t>()[owner * lanes_], line, lanes_);
        }
        SyncFunc<HardEvent::MTE2_S>();
    }

    // V1: positions are expand_idx.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        if (info_->triples == 0) CopyIn(positionBuf_.Get<int32_t>(), index_[begin], count);
    }
    // V2: positions are counted again; the owner has checked that its rows are in dispatch's order.
    __aicore__ inline void Place(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        if (info_->triples == 0) return;
        LocalTensor<int32_t> position = positionBuf_.Get<int32_t>();
        for (uint32_t t = 0, i = 0; t < tokens; ++t) {
            for (uint32_t k = 0; k < info_->topK; ++k, ++i) {
                const int32_t id = routing.pairs().Id(i, token + t);
                if (routing.pairs().Routed(id))
                    position.SetValue(i, static_cast<int32_t>(routing.TakePosition(id)));
            }
        }
    }
    __aicore__ inline GM_ADDR Address(RoutingTable&, int32_t id, uint32_t, uint32_t, uint32_t i) {
        const uint32_t expert = static_cast<uint32_t>(id), owner = expert / info_->localExperts;
        const int32_t start =
            startBuf_.Get<int32_t>().GetValue(owner * lanes_ + expert % info_->localExperts);
        const int32_t row = start + positionBuf_.Get<int32_t>().GetValue(i);
        return reinterpret_cast<GM_ADDR>(baseBuf_.Get<uint64_t>().GetValue(owner)) +
               RowOffsetBytes(row, rowBytes_);
    }

private:
    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> index_;
    UbBuf baseBuf_, startBuf_, positionBuf_;
    uint32_t lanes_ = 0;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H
