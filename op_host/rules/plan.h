// Tiling: from a checked call to window need, UB layout and the words that the kernels read.
#pragma once

#include "vendor_needs.h"
#include "check.h"
#include "rings.h"

namespace moe {

// What a round trip fills of each ping-pong buffer of a window: one region per source rank, or the whole buffer.
struct WindowNeed {
    uint64_t dispatchRegion;
    uint64_t combineRegion;     // V1
    uint64_t dispatchPingPong;  // direct
    uint64_t combinePingPong;   // V2, direct
};
// Bytes of a returned row. Dispatch has no comm_quant_mode, but a plan of both ops may.
inline uint32_t ReturnedRowOf(const CallSpec& call, const MoeDistributeInfo& info) {
    if (MOE_ATTRIBUTE(call, comm_quant_mode) == kCommQuantMode) return CommQuantRowBytes(info.hidden);
    return info.hidden * TypeSize(info.xType);
}
inline WindowNeed DirectNeedOf(const MoeDistributeInfo& info, uint32_t back) {
    const uint32_t row = DispatchRowStride(info.hidden, TypeSize(info.wireType), info.quantMode != 0, 0);
    const uint64_t weights = static_cast<uint64_t>(info.hasWeights) * info.maxBatch * info.topK * sizeof(float);
    const uint64_t returned = static_cast<uint64_t>(info.world) * info.capacity;
    return {0, 0, PublishedWeightsOffset(info, row) + weights, returned * RowStep(info, back)};
}
// Regions of ranks contain rows for an owner, which return as they are; those of servers records with rows, and sums of
// `back` bytes.
inline WindowNeed HierarchyNeedOf(const MoeDistributeInfo& info, uint64_t back) {
    const uint64_t message = InterNodeMessageBytes(info.world),
                   trailer = RelayTrailerBytes(info.world, info.intraNodeRanks);
    const uint64_t row = DispatchRowStride(info.hidden, TypeSize(info.wireType), info.quantMode != 0, 0);
    const uint64_t plain = static_cast<uint64_t>(info.hidden) * TypeSize(info.xType);
    const uint64_t trailers = (1 + info.hasWeights) * kBlock;  // combine does not know dispatch's
    return {
        std::max(info.capacity * (row + trailers) + message, info.maxBatch * (row + RecordBytes(info.topK)) + trailer),
        std::max(info.capacity * plain + message, info.maxBatch * back + trailer), 0, 0};
}
// `back`: bytes of a returned row.
inline WindowNeed WindowNeedOf(const MoeDistributeInfo& info, uint32_t back) {
    if (info.algorithm == kAlgorithmDirect) return DirectNeedOf(info, back);
    if (info.algorithm == kAlgorithmHierarchy) return HierarchyNeedOf(info, back);
    const bool sourceIndices = info.sourceIndices != 0;
    const uint64_t sent = RowStep(info, RowBytesWithTrailer(info)), returned = RowStep(info, back);
    const uint32_t step = RowStep(info, IndexedRowBytes(back));
    // Over RDMA a status message follows the rows.
    const uint64_t run = info.transport == kTransportRdma ? InterNodeMessageBytes(info.world) : 0;
    return {BytesOnWire(info, info.capacity * sent) + run,
            sourceIndices ? 0 : BytesOnWire(info, info.capacity * returned) + run, 0,
            sourceIndices ? static_cast<uint64_t>(info.maxBatch) * info.topK * step : 0};
}

// The ping-pong buffer that direct needs: in dispatch also for the rows that will return, by either algorithm.
inline uint64_t DirectPingPongOf(const CallSpec& call, const MoeDistributeInfo& info) {
    const uint32_t row = ReturnedRowOf(call, info);
    const WindowNeed direct = DirectNeedOf(info, row);
    if (call.op != kOpDispatch) return direct.combinePingPong;
    MoeDistributeInfo as = info;
    as.algorithm = kAlgorithmWindow;
    const WindowNeed window = WindowNeedOf(as, row);
    const uint64_t back = std::max(window.combinePingPong, info.world * CeilTo(window.combineRegion, 512));
    return std::max(direct.dispatchPingPong, std::min(direct.combinePingPong, back));
}

// The algorithm selected by comm_alg. "auto", the default, uses values that are equal on all ranks: direct if ranks
// reach each other by memory and its rows fit.
inline uint32_t AlgorithmOf(const CallSpec& call, const MoeDistributeInfo& info) {
    if (call.comm_alg == kCommAlgDirect) return kAlgorithmDirect;
    if (HasTwoLevels(call)) return kAlgorithmHierarchy;
    if (call.comm_alg < kCommAlgAuto || info.transport != kTransportMemory) return kAlgorithmWindow;
    return DirectPingPongOf(call, info) <= PingPongBytes(info.dataBytes) ? kAlgorithmDirect : kAlgorithmWindow;
}

// What this op fills of a ping-pong buffer, and whether the window has room for it.
inline bool Fits(const CallSpec& call, const MoeDistributeInfo& info, uint64_t& region, uint64_t& pingPong) {
    const WindowNeed need = WindowNeedOf(info, ReturnedRowOf(call, info));
    const bool dispatch = call.op == kOpDispatch;
    region = dispatch ? need.dispatchRegion : need.combineRegion;
    pingPong = dispatch ? need.dispatchPingPong : need.combinePingPong;
    return region <= RegionBytes(info.dataBytes, info.regions) && pingPong <= PingPongBytes(info.dataBytes);
}
// The alignment of this op's rows: the platform's if only stores carry them and the window has room. It depends on
// values that are equal on all ranks, and no call is refused for it.
inline uint32_t RowUnitOf(const CallSpec& call, MoeDistributeInfo info) {
    if (info.transport != kTransportMemory || info.algorithm == kAlgorithmHierarchy || call.row_unit == kBlock)
        return kBlock;
    uint64_t region, pingPong;
    info.rowUnit = kRowUnit;
    return Fits(call, info, region, pingPong) ? kRowUnit : kBlock;
}

inline void FillInfo(const CallSpec& call, MoeDistributeInfo& info) {
    const CallSizes sizes = SizesOf(call);
    const bool dispatch = call.op == kOpDispatch;
    const TensorDesc& rows = dispatch ? MOE_TENSOR(call, x) : MOE_TENSOR(call, expand_x);
    info = MoeDistributeInfo();
    info.world = static_cast<uint32_t>(sizes.world);
    info.rank = static_cast<uint32_t>(MOE_ATTRIBUTE(call, ep_rank_id));
    info.experts = static_cast<uint32_t>(MOE_ATTRIBUTE(call, moe_expert_num));
    info.localExperts = static_cast<uint32_t>(sizes.localExperts);
    info.batch = static_cast<uint32_t>(sizes.batch);
    info.maxBatch = static_cast<uint32_t>(sizes.maxBatch);
    info.topK = static_cast<uint32_t>(sizes.topK);
    info.hidden = static_cast<uint32_t>(sizes.hidden);
    info.cores = static_cast<uint32_t>(call.cores);
    info.contract = static_cast<uint32_t>(call.contract);
    info.xType = static_cast<uint32_t>(rows.dtype);
    const int64_t quant = dispatch ? MOE_ATTRIBUTE(call, quant_mode) : MOE_ATTRIBUTE(call, comm_quant_mode);
    info.quantMode = quant == kNoValue ? 0 : static_cast<uint32_t>(quant);
    info.wireType = info.quantMode != 0 ? kTypeInt8 : info.xType;
    info.hasScales = dispatch && MOE_GIVEN(call, scales) ? 1 : 0;
    info.hasWeights = MOE_GIVEN(call, expert_scales) && (dispatch || HasElements(MOE_TENSOR(call, expert_scales)));
    info.maskRank = MOE_GIVEN(call, x_active_mask) ? static_cast<uint32_t>(MOE_TENSOR(call, x_active_mask).rank) : 0;
    info.globalBsGiven = MOE_ATTRIBUTE(call, global_bs) != 0 ? 1 : 0;
    info.expandRows = static_cast<uint32_t>(dispatch ? sizes.rows : rows.dims[0]);
    info.windowMiB = static_cast<uint32_t>(call.window_mib);
    info.capacity = Capacity(info.maxBatch, info.topK, info.localExperts);
    info.dataBytes = static_cast<uint64_t>(call.window_mib) * kMiB;
    info.registeredBytes = static_cast<uint64_t>(call.registered_mib) * kMiB;
    info.registeredGeneration =
        !dispatch && call.registered_mib > 0 ? 1 : 0;  // for hosts that do not set the block's own
    info.contextKind = static_cast<uint32_t>(call.context_kind);
    info.transport = TransportOf(call);
    info.ranksPerServer = static_cast<uint32_t>(call.ranks_per_server);
    info.rdmaFlags = info.transport == kTransportRdma && call.rdma_flags != 0 ? 1 : 0;
    const bool levels = HasTwoLevels(call);
    info.intraNodeRanks = call.intra_node_stores != 0 || levels ? static_cast<uint32_t>(call.ranks_per_server) : 1;
    info.regions = RegionsOf(info.world, levels ? info.intraNodeRanks : 0);
    // Over RDMA both contracts send rows in V1's layout; expand_idx then fills the first BS*K words of V2's tensor.
    // With two levels rows have source indices but return compacted.
    const bool carried = info.transport == kTransportMemory || (levels && dispatch);
    info.sourceIndices = info.contract == kContractV2 && carried ? 1 : 0;
    info.deadlineCycles = static_cast<uint64_t>(call.deadline_micros) * kCyclesPerMicro;
    info.coreBarrier = static_cast<uint32_t>(call.core_barrier);
    info.timestamps = static_cast<uint32_t>(call.timestamps);
    info.part = static_cast<uint32_t>(call.part);
    const SpecialNumbers special = SpecialOf(call);
    info.firstCopy = info.experts + static_cast<uint32_t>(special.zero);
    info.firstConst = info.firstCopy + static_cast<uint32_t>(special.copy);
    info.ids = info.firstConst + static_cast<uint32_t>(special.constant);
    const bool mixes = !dispatch && special.constant != 0;
    info.alphaRank = mixes ? static_cast<uint32_t>(MOE_TENSOR(call, const_expert_alpha_1).rank) : 0;
    info.measures = MOE_GIVEN(call, performance_info) ? 1 : 0;
    info.rowUnit = kBlock;
    info.algorithm = AlgorithmOf(call, info);
    info.rowUnit = RowUnitOf(call, info);
}

// HCCL_BUFFSIZE for such a region and ping-pong buffer. A2 has the state area in the window's last MiB.
inline uint32_t StateMiB(const MoeDistributeInfo& info) { return info.contextKind == kContextA2 ? 1 : 0; }
inline int64_t NeededMiB(const MoeDistributeInfo& info, uint64_t regionBytes, uint64_t pingPongBytes) {
    const uint64_t pingPong = std::max(CeilTo(pingPongBytes, 512), info.regions * CeilTo(regionBytes, 512));
    return static_cast<int64_t>((2 * pingPong + kMiB - 1) / kMiB) + StateMiB(info);
}

// The same call for CANN's own operators.
inline CannCall CannCallOf(const MoeDistributeInfo& info) {
    return {info.world,
            info.experts,
            info.maxBatch,
            info.hidden,
            info.topK,
            0,
            info.xType == kTypeFp32,
            info.globalBsGiven == 0,
            info.ids - info.experts};
}

inline bool CheckWindow(const CallSpec& call, const MoeDistributeInfo& info, CallPlan& plan, CheckResult& result) {
    uint64_t region, pingPong;
    const bool fits = Fits(call, info, region, pingPong);
    plan.windowBytes = std::max(region, pingPong);
    if (fits) return true;
    result.kind = kCheckWindow;
    const WindowNeed need = WindowNeedOf(info, ReturnedRowOf(call, info));
    const bool dispatch = call.op == kOpDispatch;
    // Dispatch reports the need of the round trip; combine the rest of it.
    const uint64_t whole = dispatch ? std::max(need.dispatchRegion, need.combineRegion) : need.combineRegion;
    result.needed_mib =
        NeededMiB(info, whole, dispatch ? std::max(need.dispatchPingPong, need.combinePingPong) : need.combinePingPong);
    if (call.comm_alg >= kCommAlgAuto && info.transport == kTransportMemory)
        result.needed_mib = std::min(result.needed_mib, NeededMiB(info, 0, DirectPingPongOf(call, info)));
    const CannCall cann = CannCallOf(info);
    const CannVersion& a3 = kCannVersions[info.contract == kContractV2 ? kCannA3V2 : kCannA3V1];
    const bool levels = info.algorithm == kAlgorithmHierarchy;
    const int64_t a2 = levels ? CannA2HierarchyLater(cann) : CannA2Fullmesh(cann);
    snprintf(result.argument, sizeof(result.argument), "group_ep");
    snprintf(result.message, sizeof(result.message),
             "the window of group_ep has %u MiB, this call (maxBS %u, K %u, H %u, L %u, W %u) needs %lld "
             "(CANN's own operator: %lld on %s, %lld on A2): export HCCL_BUFFSIZE=%lld on "
             "all ranks before the group's first op",
             info.windowMiB + StateMiB(info), info.maxBatch, info.topK, info.hidden, info.localExperts, info.world,
             static_cast<long long>(result.needed_mib), static_cast<long long>(CannMiB(a3.bytes(cann))), a3.name,
             static_cast<long long>(CannMiB(a2)), static_cast<long long>(result.needed_mib));
    return false;
}

inline uint32_t UbOf(const CallSpec& call) {
    return call.ub_bytes > 0 ? static_cast<uint32_t>(call.ub_bytes) : kUbBytes;
}

inline void PlanDispatch(const CallSpec& call, const MoeDistributeInfo& info, CallPlan& plan) {
    const bool quant = info.quantMode != 0, direct = info.algorithm == kAlgorithmDirect;
    const uint32_t kind = !quant ? 0 : info.hasScales != 0 ? 2 : 1;
    static const uint32_t kWindowKeys[] = {ASCEND_MOE_TILING_KEY_DISPATCH, ASCEND_MOE_TILING_KEY_DISPATCH_QUANT,
                                           ASCEND_MOE_TILING_KEY_DISPATCH_QUANT_SMOOTH};
    static const uint32_t kDirectKeys[] = {ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT,
                                           ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT,
                                           ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT_SMOOTH};
    static const uint32_t kHierarchyKeys[] = {ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY,
                                              ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY_QUANT};
    const bool levels = info.algorithm == kAlgorithmHierarchy;
    plan.tilingKey = levels ? kHierarchyKeys[quant] : (direct ? kDirectKeys : kWindowKeys)[kind];
    plan.dispatch.info = info;
    plan.dispatch.tokenNumsType = static_cast<uint32_t>(MOE_ATTRIBUTE(call, expert_token_nums_type));
    plan.dispatch.tpWorldSize = static_cast<uint32_t>(MOE_ATTRIBUTE(call, tp_world_size));
    RingChooser rings(plan, UbOf(call));
    if (direct) {
        rings.DirectDispatch(call.list_cores);
    } else if (levels) {
        rings.HierarchyDispatch();
    } else {
        rings.WindowDispatch();
    }
}

inline void PlanCombine(const CallSpec& call, const MoeDistributeInfo& info, CallPlan& plan) {
    const bool direct = info.algorithm == kAlgorithmDirect;
    static const uint32_t kKeys[][2] = {
        {ASCEND_MOE_TILING_KEY_COMBINE, ASCEND_MOE_TILING_KEY_COMBINE_QUANT},
        {ASCEND_MOE_TILING_KEY_COMBINE_INDEXED, ASCEND_MOE_TILING_KEY_COMBINE_INDEXED_QUANT},
        {ASCEND_MOE_TILING_KEY_COMBINE_DIRECT, ASCEND_MOE_TILING_KEY_COMBINE_DIRECT_QUANT},
        {ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY, ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY_QUANT}};
    const bool levels = info.algorithm == kAlgorithmHierarchy;
    plan.tilingKey = kKeys[levels ? 3 : direct ? 2 : info.sourceIndices][info.quantMode != 0];
    plan.combine.info = info;
    plan.combine.hasSharedExpertX = MOE_GIVEN(call, shared_expert_x) ? 1 : 0;
    RingChooser rings(plan, UbOf(call));
    if (direct) {
        rings.DirectCombine();
    } else if (levels) {
        rings.HierarchyCombine();
    } else {
        rings.WindowCombineBase();
    }
}

// Returns false if a step needs more UB than a core has even with the smallest rings and pieces.
inline bool CheckUb(const CallSpec& call, const CallPlan& plan, CheckResult& result) {
    const MoeDistributeInfo& info = plan.info();
    const Step step = FullestStep(plan);
    const uint64_t bytes = UbBudget(plan, step).Bytes();
    if (bytes <= UbOf(call)) return true;
    result.kind = kCheckArgument;
    snprintf(result.argument, sizeof(result.argument), "%s", plan.op == kOpDispatch ? "x" : "expand_x");
    snprintf(
        result.message, sizeof(result.message),
        "%s has H = %u %s, which with E %u, W %u, K %u on %u cores needs %llu bytes of UB a core in the step %s of "
        "'%s', a core has %u: use %s%sfewer experts",
        result.argument, info.hidden, TypeName(info.xType), info.experts, info.world, info.topK, info.cores,
        static_cast<unsigned long long>(bytes), StepName(step), AlgorithmName(info.algorithm), UbOf(call),
        info.xType == kTypeFp32 ? "bfloat16 or float16, " : "",
        info.hidden * TypeSize(info.xType) > kBlock ? "a smaller H, or " : "");
    return false;
}

// Plans everything a launch needs, or reports why it cannot run.
inline bool PlanCall(const CallSpec& call, CallPlan& plan, CheckResult& result) {
    plan = CallPlan();
    if (!Checker(call, result).Run()) return false;
    MoeDistributeInfo info;
    FillInfo(call, info);
    if (!CheckWindow(call, info, plan, result)) return false;
    plan.op = static_cast<uint32_t>(call.op);
    plan.blockDim = info.cores;
    plan.xType = info.xType;
    plan.workspaceBytes = WorkspaceBytes(info);
    if (call.op == kOpDispatch) {
        PlanDispatch(call, info, plan);
    } else {
        PlanCombine(call, info, plan);
    }
    return CheckUb(call, plan, result);
}

}  // namespace moe
