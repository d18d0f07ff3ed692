// UB of one core by item, in every step of a plan: what the kernels' InitBuffer calls add up to on the core that needs
// most. The rings of a plan are chosen by these sums (rings.h), so a plan that is refused for want of UB needs no other
// account of it.
#pragma once

#include "call_plan.h"

namespace moe {

struct UbItem {
    const char* name;
    uint32_t bytes;
};

// Of one step.
class UbBudget {
public:
    UbBudget(const CallPlan& plan, Step step) : plan_(plan), info_(plan.info()) {
        Add("verdicts of the cores", VerdictBytes(info_.cores));
        switch (step) {
            case Step::kSend: plan.op == kOpDispatch ? DispatchSend() : CombineSend(); break;
            case Step::kStatus: DispatchStatus(); break;
            case Step::kCopy: DispatchCopy(); break;
            case Step::kSum: CombineSum(); break;
            case Step::kPublish: DirectPublish(); break;
            case Step::kLists: plan.dispatch.listCores == 0 ? DirectLists() : DirectExpertLists(); break;
            case Step::kGather: DirectGather(); break;
            case Step::kReturn: DirectReturn(); break;
        }
    }
    const UbItem* begin() const { return items_; }
    const UbItem* end() const { return items_ + count_; }
    uint64_t Bytes() const { return bytes_; }

private:
    // UB is carved in blocks.
    void Add(const char* name, uint64_t bytes) {
        if (bytes == 0) return;
        const uint64_t blocks = CeilTo(bytes, kBlock);
        items_[count_++] = {name, static_cast<uint32_t>(blocks)};
        bytes_ += blocks;
    }
    uint32_t Ints(uint32_t n) const { return PaddedInts(n) * 4; }
    uint32_t Counts() const { return MessageCounts(info_.algorithm, plan_.op, info_.localExperts); }
    uint32_t Slots() const { return info_.world * info_.localExperts; }

    // The first step of a core.
    void Entry() { Add("epoch", kBlock); }
    void Routing() {
        const uint32_t lanes = Ints(info_.experts);
        Add("expert ids", kChunkPairs * 4);
        if (info_.maskRank != 0) Add("mask", kChunkPairs);
        Add("counts, totals, places", 3 * lanes);
    }
    void Places() { Add("histograms, places", RowPlacesBytes(info_)); }
    void Segments() {
        Add("segments", 2 * Ints(Slots()));
        Add("rows by source", Ints(info_.world));
    }
    // Sending a run, and waiting for a share of the sources. Core 0, which has `before` bytes from the entry
    // besides, may have one source fewer than others.
    void Status(uint32_t before) {
        const uint32_t run = StatusMessageBytes(info_.localExperts);
        const uint32_t first = info_.world / info_.cores, most = CeilDiv(info_.world, info_.cores);
        const bool ofFirst = before + first * run >= most * run;
        if (ofFirst) Add("abort blocks at entry", before);
        Add("status run", run);
        Add("BatchWrite item", kBlock);
        Add("flags of blocks", 2 * FlagBytes(info_) + FlagBitBytes(info_));
        Add("abort blocks", AbortBytes(info_.world));
        Add("awaited runs", static_cast<uint64_t>(ofFirst ? first : most) * run);
        if (info_.measures != 0) Add("times of the sources", WaitTimesBytes(most));
    }

    // Rows of x on their way out, and what quantizes them.
    void SendRows() {
        const MoeDistributeDispatchTiling& tiling = plan_.dispatch;
        const uint64_t row = static_cast<uint64_t>(info_.hidden) * TypeSize(info_.xType);
        Add("rows of x", tiling.sendRing * CeilTo(row, kBlock));
        if (info_.quantMode != 0) {
            const uint64_t values = CeilTo(tiling.quantPiece * 4ull, kBlock);
            Add("int8 rows", static_cast<uint64_t>(tiling.sendRing) * (PayloadBytes(info_.hidden, 1) + kBlock));
            Add("fp32 rows of the quantizer", 2 * values);
            Add("its reduction", QuantReduceBytes(info_.hidden, tiling.quantPiece));
            if (info_.hasScales != 0) Add("smooth scales", values);
        }
    }
    void DispatchSend() {
        Entry();
        Routing();
        Places();
        SendRows();
        Add("expand_idx, row numbers", 2 * kChunkPairs * 4);
        if (info_.triples != 0) Add("triples", kChunkPairs * kBlock);
        if (info_.hasWeights != 0) Add("weights", kChunkPairs * (4 + kBlock));
        Add("rows with tails", plan_.dispatch.tailRing * TailedRowBytes(info_));
        Add("abort blocks", AbortBytes(info_.world));
    }
    void DispatchStatus() {
        Add("counts", Ints(info_.experts));
        Status(0);
    }
    void DispatchCopy() {
        const uint64_t stride =
            DispatchRowStride(info_.hidden, TypeSize(info_.wireType), info_.quantMode != 0, TailBlocks(info_));
        Segments();
        Add("messages of all sources", static_cast<uint64_t>(info_.world) * StatusMessageBytes(info_.localExperts));
        if (FindsPlaces(info_))
            Add("their sums", ScanBytes(info_.world, info_.localExperts, StatusMessageBytes(info_.localExperts)));
        Add("rows of the window", plan_.dispatch.copyRing * CeilTo(plan_.dispatch.copyRows * stride, kBlock));
        Add("expert_token_nums", CeilTo(info_.localExperts * 8ull, kBlock) + kBlock);
    }

