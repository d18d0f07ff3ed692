// ep_send_counts of combine, algorithm "direct": where the rows of each (local expert, source rank) begin and
// end. Every core has them all, and vector instructions say whether they can be; only where they cannot do
// scalar ones look for what is wrong.
#ifndef ASCEND_MOE_DISTRIBUTE_RETURN_COUNTS_H
#define ASCEND_MOE_DISTRIBUTE_RETURN_COUNTS_H

#include "../common/combine_inputs.h"

namespace moe {

class ReturnCounts {
public:
    // UB: ends, starts, and twice as many floats.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info) {
        info_ = &info;
        slots_ = info.world * info.localExperts;
        pipe.InitBuffer(endBuf_, PaddedInts(slots_) * sizeof(int32_t));
        pipe.InitBuffer(startBuf_, PaddedInts(slots_) * sizeof(int32_t));
        pipe.InitBuffer(countBuf_, ReturnCountLanes(info.world, slots_) * sizeof(float));
        pipe.InitBuffer(workBuf_, (PaddedInts(slots_) + 2 * kBlockWords) * sizeof(float));
    }
    // On its way only: the caller waits for MTE2.
    __aicore__ inline void Load(GM_ADDR epSendCounts) {
        GlobalTensor<int32_t> counts;
        counts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(epSendCounts), slots_);
        LocalTensor<int32_t> start = startBuf_.Get<int32_t>();
        CopyIn(endBuf_.Get<int32_t>(), counts, slots_);
        // A segment starts where the one before ends: the same words, one place further on, behind a 0.
        if (slots_ > 1) {
            const DataCopyExtParams params{1, static_cast<uint32_t>((slots_ - 1) * sizeof(int32_t)), 0, 0, 0};
            const DataCopyPadExtParams<int32_t> pad{true, 1, 0, 0};
            AscendC::DataCopyPad(start, counts, params, pad);
        } else {
            AscendC::Duplicate(start, static_cast<int32_t>(0), kBlockWords);
            SyncFunc<HardEvent::V_S>();
        }
    }
    // All rows, if they may be so many; nothing more is known of the counts before Check.
    __aicore__ inline bool Total(uint32_t& rows) {
        rows = End(slots_ - 1);
        return rows <= info_->expandRows && rows <= info_->world * info_->capacity;
    }
    // Monotone, within expand_x, and no source over its capacity.
    __aicore__ inline Verdict Check() {
        uint32_t rows;
        if (Total(rows) && Plausible()) return Verdict();
        return Search();
    }
    __aicore__ inline uint32_t End(uint32_t slot) {
        return static_cast<uint32_t>(endBuf_.Get<int32_t>().GetValue(slot));
    }
    __aicore__ inline uint32_t Start(uint32_t slot) {
        return static_cast<uint32_t>(startBuf_.Get<int32_t>().GetValue(slot));
    }
    __aicore__ inline uint32_t Rows() { return End(slots_ - 1); }
    // The slot that holds `row`.
    __aicore__ inline uint32_t Find(uint32_t row) {
        uint32_t first = 0, last = slots_ - 1;
        while (first < last) {
            const uint32_t middle = (first + last) / 2;
            if (End(middle) <= row) {
                first = middle + 1;
            } else {
                last = middle;
            }
        }
        return first;
    }

private:
    // False: something may be wrong. As floats the counts keep their order, and those within the limits their
    // values: these are far below 2^24.
    __aicore__ inline bool Plausible() {
        const uint32_t unit = ReturnCountUnit(info_->world), lanes = ReturnCountLanes(info_->world, slots_);
        LocalTensor<float> count = countBuf_.Get<float>(), work = workBuf_.Get<float>();
        LocalTensor<float> least = work[PaddedInts(slots_)], most = least[kBlockWords];
        AscendC::Duplicate(count, 0.0f, static_cast<int32_t>(lanes));
        AscendC::Cast(work, startBuf_.Get<int32_t>(), AscendC::RoundMode::CAST_RINT, slots_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(count, endBuf_.Get<int32_t>(), AscendC::RoundMode::CAST_RINT, slots_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(count, count, work, static_cast<int32_t>(slots_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceMin(least, count, work, static_cast<int32_t>(slots_), false);
        // Lane i of all rows of `unit` lanes is of source i % W.
        for (uint32_t n = lanes / unit; n > 1;) {
            const uint32_t half = n / 2;
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(count, count, count[(n - half) * unit], static_cast<int32_t>(half * unit));
            n -= half;
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceMax(most, count, work, static_cast<int32_t>(unit), false);
        SyncFunc<HardEvent::V_S>();
        const float lanesOfSource = static_cast<float>(unit / info_->world);
        return least.GetValue(0) >= 0.0f &&
               most.GetValue(0) * lanesOfSource <= static_cast<float>(info_->capacity);
    }
    __aicore__ inline Verdict Search() {
        int32_t before = 0;
        for (uint32_t slot = 0; slot < slots_; ++slot) {
            const int32_t end = endBuf_.Get<int32_t>().GetValue(slot);
            if (end < before || end > static_cast<int32_t>(info_->expandRows))
                return InvalidOf(*info_, kInvalidCounts, slot, static_cast<uint32_t>(end));
            before = end;
        }
        for (uint32_t s = 0; s < info_->world; ++s) {
            uint32_t rows = 0;
            for (uint32_t slot = s; slot < slots_; slot += info_->world) rows += End(slot) - Start(slot);
            if (rows > info_->capacity) return InvalidOf(*info_, kInvalidCounts, kCountsOfSource | s, rows);
        }
        return Verdict();
    }

    UbBuf endBuf_, startBuf_, countBuf_, workBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t slots_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RETURN_COUNTS_H
