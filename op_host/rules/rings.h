// Tiling of UB: how many rows are on their way at a time in the steps of the kernels.
#pragma once

#include <algorithm>

#include "args.h"
#include "protocol/tiling.h"

namespace moe {

constexpr uint32_t kUbBytes = 196352;        // what CANN grants of 192 KiB, where nothing else is known
constexpr uint32_t kChunkBytes = 56 * 1024;  // one of the two chunks of rows on their way
constexpr uint32_t kMaxChunkRows = 4095;     // blockCount of one DataCopyPad
constexpr uint32_t kSendPairs = 512;         // pairs whose places and triples are in UB at a time
constexpr uint32_t kMaxSendRing = 4;
constexpr uint32_t kMaxReturnRing = 4;
constexpr uint32_t kMostPart = 8192;  // elements that are summed at a time
static_assert(kMaxSendRing <= kMostRing && kMaxReturnRing <= kMostRing && kMaxSumGroups <= kMostRing,
              "every ring has event ids");

// UB rows in flight while dispatch sends: what is left of UB after the fixed tables and the quantiser's rows.
inline uint32_t SendRing(const MoeDistributeInfo& info, uint32_t ub) {
    const uint32_t rowBytes = info.hidden * TypeSize(info.xType), floatBytes = QuantPiece(info.hidden) * 4;
    const uint32_t lanes = PaddedInts(info.experts) * 4;
    uint32_t fixed = 3 * lanes + kSendPairs * (4 + 1 + 4 + 4) + (info.cores + 1) * kBlock + info.world * kBlock + 1024;
    if (info.algorithm != kAlgorithmDirect) fixed += RowPlacesBytes(info) + kSendPairs * kBlock * TailBlocks(info);
    if (info.hasWeights != 0) fixed += kSendPairs * 4;
    uint32_t perRow = rowBytes;
    if (info.quantMode != 0) {
        fixed += floatBytes * (info.hasScales != 0 ? 3 : 2) + QuantReduceBytes(info.hidden);
        perRow += PayloadBytes(info.hidden, 1) + kBlock;
    }
    const uint32_t ring = (ub - std::min(fixed, ub)) / (perRow + kBlock);
    return std::max(1u, std::min(ring, kMaxSendRing));
}

inline uint32_t ChunkRows(uint32_t rowBytes) { return std::max(1u, std::min(kChunkBytes / rowBytes, kMaxChunkRows)); }

// Window combine: chunks of rows on their way back, two if they fit beside what else is in UB, and rows of each.
inline void ReturnChunks(const MoeDistributeInfo& info, uint32_t ub, MoeDistributeCombineTiling& tiling) {
    const uint32_t lanes = PaddedInts(info.experts) * 4, rowBytes = info.hidden * TypeSize(info.xType);
    const uint32_t messages = (info.triples != 0 ? info.world : CeilDiv(info.world, info.cores)) + 1;
    uint32_t fixed = (info.cores + 1) * kBlock + 8 * lanes + ReturnCountLanes(info.world, info.experts) * 4 +
                     RowPlacesBytes(info) + kSendPairs * (4 + 1 + 4) +
                     messages * StatusMessageBytes(info.localExperts) + 3 * info.world * kBlock + 2048;
    if (info.triples != 0 && info.cores > 1) fixed += MatchBytes(info.world, info.localExperts);
    const uint32_t room = (ub - std::min(fixed, ub)) / (rowBytes + kBlock);  // in rows
    tiling.returnRing = room > 1 ? 2 : 1;
    tiling.sendRows = std::max(1u, std::min(ChunkRows(rowBytes), room / 2));
}

// Cores that may make lists in direct dispatch while the others, one at least, publish rows.
inline uint32_t MostListCores(const MoeDistributeInfo& info) {
    return info.batch * info.topK <= kMostListPairs ? info.cores - 1 : 0;
}
// Roles pay where cores are many: they meet once, not twice, but a core that makes lists reads all ids.
inline uint32_t ListCores(const MoeDistributeInfo& info, int32_t asked) {
    if (asked > 0) return std::min(static_cast<uint32_t>(asked), MostListCores(info));
    if (info.cores < kManyCores) return 0;
    const uint32_t share = info.batch > 4 * info.cores ? 8 : 4;
    return std::min(info.cores / share, MostListCores(info));
}

// What direct dispatch has in UB besides the rows that it gathers.
inline uint32_t GatherFixed(const MoeDistributeInfo& info) {
    const uint32_t slots = PaddedInts(info.world * info.localExperts) * 4;
    uint32_t fixed = (info.cores + 1) * kBlock + PaddedInts(info.experts) * 4 +
                     (info.world + MessagesInUb(info)) * StatusMessageBytes(info.localExperts) +
                     (info.world + 2) * kBlock + 2 * slots + PaddedInts(info.world) * 4 + kSendPairs * 4 +
                     static_cast<uint32_t>(CeilTo(info.localExperts * 8ull, kBlock)) + kBlock;
    if (info.triples != 0) fixed += kSendPairs * kTripleWords * 4;
    if (info.cores > 1) fixed += MatchBytes(info.world, info.localExperts);
    if (ScansSegments(info.world, info.cores)) fixed += ScanBytes(info.world, info.localExperts);
    if (SharesRows(info)) fixed += SharedRowBytes(info);
    if (info.hasWeights != 0) fixed += kWeightRows * (4 + kBlock);
    return fixed;
}
// Chunks in flight, and rows of each, while direct dispatch gathers.
inline void GatherRing(const MoeDistributeInfo& info, uint32_t ub, MoeDistributeDispatchTiling& tiling) {
    const uint32_t stride = DispatchRowStride(info.hidden, TypeSize(info.wireType), info.quantMode != 0, 0);
    const uint32_t fixed = GatherFixed(info), room = (ub - std::min(fixed, ub)) / stride;
    tiling.copyRing = std::max(1u, std::min(room, kMostGatherRing));
    // Many cores: each row leaves as it comes, rather than with others.
    const uint32_t most = info.cores >= kManyCores ? 1 : kMaxChunkRows;
    tiling.copyRows = std::max(1u, std::min(room / tiling.copyRing, most));
}

constexpr uint32_t kPartUnit = 32;  // elements
inline void SetParts(const MoeDistributeInfo& info, uint32_t parts, MoeDistributeCombineTiling& tiling) {
    tiling.partElements = static_cast<uint32_t>(CeilTo(CeilDiv(info.hidden, parts), kPartUnit));
    tiling.partsPerToken = CeilDiv(info.hidden, tiling.partElements);
}

// Cores that share one token's H while combine sums, when there are more cores than tokens.
inline void SplitTokens(const MoeDistributeInfo& info, MoeDistributeCombineTiling& tiling) {
    constexpr uint32_t kLeastPart = 512;
    const uint32_t parts = info.batch == 0 ? 1 : std::max(1u, info.cores / std::max(1u, info.batch));
    SetParts(info, std::max(CeilDiv(info.hidden, kMostPart), std::min(parts, info.hidden / kLeastPart)), tiling);
}

// Direct combine: a token's H is shared so that all cores have as much to sum, in few parts.
inline void ShareTokens(const MoeDistributeInfo& info, MoeDistributeCombineTiling& tiling) {
    constexpr uint32_t kMostParts = 8, kLeastBytes = 2048;
    SplitTokens(info, tiling);
    const auto slowest = [&](uint32_t parts) {  // rows of the core that has most, times 2^16
        return (static_cast<uint64_t>(CeilDiv(info.batch * parts, info.cores)) << 16) / parts;
    };
    uint32_t best = tiling.partsPerToken;
    for (uint32_t parts = best + 1; parts <= kMostParts; ++parts) {
        if (info.hidden * TypeSize(info.xType) / parts < kLeastBytes) break;
        if (slowest(parts) * 20 < slowest(best) * 19) best = parts;
    }
    SetParts(info, best, tiling);
}

// What direct combine has in UB besides copied chunks, rows to sum and their sums.
inline uint32_t ReturnFixed(const MoeDistributeInfo& info) {
    const uint32_t lanes = PaddedInts(info.experts) * 4, slots = info.world * info.localExperts;
    const uint32_t counts = MessageCounts(info.algorithm, kOpCombine, info.localExperts);
    const uint32_t runs = (info.world + MessagesInUb(info)) * StatusMessageBytes(counts);
    uint32_t fixed = (info.cores + 1) * kBlock + 3 * lanes + kSendPairs * (4 + 1 + 4 + 4) + SumEntries(info.topK) * 12 +
                     4 * kSendPairs / info.topK + 3 * PaddedInts(slots) * 4 + ReturnCountLanes(info.world, slots) * 4 +
                     2 * info.world * kBlock + runs + 10 * kBlock;
    if (info.cores > 1) fixed += MatchBytes(info.world, counts);
    fixed += info.triples != 0 ? kSendPairs * kTripleWords * 4 + kBlock : kSendPairs * 4 + lanes;
    return fixed;
}

// Direct combine: chunks of expand_x, and parts of rows to sum, on their way at a time. Two groups of parts
// at least, so that one is summed while another comes; then as many chunks as there is room for.
inline void ReturnRings(const MoeDistributeInfo& info, uint32_t ub, MoeDistributeCombineTiling& tiling) {
    const uint32_t size = TypeSize(info.xType), fixed = ReturnFixed(info);
    const bool wide = info.xType == kTypeFp32;
    tiling.sendRows = std::max(1u, kReturnChunkBytes / (info.hidden * size));
    ShareTokens(info, tiling);
    for (uint32_t parts = tiling.partsPerToken;; ++parts) {
        SetParts(info, parts, tiling);
        const uint32_t piece = tiling.partElements * size;
        const uint32_t sums = (wide ? 1 : 2) * (piece + tiling.partElements * 4);
        for (tiling.returnRing = kMaxReturnRing; tiling.returnRing > 0; --tiling.returnRing) {
            const uint32_t taken =
                fixed + sums + tiling.returnRing * ReturnChunkBytes(info.hidden * size, tiling.sendRows);
            const uint32_t room = taken < ub ? (ub - taken) / SumGroupBytes(info.experts, 1, piece) : 0;
            if (room < 2) continue;
            tiling.sumGroup = std::min(info.topK, room / 2);
            tiling.sumRing = std::min(kMaxSumGroups, room / tiling.sumGroup) * tiling.sumGroup;
            return;
        }
    }
}
}  // namespace moe
