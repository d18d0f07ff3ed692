// Direct combine, the rank that reads: checks expand_idx (V1), and finds where the rows of its pairs lie.
#ifndef ASCEND_MOE_DIRECT_ROWS_H
#define ASCEND_MOE_DIRECT_ROWS_H

#include "../common/inputs.h"

namespace moe {

// V1: checks expand_idx without a meeting of its own. In phase 3 each core stores the largest position of
// every expert among its pairs, [cores][E] int32 in the workspace. In phase 5 core 0 compares the largest of
// all cores with the totals: a position must be below its expert's total.
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
        pipe.InitBuffer(indexBuf_, kChunkPairs * sizeof(int32_t));
        pipe.InitBuffer(largestBuf_, lanes_ * sizeof(int32_t));
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
    // After all cores have stored; `routing` must have the totals of all experts. The verdict is the first
    // position that is too large.
    template <typename Queue>
    __aicore__ inline Verdict CheckAll(Queue& queue, uint32_t room, RoutingTable& routing) {
        LocalTensor<int32_t> largest = largestBuf_.Get<int32_t>();
        AscendC::Duplicate(largest, kNone, static_cast<int32_t>(lanes_));
        rows_.template Fold<true>(queue, room, largest, 0, info_->experts, 0, info_->cores);
        SyncFunc<HardEvent::V_S>();
        for (uint32_t e = 0; e < info_->experts; ++e) {
            const int32_t position = largest.GetValue(e);
            if (position == kNone || static_cast<uint32_t>(position) < routing.Total(static_cast<int32_t>(e))) continue;
            return CheckIndex(*info_, expandIdx_, routing, 0, info_->batch * info_->topK, indexBuf_.Get<int32_t>());
        }
        return Verdict();
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

// Finds the rows of this rank's pairs: in the half or the lent area of the owner (the expert's rank), whose
// message says where this rank's rows of each expert begin. Rows of its own experts are in expand_x.
class ReturnedRows {
public:
    __aicore__ inline void Init(Exchange& exchange, StatusWaiter& messages, const MoeDistributeInfo& info,
                                GM_ADDR expandX, GM_ADDR expandIdx, uint32_t rowBytes) {
        exchange_ = &exchange;
        messages_ = &messages;
        info_ = &info;
        expandX_ = expandX;
        rowBytes_ = rowBytes;
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        exchange.pipe().InitBuffer(positionBuf_, kChunkPairs * sizeof(int32_t));
    }

    // V1: begins to load positions, which are expand_idx.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        if (info_->triples == 0) CopyIn(positionBuf_.Get<int32_t>(), index_[begin], count);
    }
    // V2: counts the positions again. The owner has checked that its rows are in dispatch's order.
    __aicore__ inline void Place(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        if (info_->triples == 0) return;
        LocalTensor<int32_t> position = positionBuf_.Get<int32_t>();
        for (uint32_t t = 0, i = 0; t < tokens; ++t) {
            for (uint32_t k = 0; k < info_->topK; ++k, ++i) {
                const int32_t id = routing.pairs().Id(i, token + t);
                if (routing.pairs().Routed(id)) position.SetValue(i, static_cast<int32_t>(routing.TakePosition(id)));
            }
        }
    }
    // The address of the row of pair `i` of the chunk, when all messages have come. Core 0 may not have
    // checked the counts or expand_idx yet, so the address is kept inside the area that the message names.
    __aicore__ inline GM_ADDR Address(int32_t id, uint32_t i) {
        const uint32_t expert = static_cast<uint32_t>(id), owner = expert / info_->localExperts;
        const LocalTensor<uint32_t> message = messages_->Message(owner);
        const uint32_t start =
            message.GetValue(StatusWriter::CountWord(info_->localExperts + expert - owner * info_->localExperts));
        const uint32_t row = start + static_cast<uint32_t>(positionBuf_.Get<int32_t>().GetValue(i));
        GM_ADDR base = exchange_->HalfOf(owner);
        uint64_t bytes = static_cast<uint64_t>(info_->world) * info_->capacity * rowBytes_;
        if (owner == info_->rank && info_->expandRows != 0) {  // nobody has to copy those
            base = expandX_;
            bytes = static_cast<uint64_t>(info_->expandRows) * rowBytes_;
        } else if (PhaseOf(message.GetValue(kH0OpPhase)) == kPhaseLent) {
            const WindowContext& context = exchange_->context();
            const uint64_t lent = static_cast<uint64_t>(message.GetValue(kBlockWords + kH1Detail0)) * kBlock;
            if (lent + rowBytes_ <= context.lent_bytes()) {
                base = context.lent(owner) + lent;
                bytes = context.lent_bytes() - lent;
            }
        }
        const uint64_t at = static_cast<uint64_t>(row) * rowBytes_, most = bytes - rowBytes_;
        return base + (at < most ? at : most);
    }

private:
    Exchange* exchange_ = nullptr;
    StatusWaiter* messages_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> index_;
    GM_ADDR expandX_ = nullptr;
    UbBuf positionBuf_;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_ROWS_H
