// V1's expand_idx, checked by all cores together with a single meeting: each leaves the largest position of
// every expert in its share, and after the meeting one compares the largest of all with the totals.
#ifndef ASCEND_MOE_DISTRIBUTE_INDEX_BOUNDS_H
#define ASCEND_MOE_DISTRIBUTE_INDEX_BOUNDS_H

#include "../common/combine_inputs.h"

namespace moe {

class IndexBounds {
public:
    // UB: expand_idx of a chunk, and a row of all experts.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx,
                                GM_ADDR workspace, uint32_t core) {
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
    // Of this core's share of the pairs. A negative position counts as the largest there is.
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
            SyncFunc<HardEvent::S_MTE2>();
        }
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(bounds_[static_cast<uint64_t>(core_) * lanes_], largest, lanes_);
    }
    // After all cores have stored, and with the totals of all experts: whether positions are too large, and
    // then the first that is.
    template <typename Queue>
    __aicore__ inline Verdict CheckAll(Queue& queue, uint32_t room, RoutingTable& routing) {
        LocalTensor<int32_t> largest = largestBuf_.Get<int32_t>();
        AscendC::Duplicate(largest, kNone, static_cast<int32_t>(lanes_));
        rows_.template Fold<true>(queue, room, largest, 0, info_->experts, 0, info_->cores);
        SyncFunc<HardEvent::V_S>();
        for (uint32_t e = 0; e < info_->experts; ++e) {
            const int32_t position = largest.GetValue(e);
            if (position == kNone || static_cast<uint32_t>(position) < routing.Total(static_cast<int32_t>(e)))
                continue;
            return CheckIndex(*info_, expandIdx_, routing, 0, info_->batch * info_->topK,
                              indexBuf_.Get<int32_t>());
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

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_INDEX_BOUNDS_H
