// UB of one core by item, for every step of a plan: the entries of the classes (op_kernel/protocol/ub.h) in the step's
// kernel, on the core that needs most. The rings of a plan are chosen by these sums (rings.h).
#pragma once

#include "call_plan.h"
#include "protocol/ub.h"

namespace moe {

struct UbItem {
    const char* name;
    uint32_t bytes;
};

// The UB of one step.
class UbBudget {
public:
    UbBudget(const CallPlan& plan, Step step) : plan_(plan), info_(plan.info()) {
        Add("core barrier", CoreBarrierBytes(info_.cores));
        switch (step) {
            case Step::kSend: plan.op == kOpDispatch ? DispatchSend() : CombineSend(); break;
            case Step::kStatus: DispatchStatus(); break;
            case Step::kCopy: DispatchCopy(); break;
            case Step::kSum: CombineSum(); break;
            case Step::kPublish: DirectPublish(); break;
            case Step::kLists: plan.dispatch.listCores == 0 ? DirectLists() : DirectExpertLists(); break;
            case Step::kGather: DirectGather(); break;
            case Step::kReturn: DirectReturn(); break;
            case Step::kForward: Forward(); break;
            case Step::kServerSum: ServerSum(); break;
            case Step::kWaitSums: WaitSums(); break;
        }
    }
    const UbItem* begin() const { return items_; }
    const UbItem* end() const { return items_ + count_; }
    uint64_t Bytes() const { return bytes_; }

private:
    void Add(const char* name, uint64_t bytes) {
        if (bytes == 0) return;
        const uint64_t blocks = CeilTo(bytes, kBlock);
        items_[count_++] = {name, static_cast<uint32_t>(blocks)};
        bytes_ += blocks;
    }
    uint32_t Counts() const { return MessageCounts(info_.algorithm, plan_.op, info_.localExperts); }
    uint32_t ElementBytes() const { return TypeSize(info_.xType); }

    // The first step of a core.
    void Entry() { Add("epoch", kEpochWordBytes); }
    void Peers() { Add("windows of the ranks", PeersBytes(info_)); }
    void Routing() {
        const RoutingTableUb table(info_);
        Add("expert ids", table.pairs.ids);
        Add("mask", table.pairs.mask);
        Add("counts, totals, places", 3 * table.experts);
    }
    void Places() { Add("histograms, places", RowPlacesUb(info_).Bytes()); }
    void Segments() { Add("segments, rows by source", SegmentTableUb(info_).Bytes()); }
    // Sending a message, and waiting for a share of the sources. Core 0, which also has `before` bytes from the entry,
    // may have one source fewer.
    void Status(uint32_t before) {
        const uint32_t run = StatusMessageBytes(info_.localExperts);
        const uint32_t first = info_.world / info_.cores, most = CeilDiv(info_.world, info_.cores);
        const bool ofFirst = before + first * run >= most * run;
        if (ofFirst) Add("abort blocks at entry", before);
        OwnRun();
        Add("local abort flag", kLocalAbortFlagBytes);
        Add("flags of blocks", BlockFlagsUb(info_).Bytes());
        Waiter({info_, info_.localExperts, ofFirst ? first : most}, most);
    }
    // `timed`: sources whose times are measured for performance_info.
    void Waiter(const StatusWaiterUb& waiter, uint32_t timed) {
        Add("algorithm hints", HintsBytes(info_));
        Add("abort blocks", waiter.aborts);
        if (info_.measures != 0) Add("times of the sources", WaitTimesUb(timed).Bytes());
        Add("awaited runs", waiter.messages);
        Add("counts of all sources", waiter.stored);
        Add("their comparison", waiter.match);
    }

