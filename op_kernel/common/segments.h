// Rows of a rank as (local expert, source rank) segments: the counts of all sources, their inclusive prefix
// sums in [local expert][source] order, and where each segment starts in its source's region.
#ifndef ASCEND_MOE_DISTRIBUTE_SEGMENTS_H
#define ASCEND_MOE_DISTRIBUTE_SEGMENTS_H

#include "base.h"

namespace moe {

class SegmentTable {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info) {
        world_ = info.world;
        localExperts_ = info.localExperts;
        pipe.InitBuffer(endBuf_, PaddedInts(slots()) * sizeof(int32_t));
        pipe.InitBuffer(offsetBuf_, PaddedInts(slots()) * sizeof(int32_t));
        pipe.InitBuffer(sourceBuf_, PaddedInts(world_) * sizeof(int32_t));
    }
    // From counts as the sources gave them, counts(source, local expert).
    template <typename Counts>
    __aicore__ inline void FromCounts(Counts& counts) {
        Begin();
        for (uint32_t slot = 0, l = 0; l < localExperts_; ++l) {
            for (uint32_t s = 0; s < world_; ++s, ++slot) Append(slot, s, counts(s, l));
        }
    }
    // From inclusive prefix sums [local expert][source]. False when they fall, start below 0 or pass `limit`.
    __aicore__ inline bool FromPrefix(const LocalTensor<int32_t>& prefix, uint32_t limit, uint32_t& badSlot) {
        Begin();
        int32_t before = 0;
        for (uint32_t slot = 0, s = 0; slot < slots(); ++slot) {
            const int32_t end = prefix.GetValue(slot);
            if (end < before || end > static_cast<int32_t>(limit)) {
                badSlot = slot;
                return false;
            }
            Append(slot, s, end - before);
            before = end;
            if (++s == world_) s = 0;
        }
        return true;
    }
    // Over RDMA rows are counted from where those of their source end.
    __aicore__ inline void AlignEnd() {
        LocalTensor<int32_t> offset = offsetBuf_.Get<int32_t>(), bySource = sourceBuf_.Get<int32_t>();
        for (uint32_t slot = 0, s = 0; slot < slots(); ++slot) {
            offset.SetValue(slot, offset.GetValue(slot) - bySource.GetValue(s));
            if (++s == world_) s = 0;
        }
    }
    __aicore__ inline uint32_t slots() const { return world_ * localExperts_; }
    __aicore__ inline uint32_t Rows() { return static_cast<uint32_t>(total_); }
    __aicore__ inline uint32_t End(uint32_t slot) {
        return static_cast<uint32_t>(endBuf_.Get<int32_t>().GetValue(slot));
    }
    __aicore__ inline uint32_t Start(uint32_t slot) { return slot == 0 ? 0 : End(slot - 1); }
    // Number of the segment's first row in its source's region.
    __aicore__ inline int32_t Offset(uint32_t slot) { return offsetBuf_.Get<int32_t>().GetValue(slot); }
    // All rows of one source.
    __aicore__ inline uint32_t SourceRows(uint32_t s) {
        return static_cast<uint32_t>(sourceBuf_.Get<int32_t>().GetValue(s));
    }
    __aicore__ inline LocalTensor<int32_t> Ends() { return endBuf_.Get<int32_t>(); }
    __aicore__ inline LocalTensor<int32_t> Offsets() { return offsetBuf_.Get<int32_t>(); }
    // Of ends and offsets that come from elsewhere.
    __aicore__ inline void SetRows(int32_t rows) { total_ = rows; }
    // The slot that holds `row`.
    __aicore__ inline uint32_t Find(uint32_t row) {
        uint32_t slot = 0;
        while (slot + 1 < slots() && End(slot) <= row) ++slot;
        return slot;
    }
    // The same, in fewer looks where slots are many.
    __aicore__ inline uint32_t Seek(uint32_t row) {
        uint32_t slot = 0;
        for (uint32_t end = slots() - 1; slot < end;) {
            const uint32_t middle = (slot + end) / 2;
            if (End(middle) <= row) {
                slot = middle + 1;
            } else {
                end = middle;
            }
        }
        return slot;
    }

private:
    __aicore__ inline void Begin() {
        total_ = 0;
        for (uint32_t s = 0; s < world_; ++s) sourceBuf_.Get<int32_t>().SetValue(s, 0);
    }
    __aicore__ inline void Append(uint32_t slot, uint32_t s, int32_t count) {
        LocalTensor<int32_t> bySource = sourceBuf_.Get<int32_t>();
        const int32_t before = bySource.GetValue(s);
        offsetBuf_.Get<int32_t>().SetValue(slot, before);
        bySource.SetValue(s, before + count);
        total_ += count;
        endBuf_.Get<int32_t>().SetValue(slot, total_);
    }
    UbBuf endBuf_, offsetBuf_, sourceBuf_;
    uint32_t world_ = 0;
    uint32_t localExperts_ = 0;
    int32_t total_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_SEGMENTS_H
