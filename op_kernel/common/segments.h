// The rows of expand_x as segments, [L][W]: segment (local expert, source rank) has slot local expert * W + source.
// End(slot) is the inclusive prefix sum of the counts, so the segment is rows Start(slot)..End(slot); Offset(slot) is
// the number of its first row among its source's rows.
#ifndef ASCEND_MOE_COMMON_SEGMENTS_H
#define ASCEND_MOE_COMMON_SEGMENTS_H

#include "routing.h"
#include "status.h"

namespace moe {

// Adds `row` to each of `count` rows of `width` words, a multiple of 8.
__aicore__ inline void AddToRows(const LocalTensor<int32_t>& rows, uint32_t count, uint32_t width,
                                 const LocalTensor<int32_t>& row) {
    const uint8_t stride = Repeats(width / kBlockWords);
    const AscendC::BinaryRepeatParams strides(1, 1, 1, stride, stride, 0);
    for (uint32_t first = 0; first < count; first += kMostRepeats) {
        const uint8_t repeats = Repeats(Min(kMostRepeats, count - first));
        for (uint32_t at = 0; at < width; at += kRepeatWords) {
            const LocalTensor<int32_t> to = rows[first * width + at];
            AscendC::Add(to, to, row[at], static_cast<uint64_t>(Min(kRepeatWords, width - at)), repeats, strides);
        }
    }
}
// Starts to load where segments end, `sums` (inclusive prefix sums), and where they start: the same words shifted by
// one, after a 0.
__aicore__ inline void LoadEnds(const LocalTensor<int32_t>& end, const LocalTensor<int32_t>& start,
                                const GlobalTensor<int32_t>& sums, uint32_t slots) {
    CopyIn(end, sums, slots);
    if (slots > 1) {
        const DataCopyExtParams params{1, static_cast<uint32_t>((slots - 1) * sizeof(int32_t)), 0, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{true, 1, 0, 0};
        AscendC::DataCopyPad(start, sums, params, pad);
    } else {
        AscendC::Duplicate(start, static_cast<int32_t>(0), kBlockWords);
        SyncFunc<HardEvent::V_S>();
    }
}

class SegmentTable {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info) {
        byVectors_ = ScansSegments(info.world, info.cores);
        world_ = info.world;
        localExperts_ = info.localExperts;
        const SegmentTableUb ub(info);
        pipe.InitBuffer(endBuf_, ub.slots);
        pipe.InitBuffer(offsetBuf_, ub.slots);
        pipe.InitBuffer(sourceBuf_, ub.sources);
    }
    // From the sources' counts, counts(source, local expert).
    template <typename Counts>
    __aicore__ inline void FromCounts(Counts& counts) {
        Begin();
        for (uint32_t slot = 0, l = 0; l < localExperts_; ++l) {
            for (uint32_t s = 0; s < world_; ++s, ++slot) Append(slot, s, counts(s, l));
        }
    }
    // From inclusive prefix sums [local expert][source]. Returns false if they decrease, start below 0 or exceed
    // `limit`.
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
    // Over RDMA: makes offsets negative, counted from the end of the source's rows.
    __aicore__ inline void AlignEnd() {
        LocalTensor<int32_t> offset = offsetBuf_.Get<int32_t>(), bySource = sourceBuf_.Get<int32_t>();
        const int32_t row = static_cast<int32_t>(world_);
        if (byVectors_) {
            SyncFunc<HardEvent::S_V>();
            AscendC::Muls(bySource, bySource, static_cast<int32_t>(-1), row);
            AscendC::PipeBarrier<PIPE_V>();
            AddToRows(offset, localExperts_, world_, bySource);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Muls(bySource, bySource, static_cast<int32_t>(-1), row);
            SyncFunc<HardEvent::V_S>();
            return;
        }
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
    // For Exchange::SetStatus: rows of a local expert that return to a source.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t source, uint32_t localExpert) {
        const uint32_t slot = localExpert * world_ + source;
        return End(slot) - Start(slot);
    }
    // All rows of one source.
    __aicore__ inline uint32_t SourceRows(uint32_t s) {
        return static_cast<uint32_t>(sourceBuf_.Get<int32_t>().GetValue(s));
    }
    __aicore__ inline LocalTensor<int32_t> Ends() { return endBuf_.Get<int32_t>(); }
    __aicore__ inline LocalTensor<int32_t> Offsets() { return offsetBuf_.Get<int32_t>(); }
    __aicore__ inline LocalTensor<int32_t> BySource() { return sourceBuf_.Get<int32_t>(); }
    // The number of all rows, if Ends() and Offsets() were filled by the caller.
    __aicore__ inline void SetRows(int32_t rows) { total_ = rows; }
    // The slot that contains `row`.
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
    bool byVectors_ = false;
};

// Computes the segments from all sources' counts with vector instructions, as prefix sums over sources and local
// experts. A scalar loop over all W * L slots takes tens of microseconds.
class SegmentScan {
public:
    // Requires W to be a multiple of 8; pays off with more than one core.
    static __aicore__ inline bool Suits(const MoeDistributeInfo& info) { return ScansSegments(info.world, info.cores); }
    // `rowWords`: words per source in the counts, which are laid out as in its message from block `firstBlock` on.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, uint32_t rowWords, uint32_t firstBlock) {
        world_ = info.world;
        localExperts_ = info.localExperts;
        rowWords_ = rowWords;
        firstWord_ = firstBlock * kBlockWords;
        const SegmentScanUb ub(world_, localExperts_, static_cast<uint32_t>(rowWords * sizeof(int32_t)));
        pipe.InitBuffer(placeBuf_, ub.slots);
        pipe.InitBuffer(spareBuf_, ub.slots);
        pipe.InitBuffer(sumBuf_, ub.rows);
        pipe.InitBuffer(baseBuf_, ub.base);
        FindPlaces();
    }
    // Overwrites the counts. `fromEnd`: offsets are negative, as SegmentTable::AlignEnd makes them.
    __aicore__ inline void Run(const LocalTensor<int32_t>& counts, SegmentTable& segments, bool fromEnd) {
        const LocalTensor<uint32_t> places = placeBuf_.Get<uint32_t>();
        const uint32_t slots = world_ * localExperts_;
        // In its source's list a segment begins where the previous experts end.
        const bool odd = Steps(localExperts_) % 2 != 0;
        LocalTensor<int32_t> first = odd ? spareBuf_.Get<int32_t>() : segments.Offsets();
        AscendC::Duplicate(first, static_cast<int32_t>(0), static_cast<int32_t>(world_));
        AscendC::PipeBarrier<PIPE_V>();  // the counts were made by vectors
        if (slots > world_) AscendC::Gather(first[world_], counts, places, 0u, slots - world_);
        Sum(first, odd ? segments.Offsets() : spareBuf_.Get<int32_t>(), localExperts_, world_);
        if (fromEnd) {  // all rows of a source: before its last expert, and of it
            const uint32_t last = slots - world_;
            const LocalTensor<int32_t> bySource = segments.BySource();
            AscendC::Gather(bySource, counts, places[last], 0u, world_);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(bySource, bySource, segments.Offsets()[last], static_cast<int32_t>(world_));
            AscendC::PipeBarrier<PIPE_V>();
            segments.AlignEnd();
        }
        // Within its expert's rows a segment ends where its source does; they begin where the previous experts end.
        const LocalTensor<int32_t> end = Sum(counts, sumBuf_.Get<int32_t>(), world_, rowWords_);
        const int32_t total = AddBases(end);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Gather(segments.Ends(), end, places, 0u, slots);
        SyncFunc<HardEvent::V_S>();
        segments.SetRows(total);
    }

