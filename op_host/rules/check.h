// The rules for arguments of dispatch and combine, shared by CANN's tiling, the emulator and Python.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "shape.h"

namespace moe {

constexpr int32_t kCheckArgument = 1, kCheckWindow = 2;  // 0: no error

struct CheckResult {
    int32_t kind;
    int32_t reserved;
    int64_t needed_mib;  // kCheckWindow
    char argument[64];
    char message[448];
};

class Checker {
public:
    Checker(const CallSpec& call, CheckResult& result) : call_(call), result_(result) {
        memset(&result, 0, sizeof(result));
    }

    // Returns true if the call obeys all rules.
    bool Run() {
        return Communicator() && Context() && Unsupported() && Experts() &&
               (call_.op == kOpDispatch ? Dispatch() : Combine()) && Batches() && Mask() && Attributes();
    }

private:
    // Returns `ok`. Otherwise the result names the argument and what is wrong with it.
    __attribute__((format(printf, 4, 5))) bool Need(bool ok, const char* argument, const char* format, ...) {
        if (ok) return true;
        result_.kind = kCheckArgument;
        snprintf(result_.argument, sizeof(result_.argument), "%s", argument);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(result_.message, sizeof(result_.message), format, arguments);
        va_end(arguments);
        return false;
    }
    static long long Wide(int64_t value) { return static_cast<long long>(value); }
    // For example "(3, 64)". Only the first three sizes are known.
    struct ShapeText {
        char text[96] = "(";
        explicit ShapeText(const TensorDesc& tensor) {
            size_t at = 1;
            for (int32_t i = 0; i < tensor.rank && i < 3; ++i) {
                at += static_cast<size_t>(
                    snprintf(text + at, sizeof(text) - at, i == 0 ? "%lld" : ", %lld", Wide(tensor.dims[i])));
            }
            snprintf(text + at, sizeof(text) - at, tensor.rank > 3 ? ", ...)" : tensor.rank == 1 ? ",)" : ")");
        }
    };
    bool InRange(const char* name, int64_t value, int64_t low, int64_t high) {
        return Need(value >= low && value <= high, name, "%s is %lld, it must be in %lld..%lld", name, Wide(value),
                    Wide(low), Wide(high));
    }

    int64_t MostRanks() const { return call_.planned != 0 ? kMaxPlanned : kMaxWorld; }
    bool Communicator() {
        const int64_t world = MOE_ATTRIBUTE(call_, ep_world_size), rank = MOE_ATTRIBUTE(call_, ep_rank_id);
        const int32_t length = call_.group_ep_length;
        return Need(length >= 1 && length <= 127, "group_ep", "group_ep has %d characters, it must have 1..127",
                    length) &&
               InRange("ep_world_size", world, 1, MostRanks()) && InRange("ep_rank_id", rank, 0, world - 1) &&
               Need(world == call_.comm_world, "ep_world_size",
                    "ep_world_size is %lld, but the group of group_ep has %lld ranks", Wide(world),
                    Wide(call_.comm_world)) &&
               Need(rank == call_.comm_rank, "ep_rank_id", "ep_rank_id is %lld, but this is rank %lld of group_ep",
                    Wide(rank), Wide(call_.comm_rank));
    }

    // The communicator, not the op: no caller passes these.
    bool Context() {
        return InRange("context_kind", call_.context_kind, kContextTable, kContextA2) &&
               InRange("ranks_per_server", call_.ranks_per_server, 0, MostRanks()) &&
               InRange("core_barrier", call_.core_barrier, kBarrierByBlocks, kBarrierBySyncAll) &&
               InRange("timestamps", call_.timestamps, 0, 1);
    }

