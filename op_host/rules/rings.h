// Tiling of UB: rows in flight in the kernels' steps. Every choice is the largest with which the step fits into UB
// (ub.h) and its queues into the event ids (events.h). If not even one row fits, the step takes smaller pieces.
#pragma once

#include "events.h"
#include "ub.h"

namespace moe {

constexpr uint32_t kChunkBytes = 56 * 1024;  // one of the two chunks of rows in flight
constexpr uint32_t kMaxReturnRing = 4;
constexpr uint32_t kMaxTrailerRing = 4;
constexpr uint32_t kMostPart = 8192;                                 // elements that are summed at a time
constexpr uint32_t kPartUnit = 32;                                   // of them,
constexpr uint32_t kFlaggedUnit = 128;                               // where scales of them end at whole blocks
constexpr uint32_t kQuantWhole = 7168;                               // longest row that is quantized in one piece,
constexpr uint32_t kQuantPieces[] = {kQuantWhole, 2048, 1024, 512};  // and the pieces of others, the largest that fits

inline uint32_t ChunkRows(uint32_t rowBytes) { return Max(1, Min(kChunkBytes / rowBytes, kMostPieces)); }

// Cores that may make lists in direct dispatch while the others, one at least, publish rows.
inline uint32_t MostListCores(const MoeDistributeInfo& info) {
    return info.batch * info.topK <= kMostListPairs ? info.cores - 1 : 0;
}
// Roles pay off with many cores: one core barrier instead of two, but a core that makes lists reads all ids.
inline uint32_t ListCores(const MoeDistributeInfo& info, int32_t asked) {
    if (asked > 0) return Min(static_cast<uint32_t>(asked), MostListCores(info));
    if (info.cores < kManyCores) return 0;
    const uint32_t share = info.batch > 4 * info.cores ? 8 : 4;
    return Min(info.cores / share, MostListCores(info));
}

// Reading rows once for all experts of a rank pays off with many cores.
inline bool SharesRows(const MoeDistributeInfo& info) {
    constexpr uint32_t kMostPairs = 1u << 19;  // keys are exact
    return info.hasScales == 0 && info.localExperts > 1 && info.topK > 1 && info.cores >= kManyCores &&
           info.cores >= SharedRowGroups(info) && info.maxBatch * info.topK <= kMostPairs;
}
constexpr uint32_t kSharedLaneUnit = 32, kMostSharedLanes = 1024, kLeastSharedLanes = 256;
// List entries of a group of sources that are worth sorting at a time.
inline uint32_t SharedLanes(const MoeDistributeInfo& info) {
    if (!SharesRows(info)) return 0;
    const uint32_t entries = SharedRowSources(info) * PaddedInts(info.capacity);
    return CeilDiv(Max(1, Min(kMostSharedLanes, entries)), kSharedLaneUnit) * kSharedLaneUnit;
}

// Parts of codes in flagged blocks, and parts made in hierarchy, are loaded in whole blocks of 32 bytes, scales too.
inline uint32_t PartUnit(const MoeDistributeInfo& info) {
    const bool whole = info.rdmaFlags != 0 || info.algorithm == kAlgorithmHierarchy;
    return whole && CommQuantMode(info) != 0 ? kFlaggedUnit : kPartUnit;
}
inline void SetParts(const MoeDistributeInfo& info, uint32_t parts, MoeDistributeCombineTiling& tiling) {
    tiling.partElements = static_cast<uint32_t>(CeilTo(CeilDiv(info.hidden, parts), PartUnit(info)));
    tiling.partsPerToken = CeilDiv(info.hidden, tiling.partElements);
    // A whole row of codes is loaded together with its scales.
    if (tiling.partsPerToken == 1 && info.rdmaFlags == 0)
        tiling.partElements = static_cast<uint32_t>(CeilTo(info.hidden, kPartUnit));
}
// Cores that share one token's H while combine sums, when there are more cores than tokens.
inline void SplitTokens(const MoeDistributeInfo& info, MoeDistributeCombineTiling& tiling) {
    constexpr uint32_t kLeastPart = 512;
    const uint32_t parts = info.batch == 0 ? 1 : Max(1, info.cores / info.batch);
    SetParts(info, Max(CeilDiv(info.hidden, kMostPart), Min(parts, info.hidden / kLeastPart)), tiling);
}
// Direct combine: shares a token's H so that all cores sum equally much, in few parts.
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

// Chooses the rings of a plan whose other words are set.
class RingChooser {
public:
    RingChooser(CallPlan& plan, uint32_t ub) : plan_(plan), info_(plan.info()), ub_(ub) {}

