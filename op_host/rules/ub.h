// UB of one core by item, for every plan of a call: what the kernels' InitBuffer calls add up to on the core
// that needs most. A kernel gives its UB back between the steps, so that the largest step is the need.
#pragma once

#include <vector>

#include "plan.h"

namespace moe {

struct UbItem {
    const char* step;
    const char* name;
    uint32_t bytes;
};

class UbBudget {
public:
    explicit UbBudget(const CallPlan& plan)
        : plan_(plan), info_(plan.op == kOpDispatch ? plan.dispatch.info : plan.combine.info) {
        const bool direct = info_.algorithm == kAlgorithmDirect;
        if (direct && plan.op == kOpDispatch) {
            DirectPublish();
            if (plan.dispatch.listCores == 0) {
                DirectLists();
            } else {
                DirectExpertLists();
            }
            DirectGather();
        } else if (direct) {
            DirectReturn();
        } else if (plan.op == kOpDispatch) {
            DispatchSend();
            DispatchStatus();
            DispatchCopy();
        } else {
            CombineSend();
            CombineSum();
        }
    }
    const std::vector<UbItem>& items() const { return items_; }

private:
    void Step(const char* step) {
        step_ = step;
        Add("verdicts of the cores", (info_.cores + 1) * kBlock);
    }
    // UB is carved in blocks.
    void Add(const char* name, uint64_t bytes) {
        if (bytes != 0) items_.push_back({step_, name, static_cast<uint32_t>(CeilTo(bytes, kBlock))});
    }
    uint32_t Ints(uint32_t n) const { return PaddedInts(n) * 4; }
    uint32_t Counts() const { return MessageCounts(info_.algorithm, plan_.op, info_.localExperts); }
    uint32_t Slots() const { return info_.world * info_.localExperts; }

    // The first step of an op.
    void Entry(const char* step) {
        Step(step);
        Add("epoch", kBlock);
    }
    void Routing() {
        const uint32_t lanes = Ints(info_.experts);
        Add("expert ids", kSendPairs * 4);
        if (info_.maskRank != 0) Add("mask", kSendPairs);
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
        Add("abort blocks", info_.world * kBlock);
        Add("awaited runs", static_cast<uint64_t>(ofFirst ? first : most) * run);
    }

    // Rows of x on their way out, and what quantises them.
    void SendRows() {
        const MoeDistributeDispatchTiling& tiling = plan_.dispatch;
        const uint64_t row = static_cast<uint64_t>(info_.hidden) * TypeSize(info_.xType);
        Add("rows of x", tiling.sendRing * CeilTo(row, kBlock));
        if (info_.quantMode != 0) {
            const uint64_t values = CeilTo(static_cast<uint64_t>(QuantPiece(info_.hidden)) * 4, kBlock);
            Add("int8 rows", static_cast<uint64_t>(tiling.sendRing) * (PayloadBytes(info_.hidden, 1) + kBlock));
            Add("fp32 rows of the quantiser", 2 * values);
            Add("its reduction", QuantReduceBytes(info_.hidden));
            if (info_.hasScales != 0) Add("smooth scales", values);
        }
    }
    void DispatchSend() {
        Entry("send");
        Routing();
        Places();
        SendRows();
        Add("expand_idx, row numbers", 2 * kSendPairs * 4);
        if (info_.triples != 0) Add("triples", kSendPairs * kBlock);
        if (info_.hasWeights != 0) Add("weights", kSendPairs * (4 + kBlock));
        Add("abort blocks", info_.world * kBlock);
    }
    void DispatchStatus() {
        Step("status");
        Add("counts", Ints(info_.experts));
        Status(0);
    }
    void DispatchCopy() {
        const uint64_t stride =
            DispatchRowStride(info_.hidden, TypeSize(info_.wireType), info_.quantMode != 0, TailBlocks(info_));
        Step("copy");
        Segments();
        Add("messages of all sources", static_cast<uint64_t>(info_.world) * StatusMessageBytes(info_.localExperts));
        if (FindsPlaces(info_)) Add("their sums", ScanBytes(info_.world, info_.localExperts));
        Add("rows of the window", plan_.dispatch.copyRing * CeilTo(plan_.dispatch.copyRows * stride, kBlock));
        Add("expert_token_nums", CeilTo(info_.localExperts * 8ull, kBlock) + kBlock);
    }