    // What this package does not do yet, or never will on this path: refused by name with the reason, never ignored.
    bool Unsupported() {
#define ASCEND_MOE_ONLY(allowed, name, why) Only(allowed, #name, kAttribute_##name, why)
        const int64_t shared = MOE_ATTRIBUTE(call_, shared_expert_rank_num), tp = MOE_ATTRIBUTE(call_, tp_world_size),
                      tp_rank = MOE_ATTRIBUTE(call_, tp_rank_id), shard = MOE_ATTRIBUTE(call_, expert_shard_type);
        return Need(shared == 0, "shared_expert_rank_num",
                    "shared_expert_rank_num is %lld, only 0 is supported: run shared experts as a dense layer "
                    "(shared_expert_x)",
                    Wide(shared)) &&
               InRange("shared_expert_num", MOE_ATTRIBUTE(call_, shared_expert_num), 0, 1) &&
               Need(tp == 0 || tp == 1, "tp_world_size",
                    "tp_world_size is %lld, only 0 and 1 are supported: CANN no longer has the TP domain", Wide(tp)) &&
               Need(tp_rank == 0, "tp_rank_id", "tp_rank_id is %lld, it must be 0 with tp_world_size %lld",
                    Wide(tp_rank), Wide(tp)) &&
               Need(shard == 0, "expert_shard_type",
                    "expert_shard_type is %lld, only 0 is supported: CANN has no other", Wide(shard)) &&
               ASCEND_MOE_ONLY(0, out_dtype, "it is for int32 rows, which CANN refuses too") && Refused() &&
               Algorithm();
#undef ASCEND_MOE_ONLY
    }
    bool Only(int64_t allowed, const char* name, uint32_t index, const char* why) {
        const int64_t value = call_.attributes[index];
        return Need(value == allowed || value == kNoValue, name, "%s is %lld, only %s is supported: %s", name,
                    Wide(value), allowed == 0 ? "0" : "None", why);
    }
    bool Refused() {
        const OpInterface& op = InterfaceOf(static_cast<uint32_t>(call_.op));
        for (const OpRefused& input : op.refused_inputs) {
            if (!Need(call_.tensors[input.index].dtype == static_cast<int32_t>(kTypeAbsent), input.name,
                      "%s is given, only None is supported: %s", input.name, input.why))
                return false;
        }
        for (const OpRefused& attribute : op.refused_attributes) {
            if (!Only(kNoValue, attribute.name, attribute.index, attribute.why)) return false;
        }
        return true;
    }
    bool Algorithm() {
        const bool direct = call_.comm_alg == kCommAlgDirect, intraNode = TransportOf(call_) != kTransportRdma;
        return Need(call_.comm_alg >= 0 && call_.comm_alg < kCommAlgCount, "comm_alg",
                    "comm_alg must be one of '', 'window', 'fullmesh', 'fullmesh_v1', 'fullmesh_v2', "
                    "'hierarchy', 'direct', 'auto'") &&
               (!HasTwoLevels(call_) || TwoLevels()) &&
               Need(!direct || intraNode, "comm_alg",
                    "comm_alg is 'direct', which reads other ranks' windows; %lld ranks with %d a server "
                    "reach each other by RDMA, which cannot: use 'window', or 'auto'",
                    Wide(call_.comm_world), call_.ranks_per_server);
    }

    // What the two levels of hierarchy do not support.
    bool TwoLevels() {
        const int64_t world = call_.comm_world;
        const int32_t localRanks = call_.ranks_per_server;
        const char* why = call_.comm_alg == kCommAlgHccl
                              ? " by HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0 (ASCEND_MOE_COMM_ALG=window "
                                "overrules them)"
                              : "";
        const TensorDesc& weights = MOE_TENSOR(call_, expert_scales);
        const bool empty = MOE_TENSOR(call_, expert_ids).dims[0] == 0;  // no tokens
        return Need(call_.contract == kContractV2, "comm_alg",
                    "comm_alg is 'hierarchy'%s, with %lld ranks and %d a server V1 has no way for it: use "
                    "npu_moe_distribute_dispatch_v2 and _combine_v2",
                    why, Wide(world), localRanks) &&
               Need(localRanks > 1 && world % localRanks == 0, "comm_alg",
                    "comm_alg is 'hierarchy'%s, there are %lld ranks with %d a server: every server must have the same "
                    "number of them, and more than one; use 'window', or 'auto'",
                    why, Wide(world), localRanks) &&
               Need(MOE_GIVEN(call_, expert_scales) && (HasElements(weights) || empty), "expert_scales",
                    "expert_scales is %s, comm_alg 'hierarchy'%s needs it in dispatch and combine: a server sums its "
                    "rows by dispatch's weights",
                    MOE_GIVEN(call_, expert_scales) ? "empty" : "None", why) &&
               Need(!MOE_GIVEN(call_, scales), "scales",
                    "scales is given, only None is supported with comm_alg 'hierarchy'%s: a row goes to a server once, "
                    "for all of its experts",
                    why) &&
               Need(call_.rdma_flags == 0, "comm_alg",
                    "comm_alg is 'hierarchy'%s, which has no flags: unset ASCEND_MOE_RDMA_FLAGS on all ranks, or use "
                    "'window'",
                    why) &&
               Need(!MOE_GIVEN(call_, performance_info), "performance_info",
                    "performance_info is given, only None is supported with comm_alg 'hierarchy'%s: a rank waits for "
                    "those that relay, not for the sources",
                    why);
    }

