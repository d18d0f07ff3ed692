// The launches, with their arguments in the order of the operators' definition and aclnn entries.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <string>

namespace ascend_moe_npu {

using Given = const at::Tensor&;
using Optional = const c10::optional<at::Tensor>&;
using Output = const at::Tensor&;  // written by the kernel
using Text = c10::string_view;

#define AM_DISPATCH_ARGUMENTS                                                                                \
    Given x, Given expert_ids, Optional scales, Optional x_active_mask, Optional expert_scales,              \
        Text group_ep, int64_t ep_world_size, int64_t ep_rank_id, int64_t moe_expert_num, Text group_tp,     \
        int64_t tp_world_size, int64_t tp_rank_id, int64_t expert_shard_type, int64_t shared_expert_num,     \
        int64_t shared_expert_rank_num, int64_t quant_mode, int64_t global_bs,                               \
        int64_t expert_token_nums_type, Text comm_alg, int64_t zero_expert_num, int64_t copy_expert_num,     \
        int64_t const_expert_num, int64_t contract, int64_t window_mib, int64_t timeout_us, Output expand_x, \
        Output dynamic_scales, Output expand_idx, Output expert_token_nums, Output ep_recv_counts,           \
        Output tp_recv_counts, Output expand_scales, Output error_record

#define AM_COMBINE_ARGUMENTS                                                                               \
    Given expand_x, Given expert_ids, Given expand_idx, Given ep_send_counts, Given expert_scales,         \
        Optional tp_send_counts, Optional x_active_mask, Optional expand_scales, Optional shared_expert_x, \
        Text group_ep, int64_t ep_world_size, int64_t ep_rank_id, int64_t moe_expert_num, Text group_tp,   \
        int64_t tp_world_size, int64_t tp_rank_id, int64_t expert_shard_type, int64_t shared_expert_num,   \
        int64_t shared_expert_rank_num, int64_t global_bs, int64_t out_dtype, int64_t comm_quant_mode,     \
        int64_t group_list_type, Text comm_alg, int64_t zero_expert_num, int64_t copy_expert_num,          \
        int64_t const_expert_num, int64_t contract, int64_t window_mib, int64_t timeout_us, Output x,      \
        Output error_record

#define AM_PROBE_ARGUMENTS                                                                                 \
    Text group_ep, int64_t ep_world_size, int64_t ep_rank_id, int64_t mode, int64_t nonce, int64_t rounds, \
        int64_t cycles, int64_t broken, int64_t window_mib, int64_t timeout_us, Output report

void Dispatch(AM_DISPATCH_ARGUMENTS);
void Combine(AM_COMBINE_ARGUMENTS);
void Probe(AM_PROBE_ARGUMENTS);

}  // namespace ascend_moe_npu