    void CombineSend() {
        Entry();
        Routing();
        Places();
        if (info_.triples != 0) {
            SendCounts();
            Add("counts of the messages", CountsMatchBytes(info_.experts));
            Add("triples", Ints((kChunkPairs + 1) * kTripleWords));
        } else {
            Segments();
            Add("expand_idx", kChunkPairs * 4);
            Add("ep_send_counts", Ints(Slots()));
        }
        const uint32_t row = ReturnedRowBytes(info_, TypeSize(info_.xType));
        ReturnedRows(plan_.combine.sendRows * (info_.triples != 0 ? SlotBytes(row) : row));
        if (info_.triples != 0) {
            Add("abort blocks at entry", AbortBytes(info_.world));
            OwnRun();
            AllRuns();
        } else {
            Status(AbortBytes(info_.world));
        }
    }
    // Rows of expand_x on their way, in chunks of so many bytes, and what makes codes of them.
    void ReturnedRows(uint64_t chunkBytes) {
        const MoeDistributeCombineTiling& tiling = plan_.combine;
        if (info_.quantMode == 0) return Add("rows of expand_x", tiling.returnRing * CeilTo(chunkBytes, kBlock));
        const uint64_t rows = UnquantizedBytes(tiling, TypeSize(info_.xType));
        Add("rows of expand_x", tiling.returnRing * CeilTo(rows, kBlock));
        Add("rows of codes", tiling.returnRing * CeilTo(chunkBytes, kBlock));
        Add("fp32 rows of the quantizer", 2 * CodedLanes(tiling.quantPiece) * 4ull);
        Add("its scales", CodedScaleBytes(tiling.quantPiece));
    }
    void CombineSum() {
        Routing();
        if (info_.triples != 0) {
            Add("marks of rows", kChunkPairs * kBlock);
        } else {
            Add("expand_idx", kChunkPairs * 4);
        }
        Sums();
    }
    void Sums() {
        Add("weights", kChunkPairs * 4);
        Add("rows to sum", plan_.combine.sumRing * CeilTo(PieceBytes(), kBlock));
        Results();
    }
    uint32_t PieceBytes() const {
        const MoeDistributeCombineTiling& tiling = plan_.combine;
        return SumPieceBytes(info_, HasPlainTerms(tiling), tiling.partElements, TypeSize(info_.xType));
    }
    // Of WeightedSum.
    void Results() {
        const uint32_t part = plan_.combine.partElements, size = TypeSize(info_.xType);
        const bool wide = info_.xType == kTypeFp32;
        Add("results", (wide ? 1 : 2) * CeilTo(part * size, kBlock));
        Add("fp32 term", part * 4);
        if (!wide) Add("fp32 sum", part * 4);
        if (info_.alphaRank != 0) {
            Add("factors of const experts", ConstFactorBytes(info_.alphaRank, static_cast<uint32_t>(size)));
            Add("fp32 terms of const experts", part * 4);
        }
        if (info_.quantMode == 0) return;
        Add("rows of codes as elements", CodedLanes(part) * size);
        Add("their scales", CodedScaleBytes(part) + CodedLanes(part) * 4);
    }