    void CombineSend() {
        const MoeDistributeCombineTiling& tiling = plan_.combine;
        const uint64_t row = static_cast<uint64_t>(info_.hidden) * TypeSize(info_.xType);
        Entry("send");
        Routing();
        Places();
        if (info_.triples != 0) {
            SendCounts();
            Add("triples", Ints(tiling.sendRows * kTripleWords));
        } else {
            Segments();
            Add("expand_idx", kSendPairs * 4);
            Add("ep_send_counts", Ints(Slots()));
        }
        Add("rows of expand_x", tiling.returnRing * CeilTo(tiling.sendRows * row, kBlock));
        if (info_.triples != 0) {
            Add("abort blocks at entry", info_.world * kBlock);
            OwnRun();
            AllRuns();
        } else {
            Status(info_.world * kBlock);
        }
    }
    void CombineSum() {
        Step("sum");
        Routing();
        Add("expand_idx", kSendPairs * 4);
        Sums();
    }
    void Sums() {
        const uint64_t part = plan_.combine.partElements, size = TypeSize(info_.xType);
        const bool wide = info_.xType == kTypeFp32;
        Add("weights", kSendPairs * 4);
        Add("rows to sum", plan_.combine.sumRing * CeilTo(part * size, kBlock));
        Add("results", (wide ? 1 : 2) * CeilTo(part * size, kBlock));
        Add("fp32 term", part * 4);
        if (!wide) Add("fp32 sum", part * 4);
    }

    // Waiting for all sources, whose runs stay.
    void AllRuns() {
        Add("fail block", kBlock);
        Add("abort blocks", info_.world * kBlock);
        Add("runs of all sources", static_cast<uint64_t>(info_.world) * StatusMessageBytes(Counts()));
        if (info_.cores > 1) Add("their comparison", MatchBytes(info_.world, Counts()));
    }
    void OwnRun() {
        Add("status runs", MessagesInUb(info_) * StatusMessageBytes(Counts()));
        Add("BatchWrite item", kBlock);
    }
    void DirectPublish() {
        Entry("publish");
        Routing();
        SendRows();
        if (info_.hasWeights != 0) Add("weights", kSendPairs * 4);
        Add("abort blocks", info_.world * kBlock);
    }
    void DirectLists() {
        Step("lists");
        Routing();
        Places();
        if (info_.triples == 0) Add("expand_idx", kSendPairs * 4);
        Add("list entries", kSendPairs * kBlock);
    }
    void DirectExpertLists() {
        const uint32_t pairs = info_.batch * info_.topK, lanes = ListLanes(pairs),
                       experts = CeilDiv(info_.experts, plan_.dispatch.listCores);
        Entry("lists");
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
        Add("abort blocks", info_.world * kBlock);
    }
    void DirectGather() {
        const uint64_t stride = DispatchRowStride(info_.hidden, TypeSize(info_.wireType), info_.quantMode != 0, 0);
        Step("gather");
        Add("counts", Ints(info_.experts));
        OwnRun();
        AllRuns();
        Segments();
        if (ScansSegments(info_.world, info_.cores)) Add("their sums", ScanBytes(info_.world, info_.localExperts));
        if (SharesRows(info_)) {
            Add("lists, places, triples", SharedRowBytes(info_));
        } else {
            Add("lists", kSendPairs * 4);
            if (info_.triples != 0) Add("triples", kSendPairs * kTripleWords * 4);
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
        const uint64_t size = TypeSize(info_.xType), part = tiling.partElements;
        const bool wide = info_.xType == kTypeFp32;
        Entry("return");
        Routing();
        if (info_.triples == 0) {
            Add("expand_idx", kSendPairs * 4);
            Add("largest positions", Ints(info_.experts));
        }
        SendCounts();
        if (info_.triples != 0) Add("triples", Ints((kSendPairs + 1) * kTripleWords));
        Add("rows of expand_x",
            tiling.returnRing * ReturnChunkBytes(static_cast<uint32_t>(info_.hidden * size), tiling.sendRows));
        Add("positions", kSendPairs * 4);
        Add("weights", kSendPairs * 4);
        Add("addresses", SumEntries(info_.topK) * 8);
        Add("their weights", SumEntries(info_.topK) * 4);
        Add("rows of a token", kSendPairs / info_.topK * 4);
        Add("rows to sum", tiling.sumRing / tiling.sumGroup *
                               SumGroupBytes(info_.experts, tiling.sumGroup, static_cast<uint32_t>(part * size)));
        Add("results", (wide ? 1 : 2) * CeilTo(part * size, kBlock));
        Add("fp32 term", part * 4);
        if (!wide) Add("fp32 sum", part * 4);
        Add("abort blocks at entry", info_.world * kBlock);
        OwnRun();
        AllRuns();
    }

    const CallPlan& plan_;
    const MoeDistributeInfo& info_;
    const char* step_ = "";
    std::vector<UbItem> items_;
};

}  // namespace moe