    void WindowDispatch() {
        SendRows(Step::kSend);
        CopiedRows();
    }
    // Chunks of window rows in flight while they become expand_x, and rows of each.
    void CopiedRows() {
        const uint32_t most = ChunkRows(RowBytesWithTrailer(info_));
        plan_.dispatch.copyRing = 2;
        if (Grow(plan_.dispatch.copyRows, 1, most, Step::kCopy)) return;
        plan_.dispatch.copyRing = 1;
        Grow(plan_.dispatch.copyRows, 1, most, Step::kCopy);
    }
    // `listCores`: the caller's choice; 0: as many as pay off.
    void DirectDispatch(int32_t listCores) {
        SendRows(Step::kPublish);
        plan_.dispatch.listCores = ListCores(info_, listCores);
        if (!Fits(Step::kLists)) plan_.dispatch.listCores = 0;
        GatheredRows();
    }
    void WindowCombineBase() {
        InPieces(plan_.combine.quantPiece, [this] { return ReturnedChunks(); });
        SplitTokens(info_, plan_.combine);
        plan_.combine.sumGroup = 1;
        while (!Grow(plan_.combine.sumRing, 2, kMostRing, Step::kSum) && MoreParts()) continue;
    }
    void HierarchyDispatch() {
        InPieces(plan_.dispatch.quantPiece, [this] { return SendRings(Step::kSend); });
        while (!Fits(Step::kForward) && plan_.dispatch.sendRing > 1) --plan_.dispatch.sendRing;
        CopiedRows();
    }
    void HierarchyCombine() {
        ReturnedChunks();
        SplitTokens(info_, plan_.combine);
        plan_.combine.sumGroup = 1;
        do {
            Grow(plan_.combine.sumRing, 2, kMostRing, Step::kSum);
            while (!Fits(Step::kServerSum) && plan_.combine.sumRing > 2) --plan_.combine.sumRing;
        } while (!(Fits(Step::kSum) && Fits(Step::kServerSum)) && MoreParts());
    }
    void DirectCombine() {
        plan_.combine.sendRows = Max(1, kReturnChunkBytes / RowBytes());
        ShareTokens(info_, plan_.combine);
        const auto fit = [this] { return ReturnedGroups(); };
        while (!InPieces(plan_.combine.quantPiece, fit) && (MoreParts() || FewerRows())) continue;
    }

private:
    bool Fits(Step step) const {
        return UbBudget(plan_, step).Bytes() <= ub_ && EventBudget(plan_, step).Most() <= kMostRing;
    }
    // Sets `size`, a word of the plan's tiling, to the largest number in least..most with which the step fits. Returns
    // false, and sets `least`, if there is none.
    bool Grow(uint32_t& size, uint32_t least, uint32_t most, Step step) {
        size = most;
        if (Fits(step)) return true;
        uint32_t above = most;
        for (uint32_t fits = least; fits + 1 < above;) {
            size = (fits + above) / 2;
            (Fits(step) ? fits : above) = size;
        }
        size = Max(least, above - 1);
        return Fits(step);
    }
    uint32_t RowBytes() const { return info_.hidden * TypeSize(info_.xType); }