    // Turns every row into the sum of the rows up to it, in Steps(rows) steps between two buffers; returns the last.
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
    __aicore__ inline uint32_t LaneOf(uint32_t localExpert) const {
        return StatusWriter::CountWord(localExpert) - firstWord_;
    }

    // Byte offset of the count of [local expert][source]: four rows of experts, then rows one block, two blocks, ...
    // further.
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
    // Adds the previous experts' total to every row. Returns the number of all rows.
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
        AddToRows(end, world_, rowWords_, base);
        return total;
    }

    UbBuf placeBuf_, spareBuf_, sumBuf_, baseBuf_;
    uint32_t world_ = 0;
    uint32_t localExperts_ = 0;
    uint32_t rowWords_ = 0;
    uint32_t firstWord_ = 0;  // of the message, in a row
};

// After all cores have counted: the totals of the rank's experts, the counts of the previous cores, and where an
// owner's rows of each expert begin. Loads as many histograms [cores][E] at a time as fit in UB.
class RowPlaces {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, RoutingTable& routing, GM_ADDR workspace,
                                uint32_t core) {
        info_ = &info;
        routing_ = &routing;
        core_ = core;
        lanes_ = PaddedInts(info.experts);
        atOnce_ = HistogramsAtOnce(info);
        histograms_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace),
                                    static_cast<uint64_t>(info.cores) * lanes_);
        const RowPlacesUb ub(info);
        pipe.InitBuffer(rowsBuf_, ub.histograms);
        byVectors_ = SegmentScan::Suits(info);
        if (!byVectors_) return;
        pipe.InitBuffer(placeBuf_, ub.experts);
        pipe.InitBuffer(totalBuf_, ub.experts);
        pipe.InitBuffer(firstBuf_, ub.experts);
        pipe.InitBuffer(spareBuf_, ub.experts);
        pipe.InitBuffer(reduceBuf_, ub.reduce);
    }
    // After all cores have counted. Returns the first owner over its capacity.
    __aicore__ inline OpStatus Find() {
        LoadHistograms(0);
        if (byVectors_) FindPlaces();
        Accumulate();
        return byVectors_ ? SumByOwner() : routing_->Place();
    }
    // Number of the expert's first row at its owner.
    __aicore__ inline int32_t First(int32_t expert) {
        if (!byVectors_) return routing_->Prefix(expert);
        const uint32_t id = static_cast<uint32_t>(expert);
        return firstBuf_.Get<int32_t>().GetValue(Local(*info_, id) * info_->world + Owner(*info_, id));
    }

