// The arguments of combine and the checks on them that both algorithms share.
#ifndef ASCEND_MOE_COMMON_INPUTS_H
#define ASCEND_MOE_COMMON_INPUTS_H

#include "exchange.h"
#include "routing.h"
#include "segments.h"

namespace moe {

// All GM arguments of the entry that the bodies use.
struct CombineArguments {
    GM_ADDR expandX;
    GM_ADDR expertIds;
    GM_ADDR expandIdx;
    GM_ADDR epSendCounts;
    GM_ADDR expertScales;
    GM_ADDR xActiveMask;
    GM_ADDR sharedExpertX;
    GM_ADDR x;
    GM_ADDR errorRecord;
    GM_ADDR workspace;
    GM_ADDR tiling;
};

__aicore__ inline Verdict MismatchOf(const MoeDistributeInfo& info, uint32_t expert, uint32_t ours, uint32_t theirs) {
    Verdict verdict = InvalidOf(info, kRoutingMismatch, expert, ours);
    verdict.detail2 = theirs;
    return verdict;
}

// The segments of expand_x from ep_send_counts: monotone, within expand_x, and no source over its capacity.
// `prefix`: room for all of them.
__aicore__ inline Verdict LoadSegments(const MoeDistributeInfo& info, GM_ADDR epSendCounts,
                                       const LocalTensor<int32_t>& prefix, SegmentTable& segments) {
    GlobalTensor<int32_t> sendCounts;
    sendCounts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(epSendCounts), segments.slots());
    CopyIn(prefix, sendCounts, segments.slots());
    SyncFunc<HardEvent::MTE2_S>();
    uint32_t bad = 0;
    if (!segments.FromPrefix(prefix, info.expandRows, bad))
        return InvalidOf(info, kInvalidCounts, bad, static_cast<uint32_t>(prefix.GetValue(bad)));
    for (uint32_t s = 0; s < info.world; ++s) {
        if (segments.SourceRows(s) > info.capacity)
            return InvalidOf(info, kInvalidCounts, kCountsOfSource | s, segments.SourceRows(s));
    }
    return Verdict();
}

// A triple out of range: word 0 source rank, 1 token, 2 k.
__aicore__ inline Verdict CheckTriple(const MoeDistributeInfo& info, const LocalTensor<int32_t>& triple, uint32_t at,
                                      uint32_t row) {
    const uint32_t limits[kTripleWords] = {info.world, info.maxBatch, info.topK};
    for (uint32_t w = 0; w < kTripleWords; ++w) {
        const uint32_t value = static_cast<uint32_t>(triple.GetValue(at + w));
        if (value >= limits[w]) return InvalidOf(info, kInvalidTriple, row * 4 + w, value);
    }
    return Verdict();
}

// A peer must return exactly the rows that this rank's own ids sent it.
__aicore__ inline Verdict CompareCounts(const MoeDistributeInfo& info, RoutingTable& routing, uint32_t source,
                                        const LocalTensor<uint32_t>& message) {
    for (uint32_t l = 0; l < info.localExperts; ++l) {
        const uint32_t expert = source * info.localExperts + l;
        const uint32_t ours = routing.Total(static_cast<int32_t>(expert));
        const uint32_t theirs = message.GetValue(StatusWriter::CountWord(l));
        if (ours != theirs) return MismatchOf(info, expert, ours, theirs);
    }
    return Verdict();
}

// V1: a position of expand_idx past the expert's pairs would read another row. The verdict is the first such
// among pairs [begin, end).
__aicore__ inline Verdict CheckIndex(const MoeDistributeInfo& info, GM_ADDR expandIdx, RoutingTable& routing,
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
        SyncFunc<HardEvent::S_MTE2>();
    }
    return Verdict();
}

// After a failure: this core's share of the sums is zeros. The UB is free.
__aicore__ inline void ZeroSums(Exchange& exchange, const MoeDistributeInfo& info, GM_ADDR sums, uint32_t rowBytes) {
    UbBuf zeroBuf;
    exchange.pipe().InitBuffer(zeroBuf, rowBytes);
    AscendC::Duplicate(zeroBuf.Get<int16_t>(), static_cast<int16_t>(0),
                       static_cast<int32_t>(rowBytes / sizeof(int16_t)));
    SyncFunc<HardEvent::V_MTE3>();
    GlobalTensor<int8_t> x;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(sums), static_cast<uint64_t>(info.batch) * rowBytes);
    const uint32_t end = PartBegin(info.batch, exchange.core() + 1, info.cores);
    for (uint32_t token = PartBegin(info.batch, exchange.core(), info.cores); token < end; ++token)
        AscendC::DataCopy(x[static_cast<uint64_t>(token) * rowBytes], zeroBuf.Get<int8_t>(), rowBytes);
    AscendC::PipeBarrier<PIPE_ALL>();
}

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_INPUTS_H
