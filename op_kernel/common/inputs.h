// The arguments of combine, and the checks on them that all algorithms share.
#ifndef ASCEND_MOE_COMMON_INPUTS_H
#define ASCEND_MOE_COMMON_INPUTS_H

#include "exchange.h"
#include "routing.h"
#include "segments.h"

namespace moe {

// The GM arguments of the entry that the bodies use.
struct CombineArguments {
    GM_ADDR expandX;
    GM_ADDR expertIds;
    GM_ADDR expandIdx;
    GM_ADDR epSendCounts;
    GM_ADDR expertScales;
    GM_ADDR xActiveMask;
    GM_ADDR sharedExpertX;
    GM_ADDR oriX;
    GM_ADDR constAlpha1;
    GM_ADDR constAlpha2;
    GM_ADDR constV;
    GM_ADDR performanceInfo;
    GM_ADDR x;
    GM_ADDR errorRecord;
    GM_ADDR workspace;
    GM_ADDR tiling;
    CoreGroup group;
};

__aicore__ inline OpStatus MismatchOf(const MoeDistributeInfo& info, uint32_t expert, uint32_t ours, uint32_t theirs) {
    OpStatus status = InvalidOf(info, kRoutingMismatch, expert, ours);
    status.detail2 = theirs;
    return status;
}

// Computes the segments with vector instructions from `sums`, inclusive prefix sums. `spare`: room for as many. Returns
// false, and leaves the segments undefined, if a sum is less than the one before, less than 0 or more than `limit`.
__aicore__ inline bool ScanPrefix(const MoeDistributeInfo& info, const GlobalTensor<int32_t>& sums,
                                  const LocalTensor<int32_t>& spare, uint32_t limit, SegmentTable& segments) {
    const uint32_t slots = segments.slots(), last = slots - info.world;
    const int32_t words = static_cast<int32_t>(slots), row = static_cast<int32_t>(info.world);
    const LocalTensor<int32_t> end = segments.Ends(), offset = segments.Offsets();
    const bool odd = SegmentScan::Steps(info.localExperts) % 2 != 0;  // the sums of the counts end in `spare`
    const LocalTensor<int32_t> count = odd ? offset : spare, least = odd ? spare : offset;
    LoadEnds(end, count, sums, slots);
    SyncFunc<HardEvent::MTE2_V>();
    AscendC::Sub(count, end, count, words);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Min(least, count, end, words);
    for (uint32_t blocks = slots / kBlockWords; blocks > 1;) {
        const uint32_t half = blocks / 2;
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Min(least, least, least[(blocks - half) * kBlockWords], static_cast<int32_t>(half * kBlockWords));
        blocks -= half;
    }
    SyncFunc<HardEvent::V_S>();
    const int32_t rows = end.GetValue(slots - 1);
    bool good = rows <= static_cast<int32_t>(limit);
    for (uint32_t w = 0; w < kBlockWords; ++w) good = good && least.GetValue(w) >= 0;
    if (!good) return false;
    SyncFunc<HardEvent::S_V>();
    SegmentScan::Sum(count, least, info.localExperts, info.world);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Duplicate(offset, static_cast<int32_t>(0), row);
    if (last > 0) AscendC::Adds(offset[info.world], spare, static_cast<int32_t>(0), static_cast<int32_t>(last));
    AscendC::Adds(segments.BySource(), spare[last], static_cast<int32_t>(0), row);
    SyncFunc<HardEvent::V_S>();
    segments.SetRows(rows);
    return true;
}

// Reads the segments of expand_x from ep_send_counts; they must be monotone, within expand_x, and no source over its
// capacity. `prefix`: room for all of them.
__aicore__ inline OpStatus LoadSegments(const MoeDistributeInfo& info, GM_ADDR epSendCounts,
                                        const LocalTensor<int32_t>& prefix, SegmentTable& segments) {
    GlobalTensor<int32_t> sendCounts;
    sendCounts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(epSendCounts), segments.slots());
    if (!SegmentScan::Suits(info) || !ScanPrefix(info, sendCounts, prefix, info.expandRows, segments)) {
        SyncFunc<HardEvent::S_MTE2>();
        CopyIn(prefix, sendCounts, segments.slots());
        SyncFunc<HardEvent::MTE2_S>();
        uint32_t bad = 0;
        if (!segments.FromPrefix(prefix, info.expandRows, bad))
            return InvalidOf(info, kInvalidCounts, bad, static_cast<uint32_t>(prefix.GetValue(bad)));
    }
    for (uint32_t s = 0; s < info.world; ++s) {
        if (segments.SourceRows(s) > info.capacity)
            return InvalidOf(info, kInvalidCounts, kCountsOfSource | s, segments.SourceRows(s));
    }
    return OpStatus();
}

