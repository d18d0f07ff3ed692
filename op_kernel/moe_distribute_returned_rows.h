// Where the rows of this rank's pairs lie when combine runs "direct": in the halves, or the lent areas, of
// their experts' ranks, each of which says in its half where this rank's rows of an expert begin.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H
#define ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H

#include "moe_distribute_combine_inputs.h"

namespace moe {

class ReturnedRows {
public:
    __aicore__ inline void Init(Exchange& exchange, const MoeDistributeInfo& info, GM_ADDR expandIdx,
                                GM_ADDR workspace, uint32_t rowBytes) {
        exchange_ = &exchange;
        info_ = &info;
        rowBytes_ = rowBytes;
        lanes_ = StartsBytes(info.localExperts) / sizeof(int32_t);
        ownerWords_ = OwnerBytes(info.localExperts) / sizeof(int32_t);
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        shared_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace + OwnersOffset(info)),
                                info.world * ownerWords_);
        exchange.pipe().InitBuffer(ownerBuf_, info.world * OwnerBytes(info.localExperts));
        exchange.pipe().InitBuffer(positionBuf_, kChunkPairs * sizeof(int32_t));
        AscendC::Duplicate(ownerBuf_.Get<int32_t>(), static_cast<int32_t>(0),
                           static_cast<int32_t>(info.world * ownerWords_));
        SyncFunc<HardEvent::V_S>();
        SyncFunc<HardEvent::V_MTE2>();
    }
    // An owner whose run is good: where its rows lie, as the run says, and this rank's line of its table, for
    // all cores of the rank.
    __aicore__ inline void SetOwner(uint32_t owner, const LocalTensor<uint32_t>& run) {
        LocalTensor<int32_t> entry = ownerBuf_.Get<int32_t>()[owner * ownerWords_];
        GlobalTensor<int32_t> line;
        line.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(
                                 exchange_->HalfOf(owner) + info_->rank * StartsBytes(info_->localExperts)),
                             lanes_);
        AscendC::DataCopy(entry[kBlockWords], line, lanes_);
        GM_ADDR base = exchange_->HalfOf(owner) + ReturnedRowsOffset(info_->world, info_->localExperts);
        const bool lent = PhaseOf(run.GetValue(kH0OpPhase)) == kPhaseLent;
        if (lent && !IsMutant(Mutant::kLentAsPublished)) {
            base = exchange_->context().lent(owner) +
                   static_cast<uint64_t>(run.GetValue(kBlockWords + kH1Detail0)) * kBlock;
        }
        entry.ReinterpretCast<uint64_t>().SetValue(0, reinterpret_cast<uint64_t>(base));
        if (info_->cores == 1) return;
        SyncFunc<HardEvent::S_MTE3>();
        SyncFunc<HardEvent::MTE2_MTE3>();
        AscendC::DataCopy(shared_[owner * ownerWords_], entry, ownerWords_);
    }
    // When the cores have met: what all of them have found.
    __aicore__ inline void LoadOwners() {
        if (info_->cores > 1) {
            SyncFunc<HardEvent::S_MTE2>();
            AscendC::DataCopy(ownerBuf_.Get<int32_t>(), shared_, info_->world * ownerWords_);
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
    // Of pair `i` of the chunk.
    __aicore__ inline GM_ADDR Address(int32_t id, uint32_t i) {
        const uint32_t expert = static_cast<uint32_t>(id), owner = expert / info_->localExperts;
        const LocalTensor<int32_t> entry = ownerBuf_.Get<int32_t>()[owner * ownerWords_];
        const int32_t row = entry.GetValue(kBlockWords + expert % info_->localExperts) +
                            positionBuf_.Get<int32_t>().GetValue(i);
        return reinterpret_cast<GM_ADDR>(entry.ReinterpretCast<uint64_t>().GetValue(0)) +
               RowOffsetBytes(row, rowBytes_);
    }

private:
    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> index_, shared_;
    UbBuf ownerBuf_, positionBuf_;
    uint32_t lanes_ = 0;
    uint32_t ownerWords_ = 0;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H
