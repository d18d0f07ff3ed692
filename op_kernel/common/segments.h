// The rows of expand_x as segments, [L][W]: segment (local expert, source rank) has slot local expert * W +
// source. End(slot) is the inclusive prefix sum of the counts, so rows Start(slot)..End(slot) of expand_x are
// the segment; Offset(slot) is the number of its first row among the rows of its source.
#ifndef ASCEND_MOE_COMMON_SEGMENTS_H
#define ASCEND_MOE_COMMON_SEGMENTS_H

#include "status.h"

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
    // Over RDMA: offsets become negative, counted from the end of the source's rows.
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
    // The number of all rows, when Ends() and Offsets() were filled from outside.
    __aicore__ inline void SetRows(int32_t rows) { total_ = rows; }
    // The slot that holds `row`.
    __aicore__ inline uint32_t Find(uint32_t row) {
        uint32_t slot = 0;
        while (slot + 1 < slots() && End(slot) <= row) ++slot;
        return slot;
    }
    // The same by bisection, for many slots.
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

// The segments of a rank's rows from the counts of all sources, by vector instructions: prefix sums over the
// sources and over the local experts, where a loop over all W * L slots takes the scalar unit tens of
// microseconds.
class SegmentScan {
public:
    // The vector way needs W to be a multiple of 8, and pays only with more than one core.
    static __aicore__ inline bool Suits(const MoeDistributeInfo& info) { return ScansSegments(info.world, info.cores); }
    // `rowWords`: of a source's row in the counts, which lie as in its message.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, uint32_t rowWords) {
        world_ = info.world;
        localExperts_ = info.localExperts;
        rowWords_ = rowWords;
        const uint32_t slotBytes = world_ * localExperts_ * sizeof(int32_t);
        pipe.InitBuffer(placeBuf_, slotBytes);
        pipe.InitBuffer(spareBuf_, slotBytes);
        pipe.InitBuffer(sumBuf_, world_ * rowWords * sizeof(int32_t));
        pipe.InitBuffer(baseBuf_, rowWords * sizeof(int32_t));
        FindPlaces();
    }
    // Uses up the counts.
    __aicore__ inline void Run(const LocalTensor<int32_t>& counts, SegmentTable& segments) {
        const LocalTensor<uint32_t> places = placeBuf_.Get<uint32_t>();
        const uint32_t slots = world_ * localExperts_;
        // In its source's list a segment begins where the experts before it end.
        const bool odd = Steps(localExperts_) % 2 != 0;
        LocalTensor<int32_t> first = odd ? spareBuf_.Get<int32_t>() : segments.Offsets();
        AscendC::Duplicate(first, static_cast<int32_t>(0), static_cast<int32_t>(world_));
        AscendC::PipeBarrier<PIPE_V>();  // the counts were made by vectors
        if (slots > world_) AscendC::Gather(first[world_], counts, places, 0u, slots - world_);
        Sum(first, odd ? segments.Offsets() : spareBuf_.Get<int32_t>(), localExperts_, world_);
        // Among its expert's rows it ends where its source does, and they begin where the experts before end.
        const LocalTensor<int32_t> end = Sum(counts, sumBuf_.Get<int32_t>(), world_, rowWords_);
        const int32_t total = AddBases(end);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Gather(segments.Ends(), end, places, 0u, slots);
        SyncFunc<HardEvent::V_S>();
        segments.SetRows(total);
    }

    // Every row becomes the sum of those up to it, in Steps(rows) steps from one place to the other; the last
    // is returned.
    static __aicore__ inline uint32_t Steps(uint32_t rows) {
        uint32_t steps = 0;
        for (uint32_t shift = 1; shift < rows; shift *= 2) ++steps;
        return steps;
    }
    static __aicore__ inline LocalTensor<int32_t> Sum(LocalTensor<int32_t> rows, LocalTensor<int32_t> other,
                                                      uint32_t count, uint32_t width) {
        for (uint32_t shift = 1; shift < count; shift *= 2) {
            const uint32_t head = shift * width, rest = (count - shift) * width;
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Adds(other, rows, static_cast<int32_t>(0), static_cast<int32_t>(head));
            AscendC::Add(other[head], rows[head], rows, static_cast<int32_t>(rest));
            const LocalTensor<int32_t> summed = other;
            other = rows;
            rows = summed;
        }
        return rows;
    }

private:
    static constexpr uint32_t kLanes = 64;  // of a repeat
    static __aicore__ inline uint32_t LaneOf(uint32_t localExpert) { return StatusWriter::CountWord(localExpert); }

    // Where the count of [local expert][source] lies, in bytes: four rows of experts, then the rows that lie
    // a block, two blocks, .. further.
    __aicore__ inline void FindPlaces() {
        LocalTensor<int32_t> place = placeBuf_.Get<int32_t>(), source = spareBuf_.Get<int32_t>();
        const int32_t row = static_cast<int32_t>(world_);
        AscendC::CreateVecIndex(source, static_cast<int32_t>(0), world_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(source, source, static_cast<int32_t>(rowWords_ * sizeof(int32_t)), row);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t l = 0; l < Min(kCountsPerBlock, localExperts_); ++l)
            AscendC::Adds(place[l * world_], source, static_cast<int32_t>(LaneOf(l) * sizeof(int32_t)), row);
        for (uint32_t done = kCountsPerBlock; done < localExperts_; done *= 2) {
            const uint32_t more = Min(done, localExperts_ - done);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Adds(place[done * world_], place, static_cast<int32_t>(done / kCountsPerBlock * kBlock),
                          static_cast<int32_t>(more * world_));
        }
        AscendC::PipeBarrier<PIPE_V>();
    }
    // Adds to every row what all sources have for the experts before. Returns the number of all rows.
    __aicore__ inline int32_t AddBases(const LocalTensor<int32_t>& end) {
        LocalTensor<int32_t> base = baseBuf_.Get<int32_t>();
        AscendC::Duplicate(base, static_cast<int32_t>(0), static_cast<int32_t>(rowWords_));
        SyncFunc<HardEvent::V_S>();
        int32_t total = 0;
        const uint32_t last = (world_ - 1) * rowWords_;
        for (uint32_t l = 0; l < localExperts_; ++l) {
            base.SetValue(LaneOf(l), total);
            total += end.GetValue(last + LaneOf(l));
        }
        SyncFunc<HardEvent::S_V>();
        const uint8_t stride = static_cast<uint8_t>(rowWords_ / kBlockWords);
        const AscendC::BinaryRepeatParams strides(1, 1, 1, stride, stride, 0);
        for (uint32_t at = 0; at < rowWords_; at += kLanes) {
            const uint64_t lanes = Min(kLanes, rowWords_ - at);
            AscendC::Add(end[at], end[at], base[at], lanes, static_cast<uint8_t>(world_), strides);
        }
        return total;
    }

    UbBuf placeBuf_, spareBuf_, sumBuf_, baseBuf_;
    uint32_t world_ = 0;
    uint32_t localExperts_ = 0;
    uint32_t rowWords_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_SEGMENTS_H