    bool Experts() {
        const int64_t experts = MOE_ATTRIBUTE(call_, moe_expert_num), world = MOE_ATTRIBUTE(call_, ep_world_size);
        return InRange("moe_expert_num", experts, 1, kMaxExperts) &&
               Need(experts % world == 0, "moe_expert_num",
                    "moe_expert_num is %lld, it must be a multiple of ep_world_size %lld", Wide(experts),
                    Wide(world)) &&
               SpecialExperts("zero_expert_num", SpecialOf(call_).zero) &&
               SpecialExperts("copy_expert_num", SpecialOf(call_).copy) &&
               SpecialExperts("const_expert_num", SpecialOf(call_).constant);
    }
    bool SpecialExperts(const char* name, int64_t experts) {
        return InRange(name, experts, 0, kMaxSpecialExperts) &&
               Need(experts == 0 || call_.contract != kContractV1, name,
                    "%s is %lld: use npu_moe_distribute_dispatch_v2 and _combine_v2, V1 has no such experts", name,
                    Wide(experts));
    }

    // Shape of a required tensor with this number of dimensions.
    bool Shape(const char* name, TensorIndex index, int32_t rank) {
        const TensorDesc& tensor = Tensor(call_, index);
        return Need(tensor.dtype != static_cast<int32_t>(kTypeAbsent), name, "%s is None, it is required", name) &&
               Need(tensor.rank == rank, name, "%s has %d dimensions, it must have %d", name, tensor.rank, rank);
    }
    bool Type(const char* name, TensorIndex index, uint32_t wanted) {
        const uint32_t type = static_cast<uint32_t>(Tensor(call_, index).dtype);
        return Need(type == wanted, name, "%s is %s, it must be %s", name, TypeName(type), TypeName(wanted));
    }
    bool Typed(const char* name, TensorIndex index, int32_t rank, uint32_t type) {
        return Shape(name, index, rank) && Type(name, index, type);
    }
    bool Matrix(const char* name, TensorIndex index, uint32_t type, int64_t rows, int64_t columns) {
        const TensorDesc& tensor = Tensor(call_, index);
        return Typed(name, index, 2, type) &&
               Need(tensor.dims[0] == rows && tensor.dims[1] == columns, name,
                    "%s has shape (%lld, %lld), it must be (%lld, %lld)", name, Wide(tensor.dims[0]),
                    Wide(tensor.dims[1]), Wide(rows), Wide(columns));
    }
    bool Rows(const char* name, TensorIndex index) {
        const TensorDesc& tensor = Tensor(call_, index);
        const uint32_t type = static_cast<uint32_t>(tensor.dtype);
        const int64_t hidden = tensor.dims[1];
        return Shape(name, index, 2) &&
               Need(type == kTypeFp32 || type == kTypeFp16 || type == kTypeBf16, name,
                    "%s is %s, it must be bfloat16, float16 or float32", name, TypeName(type)) &&
               Need(hidden >= 1 && hidden <= kMaxHidden, name, "%s has H = %lld, it must be in 1..%u", name,
                    Wide(hidden), kMaxHidden) &&
               Need(hidden * TypeSize(type) % kBlock == 0, name,
                    "%s has rows of %lld bytes (H = %lld %s), they must be a multiple of %u, the unit of copies: pad H "
                    "to "
                    "%lld",
                    name, Wide(hidden * TypeSize(type)), Wide(hidden), TypeName(type), kBlock,
                    Wide(static_cast<int64_t>(CeilTo(static_cast<uint64_t>(hidden) * TypeSize(type), kBlock)) /
                         TypeSize(type)));
    }
    bool Ids() {
        const TensorDesc& ids = MOE_TENSOR(call_, expert_ids);
        const int64_t most = std::min<int64_t>(kMaxTopK, MOE_ATTRIBUTE(call_, moe_expert_num) + SpecialOf(call_).All());
        return Typed("expert_ids", kTensor_expert_ids, 2, kTypeInt32) &&
               Need(ids.dims[0] <= kMaxBatch, "expert_ids", "expert_ids has BS = %lld tokens, at most %u are supported",
                    Wide(ids.dims[0]), kMaxBatch) &&
               Need(ids.dims[1] >= 1 && ids.dims[1] <= most, "expert_ids",
                    "expert_ids has K = %lld, it must be in 1..%lld", Wide(ids.dims[1]), Wide(most));
    }

