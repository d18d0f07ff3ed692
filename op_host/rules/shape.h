// Output shapes, as torch_npu's C++ allocates them; infershape of the CANN package uses the same functions.
#pragma once

#include <algorithm>

#include "op_tables.h"

namespace moe {

constexpr uint32_t kMostOutputs = DispatchOutput::error_record;  // dispatch's; combine has one
constexpr int64_t kRanksPerServer = 8;
constexpr int64_t kAssistWordsPerRow = 128;

struct OutputDesc {
    uint32_t dtype;
    int32_t rank;
    int64_t dims[2];
};

// Sizes that follow from the attributes alone. Invalid divisions give 0: the checks report the argument.
struct CallSizes {
    int64_t world, batch, topK, hidden, localExperts, globalBatch, maxBatch, rows;
    bool sharedRank;
};

inline int64_t SafeDiv(int64_t a, int64_t b) { return b > 0 ? a / b : 0; }

// Experts that receive no rows, by kind, in the order of their ids after the others. V1's functions have none.
struct SpecialNumbers {
    int64_t zero, copy, constant;
    int64_t All() const { return zero + copy + constant; }
};
inline SpecialNumbers SpecialOf(const CallSpec& call) {
    const auto number = [](int64_t value) { return value == kNoValue ? 0 : value; };
    return {number(MOE_ATTRIBUTE(call, zero_expert_num)), number(MOE_ATTRIBUTE(call, copy_expert_num)),
            number(MOE_ATTRIBUTE(call, const_expert_num))};
}

// Is this rank one of the shared-expert ranks? The first ones; the last ones for shard type 1 (V1 only).
inline bool IsSharedRank(const CallSpec& call) {
    const int64_t shared = MOE_ATTRIBUTE(call, shared_expert_rank_num), rank = MOE_ATTRIBUTE(call, ep_rank_id);
    if (MOE_ATTRIBUTE(call, expert_shard_type) == 0) return rank < shared;
    return call.contract == kContractV1 && rank >= MOE_ATTRIBUTE(call, ep_world_size) - shared;
}

// With elastic_info a rank may change its kind, so it gets room for both.
inline bool IsElastic(const CallSpec& call) {
    return MOE_GIVEN(call, elastic_info) && MOE_ATTRIBUTE(call, expert_shard_type) == 0;
}

// Most rows that this rank can receive.
inline int64_t ReceivableRows(const CallSpec& call, const CallSizes& sizes) {
    const int64_t shared = MOE_ATTRIBUTE(call, shared_expert_rank_num);
    const int64_t local = SafeDiv(MOE_ATTRIBUTE(call, moe_expert_num), sizes.world - shared);
    const int64_t moe = sizes.globalBatch * std::min(local, sizes.topK);
    int64_t ofShared = 0;
    if (call.contract == kContractV1) {
        ofShared = SafeDiv(sizes.globalBatch, shared);
    } else {
        const int64_t ranksEach = SafeDiv(shared, MOE_ATTRIBUTE(call, shared_expert_num));
        ofShared = SafeDiv(sizes.globalBatch, sizes.world) * SafeDiv(sizes.world + ranksEach - 1, ranksEach);
    }
    if (IsElastic(call)) return std::max(moe, shared > 0 ? ofShared : 0);
    return sizes.sharedRank ? ofShared : moe;
}

inline CallSizes SizesOf(const CallSpec& call) {
    const TensorDesc& ids = MOE_TENSOR(call, expert_ids);
    const TensorDesc& rows = call.op == kOpDispatch ? MOE_TENSOR(call, x) : MOE_TENSOR(call, expand_x);
    CallSizes sizes = {};
    sizes.world = MOE_ATTRIBUTE(call, ep_world_size);
    sizes.batch = ids.dims[0];
    sizes.topK = ids.dims[1];
    sizes.hidden = rows.dims[1];
    sizes.sharedRank = IsSharedRank(call);
    const int64_t local =
        SafeDiv(MOE_ATTRIBUTE(call, moe_expert_num), sizes.world - MOE_ATTRIBUTE(call, shared_expert_rank_num));
    sizes.localExperts = sizes.sharedRank ? 1 : local;
    if (IsElastic(call)) sizes.localExperts = std::max<int64_t>(1, local);
    const int64_t globalBs = MOE_ATTRIBUTE(call, global_bs);
    sizes.globalBatch = globalBs > 0 ? globalBs : sizes.batch * sizes.world;
    sizes.maxBatch = globalBs > 0 ? SafeDiv(globalBs, sizes.world) : sizes.batch;
    sizes.rows = ReceivableRows(call, sizes);
    return sizes;
}

// A2's servers are connected by RDMA; A3's are one supernode, where stores reach every window, as in the emulator.
inline uint32_t TransportOf(const CallSpec& call) {
    const bool interNode = call.ranks_per_server > 0 && call.ranks_per_server < MOE_ATTRIBUTE(call, ep_world_size);
    return interNode && call.context_kind == static_cast<int32_t>(kContextA2) ? kTransportRdma : kTransportMemory;
}

// comm_alg "hierarchy" has two levels between servers; within one it is the window algorithm.
inline bool HasTwoLevels(const CallSpec& call) {
    const bool asked = call.comm_alg == kCommAlgHierarchy || call.comm_alg == kCommAlgHccl;
    return asked && TransportOf(call) == kTransportRdma;
}

inline void DispatchShapes(const CallSpec& call, OutputDesc* out) {
    const CallSizes sizes = SizesOf(call);
    const int64_t tp = MOE_ATTRIBUTE(call, tp_world_size);
    const int64_t rows = sizes.rows * std::max<int64_t>(tp, 1);
    const bool quantized =
        MOE_ATTRIBUTE(call, quant_mode) != 0 || (call.contract == kContractV1 && MOE_GIVEN(call, scales));
    int64_t counts = sizes.world * sizes.localExperts * (tp == 2 ? 2 : 1);
    if (MOE_GIVEN(call, expert_scales)) counts += 2 * sizes.globalBatch * sizes.topK * (sizes.world / kRanksPerServer);
    const int64_t pairs = sizes.batch * sizes.topK;
    const int64_t index = call.contract == kContractV1 ? pairs : std::max(pairs, sizes.rows * kAssistWordsPerRow);
    out[DispatchOutput::expand_x] = {
        quantized ? kTypeInt8 : static_cast<uint32_t>(MOE_TENSOR(call, x).dtype), 2, {rows, sizes.hidden}};
    out[DispatchOutput::dynamic_scales] = {kTypeFp32, 1, {rows, 0}};
    out[DispatchOutput::expand_idx] = {kTypeInt32, 1, {index, 0}};
    out[DispatchOutput::expert_token_nums] = {kTypeInt64, 1, {sizes.localExperts, 0}};
    out[DispatchOutput::ep_recv_counts] = {kTypeInt32, 1, {counts, 0}};
    out[DispatchOutput::tp_recv_counts] = {kTypeInt32, 1, {tp, 0}};
    out[DispatchOutput::expand_scales] = {kTypeFp32, 1, {sizes.rows, 0}};
}

inline OutputDesc CombineShape(const CallSpec& call) {
    const CallSizes sizes = SizesOf(call);
    uint32_t type = static_cast<uint32_t>(MOE_TENSOR(call, expand_x).dtype);
    if (type == kTypeInt32) {
        const int64_t outDtype = MOE_ATTRIBUTE(call, out_dtype);
        type = call.contract == kContractV1 && outDtype != 0 && outDtype != kNoValue ? kTypeFp16 : kTypeBf16;
    }
    return {type, 2, {sizes.batch, sizes.hidden}};
}

// Output shapes of either op, at most kMostOutputs. Returns how many.
inline uint32_t OutputsOf(const CallSpec& call, OutputDesc* out) {
    if (call.op != static_cast<int32_t>(kOpDispatch)) return *out = CombineShape(call), 1;
    DispatchShapes(call, out);
    return kMostOutputs;
}

}  // namespace moe
