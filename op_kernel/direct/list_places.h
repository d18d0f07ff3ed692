// Where the entries of direct dispatch's lists go: how many pairs of an expert the cores before this one
// have, and how many rows its owner gets before those of the expert. All histograms are in UB at once.
#ifndef ASCEND_MOE_DISTRIBUTE_LIST_PLACES_H
#define ASCEND_MOE_DISTRIBUTE_LIST_PLACES_H

#include "../common/routing.h"
#include "../common/segment_scan.h"

namespace moe {

class ListPlaces {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, RoutingTable& routing,
                                GM_ADDR workspace, uint32_t core) {
        info_ = &info;
        routing_ = &routing;
        core_ = core;
        lanes_ = PaddedInts(info.experts);
        atOnce_ = HistogramsAtOnce(info.cores, info.experts);
        histograms_.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(workspace + HistogramOffset(info.cores)),
            static_cast<uint64_t>(info.cores) * lanes_);
        pipe.InitBuffer(rowsBuf_, atOnce_ * lanes_ * sizeof(int32_t));
        byVectors_ = ScansSegments(info.world, info.cores);
        if (!byVectors_) return;
        pipe.InitBuffer(placeBuf_, info.experts * sizeof(int32_t));
        pipe.InitBuffer(totalBuf_, info.experts * sizeof(int32_t));
        pipe.InitBuffer(firstBuf_, info.experts * sizeof(int32_t));
        pipe.InitBuffer(spareBuf_, info.experts * sizeof(int32_t));
        pipe.InitBuffer(reduceBuf_, CeilTo(info.world * sizeof(float), kBlock) + 2 * kBlock +
                                        MatchReduceBytes(info.world));
    }
    // After all cores have counted. The first owner over its capacity is the verdict.
    __aicore__ inline Verdict Find() {
        LoadHistograms(0);
        if (byVectors_) FindPlaces();
        Accumulate();
        return byVectors_ ? SumByOwner() : routing_->Place();
    }
    // Number of the expert's first row at its owner.
    __aicore__ inline int32_t First(int32_t expert) {
        if (!byVectors_) return routing_->Prefix(expert);
        const uint32_t id = static_cast<uint32_t>(expert);
        return firstBuf_.Get<int32_t>().GetValue(id % info_->localExperts * info_->world +
                                                 id / info_->localExperts);
    }

private:
    __aicore__ inline void LoadHistograms(uint32_t core) {
        AscendC::DataCopy(rowsBuf_.Get<int32_t>(), histograms_[static_cast<uint64_t>(core) * lanes_],
                          Min(atOnce_, info_->cores - core) * lanes_);
    }
    // The sum of `count` rows into the first of them.
    __aicore__ inline void Fold(const LocalTensor<int32_t>& rows, uint32_t count) {
        while (count > 1) {
            const uint32_t half = count / 2;
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(rows, rows, rows[(count - half) * lanes_], static_cast<int32_t>(half * lanes_));
            count -= half;
        }
    }
    __aicore__ inline void Accumulate() {
        LocalTensor<int32_t> running = routing_->Running(), total = routing_->Totals();
        const LocalTensor<int32_t> rows = rowsBuf_.Get<int32_t>();
        const int32_t lanes = static_cast<int32_t>(lanes_);
        AscendC::Duplicate(running, static_cast<int32_t>(0), lanes);
        AscendC::Duplicate(total, static_cast<int32_t>(0), lanes);
        for (uint32_t core = 0; core < info_->cores; core += atOnce_) {
            if (core > 0) {
                SyncFunc<HardEvent::V_MTE2>();
                LoadHistograms(core);
            }
            SyncFunc<HardEvent::MTE2_V>();
            const uint32_t count = Min(atOnce_, info_->cores - core);
            const uint32_t before = core_ > core ? Min(count, core_ - core) : 0;
            const LocalTensor<int32_t> others = rows[before * lanes_];
            Fold(rows, before);
            if (before < count) Fold(others, count - before);
            AscendC::PipeBarrier<PIPE_V>();
            if (before > 0) {
                AscendC::Add(running, running, rows, lanes);
                AscendC::Add(total, total, rows, lanes);
                AscendC::PipeBarrier<PIPE_V>();
            }
            if (before < count) AscendC::Add(total, total, others, lanes);
        }
        SyncFunc<HardEvent::V_S>();
    }
    // Where the total of [local expert][owner] lies, in bytes.
    __aicore__ inline void FindPlaces() {
        LocalTensor<int32_t> place = placeBuf_.Get<int32_t>();
        const uint32_t world = info_->world, rows = info_->localExperts;
        AscendC::CreateVecIndex(place, static_cast<int32_t>(0), world);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(place, place, static_cast<int32_t>(rows * sizeof(int32_t)),
                      static_cast<int32_t>(world));
        for (uint32_t done = 1; done < rows; done *= 2) {
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Adds(place[done * world], place, static_cast<int32_t>(done * sizeof(int32_t)),
                          static_cast<int32_t>(Min(done, rows - done) * world));
        }
        AscendC::PipeBarrier<PIPE_V>();
    }
    __aicore__ inline Verdict SumByOwner() {
        const LocalTensor<int32_t> total = totalBuf_.Get<int32_t>(), first = firstBuf_.Get<int32_t>();
        const LocalTensor<uint32_t> places = placeBuf_.Get<uint32_t>();
        const uint32_t world = info_->world, rows = info_->localExperts;
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Gather(total, routing_->Totals(), places, 0u, info_->experts);
        AscendC::Gather(first, routing_->Totals(), places, 0u, info_->experts);
        const LocalTensor<int32_t> sum = SegmentScan::Sum(first, spareBuf_.Get<int32_t>(), rows, world);
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<float> most = reduceBuf_.Get<float>();
        LocalTensor<float> result = most[PaddedInts(world)];
        AscendC::Cast(most, sum[(rows - 1) * world], AscendC::RoundMode::CAST_RINT, world);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(first, sum, total, static_cast<int32_t>(info_->experts));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceMax(result, most, result[kBlockWords], static_cast<int32_t>(world), false);
        SyncFunc<HardEvent::V_S>();
        if (result.GetValue(0) <= static_cast<float>(info_->capacity)) return Verdict();
        return routing_->Place();
    }

    GlobalTensor<int32_t> histograms_;
    UbBuf rowsBuf_, placeBuf_, totalBuf_, firstBuf_, spareBuf_, reduceBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    RoutingTable* routing_ = nullptr;
    uint32_t core_ = 0;
    uint32_t lanes_ = 0;
    uint32_t atOnce_ = 1;
    bool byVectors_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_LIST_PLACES_H