    bool Dispatch() {
        if (!Rows("x", kTensor_x) || !Ids()) return false;
        const TensorDesc &x = MOE_TENSOR(call_, x), &ids = MOE_TENSOR(call_, expert_ids);
        const int64_t quant = MOE_ATTRIBUTE(call_, quant_mode), experts = MOE_ATTRIBUTE(call_, moe_expert_num);
        const bool scales = MOE_GIVEN(call_, scales);
        return Need(x.dims[0] == ids.dims[0], "expert_ids",
                    "expert_ids has %lld tokens, x has %lld: they must be equal", Wide(ids.dims[0]), Wide(x.dims[0])) &&
               Need(quant == 0 || quant == 2, "quant_mode",
                    "quant_mode is %lld, only 0 and 2 are supported: static scales (1) are in no CANN, others are "
                    "Ascend 950's alone",
                    Wide(quant)) &&
               Need(!scales || quant != 0, "scales", "scales is given with quant_mode 0, it needs quant_mode 2") &&
               (!scales || Matrix("scales", kTensor_scales, kTypeFp32, experts, x.dims[1])) &&
               InRange("expert_token_nums_type", MOE_ATTRIBUTE(call_, expert_token_nums_type), 0, 1) &&
               (!MOE_GIVEN(call_, expert_scales) ||
                Matrix("expert_scales", kTensor_expert_scales, kTypeFp32, ids.dims[0], ids.dims[1])) &&
               Performance();
    }
    bool Performance() {
        if (!MOE_GIVEN(call_, performance_info)) return true;
        const int64_t length = MOE_TENSOR(call_, performance_info).dims[0], world = MOE_ATTRIBUTE(call_, ep_world_size);
        return Typed("performance_info", kTensor_performance_info, 1, kTypeInt64) &&
               Need(length == world, "performance_info",
                    "performance_info has %lld elements, it must have ep_world_size = %lld: microseconds for each rank",
                    Wide(length), Wide(world));
    }