// A peer must return exactly the rows that this rank's ids sent to it. `counts`: the count blocks of its message.
__aicore__ inline OpStatus CompareCountBlocks(const MoeDistributeInfo& info, RoutingTable& routing, uint32_t source,
                                              const LocalTensor<uint32_t>& counts) {
    for (uint32_t l = 0; l < info.localExperts; ++l) {
        const uint32_t expert = source * info.localExperts + l;
        const uint32_t ours = routing.Total(static_cast<int32_t>(expert));
        const uint32_t theirs = counts.GetValue(StatusWriter::WordOfCounts(l));
        if (ours != theirs) return MismatchOf(info, expert, ours, theirs);
    }
    return OpStatus();
}
__aicore__ inline OpStatus CompareCounts(const MoeDistributeInfo& info, RoutingTable& routing, uint32_t source,
                                         const LocalTensor<uint32_t>& message) {
    return CompareCountBlocks(info, routing, source, message[kHeaderBlocks * kBlockWords]);
}

// Compares the messages of all ranks at once with vector instructions; reports only whether all counts are right.
class CountsMatch {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info) {
        info_ = &info;
        lanes_ = CountsLanes(info.experts);
        pipe.InitBuffer(buf_, CountsMatchBytes(info.experts));
    }
    // `counts`: the count blocks of the first rank's message, visible to the scalar unit; the next rank's are `words`
    // further.
    __aicore__ inline bool Equal(RoutingTable& routing, const LocalTensor<uint32_t>& counts, uint32_t words) {
        LocalTensor<int32_t> value = buf_.Get<int32_t>(), other = value[lanes_];
        const LocalTensor<uint8_t> bits = buf_.Get<uint8_t>()[2 * lanes_ * sizeof(int32_t)];
        FindPlaces(other, words * static_cast<uint32_t>(sizeof(int32_t)));
        AscendC::Duplicate(value, static_cast<int32_t>(0), static_cast<int32_t>(lanes_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Gather(value, counts.ReinterpretCast<int32_t>(), other.ReinterpretCast<uint32_t>(), 0u,
                        info_->experts);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(value, value, routing.Totals(), static_cast<int32_t>(info_->experts));
        AscendC::Duplicate(other, static_cast<int32_t>(0), static_cast<int32_t>(lanes_));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compare(bits, value, other, AscendC::CMPMODE::EQ, lanes_);
        SyncFunc<HardEvent::V_S>();
        const LocalTensor<uint32_t> equal = bits.ReinterpretCast<uint32_t>();
        for (uint32_t i = 0; i < lanes_ / 32; ++i) {
            if (equal.GetValue(i) != 0xFFFFFFFFu) return false;
        }
        return true;
    }

private:
    // Byte offset of each expert's count: by scalars for the first ranks until a whole block is full, then by vectors.
    __aicore__ inline void FindPlaces(const LocalTensor<int32_t>& place, uint32_t stride) {
        const uint32_t rows = info_->localExperts, world = info_->world;
        uint32_t done = 0;
        do {
            for (uint32_t l = 0; l < rows; ++l) {
                const uint32_t word = StatusWriter::WordOfCounts(l);
                const uint32_t at = done * stride + word * static_cast<uint32_t>(sizeof(int32_t));
                place.SetValue(done * rows + l, static_cast<int32_t>(at));
            }
        } while (++done < world && done * rows % kBlockWords != 0);
        SyncFunc<HardEvent::S_V>();
        for (; done < world; done *= 2) {
            const uint32_t more = Min(done, world - done) * rows;
            AscendC::Adds(place[done * rows], place, static_cast<int32_t>(done * stride), static_cast<int32_t>(more));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    UbBuf buf_;
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t lanes_ = 0;
};

// Core 0 of combine, while its first rows are in flight: checks the words of the messages that the other cores trust
// (see LocalAbortFlag). Returns the status of CompareCounts; errors in the messages go to the exchange.
__aicore__ inline OpStatus JudgeMessages(Exchange& exchange, const MoeDistributeInfo& info, RoutingTable& routing,
                                         StatusWaiter& waiter, CountsMatch& match) {
    const bool equal = match.Equal(routing, waiter.CountsOf(0), waiter.words());
    OpStatus status;
    if (!exchange.CheckCountsHashes(waiter, equal) || equal) return status;
    for (uint32_t source = 0; source < info.world; ++source)
        Worsen(status, CompareCountBlocks(info, routing, source, waiter.CountsOf(source)));
    return status;
}

// A position in expand_idx beyond the expert's pairs would read another row. Returns the first such among pairs [begin,
// end).
__aicore__ inline OpStatus CheckIndex(const MoeDistributeInfo& info, GM_ADDR expandIdx, RoutingTable& routing,
                                      uint32_t begin, uint32_t end, const LocalTensor<int32_t>& index) {
    GlobalTensor<int32_t> source;
    source.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
    for (uint32_t at = begin; at < end; at += kChunkPairs) {
        const uint32_t count = Min(kChunkPairs, end - at);
        routing.pairs().Load(at, count);
        CopyIn(index, source[at], count);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < count; ++i) {
            const int32_t id = routing.pairs().Id(i, (at + i) / info.topK);
            if (!routing.pairs().Routed(id)) continue;
            const uint32_t position = static_cast<uint32_t>(index.GetValue(i)), total = routing.Total(id);
            if (position >= total) return MismatchOf(info, static_cast<uint32_t>(id) | kMismatchIndex, total, position);
        }
    }
    return OpStatus();
}

// After a failure each core writes zeros into its share of the sums, and core 0 writes the error record.
__aicore__ inline void LeaveCombine(Exchange& exchange, const MoeDistributeCombineTiling& tiling, GM_ADDR sums,
                                    uint32_t rowBytes) {
    exchange.NextPlan();
    const MoeDistributeInfo& info = tiling.info;
    const uint32_t parts = tiling.partsPerToken, partBytes = tiling.partElements * (rowBytes / info.hidden);
    UbBuf zeroBuf;
    exchange.pipe().InitBuffer(zeroBuf, partBytes);
    AscendC::Duplicate(zeroBuf.Get<int16_t>(), static_cast<int16_t>(0),
                       static_cast<int32_t>(partBytes / sizeof(int16_t)));
    SyncFunc<HardEvent::V_MTE3>();
    GlobalTensor<int8_t> x;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(sums), static_cast<uint64_t>(info.batch) * rowBytes);
    const uint32_t end = PartBegin(info.batch * parts, exchange.core() + 1, info.cores);
    for (uint32_t item = PartBegin(info.batch * parts, exchange.core(), info.cores); item < end; ++item) {
        const uint32_t begin = item % parts * partBytes;
        AscendC::DataCopy(x[static_cast<uint64_t>(item / parts) * rowBytes + begin], zeroBuf.Get<int8_t>(),
                          Min(partBytes, rowBytes - begin));
    }
    AscendC::PipeBarrier<PIPE_ALL>();
    exchange.Report();
}

// Reads and checks the source indices (source rank, token, k) of a core's share of expand_x, a chunk at a time.

// In direct, readers recount positions instead of reading source indices, so rows must be in dispatch's order: those of
// a segment belong to its source and ascend in (token, k). Window takes rows in any order.
class SourceIndexReader {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx) {
        info_ = &info;
        expandIdx_ = expandIdx;
        pipe.InitBuffer(buf_, kSourceIndexReaderBytes);
    }
    // Rows [begin, end) are this core's share. Starts to load their first source indices, before the copies of rows.
    __aicore__ inline void Begin(uint32_t begin, uint32_t end) {
        next_ = begin;
        end_ = end;
        if (next_ == end_) return;
        loaded_ = GetTPipePtr()->AllocEventID<HardEvent::MTE2_S>();
        Load();
        AscendC::SetFlag<HardEvent::MTE2_S>(loaded_);
        loading_ = true;
    }
    // Ends the load that Begin has started.
    __aicore__ inline void Drop() {
        if (!loading_) return;
        loading_ = false;
        AscendC::WaitFlag<HardEvent::MTE2_S>(loaded_);
        GetTPipePtr()->ReleaseEventID<HardEvent::MTE2_S>(loaded_);
    }
    // Goes to the next chunk of the share, rows [first(), stop()). Returns false if none is left or a source index in
    // it is invalid; `status` is then the first such. Requires checked `counts`.
    __aicore__ inline bool Next(ReturnCounts& counts, OpStatus& status) {
        if (next_ == end_) return false;
        if (loading_) {
            Drop();
            slot_ = counts.Find(next_);
        } else {
            SyncFunc<HardEvent::S_MTE2>();
            Load();
            SyncFunc<HardEvent::MTE2_S>();
        }
        first_ = next_;
        next_ += Chunk();
        before_ = first_ == 0 ? 0 : kSourceIndexWords;
        const OpStatus found = Check(counts);
        Worsen(status, found);
        return found.code == kOk;
    }
    __aicore__ inline uint32_t first() const { return first_; }
    __aicore__ inline uint32_t stop() const { return next_; }
    // Word `word` of a row's source index.
    __aicore__ inline uint32_t Word(uint32_t row, uint32_t word) {
        const uint32_t at = before_ + (row - first_) * kSourceIndexWords + word;
        return static_cast<uint32_t>(buf_.Get<int32_t>().GetValue(at));
    }

private:
    __aicore__ inline uint32_t Chunk() const { return Min(kSourceIndexRows, end_ - next_); }
    // Also loads the row before the chunk, if any: the order is checked across chunks and cores.
    __aicore__ inline void Load() {
        const uint32_t before = next_ == 0 ? 0 : 1, words = (Chunk() + before) * kSourceIndexWords;
        GlobalTensor<int32_t> assist;
        assist.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(expandIdx_) + static_cast<uint64_t>(next_ - before) * kSourceIndexWords,
            words);
        CopyIn(buf_.Get<int32_t>(), assist, words);
    }
    __aicore__ inline int32_t PairBefore() {
        if (before_ == 0) return 0;
        // Another core checks this source index; until then its words are arbitrary.
        const LocalTensor<int32_t> sourceIndex = buf_.Get<int32_t>();
        return static_cast<int32_t>(static_cast<uint32_t>(sourceIndex.GetValue(1)) * info_->topK +
                                    static_cast<uint32_t>(sourceIndex.GetValue(2)));
    }
    __aicore__ inline OpStatus Check(ReturnCounts& counts) {
        const uint32_t limits[kSourceIndexWords] = {info_->world, info_->maxBatch, info_->topK};
        uint32_t start = counts.Start(slot_), end = counts.End(slot_);
        int32_t before = PairBefore();
        for (uint32_t row = first_; row < next_; ++row) {
            uint32_t value[kSourceIndexWords];
            for (uint32_t w = 0; w < kSourceIndexWords; ++w) {
                value[w] = Word(row, w);
                if (value[w] >= limits[w]) return InvalidOf(*info_, kInvalidSourceIndex, row * 4 + w, value[w]);
            }
            if (info_->algorithm != kAlgorithmDirect) continue;
            while (end <= row) {
                start = end;
                end = counts.End(++slot_);
            }
            const int32_t pair = static_cast<int32_t>(value[1] * info_->topK + value[2]);
            if (value[0] != slot_ % info_->world || (row != start && before >= pair))
                return InvalidOf(*info_, kInvalidSourceIndex, row * 4 + kSourceIndexOrder, static_cast<uint32_t>(pair));
            before = pair;
        }
        return OpStatus();
    }

    UbBuf buf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR expandIdx_ = nullptr;
    AscendC::TEventID loaded_ = 0;
    bool loading_ = false;
    uint32_t first_ = 0;   // rows of the chunk
    uint32_t next_ = 0;    // those after it
    uint32_t end_ = 0;     // of the share
    uint32_t before_ = 0;  // words of the row before the chunk
    uint32_t slot_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_INPUTS_H
