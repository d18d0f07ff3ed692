// Tiling of UB: how many rows are on their way at a time in the steps of the kernels.
#ifndef ASCEND_MOE_DISTRIBUTE_RINGS_H
#define ASCEND_MOE_DISTRIBUTE_RINGS_H

#include <algorithm>

#include "moe_distribute_args.h"
#include "moe_distribute_combine_tiling.h"
#include "moe_distribute_dispatch_tiling.h"

namespace moe {

constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kChunkBytes = 56 * 1024;  // one of the two chunks of rows on their way
constexpr uint32_t kMaxChunkRows = 4095;     // blockCount of one DataCopyPad
constexpr uint32_t kSendPairs = 512;         // pairs whose places and triples are in UB at a time
constexpr uint32_t kMaxSendRing = 4;
constexpr uint32_t kMaxGatherRing = 4;
constexpr uint32_t kMaxSumRing = 4;

// UB rows in flight while dispatch sends: what is left of UB after the fixed tables and the quantiser's rows.
inline uint32_t SendRing(const MoeDistributeInfo& info) {
    const uint32_t rowBytes = info.hidden * TypeSize(info.xType), floatBytes = info.hidden * 4;
    const uint32_t lanes = PaddedInts(info.experts) * 4;
    uint32_t fixed = 3 * lanes + std::max(8192u, lanes) + kSendPairs * (4 + 1 + 4 + 4) +
                     (info.cores + 1) * kBlock + info.world * kBlock + 1024;
    // Triples, or the entries of direct's lists.
    if (info.triples != 0 || info.algorithm == kAlgorithmDirect) fixed += kSendPairs * kBlock;
    uint32_t perRow = rowBytes;
    if (info.quantMode != 0) {
        fixed += floatBytes * (info.hasScales != 0 ? 3 : 2) + 1280;
        perRow += PayloadBytes(info.hidden, 1) + kBlock;
    }
    const uint32_t ring = (kUbBytes - std::min(fixed, kUbBytes)) / (perRow + kBlock);
    return std::max(1u, std::min(ring, kMaxSendRing));
}

inline uint32_t ChunkRows(uint32_t rowBytes) {
    return std::max(1u, std::min(kChunkBytes / rowBytes, kMaxChunkRows));
}

// What direct dispatch has in UB besides the rows that it gathers.
inline uint32_t GatherFixed(const MoeDistributeInfo& info) {
    const uint32_t slots = PaddedInts(info.world * info.localExperts) * 4;
    uint32_t fixed = (info.cores + 1) * kBlock + PaddedInts(info.localExperts) * 4 +
                     (info.world + 1) * StatusRunBytes(info.localExperts) + (info.world + 2) * kBlock +
                     2 * slots + PaddedInts(info.world) * 4 + kSendPairs * 4 +
                     static_cast<uint32_t>(CeilTo(info.localExperts * 8ull, kBlock)) + kBlock;
    if (info.triples != 0) fixed += kSendPairs * kTripleWords * 4;
    if (info.cores > 1) fixed += MatchBytes(info.world, info.localExperts);
    if (ScansSegments(info.world, info.cores)) fixed += ScanBytes(info.world, info.localExperts);
    return fixed;
}
// Chunks in flight, and rows of each, while direct dispatch gathers.
inline void GatherRing(const MoeDistributeInfo& info, MoeDistributeDispatchTiling& tiling) {
    const uint32_t stride =
        DispatchRowStride(info.hidden, TypeSize(info.wireType), info.quantMode != 0, false);
    const uint32_t room = (kUbBytes - GatherFixed(info)) / stride;
    tiling.copyRing = std::max(1u, std::min(room, kMaxGatherRing));
    tiling.copyRows = std::max(1u, std::min(room / tiling.copyRing, kMaxChunkRows));
}

// Parts of rows in flight while direct combine sums.
inline uint32_t SumRing(const MoeDistributeInfo& info, uint32_t partElements) {
    const uint32_t lanes = PaddedInts(info.experts) * 4, part = partElements * TypeSize(info.xType);
    const bool wide = info.xType == kTypeFp32;
    const uint32_t fixed = (info.cores + 1) * kBlock + 5 * lanes + std::max(8192u, lanes) +
                           kSendPairs * (4 + 1 + 4 + 4 + 4) + (info.world + 1) * (8 + kBlock) +
                           info.world * (StartsBytes(info.localExperts) + StatusRunBytes(info.localExperts)) +
                           (info.cores > 1 ? MatchBytes(info.world, info.localExperts) : 0) +
                           (wide ? 1 : 2) * part + (wide ? 1 : 2) * partElements * 4 + 256;
    const uint32_t room = (kUbBytes - std::min(fixed, kUbBytes)) / part;
    return std::max(1u, std::min(room, kMaxSumRing));
}

// Cores that share one token's H while combine sums, when there are more cores than tokens.
inline void SplitTokens(const MoeDistributeInfo& info, MoeDistributeCombineTiling& tiling) {
    constexpr uint32_t kUnit = 32;  // elements
    constexpr uint32_t kLeastPart = 512;
    uint32_t parts = info.batch == 0 ? 1 : std::max(1u, info.cores / std::max(1u, info.batch));
    parts = std::max(1u, std::min(parts, info.hidden / kLeastPart));
    tiling.partElements = static_cast<uint32_t>(CeilTo(CeilDiv(info.hidden, parts), kUnit));
    tiling.partsPerToken = CeilDiv(info.hidden, tiling.partElements);
}

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RINGS_H