private:
    __aicore__ inline void LoadHistograms(uint32_t core) {
        AscendC::DataCopy(rowsBuf_.Get<int32_t>(), histograms_[static_cast<uint64_t>(core) * lanes_],
                          Min(atOnce_, info_->cores - core) * lanes_);
    }
    // Sums `count` rows into the first.
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
    // Byte offset of the total of [local expert][owner].
    __aicore__ inline void FindPlaces() {
        LocalTensor<int32_t> place = placeBuf_.Get<int32_t>();
        const uint32_t world = info_->world, rows = info_->localExperts;
        AscendC::CreateVecIndex(place, static_cast<int32_t>(0), world);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(place, place, static_cast<int32_t>(rows * sizeof(int32_t)), static_cast<int32_t>(world));
        for (uint32_t done = 1; done < rows; done *= 2) {
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Adds(place[done * world], place, static_cast<int32_t>(done * sizeof(int32_t)),
                          static_cast<int32_t>(Min(done, rows - done) * world));
        }
    }
    __aicore__ inline OpStatus SumByOwner() {
        const LocalTensor<int32_t> total = totalBuf_.Get<int32_t>(), first = firstBuf_.Get<int32_t>();
        const LocalTensor<uint32_t> places = placeBuf_.Get<uint32_t>();
        const uint32_t world = info_->world, rows = info_->localExperts;
        AscendC::Gather(total, routing_->Totals(), places, 0u, info_->experts);
        AscendC::Gather(first, routing_->Totals(), places, 0u, info_->experts);
        const LocalTensor<int32_t> sum = SegmentScan::Sum(first, spareBuf_.Get<int32_t>(), rows, world);
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<float> most = reduceBuf_.Get<float>();
        LocalTensor<float> result = most[PaddedInts(world)];
        AscendC::Cast(most, sum[(rows - 1) * world], AscendC::RoundMode::CAST_RINT, world);
        const LocalTensor<int32_t> ofOwner = placeBuf_.Get<int32_t>();
        const bool rdma = info_->transport == kTransportRdma;
        if (rdma)
            AscendC::Muls(ofOwner, sum[(rows - 1) * world], static_cast<int32_t>(-1), static_cast<int32_t>(world));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(first, sum, total, static_cast<int32_t>(info_->experts));
        AscendC::ReduceMax(result, most, result[kBlockWords], static_cast<int32_t>(world), false);
        if (rdma) {  // counted from the end of the owner's rows
            AscendC::PipeBarrier<PIPE_V>();
            AddToRows(first, rows, world, ofOwner);
        }
        SyncFunc<HardEvent::V_S>();
        if (result.GetValue(0) <= static_cast<float>(info_->capacity)) return OpStatus();
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

// ep_send_counts [L*W] int32: where the rows of each (local expert, source rank) end. Every core loads and checks all
// with vector instructions; only if they are wrong, the scalar unit searches for the first wrong count.
class ReturnCounts {
public:
    // UB: ends, starts, and floats for the check.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info) {
        info_ = &info;
        slots_ = info.world * info.localExperts;
        const ReturnCountsUb ub(info);
        pipe.InitBuffer(endBuf_, ub.slots);
        pipe.InitBuffer(startBuf_, ub.slots);
        pipe.InitBuffer(countBuf_, ub.sums);
        pipe.InitBuffer(workBuf_, ub.work);
    }
    // Starts to load; the caller waits for MTE2.
    __aicore__ inline void Load(GM_ADDR epSendCounts) {
        GlobalTensor<int32_t> counts;
        counts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(epSendCounts), slots_);
        LoadEnds(endBuf_.Get<int32_t>(), startBuf_.Get<int32_t>(), counts, slots_);
    }
    // The number of all rows. Returns false if it is impossible. Before Check no other count is known.
    __aicore__ inline bool Total(uint32_t& rows) {
        rows = End(slots_ - 1);
        return rows <= info_->expandRows && rows <= info_->world * info_->capacity;
    }
    // Checks that the counts never decrease, stay within expand_x, and give no source more than its capacity.
    __aicore__ inline OpStatus Check() {
        uint32_t rows;
        if (Total(rows) && Plausible()) return OpStatus();
        return Search();
    }
    __aicore__ inline uint32_t End(uint32_t slot) {
        return static_cast<uint32_t>(endBuf_.Get<int32_t>().GetValue(slot));
    }
    __aicore__ inline uint32_t Start(uint32_t slot) {
        return static_cast<uint32_t>(startBuf_.Get<int32_t>().GetValue(slot));
    }
    __aicore__ inline uint32_t Rows() { return End(slots_ - 1); }
    // The slot that contains `row`.
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
    // Returns false if something may be wrong. Floats preserve the order of the counts, and exactly all values within
    // the limits, inter-node below 2^24.
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
        // In rows of `unit` lanes, lane i belongs to source i % W in every row: adding the rows adds by source.
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
        return least.GetValue(0) >= 0.0f && most.GetValue(0) * lanesOfSource <= static_cast<float>(info_->capacity);
    }
    __aicore__ inline OpStatus Search() {
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
        return OpStatus();
    }

    UbBuf endBuf_, startBuf_, countBuf_, workBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t slots_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_SEGMENTS_H
