"""npu_moe_distribute_combine_add_rms_norm: combine, the residual, and the RMS norm of their sum."""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.errors import ArgumentError, WindowTooSmall
from ascend_moe.vendor.checks import need, need_dtype, need_only, need_shape, need_unset

_NAME = "npu_moe_distribute_combine_add_rms_norm"
_COMBINE = "npu_moe_distribute_combine_v2"
# What combine_v2 calls expand_idx.
_INDEX = "assist_info_for_combine"


def npu_moe_distribute_combine_add_rms_norm(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    residual_x: torch.Tensor,
    gamma: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    group_list: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
    comm_alg: str = "",
    norm_eps: float = 1e-6,
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the experts' rows, add the residual, normalise by the root of the mean square.

    ``acc`` is combine's fp32 sum, not rounded, plus the residual:
    ``x = acc``, ``rstd = 1 / sqrt(sum(acc * acc * (1 / H)) + norm_eps)`` and
    ``y = rounded(acc * rstd) * gamma``, fp32 inside, each result rounded once. The rows travel as fp32, so
    that the sum arrives as it is: windows twice as large as for `npu_moe_distribute_combine_v2`.

    Args:
        expand_x: ``(>= rows, H)`` bfloat16, float16 or float32, in the row order of
            ``npu_moe_distribute_dispatch_v2``.
        expand_idx: ``(>= 3*rows,)`` int32, the v2 dispatch's assist_info_for_combine.
        residual_x: ``(BS, 1, H)``, dtype of expand_x. gamma: ``(H,)``, dtype of expand_x.
        norm_eps: added to the mean square, finite and at least 0.
        shared_expert_x: ``(BS, H)`` or ``(BS, 1, H)``, dtype of expand_x; added before the residual.
        expert_ids, ep_send_counts, expert_scales, x_active_mask, group_ep, ep_world_size, ep_rank_id,
            moe_expert_num, global_bs, comm_alg: as for `npu_moe_distribute_combine_v2`.
        tp_send_counts, expand_scales, group_tp, tp_rank_id, group_list_type: accepted and ignored.
        activation_scale, weight_scale, group_list: must be None. out_dtype: must be 0.
        elastic_info, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v, tp_world_size,
            expert_shard_type, shared_expert_num, shared_expert_rank_num, comm_quant_mode, zero_expert_num,
            copy_expert_num, const_expert_num: what `npu_moe_distribute_combine_v2` takes.

    Returns:
        y ``(BS, 1, H)`` of expand_x's dtype; rstd ``(BS, 1, 1)`` fp32; x ``(BS, 1, H)``, the sum that was
        normalised. An inactive token's x is its residual (CANN leaves those rows as they are).

    Collective; errors, order and compilers as for `npu_moe_distribute_combine_v2`. Not differentiable.

    Source: torch_npu ``npu_moe_distribute_combine_add_rms_norm``. NPU tensors take the same way over our
    combine, not CANN's operator, which would write into the windows of the group in its own layout.
    """
    combine_only = {
        "tp_send_counts": tp_send_counts, "x_active_mask": x_active_mask, "expand_scales": expand_scales,
        "elastic_info": elastic_info, "ori_x": ori_x, "const_expert_alpha_1": const_expert_alpha_1,
        "const_expert_alpha_2": const_expert_alpha_2, "const_expert_v": const_expert_v,
        "group_tp": group_tp, "tp_world_size": tp_world_size, "tp_rank_id": tp_rank_id,
        "expert_shard_type": expert_shard_type, "shared_expert_num": shared_expert_num,
        "shared_expert_rank_num": shared_expert_rank_num, "global_bs": global_bs,
        "comm_quant_mode": comm_quant_mode, "comm_alg": comm_alg, "zero_expert_num": zero_expert_num,
        "copy_expert_num": copy_expert_num, "const_expert_num": const_expert_num,
    }  # fmt: skip
    need_unset(activation_scale=activation_scale, weight_scale=weight_scale, group_list=group_list)
    need_only("out_dtype", out_dtype, 0)
    need(0 <= norm_eps < float("inf"), "norm_eps", f"is {norm_eps}; it must be finite and at least 0")
    _check(expand_x, expert_ids, residual_x, gamma, shared_expert_x)
    acc = _combined(
        (expand_x.float(), expert_ids, expand_idx, ep_send_counts, expert_scales),
        (group_ep, ep_world_size, ep_rank_id, moe_expert_num),
        combine_only | {"shared_expert_x": None if shared_expert_x is None else shared_expert_x.float()},
    )
    return _normalised(acc.unsqueeze(1) + residual_x.float(), gamma, norm_eps, expand_x.dtype)


def _check(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    residual_x: torch.Tensor,
    gamma: torch.Tensor,
    shared: torch.Tensor | None,
) -> None:
    need_dtype("expand_x", expand_x, torch.bfloat16, torch.float16, torch.float32)
    for name, tensor in (("expand_x", expand_x), ("expert_ids", expert_ids)):
        need(tensor.dim() == 2, name, f"has {tensor.dim()} dimensions, it must have 2")
    batch, hidden = expert_ids.shape[0], expand_x.shape[1]
    need_shape("residual_x", residual_x, (batch, 1, hidden))
    need_shape("gamma", gamma, (hidden,))
    for name, value in (("residual_x", residual_x), ("gamma", gamma), ("shared_expert_x", shared)):
        if value is not None:
            need_dtype(name, value, expand_x.dtype)


def _combined(tensors: tuple[Any, ...], place: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    try:
        result: torch.Tensor = getattr(torch.ops.ascend_moe, _COMBINE)(*tensors, *place, **kwargs)
    except ArgumentError as error:
        # Names of this operator for what the other one found.
        message = str(error).replace(_COMBINE, _NAME).replace(_INDEX, "expand_idx")
        argument = "expand_idx" if error.argument == _INDEX else error.argument
        kind = WindowTooSmall if isinstance(error, WindowTooSmall) else ArgumentError
        raise kind(message, **{**error.details, "argument": argument}) from None
    return result


def _normalised(
    acc: torch.Tensor, gamma: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = (acc * acc * (1.0 / max(acc.shape[-1], 1))).sum(-1, keepdim=True)
    rstd = 1.0 / torch.sqrt(mean + eps)
    return ((acc * rstd).to(dtype).float() * gamma.float()).to(dtype), rstd, acc.to(dtype)
