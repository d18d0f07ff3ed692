"""Schemas of torch_npu's MoE operators beside the four of `ascend_moe.ops.schemas`, its own word for word.

Taken from torch_npu 2.13.0, name by name as ``torch.ops.npu`` prints them (a test compares with the wheel).
A key is the operator's name, with ``.overload`` behind it where it has more than the default one.
"""

from __future__ import annotations

_PAIR = "(Tensor, Tensor)"
_TRIPLE = "(Tensor, Tensor, Tensor)"
_QUADRUPLE = "(Tensor, Tensor, Tensor, Tensor)"

# ---- the MC2 family: they wait for other ranks, but for the last

MC2_SCHEMAS: dict[str, str] = {
    "npu_moe_distribute_combine_add_rms_norm": (
        "(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, "
        "Tensor expert_scales, Tensor residual_x, Tensor gamma, str group_ep, int ep_world_size, "
        "int ep_rank_id, int moe_expert_num, *, Tensor? tp_send_counts=None, Tensor? x_active_mask=None, "
        "Tensor? activation_scale=None, Tensor? weight_scale=None, Tensor? group_list=None, "
        "Tensor? expand_scales=None, Tensor? shared_expert_x=None, Tensor? elastic_info=None, "
        "Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, "
        'Tensor? const_expert_v=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, '
        "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, "
        'int out_dtype=0, int comm_quant_mode=0, int group_list_type=0, str comm_alg="", '
        "float norm_eps=1e-06, int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0) "
        f"-> {_TRIPLE}"
    ),
    "_npu_distribute_barrier": (
        "(Tensor x_ref, str group, int world_size, *, Tensor? time_out=None, Tensor? elastic_info=None) "
        "-> Tensor"
    ),
    "npu_moe_update_expert": (
        "(Tensor expert_ids, Tensor eplb_table, *, Tensor? expert_scales=None, "
        "Tensor? pruning_threshold=None, Tensor? active_mask=None, int local_rank_id=-1, int world_size=-1, "
        f"int balance_mode=0) -> {_PAIR}"
    ),
}

# ---- between dispatch and combine

_GROUPED_MATMUL_LISTS = (
    "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
)
_GROUPED_MATMUL_MODES = (
    "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
    "int? group_list_type=0, int? act_type=0, "
)

EXPERT_SCHEMAS: dict[str, str] = {
    "npu_grouped_matmul": (
        f"{_GROUPED_MATMUL_LISTS}Tensor? group_list=None, {_GROUPED_MATMUL_MODES}"
        "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
        "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    "npu_grouped_matmul.List": (
        f"{_GROUPED_MATMUL_LISTS}int[]? group_list=None, {_GROUPED_MATMUL_MODES}"
        "ScalarType? output_dtype=None) -> Tensor[]"
    ),
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_dequant_swiglu_quant": (
        "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, "
        "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
        "bool activate_left=False, int quant_mode=0, int? dst_type=None, int? round_mode=None, "
        "int? activate_dim=None, int swiglu_mode=0, float clamp_limit=7., float glu_alpha=1.702, "
        f"float glu_bias=1.) -> {_PAIR}"
    ),
    "npu_grouped_matmul_swiglu_quant": (
        "(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale, *, "
        f"Tensor? bias=None, Tensor? offset=None) -> {_TRIPLE}"
    ),
    "npu_grouped_matmul_swiglu_quant_v2": (
        "(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, *, "
        "Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
        "int? dequant_mode=0, int? dequant_dtype=6, int? quant_mode=0, int? quant_dtype=1, "
        "int? group_list_type=0, int[]? tuning_config=None, int? x_dtype=None, int? weight_dtype=None, "
        f"int? weight_scale_dtype=None, int? x_scale_dtype=None) -> {_PAIR}"
    ),
    "npu_grouped_matmul_finalize_routing": (
        "(Tensor x, Tensor w, Tensor group_list, *, Tensor? scale=None, Tensor? bias=None, "
        "Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? shared_input=None, Tensor? logit=None, "
        "Tensor? row_index=None, ScalarType? dtype=None, float? shared_input_weight=1., "
        "int? shared_input_offset=0, int? output_bs=0, int? group_list_type=1, int[]? tuning_config=None, "
        "int? x_dtype=None, int? w_dtype=None, int? scale_dtype=None, int? pertoken_scale_dtype=None) "
        "-> Tensor"
    ),
    "npu_dynamic_quant": (
        "(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
        f'str quant_mode="pertoken", float dst_type_max=0.) -> {_PAIR}'
    ),
}

# ---- routers, and moving rows by what they decide

ROUTING_SCHEMAS: dict[str, str] = {
    "npu_moe_gating_top_k": (
        "(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
        "int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, "
        f"bool out_flag=False, float routed_scaling_factor=1., float eps=1e-20) -> {_TRIPLE}"
    ),
    "npu_moe_gating_top_k_softmax": f"(Tensor x, Tensor? finished=None, int k=1) -> {_TRIPLE}",
    "npu_moe_gating_top_k_softmax_v2": (
        "(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, bool? output_softmax=False) "
        f"-> {_TRIPLE}"
    ),
    "npu_moe_init_routing": (f"(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> {_TRIPLE}"),
    "npu_moe_init_routing_v2": (
        "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
        "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
        "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], "
        f"int row_idx_type=0, int? x_dtype=None) -> {_QUADRUPLE}"
    ),
    "npu_moe_compute_expert_tokens": "(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor",
    "npu_moe_token_permute": (
        f"(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> {_PAIR}"
    ),
    "npu_moe_token_unpermute": (
        "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None) -> Tensor"
    ),
    "npu_moe_finalize_routing": (
        "(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? scales, "
        "Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) "
        "-> Tensor"
    ),
    "npu_moe_re_routing": (
        "(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None, "
        f"int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) -> {_QUADRUPLE}"
    ),
}

VENDOR_SCHEMAS: dict[str, str] = {**MC2_SCHEMAS, **EXPERT_SCHEMAS, **ROUTING_SCHEMAS}

# Only in op-plugin's sources and in the wheel for torch 2.8: no other wheel of torch_npu has them.
ABSENT = (
    "npu_moe_distribute_dispatch_setup",
    "npu_moe_distribute_dispatch_teardown",
    "npu_moe_distribute_combine_setup",
    "npu_moe_distribute_combine_teardown",
)
