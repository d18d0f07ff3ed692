// The op types as CANN sees them: names, inputs, outputs and attributes in the one order that the op
// definition, the aclnn entry points and the kernel entries share. No CANN types.
#pragma once

#include <cstddef>
#include <cstring>

#include "probe/tiling.h"
#include "args.h"

namespace moe {

// Element type of a tensor of the definition; the two kinds of rows take a type of the kernels each.
enum class OpType : uint8_t { kRows, kWireRows, kFp32, kInt32, kInt64, kBool };

struct OpTensor {
    const char* name;
    OpType type;
    bool required;
    TensorIndex index;  // in CallSpec; of outputs unused
};

// An integer, or a string where `text` is not null.
struct OpAttribute {
    const char* name;
    bool required;
    int64_t value;     // default
    const char* text;  // default
};

// clang-format off
#define ASCEND_MOE_INPUT(name, type, required) {#name, OpType::type, required, kTensor_##name}
#define ASCEND_MOE_OUTPUT(name, type) {#name, OpType::type, true, kTensorCount}

constexpr OpTensor kDispatchOpInputs[] = {
    ASCEND_MOE_INPUT(x, kRows, true),
    ASCEND_MOE_INPUT(expert_ids, kInt32, true),
    ASCEND_MOE_INPUT(scales, kFp32, false),
    ASCEND_MOE_INPUT(x_active_mask, kBool, false),
    ASCEND_MOE_INPUT(expert_scales, kFp32, false),
};
constexpr OpTensor kDispatchOpOutputs[] = {
    ASCEND_MOE_OUTPUT(expand_x, kWireRows),
    ASCEND_MOE_OUTPUT(dynamic_scales, kFp32),
    ASCEND_MOE_OUTPUT(expand_idx, kInt32),
    ASCEND_MOE_OUTPUT(expert_token_nums, kInt64),
    ASCEND_MOE_OUTPUT(ep_recv_counts, kInt32),
    ASCEND_MOE_OUTPUT(tp_recv_counts, kInt32),
    ASCEND_MOE_OUTPUT(expand_scales, kFp32),
    ASCEND_MOE_OUTPUT(error_record, kInt32),
};
constexpr OpAttribute kDispatchOpAttributes[] = {
    {"group_ep", true, 0, ""},              {"ep_world_size", true, 0, nullptr},
    {"ep_rank_id", true, 0, nullptr},       {"moe_expert_num", true, 0, nullptr},
    {"group_tp", false, 0, ""},             {"tp_world_size", false, 0, nullptr},
    {"tp_rank_id", false, 0, nullptr},      {"expert_shard_type", false, 0, nullptr},
    {"shared_expert_num", false, 1, nullptr}, {"shared_expert_rank_num", false, 0, nullptr},
    {"quant_mode", false, 0, nullptr},      {"global_bs", false, 0, nullptr},
    {"expert_token_nums_type", false, 1, nullptr}, {"comm_alg", false, 0, ""},
    {"zero_expert_num", false, 0, nullptr}, {"copy_expert_num", false, 0, nullptr},
    {"const_expert_num", false, 0, nullptr}, {"contract", false, 1, nullptr},
    {"window_mib", false, 0, nullptr},      {"timeout_us", false, 0, nullptr},
    {"part", false, 0, nullptr},            {"ranks_per_server", false, 0, nullptr},
};

constexpr OpTensor kCombineOpInputs[] = {
    ASCEND_MOE_INPUT(expand_x, kRows, true),
    ASCEND_MOE_INPUT(expert_ids, kInt32, true),
    ASCEND_MOE_INPUT(expand_idx, kInt32, true),  // V2: assist_info_for_combine
    ASCEND_MOE_INPUT(ep_send_counts, kInt32, true),
    ASCEND_MOE_INPUT(expert_scales, kFp32, true),
    ASCEND_MOE_INPUT(tp_send_counts, kInt32, false),
    ASCEND_MOE_INPUT(x_active_mask, kBool, false),
    ASCEND_MOE_INPUT(expand_scales, kFp32, false),
    ASCEND_MOE_INPUT(shared_expert_x, kRows, false),
};
constexpr OpTensor kCombineOpOutputs[] = {
    ASCEND_MOE_OUTPUT(x, kRows),
    ASCEND_MOE_OUTPUT(error_record, kInt32),
};
constexpr OpAttribute kCombineOpAttributes[] = {
    {"group_ep", true, 0, ""},              {"ep_world_size", true, 0, nullptr},
    {"ep_rank_id", true, 0, nullptr},       {"moe_expert_num", true, 0, nullptr},
    {"group_tp", false, 0, ""},             {"tp_world_size", false, 0, nullptr},
    {"tp_rank_id", false, 0, nullptr},      {"expert_shard_type", false, 0, nullptr},
    {"shared_expert_num", false, 1, nullptr}, {"shared_expert_rank_num", false, 0, nullptr},
    {"global_bs", false, 0, nullptr},       {"out_dtype", false, 0, nullptr},
    {"comm_quant_mode", false, 0, nullptr}, {"group_list_type", false, 0, nullptr},
    {"comm_alg", false, 0, ""},             {"zero_expert_num", false, 0, nullptr},
    {"copy_expert_num", false, 0, nullptr}, {"const_expert_num", false, 0, nullptr},
    {"contract", false, 1, nullptr},        {"window_mib", false, 0, nullptr},
    {"timeout_us", false, 0, nullptr},      {"part", false, 0, nullptr},
    {"ranks_per_server", false, 0, nullptr},
};

constexpr OpTensor kProbeOpOutputs[] = {
    ASCEND_MOE_OUTPUT(report, kInt32),  // [kProbeReportBlocks, kBlockWords]
};
constexpr OpAttribute kProbeOpAttributes[] = {
    {"group_ep", true, 0, ""},              {"ep_world_size", true, 0, nullptr},
    {"ep_rank_id", true, 0, nullptr},       {"mode", true, 0, nullptr},
    {"nonce", true, 0, nullptr},            {"rounds", false, 1, nullptr},
    {"cycles", false, 0, nullptr},          {"window_mib", false, 0, nullptr},
    {"timeout_us", false, 0, nullptr},      {"ranks_per_server", false, 0, nullptr},
};
#undef ASCEND_MOE_INPUT
#undef ASCEND_MOE_OUTPUT
// clang-format on

template <typename T>
struct Span {
    const T* data;
    size_t size;
    const T* begin() const { return data; }
    const T* end() const { return data + size; }
    const T& operator[](size_t i) const { return data[i]; }
};
template <typename T, size_t kSize>
constexpr Span<T> SpanOf(const T (&array)[kSize]) {
    return {array, kSize};
}

struct OpInterface {
    const char* type;
    Span<OpTensor> inputs;
    Span<OpTensor> outputs;
    Span<OpAttribute> attributes;
};

inline OpInterface InterfaceOf(uint32_t op) {
    if (op == kOpDispatch) {
        return {"AscendMoeDistributeDispatch", SpanOf(kDispatchOpInputs), SpanOf(kDispatchOpOutputs),
                SpanOf(kDispatchOpAttributes)};
    }
    if (op == kOpProbe) {
        return {"AscendMoeProbe", {nullptr, 0}, SpanOf(kProbeOpOutputs), SpanOf(kProbeOpAttributes)};
    }
    return {"AscendMoeDistributeCombine", SpanOf(kCombineOpInputs), SpanOf(kCombineOpOutputs),
            SpanOf(kCombineOpAttributes)};
}

// Place of a name in CallSpec's attributes; kAttributeCount for those which are not among them.
inline uint32_t AttributeIndexOf(const char* name) {
#define ASCEND_MOE_NAME(attribute) #attribute,
    static const char* const names[] = {ASCEND_MOE_ATTRIBUTES(ASCEND_MOE_NAME)};
#undef ASCEND_MOE_NAME
    uint32_t at = 0;
    while (at < kAttributeCount && strcmp(names[at], name) != 0) ++at;
    return at;
}

// Names of comm_alg. CANN's names for its algorithms select window: on one
// server its hierarchy sums as that does.
inline int32_t AlgorithmIndexOf(const char* name) {
    static const char* const names[] = {"window",    "fullmesh", "fullmesh_v1", "fullmesh_v2",
                                        "hierarchy", "direct",   "auto",        ""};
    static_assert(sizeof(names) / sizeof(names[0]) == kCommAlgCount, "a name an index");
    for (int32_t i = 0; i < kCommAlgCount; ++i) {
        if (strcmp(name, names[i]) == 0) return i;
    }
    return -1;
}

}  // namespace moe