    // Rows in flight while dispatch sends or publishes, and the piece of a row that is quantized at a time.
    void SendRows(Step step) {
        InPieces(plan_.dispatch.quantPiece, [this, step] { return SendRings(step); });
    }
    // Sets `piece`, the elements quantized at a time, to the largest with which `fit` finds room, otherwise the
    // smallest.
    template <typename Fit>
    bool InPieces(uint32_t& piece, Fit fit) {
        if (info_.quantMode == 0) return fit();
        for (const uint32_t most : kQuantPieces) {
            if (most == kQuantWhole && info_.hidden > most) continue;
            piece = Min(info_.hidden, most);
            if (fit()) return true;
        }
        return false;
    }
    // In window also rows with their trailers, with many cores and room for two more rows.
    bool SendRings(Step step) {
        const bool window = step == Step::kSend && info_.algorithm == kAlgorithmWindow;
        const bool trailers = window && TrailerBlocks(info_) != 0 && info_.cores >= kManyCores;
        plan_.dispatch.trailerRing = trailers ? kMaxTrailerRing : 0;
        plan_.dispatch.sendRing = 2;
        if (!Fits(step)) plan_.dispatch.trailerRing = 0;
        return Grow(plan_.dispatch.sendRing, 1, kMaxSendRing, step);
    }
    // Chunks in flight, and rows of each, while direct dispatch gathers. With many cores each row leaves as it comes.
    void GatheredRows() {
        MoeDistributeDispatchTiling& tiling = plan_.dispatch;
        tiling.copyRows = 1;
        tiling.sharedLanes = SharedLanes(info_);
        while (!Grow(tiling.copyRing, 1, kMostGatherRing, Step::kGather) && tiling.sharedLanes != 0)
            tiling.sharedLanes = tiling.sharedLanes / 2 < kLeastSharedLanes ? 0 : tiling.sharedLanes / 2;
        Grow(tiling.copyRows, 1, info_.cores >= kManyCores ? 1 : kMostPieces, Step::kGather);
    }
    // Window combine: chunks of rows on the return path, two if they fit, and rows of each.
    bool ReturnedChunks() {
        plan_.combine.returnRing = 2;
        if (Grow(plan_.combine.sendRows, 1, ChunkRows(RowBytes()), Step::kSend)) return true;
        plan_.combine.returnRing = 1;
        return Fits(Step::kSend);
    }
    // Direct combine: chunks of expand_x, and parts of rows to sum, in flight. At least two groups of parts, so that
    // one is summed while another loads; then as many chunks as fit.
    bool ReturnedGroups() {
        MoeDistributeCombineTiling& tiling = plan_.combine;
        for (tiling.returnRing = kMaxReturnRing; tiling.returnRing > 0; --tiling.returnRing) {
            for (tiling.sumGroup = info_.topK; tiling.sumGroup > 0; --tiling.sumGroup) {
                tiling.sumRing = 2 * tiling.sumGroup;
                if (!Fits(Step::kReturn)) continue;
                for (tiling.sumRing = kMaxSumGroups * tiling.sumGroup; !Fits(Step::kReturn);)
                    tiling.sumRing -= tiling.sumGroup;
                return true;
            }
        }
        tiling.returnRing = tiling.sumGroup = 1;
        tiling.sumRing = 2;
        return false;
    }
    // Smaller parts of H while combine sums. Returns false if they are the smallest.
    bool MoreParts() {
        if (plan_.combine.partElements <= PartUnit(info_)) return false;
        for (uint32_t parts = plan_.combine.partsPerToken, before = parts; plan_.combine.partsPerToken == before;)
            SetParts(info_, ++parts, plan_.combine);
        return true;
    }

    // Half as many rows in a chunk of direct combine: codes of a short row take twice its bytes. Returns false if a
    // chunk is one row.
    bool FewerRows() {
        if (plan_.combine.sendRows == 1) return false;
        plan_.combine.sendRows /= 2;
        return true;
    }

    CallPlan& plan_;
    const MoeDistributeInfo& info_;
    const uint32_t ub_;
};

}  // namespace moe