    bool Combine() {
        if (!Rows("expand_x", kTensor_expand_x) || !Ids()) return false;
        const TensorDesc& ids = MOE_TENSOR(call_, expert_ids);
        const bool v2 = call_.contract == kContractV2;
        const char* name = v2 ? "assist_info_for_combine" : "expand_idx";
        const TensorIndex index = v2 ? kTensor_assist_info_for_combine : kTensor_expand_idx;
        const int64_t length = Tensor(call_, index).dims[0], pairs = ids.dims[0] * ids.dims[1],
                      rows = MOE_TENSOR(call_, expand_x).dims[0], counts = MOE_TENSOR(call_, ep_send_counts).dims[0],
                      slots = MOE_ATTRIBUTE(call_, moe_expert_num);  // W * L
        return CommQuant() && Typed(name, index, 1, kTypeInt32) &&
               Need(v2 || length == pairs, name, "expand_idx has %lld elements, it must have BS*K = %lld", Wide(length),
                    Wide(pairs)) &&
               Need(rows <= INT32_MAX, "expand_x", "expand_x has %lld rows, ep_send_counts can count at most %d",
                    Wide(rows), INT32_MAX) &&
               Need(!v2 || length >= kSourceIndexWords * rows, name,
                    "assist_info_for_combine has %lld elements, expand_x's %lld rows need at least %lld", Wide(length),
                    Wide(rows), Wide(kSourceIndexWords * rows)) &&
               Need(!v2 || TransportOf(call_) != kTransportRdma || length >= pairs, name,
                    "assist_info_for_combine has %lld elements, between servers it must have at least "
                    "BS*K = %lld: pass dispatch's own tensor",
                    Wide(length), Wide(pairs)) &&
               StoredRecords(length) && Typed("ep_send_counts", kTensor_ep_send_counts, 1, kTypeInt32) &&
               Need(counts >= slots, "ep_send_counts",
                    "ep_send_counts has %lld elements, it must have at least W*L = %lld", Wide(counts), Wide(slots)) &&
               Weights(ids) && SharedX() && OriginalX() && ConstExperts() && Performance();
    }
    // The records after the source indices.
    bool StoredRecords(int64_t length) {
        if (!HasTwoLevels(call_)) return true;
        const CallSizes sizes = SizesOf(call_);
        MoeDistributeInfo info = {};
        info.world = static_cast<uint32_t>(sizes.world);
        info.topK = static_cast<uint32_t>(sizes.topK);
        info.maxBatch = static_cast<uint32_t>(sizes.maxBatch);
        info.capacity = Capacity(info.maxBatch, info.topK, static_cast<uint32_t>(sizes.localExperts));
        info.intraNodeRanks = static_cast<uint32_t>(call_.ranks_per_server);
        const int64_t needed =
            static_cast<int64_t>((StoredRecordsOffset(info) + StoredRecordsBytes(info)) / sizeof(int32_t));
        return Need(length >= needed, "assist_info_for_combine",
                    "assist_info_for_combine has %lld elements, comm_alg 'hierarchy' needs at least %lld: pass "
                    "dispatch's own tensor",
                    Wide(length), Wide(needed));
    }
    bool CommQuant() {
        const int64_t mode = MOE_ATTRIBUTE(call_, comm_quant_mode);
        const uint32_t type = static_cast<uint32_t>(MOE_TENSOR(call_, expand_x).dtype);
        return Need(mode == 0 || mode == kCommQuantMode || mode == kNoValue, "comm_quant_mode",
                    "comm_quant_mode is %lld, only 0 and 2 are supported: CANN has no other mode for "
                    "returned int8 rows",
                    Wide(mode)) &&
               Need(mode != kCommQuantMode || type != kTypeFp32, "comm_quant_mode",
                    "comm_quant_mode is 2 and expand_x is float32, it must be bfloat16 or float16: the scales of int8 "
                    "rows travel in its type; use comm_quant_mode 0");
    }
    // Without elements: a plain sum.
    bool Weights(const TensorDesc& ids) {
        if (MOE_GIVEN(call_, expert_scales) && !HasElements(MOE_TENSOR(call_, expert_scales)))
            return Type("expert_scales", kTensor_expert_scales, kTypeFp32);
        return Matrix("expert_scales", kTensor_expert_scales, kTypeFp32, ids.dims[0], ids.dims[1]);
    }
    bool SharedX() {
        if (!MOE_GIVEN(call_, shared_expert_x)) return true;
        const TensorDesc &shared = MOE_TENSOR(call_, shared_expert_x), &rows = MOE_TENSOR(call_, expand_x);
        const int64_t batch = MOE_TENSOR(call_, expert_ids).dims[0], hidden = rows.dims[1];
        const bool flat = shared.rank == 2 && shared.dims[0] == batch && shared.dims[1] == hidden;
        int64_t tokens = 0;
        const bool split = shared.rank == 3 && !__builtin_mul_overflow(shared.dims[0], shared.dims[1], &tokens) &&
                           tokens == batch && shared.dims[2] == hidden;
        return Need(call_.contract != kContractV1, "shared_expert_x",
                    "shared_expert_x is not added by npu_moe_distribute_combine; use "
                    "npu_moe_distribute_combine_v2") &&
               Type("shared_expert_x", kTensor_shared_expert_x, static_cast<uint32_t>(rows.dtype)) &&
               Need(flat || split, "shared_expert_x",
                    "shared_expert_x has shape %s, it must be (%lld, %lld) or (a, b, %lld) with a*b = %lld",
                    ShapeText(shared).text, Wide(batch), Wide(hidden), Wide(hidden), Wide(batch));
    }