    // Rows of x to send, and their quantizer.
    void SendRows() {
        const RowLoaderUb loader(plan_.dispatch, ElementBytes());
        Add("rows of x", loader.Bytes() - loader.quantizer);
        Add("quantizer of rows", loader.quantizer);
    }
    void DispatchSend() {
        const SendChunkUb chunk(plan_.dispatch, RowBytesWithTrailer(info_));
        Entry();
        Peers();
        Routing();
        Places();
        SendRows();
        if (TwoLevels()) {
            Add("tokens by server", ServerTokensUb(info_).Bytes());
            Add("trailers, weights, records", SendRecordsUb(info_).Bytes());
            Add("abort blocks", AbortBytes(info_.world));
            Add("items of servers", RelayUb(info_).Bytes());
            OwnRun();
            return;
        }
        Add("expand_idx, row numbers", chunk.index + chunk.rows);
        Add("source indices, weights", chunk.trailers + chunk.weights);
        Add("rows with trailers", chunk.ring * InBlocks(chunk.row));
        Add("abort blocks", AbortBytes(info_.world));
    }
    void DispatchStatus() {
        Add("counts", SendCountsBytes(info_.experts));
        if (TwoLevels()) RelayTables();
        Status(0);
    }
    void DispatchCopy() {
        const CopyOutUb copy(plan_.dispatch, RowBytesWithTrailer(info_));
        const uint32_t run = StatusMessageBytes(info_.localExperts);
        Segments();
        Add("messages of all sources", copy.messages);
        if (ScansSegments(info_.world, info_.cores))
            Add("their sums", SegmentScanUb(info_.world, info_.localExperts, run).Bytes());
        Add("rows of the window", copy.ring * InBlocks(copy.chunk));
        Add("expert_token_nums", DispatchCountsBytes(info_.localExperts));
    }

    void CombineSend() {
        Entry();
        Peers();
        Routing();
        Places();
        if (TwoLevels()) return ReturnToRail();
        const uint32_t row = ReturnedRowBytes(info_, ElementBytes());
        if (info_.sourceIndices == 0) {
            const CompactedCombineUb compacted(info_);
            Segments();
            Add("expand_idx, ep_send_counts", compacted.Bytes());
            ReturnedRows(ReturnLoaderUb(plan_.combine, row, ElementBytes()));
            Status(AbortBytes(info_.world));
            return;
        }
        Add("ep_send_counts", ReturnCountsUb(info_).Bytes());
        Add("counts of the messages", CountsMatchBytes(info_.experts));
        Add("source indices", kSourceIndexReaderBytes);
        ReturnedRows(ReturnLoaderUb(plan_.combine, IndexedRowBytes(row), ElementBytes()));
        Add("abort blocks at entry", AbortBytes(info_.world));
        OwnRun();
        AllRuns();
    }
    // Chunks of rows of expand_x in flight, and their quantizer.
    void ReturnedRows(const ReturnLoaderUb& loader) {
        Add("rows of expand_x", loader.Bytes() - loader.quantizer);
        Add("quantizer of blocks", loader.quantizer);
    }
    void CombineSum() {
        const TokenSumUb queue(plan_.combine, ElementBytes());
        Routing();
        if (TwoLevels()) {
            RelayTables();
        } else if (info_.sourceIndices != 0) {
            Add("tags of rows", kChunkBlockBytes);
        } else {
            Add("expand_idx", kChunkIntBytes);
        }
        Add("rows to sum", queue.Bytes());
        Sums();
    }
    // Addends and WeightedSum.
    void Sums() {
        const AddendsUb addends(info_, ElementBytes());
        const WeightedSumUb sum(plan_.combine, ElementBytes());
        Add("weights", addends.weights);
        Add("factors of const experts", addends.factors);
        Add("results, sums in fp32", sum.Bytes() - sum.mix - sum.decoder);
        Add("fp32 addends of const experts", sum.mix);
        Add("codes as elements", sum.decoder);
    }

    // Hierarchy.
    bool TwoLevels() const { return info_.algorithm == kAlgorithmHierarchy; }
    void RelayTables() {
        Add("tokens by server", ServerTokensUb(info_).Bytes());
        Add("items of servers", RelayUb(info_).Bytes());
    }
    // A share of the sources again.
    void AwaitedRuns() {
        const uint32_t most = CeilDiv(info_.world, info_.cores);
        Add("local abort flag", kLocalAbortFlagBytes);
        Waiter({info_, info_.localExperts, most}, most);
    }
    void Forward() {
        const uint32_t row = DispatchRowStride(info_.hidden, TypeSize(info_.wireType), info_.quantMode != 0, 0);
        Peers();
        Add("items of servers", RelayUb(info_).Bytes());
        Add("messages in flight", RelayUb(info_).Messages());
        Add("rows with records", ForwardUb(plan_.dispatch, row).Bytes());
        AwaitedRuns();
    }
    void ReturnToRail() {
        Segments();
        Add("tokens by server", ServerTokensUb(info_).Bytes());
        Add("ep_send_counts, numbers of records", ReturnToRailUb(info_).Bytes());
        ReturnedRows(ReturnLoaderUb(ServerSumTiling(plan_.combine), info_.hidden * ElementBytes(), ElementBytes()));
        Status(AbortBytes(info_.world));
    }
    void ServerSum() {
        const ServerSumsUb sums(plan_.combine, ElementBytes());
        Add("items of servers", RelayUb(info_).Bytes());
        Add("messages in flight", RelayUb(info_).Messages());
        Add("rows that came, records", sums.came + sums.stored + sums.records);
        Add("rows to sum", sums.ring * InBlocks(sums.piece));
        Add("results, sums in fp32", sums.sum);
        Add("codes of sums", sums.codes + sums.quantizer);
    }
    void WaitSums() {
        Routing();
        RelayTables();
        AwaitedRuns();
    }

