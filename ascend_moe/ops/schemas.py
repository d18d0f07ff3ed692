"""Schemas of the custom ops, torch_npu's own word for word so that call sites move over."""

from __future__ import annotations

NAMESPACE = "ascend_moe"

_DISPATCH_HEAD = (
    "Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
    "Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
)
_DISPATCH_TAIL = (
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
    "int shared_expert_num=1, int shared_expert_rank_num=0, "
    "int quant_mode=0, int global_bs=0, int expert_token_nums_type=1"
)
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

SCHEMAS: dict[str, str] = {
    "npu_moe_distribute_dispatch": f"({_DISPATCH_HEAD}{_DISPATCH_TAIL}) -> {_SEVEN}",
    "npu_moe_distribute_dispatch_v2": (
        f"({_DISPATCH_HEAD}Tensor? elastic_info=None, Tensor? performance_info=None, {_DISPATCH_TAIL}, "
        'str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0, '
        f"int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None) -> {_SEVEN}"
    ),
    "npu_moe_distribute_combine": (
        "(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, "
        "Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
        "Tensor? tp_send_counts=None, "
        "Tensor? x_active_mask=None, Tensor? activation_scale=None, Tensor? weight_scale=None, "
        "Tensor? group_list=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None, "
        'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
        "int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, int out_dtype=0, "
        "int comm_quant_mode=0, int group_list_type=0) -> Tensor"
    ),
    "npu_moe_distribute_combine_v2": (
        "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, Tensor ep_send_counts, "
        "Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
        "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
        "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
        "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
        'Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, '
        "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, "
        'int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, '
        "int const_expert_num=0) -> Tensor"
    ),
}
