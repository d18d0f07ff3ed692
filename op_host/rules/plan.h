// Tiling: from a checked call to window need, UB plan and the words that the kernels read.
#pragma once

#include "vendor_needs.h"
#include "check.h"
#include "rings.h"

namespace moe {

// What a round trip fills of each half of a window: one region a source rank, or the half as a whole.
struct WindowNeed {
    uint64_t dispatchRegion;
    uint64_t combineRegion;  // V1
    uint64_t dispatchHalf;   // direct
    uint64_t combineHalf;    // V2, direct
};
// Bytes of a row on its way back. To a dispatch the op gives no comm_quant_mode, but a plan of both ops may.
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
// Regions of ranks have rows for an owner, and come back as they are; those of servers have records with rows, and sums
// of `back` bytes.
inline WindowNeed HierarchyNeedOf(const MoeDistributeInfo& info, uint64_t back) {
    const uint64_t message = FarMessageBytes(info.world), tail = RelayTailBytes(info.world, info.nearRanks);
    const uint64_t row = DispatchRowStride(info.hidden, TypeSize(info.wireType), info.quantMode != 0, 0);
    const uint64_t plain = static_cast<uint64_t>(info.hidden) * TypeSize(info.xType);
    const uint64_t tails = (1 + info.hasWeights) * kBlock;  // combine does not know of dispatch's
    return {std::max(info.capacity * (row + tails) + message, info.maxBatch * (row + RecordBytes(info.topK)) + tail),
            std::max(info.capacity * plain + message, info.maxBatch * back + tail), 0, 0};
}
// `back`: bytes of a row on its way back.
inline WindowNeed WindowNeedOf(const MoeDistributeInfo& info, uint32_t back) {
    if (info.algorithm == kAlgorithmDirect) return DirectNeedOf(info, back);
    if (info.algorithm == kAlgorithmHierarchy) return HierarchyNeedOf(info, back);
    const bool triples = info.triples != 0;
    const uint64_t sent = RowStep(info, TailedRowBytes(info)), returned = RowStep(info, back);
    const uint32_t slot = RowStep(info, SlotBytes(back));
    // A status run follows the rows that come over RDMA.
    const uint64_t run = info.transport == kTransportRdma ? FarMessageBytes(info.world) : 0;
    return {BytesOnWire(info, info.capacity * sent) + run,
            triples ? 0 : BytesOnWire(info, info.capacity * returned) + run, 0,
            triples ? static_cast<uint64_t>(info.maxBatch) * info.topK * slot : 0};
}

// The half of a window that direct needs: in dispatch also for the rows that will come back, by either algorithm.
inline uint64_t DirectHalfOf(const CallSpec& call, const MoeDistributeInfo& info) {
    const uint32_t row = ReturnedRowOf(call, info);
    const WindowNeed direct = DirectNeedOf(info, row);
    if (call.op != kOpDispatch) return direct.combineHalf;
    MoeDistributeInfo as = info;
    as.algorithm = kAlgorithmWindow;
    const WindowNeed window = WindowNeedOf(as, row);
    const uint64_t back = std::max(window.combineHalf, info.world * CeilTo(window.combineRegion, 512));
    return std::max(direct.dispatchHalf, std::min(direct.combineHalf, back));
}

// What comm_alg selects. "auto", the default, goes by what is equal on all ranks: direct where ranks reach each other
// by memory and its rows fit.
inline uint32_t AlgorithmOf(const CallSpec& call, const MoeDistributeInfo& info) {
    if (call.comm_alg == kCommAlgDirect) return kAlgorithmDirect;
    if (HasTwoLevels(call)) return kAlgorithmHierarchy;
    if (call.comm_alg < kCommAlgAuto || info.transport != kTransportMemory) return kAlgorithmWindow;
    return DirectHalfOf(call, info) <= HalfBytes(info.dataBytes) ? kAlgorithmDirect : kAlgorithmWindow;
}

// What this op fills of a half, and whether the window has room for it.
inline bool Fits(const CallSpec& call, const MoeDistributeInfo& info, uint64_t& region, uint64_t& half) {
    const WindowNeed need = WindowNeedOf(info, ReturnedRowOf(call, info));
    const bool dispatch = call.op == kOpDispatch;
    region = dispatch ? need.dispatchRegion : need.combineRegion;
    half = dispatch ? need.dispatchHalf : need.combineHalf;
    return region <= RegionBytes(info.dataBytes, info.regions) && half <= HalfBytes(info.dataBytes);
}
// What the rows of this op begin at multiples of: kRowUnit where stores alone carry them and the window has the room.
// It follows from what is equal on all ranks, and no call is refused for it.
inline uint32_t RowUnitOf(const CallSpec& call, MoeDistributeInfo info) {
    if (info.transport != kTransportMemory || info.algorithm == kAlgorithmHierarchy) return kBlock;
    uint64_t region, half;
    info.rowUnit = kRowUnit;
    return Fits(call, info, region, half) ? kRowUnit : kBlock;
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
    info.lentBytes = static_cast<uint64_t>(call.lent_mib) * kMiB;
    info.lentGeneration = !dispatch && call.lent_mib > 0 ? 1 : 0;  // for hosts that do not put the block's own
    info.contextKind = static_cast<uint32_t>(call.context_kind);
    info.transport = TransportOf(call);
    info.ranksPerServer = static_cast<uint32_t>(call.ranks_per_server);
    info.rdmaFlags = info.transport == kTransportRdma && call.rdma_flags != 0 ? 1 : 0;
    const bool levels = HasTwoLevels(call);
    info.nearRanks = call.near_stores != 0 || levels ? static_cast<uint32_t>(call.ranks_per_server) : 1;
    info.regions = RegionsOf(info.world, levels ? info.nearRanks : 0);
    // Over RDMA both contracts send rows in V1's way; expand_idx then fills the first BS*K words of V2's
    // tensor. With two levels rows have triples, and come back packed all the same.
    const bool carried = info.transport == kTransportMemory || (levels && dispatch);
    info.triples = info.contract == kContractV2 && carried ? 1 : 0;
    info.deadlineCycles = static_cast<uint64_t>(call.deadline_micros) * kCyclesPerMicro;
    info.meeting = static_cast<uint32_t>(call.meeting);
    info.stamps = static_cast<uint32_t>(call.stamps);
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

// HCCL_BUFFSIZE for such a region and half. A2 has the state area in the window's last MiB.
inline uint32_t StateMiB(const MoeDistributeInfo& info) { return info.contextKind == kContextA2 ? 1 : 0; }
inline int64_t NeededMiB(const MoeDistributeInfo& info, uint64_t regionBytes, uint64_t halfBytes) {
    const uint64_t half = std::max(CeilTo(halfBytes, 512), info.regions * CeilTo(regionBytes, 512));
    return static_cast<int64_t>((2 * half + kMiB - 1) / kMiB) + StateMiB(info);
}

// The same call, as CANN's own operators would see it.
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
    uint64_t region, half;
    const bool fits = Fits(call, info, region, half);
    plan.windowBytes = std::max(region, half);
    if (fits) return true;
    result.kind = kCheckWindow;
    const WindowNeed need = WindowNeedOf(info, ReturnedRowOf(call, info));
    const bool dispatch = call.op == kOpDispatch;
    // Dispatch names what the round trip needs; combine what is left of it.
    const uint64_t whole = dispatch ? std::max(need.dispatchRegion, need.combineRegion) : need.combineRegion;
    result.needed_mib =
        NeededMiB(info, whole, dispatch ? std::max(need.dispatchHalf, need.combineHalf) : need.combineHalf);
    if (call.comm_alg >= kCommAlgAuto && info.transport == kTransportMemory)
        result.needed_mib = std::min(result.needed_mib, NeededMiB(info, 0, DirectHalfOf(call, info)));
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
        {ASCEND_MOE_TILING_KEY_COMBINE_SLOTS, ASCEND_MOE_TILING_KEY_COMBINE_SLOTS_QUANT},
        {ASCEND_MOE_TILING_KEY_COMBINE_DIRECT, ASCEND_MOE_TILING_KEY_COMBINE_DIRECT_QUANT},
        {ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY, ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY_QUANT}};
    const bool levels = info.algorithm == kAlgorithmHierarchy;
    plan.tilingKey = kKeys[levels ? 3 : direct ? 2 : info.triples][info.quantMode != 0];
    plan.combine.info = info;
    plan.combine.hasSharedExpertX = MOE_GIVEN(call, shared_expert_x) ? 1 : 0;
    RingChooser rings(plan, UbOf(call));
    if (direct) {
        rings.DirectCombine();
    } else if (levels) {
        rings.HierarchyCombine();
    } else {
        rings.WindowCombine();
    }
}

// False: with the smallest rings and pieces a step still needs more UB than a core has.
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

// Everything a launch needs, or the reason why not.
inline bool PlanCall(const CallSpec& call, CallPlan& plan, CheckResult& result) {
    plan = CallPlan();
    if (!CheckCall(call, result)) return false;
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
