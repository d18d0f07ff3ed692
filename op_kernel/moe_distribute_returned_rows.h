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
        ownerWords_ = kBlockWords + lanes_;
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        exchange.pipe().InitBuffer(ownerBuf_, info.world * OwnerBytes(info.localExperts));
        exchange.pipe().InitBuffer(positionBuf_, kChunkPairs * sizeof(int32_t));
    }
    // Where the rows of an owner lie, as its run says, and this rank's line of its table, which is on its way
    // then. Nobody may have checked either yet: no address is outside the area that the run names.
    __aicore__ inline void SetOwner(uint32_t owner, const LocalTensor<uint32_t>& run) {
        LocalTensor<int32_t> entry = ownerBuf_.Get<int32_t>()[owner * ownerWords_];
        GlobalTensor<int32_t> line;
        line.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(
                                 exchange_->HalfOf(owner) + info_->rank * StartsBytes(info_->localExperts)),
                             lanes_);
        AscendC::DataCopy(entry[kBlockWords], line, lanes_);
        GM_ADDR base = exchange_->HalfOf(owner) + ReturnedRowsOffset(info_->world, info_->localExperts);
        uint64_t bytes = static_cast<uint64_t>(info_->world) * info_->capacity * rowBytes_;
        const WindowContext& context = exchange_->context();
        const uint64_t lent = static_cast<uint64_t>(run.GetValue(kBlockWords + kH1Detail0)) * kBlock;
        const bool isLent = PhaseOf(run.GetValue(kH0OpPhase)) == kPhaseLent;
        if (isLent && lent + rowBytes_ <= context.lent_bytes() && !IsMutant(Mutant::kLentAsPublished)) {
            base = context.lent(owner) + lent;
            bytes = context.lent_bytes() - lent;
        }
        LocalTensor<uint64_t> place = entry.ReinterpretCast<uint64_t>();
        place.SetValue(kBase, reinterpret_cast<uint64_t>(base));
        place.SetValue(kMost, bytes - rowBytes_);
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
        const LocalTensor<uint64_t> place = entry.ReinterpretCast<uint64_t>();
        const uint32_t row =
            static_cast<uint32_t>(entry.GetValue(kBlockWords + expert % info_->localExperts)) +
            static_cast<uint32_t>(positionBuf_.Get<int32_t>().GetValue(i));
        const uint64_t at = static_cast<uint64_t>(row) * rowBytes_, most = place.GetValue(kMost);
        return reinterpret_cast<GM_ADDR>(place.GetValue(kBase)) + (at < most ? at : most);
    }

private:
    // Of an owner's first block: where its row 0 lies, and how many bytes after it the last row can.
    enum Place : uint32_t { kBase, kMost };
    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> index_;
    UbBuf ownerBuf_, positionBuf_;
    uint32_t lanes_ = 0;
    uint32_t ownerWords_ = 0;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURNED_ROWS_H