    // Waiting for all sources, whose messages stay.
    void AllRuns() {
        Add("local abort flag", kLocalAbortFlagBytes);
        Waiter({info_, Counts()}, info_.world);
    }
    void OwnRun() {
        const ItemListUb list(info_);
        Add("status runs", SentMessagesBytes(info_, Counts()));
        Add("BatchWrite item", list.Bytes());
    }
    void DirectPublish() {
        Entry();
        Routing();
        SendRows();
        if (info_.hasWeights != 0) Add("weights", kChunkIntBytes);
        Add("abort blocks", AbortBytes(info_.world));
    }
    void DirectLists() {
        const ListChunkUb chunk(info_);
        Routing();
        Places();
        Add("expand_idx", chunk.index);
        Add("list entries", chunk.entries);
    }
    void DirectExpertLists() {
        const ExpertListsUb lists(info_, CeilDiv(info_.experts, plan_.dispatch.listCores));
        Entry();
        Add("expert ids, comparisons, mask", lists.pairs.Bytes());
        Add("counts", lists.counts);
        Add("lists", lists.lists);
        Add("positions", lists.positions);
        Add("local abort flag", kLocalAbortFlagBytes);
    }
    void DirectGather() {
        const uint32_t stride = DispatchRowStride(info_.hidden, TypeSize(info_.wireType), info_.quantMode != 0, 0);
        Add("counts", SendCountsBytes(info_.experts));
        OwnRun();
        Peers();
        AllRuns();
        Segments();
        if (ScansSegments(info_.world, info_.cores)) {
            const uint32_t stored = StoredBytes(info_.world, info_.cores, Counts(), info_.localExperts);
            Add("sums of the counts", SegmentScanUb(info_.world, info_.localExperts, stored).Bytes());
        }
        if (plan_.dispatch.sharedLanes != 0) {
            const SharedRowGatherUb gather(plan_.dispatch, stride);
            Add("lists, places, source indices", gather.order.Bytes() + gather.places + gather.sourceIndices);
            Add("rows of the sources", gather.ring * InBlocks(gather.row));
        } else {
            const DirectGatherUb gather(plan_.dispatch, stride);
            Add("lists, source indices", gather.lists + gather.sourceIndices);
            Add("rows of the sources", gather.ring * InBlocks(gather.chunk));
        }
        if (info_.hasWeights != 0) Add("weights", WeightGatherUb().Bytes());
        Add("expert_token_nums", DispatchCountsBytes(info_.localExperts));
    }
    // One UB layout for the whole op.
    void DirectReturn() {
        const MoeDistributeCombineTiling& tiling = plan_.combine;
        const RowReturnUb back(tiling, ReturnedRowBytes(info_, ElementBytes()), ElementBytes());
        const DirectSumUb sum(tiling, ElementBytes());
        Entry();
        Peers();
        Routing();
        if (info_.sourceIndices == 0) Add("expand_idx, largest positions", IndexBoundsUb(info_).Bytes());
        Add("counts of the messages", CountsMatchBytes(info_.experts));
        Add("ep_send_counts", back.counts.Bytes());
        Add("source indices", back.sourceIndices);
        Add("rows of expand_x", back.ring * InBlocks(back.chunk) + back.loader);
        Add("positions", kReturnedRowsBytes);
        Add("addends", sum.Bytes() - sum.groups * InBlocks(sum.group));
        Add("rows to sum", sum.groups * InBlocks(sum.group));
        Sums();
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