    // Waiting for all sources, whose runs stay.
    void AllRuns() {
        Add("fail block", kBlock);
        Add("abort blocks", AbortBytes(info_.world));
        if (info_.measures != 0) Add("times of the sources", WaitTimesBytes(info_.world));
        Add("runs of all sources", WaitBytes(info_.world, info_.cores, Counts(), info_.localExperts));
        if (info_.cores > 1)
            Add("their comparison", MatchBytes(MessagesAtOnce(info_.world, info_.cores, Counts()), Counts()));
    }
    void OwnRun() {
        Add("status runs", MessagesInUb(info_) * StatusMessageBytes(Counts()));
        Add("BatchWrite item", kBlock);
    }
    void DirectPublish() {
        Entry();
        Routing();
        SendRows();
        if (info_.hasWeights != 0) Add("weights", kChunkPairs * 4);
        Add("abort blocks", AbortBytes(info_.world));
    }
    void DirectLists() {
        Routing();
        Places();
        if (info_.triples == 0) Add("expand_idx", kChunkPairs * 4);
        Add("list entries", kChunkPairs * kBlock);
    }
    void DirectExpertLists() {
        const uint32_t pairs = info_.batch * info_.topK, lanes = ListLanes(pairs),
                       experts = CeilDiv(info_.experts, plan_.dispatch.listCores);
        Entry();
        Add("expert ids, pair numbers", 2 * lanes * 4);
        Add("comparisons", 2 * CeilTo(CeilTo(lanes, 128) / 8, kBlock));
        if (info_.maskRank != 0) {
            const uint32_t masks = Max(1, info_.maskRank == 1 ? info_.batch : pairs);
            Add("mask", CeilTo(masks, kBlock));
            Add("mask as numbers", CeilTo(masks, 128) * 2);
        }
        Add("counts", Ints(experts));
        Add("lists", ListInts(lanes, experts) * 4);
        if (info_.triples == 0) Add("positions", kPositionBlocks * (kBlock + 4));
        Add("abort blocks", AbortBytes(info_.world));
    }
    void DirectGather() {
        const uint64_t stride = DispatchRowStride(info_.hidden, TypeSize(info_.wireType), info_.quantMode != 0, 0);
        Add("counts", Ints(info_.experts));
        OwnRun();
        AllRuns();
        Segments();
        if (ScansSegments(info_.world, info_.cores))
            Add("their sums", ScanBytes(info_.world, info_.localExperts,
                                        KeptBytes(info_.world, info_.cores, Counts(), info_.localExperts)));
        if (plan_.dispatch.sharedLanes != 0) {
            Add("lists, places, triples", SharedRowBytes(info_, plan_.dispatch.sharedLanes));
        } else {
            Add("lists", kChunkPairs * 4);
            if (info_.triples != 0) Add("triples", kChunkPairs * kTripleWords * 4);
        }
        if (info_.hasWeights != 0) Add("weights", kWeightRows * (4 + kBlock));
        Add("rows of the sources", plan_.dispatch.copyRing * CeilTo(plan_.dispatch.copyRows * stride, kBlock));
        Add("expert_token_nums", CeilTo(info_.localExperts * 8ull, kBlock) + kBlock);
    }
    // One plan for the whole op.
    void SendCounts() {
        Add("segments", 2 * Ints(Slots()));
        Add("their check", ReturnCountLanes(info_.world, Slots()) * 4 + Ints(Slots()) + 2 * kBlock);
    }
    void DirectReturn() {
        const MoeDistributeCombineTiling& tiling = plan_.combine;
        const uint32_t row = ReturnedRowBytes(info_, TypeSize(info_.xType));
        Entry();
        Routing();
        if (info_.triples == 0) {
            Add("expand_idx", kChunkPairs * 4);
            Add("largest positions", Ints(info_.experts));
        }
        SendCounts();
        Add("counts of the messages", CountsMatchBytes(info_.experts));
        if (info_.triples != 0) Add("triples", Ints((kChunkPairs + 1) * kTripleWords));
        ReturnedRows(info_.quantMode != 0 ? tiling.sendRows * row : ReturnChunkBytes(row, tiling.sendRows));
        Add("positions", kChunkPairs * 4);
        Add("weights", kChunkPairs * 4);
        Add("addresses", SumEntries(info_) * 8);
        Add("their weights", SumEntries(info_) * 4);
        if (info_.alphaRank != 0) Add("their kinds", SumEntries(info_) * 8);
        Add("rows of a token", ChunkTokens(info_) * 4);
        Add("rows to sum",
            tiling.sumRing / tiling.sumGroup * SumGroupBytes(info_.experts, tiling.sumGroup, PieceBytes()));
        Results();
        Add("abort blocks at entry", AbortBytes(info_.world));
        OwnRun();
        AllRuns();
    }

    static constexpr uint32_t kMostItems = 40;
    const CallPlan& plan_;
    const MoeDistributeInfo& info_;
    UbItem items_[kMostItems];
    uint32_t count_ = 0;
    uint64_t bytes_ = 0;
};

// The step of a plan that needs most UB.
inline Step FullestStep(const CallPlan& plan) {
    const StepList steps = StepsOf(plan);
    return *std::max_element(steps.begin(), steps.end(),
                             [&](Step a, Step b) { return UbBudget(plan, a).Bytes() < UbBudget(plan, b).Bytes(); });
}

}  // namespace moe