    // Rows of copy and const experts.
    bool OriginalX() {
        const SpecialNumbers special = SpecialOf(call_);
        const TensorDesc& rows = MOE_TENSOR(call_, expand_x);
        const bool given = MOE_GIVEN(call_, ori_x);
        return Need(given || special.copy + special.constant == 0, "ori_x",
                    "ori_x is None, copy_expert_num %lld and const_expert_num %lld need it: pass dispatch's x",
                    Wide(special.copy), Wide(special.constant)) &&
               (!given || Matrix("ori_x", kTensor_ori_x, static_cast<uint32_t>(rows.dtype),
                                 MOE_TENSOR(call_, expert_ids).dims[0], rows.dims[1]));
    }
    bool ConstExperts() {
        const uint32_t type = static_cast<uint32_t>(MOE_TENSOR(call_, expand_x).dtype);
        const int64_t experts = SpecialOf(call_).constant, hidden = MOE_TENSOR(call_, expand_x).dims[1];
        const TensorDesc &first = MOE_TENSOR(call_, const_expert_alpha_1),
                         &second = MOE_TENSOR(call_, const_expert_alpha_2);
        return Alphas("const_expert_alpha_1", kTensor_const_expert_alpha_1) &&
               Alphas("const_expert_alpha_2", kTensor_const_expert_alpha_2) &&
               Need(experts == 0 || first.rank == second.rank, "const_expert_alpha_2",
                    "const_expert_alpha_2 has shape %s, const_expert_alpha_1 %s: they must be equal",
                    ShapeText(second).text, ShapeText(first).text) &&
               NeedsConst("const_expert_v", kTensor_const_expert_v) &&
               (!MOE_GIVEN(call_, const_expert_v) ||
                Matrix("const_expert_v", kTensor_const_expert_v, type, experts, hidden));
    }
    bool NeedsConst(const char* name, TensorIndex index) {
        const int64_t experts = SpecialOf(call_).constant;
        return Need(experts == 0 || Given(call_, index), name, "%s is None, const_expert_num %lld needs it", name,
                    Wide(experts));
    }
    // (C,): a factor per expert; (C, H): vectors from which a row gets its own factor.
    bool Alphas(const char* name, TensorIndex index) {
        if (!NeedsConst(name, index)) return false;
        if (!Given(call_, index)) return true;
        const TensorDesc &alphas = Tensor(call_, index), &rows = MOE_TENSOR(call_, expand_x);
        const int64_t experts = SpecialOf(call_).constant, hidden = rows.dims[1];
        const bool fits = alphas.rank == 1 || (alphas.rank == 2 && alphas.dims[1] == hidden);
        return Type(name, index, static_cast<uint32_t>(rows.dtype)) &&
               Need(fits && alphas.dims[0] == experts, name, "%s has shape %s, it must be (%lld,) or (%lld, %lld)",
                    name, ShapeText(alphas).text, Wide(experts), Wide(experts), Wide(hidden));
    }

    bool Batches() {
        const int64_t global = MOE_ATTRIBUTE(call_, global_bs), world = MOE_ATTRIBUTE(call_, ep_world_size);
        const int64_t batch = MOE_TENSOR(call_, expert_ids).dims[0], most = global / world;
        return Need(global >= 0 && global % world == 0, "global_bs",
                    "global_bs is %lld, it must be 0 or a multiple of ep_world_size %lld: ep_world_size * the largest "
                    "BS",
                    Wide(global), Wide(world)) &&
               Need(most <= kMaxBatch, "global_bs",
                    "global_bs is %lld, it allows %lld tokens a rank; at most %u are supported", Wide(global),
                    Wide(most), kMaxBatch) &&
               Need(global == 0 || batch <= most, "global_bs",
                    "BS is %lld on this rank, global_bs %lld allows at most %lld (global_bs / ep_world_size): "
                    "pass ep_world_size * the largest BS on every rank",
                    Wide(batch), Wide(global), Wide(most));
    }

    bool Mask() {
        if (!MOE_GIVEN(call_, x_active_mask)) return true;
        const TensorDesc &mask = MOE_TENSOR(call_, x_active_mask), &ids = MOE_TENSOR(call_, expert_ids);
        const bool fits =
            (mask.rank == 1 || (mask.rank == 2 && mask.dims[1] == ids.dims[1])) && mask.dims[0] == ids.dims[0];
        return Type("x_active_mask", kTensor_x_active_mask, kTypeBool) &&
               Need(fits, "x_active_mask", "x_active_mask has shape %s, it must be (%lld,) or (%lld, %lld)",
                    ShapeText(mask).text, Wide(ids.dims[0]), Wide(ids.dims[0]), Wide(ids.dims[1]));
    }

    bool Attributes() {
        const int64_t type = MOE_ATTRIBUTE(call_, group_list_type);
        return type == kNoValue || InRange("group_list_type", type, 0, 2);
    }

    const CallSpec& call_;
    CheckResult& result_;
};

}  // namespace moe
