"""torch_npu's operators that wait for all ranks, built on this package's dispatch and combine.

* ``npu_moe_distribute_combine_add_rms_norm``: combine, add the residual, RMS norm of the sum.
* ``_npu_distribute_barrier``: a dispatch without tokens.

On an NPU both also run on this package's kernels, never on CANN's operators, which would write CANN's layout into the
group's windows.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ascend_moe import comm
from ascend_moe.call import need_exact_rows
from ascend_moe.errors import (
    ArgumentError,
    need,
    need_dims,
    need_dtype,
    need_only,
    need_shape,
    need_unset,
    with_typed_errors,
)
from ascend_moe.native.torch_npu import on_npu
from ascend_moe.ops import callbacks
from ascend_moe.ops.registration import wants_gradient

_COMBINE_NORM = "npu_moe_distribute_combine_add_rms_norm"
_COMBINE = "npu_moe_distribute_combine_v2"
# expand_idx by combine_v2's name.
_INDEX = "assist_info_for_combine"
# Tensors of copy and const experts.
_SPECIAL = ("ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
# Arguments that combine_v2 lacks.
_OWN = (
    "residual_x", "gamma", "norm_eps", "activation_scale", "weight_scale", "group_list", "group_list_type",
    "out_dtype",
)  # fmt: skip


@with_typed_errors
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
    """Combine the experts' rows, add the residual, normalize by the root mean square.

    ``acc`` is combine's fp32 sum, not rounded, plus the residual:
    ``x = acc``, ``rstd = 1 / sqrt(sum(acc * acc * (1 / H)) + norm_eps)`` and
    ``y = rounded(acc * rstd) * gamma``, fp32 inside, each result rounded once. The rows are sent as fp32 to keep the
    sum exact, so windows must be twice as large as for `npu_moe_distribute_combine_v2`. With comm_quant_mode 2 they
    are first rounded like that op's int8 rows, but still sent as fp32.

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
        ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v: as for `npu_moe_distribute_combine_v2`,
            in the dtype of expand_x.
        elastic_info, tp_world_size, expert_shard_type, shared_expert_num, shared_expert_rank_num, comm_quant_mode,
            zero_expert_num, copy_expert_num, const_expert_num: as for `npu_moe_distribute_combine_v2`.

    Returns:
        y ``(BS, 1, H)`` of expand_x's dtype; rstd ``(BS, 1, 1)`` fp32; x ``(BS, 1, H)``, the sum that was
        normalized. An inactive token's x is its residual (CANN leaves these rows of its outputs unwritten).

    Collective; order, compilers and gradients as for `npu_moe_distribute_combine_v2`.

    Raises:
        As for `npu_moe_distribute_combine_v2`; ArgumentError also for residual_x, gamma and norm_eps.

    Source: torch_npu ``npu_moe_distribute_combine_add_rms_norm``. NPU tensors use this package's kernels too.
    """
    given = dict(locals())
    for name in ("expand_x", "residual_x", "gamma", "expert_ids", "expand_idx", "ep_send_counts", "expert_scales"):
        need(isinstance(given[name], torch.Tensor), name, "is a {}; it must be a tensor", type(given[name]).__name__)
    need_unset(activation_scale=activation_scale, weight_scale=weight_scale, group_list=group_list)
    need_only("out_dtype", out_dtype, 0)
    need(0 <= norm_eps < float("inf"), "norm_eps", "is {}; it must be finite and at least 0", norm_eps)
    need_dims("expand_x", expand_x, 2, dtypes=(torch.bfloat16, torch.float16, torch.float32))
    need_dims("expert_ids", expert_ids, 2)
    batch, hidden = expert_ids.shape[0], expand_x.shape[1]
    need_shape("residual_x", residual_x, (batch, 1, hidden))
    need_shape("gamma", gamma, (hidden,))
    for name in ("residual_x", "gamma", "shared_expert_x", *_SPECIAL):
        if given[name] is not None:
            need_dtype(name, given[name], expand_x.dtype)
    wide = {name: value.float() for name in (*_SPECIAL, "shared_expert_x") if (value := given[name]) is not None}
    rows = expand_x
    if comm_quant_mode == 2:
        rule = "is 2 and expand_x is float32, it must be bfloat16 or float16; use comm_quant_mode 0"
        need(expand_x.dtype != torch.float32, "comm_quant_mode", rule)
        if wants_gradient((expand_x, expert_scales)):
            need_exact_rows(given)
        given["comm_quant_mode"] = 0
        rows = _as_codes(expand_x) if hidden % _CODES_OF_SCALE == 0 else expand_x  # combine raises the error
    acc = _combined(**given | wide | {"expand_x": rows.float()}).unsqueeze(1) + residual_x.float()
    if x_active_mask is None or not wants_gradient((acc, gamma)):
        return _normalised(acc, gamma, norm_eps, expand_x.dtype)
    active = x_active_mask if x_active_mask.dim() == 1 else x_active_mask.any(1)
    return _normalised_active(acc, gamma, norm_eps, expand_x.dtype, active)


_CODES_OF_SCALE = 8
_PER_CODE = 0.007874015718698502  # 1 / 127 in fp32


def _as_codes(rows: torch.Tensor) -> torch.Tensor:
    """Round rows to int8 codes with a scale per block of 8, exactly as combine's kernels do."""
    blocks = rows.detach().float().reshape(rows.shape[0], rows.shape[1] // _CODES_OF_SCALE, _CODES_OF_SCALE)
    largest = blocks.abs().nan_to_num(nan=-1.0, posinf=float("inf")).amax(-1, keepdim=True)
    scale = torch.where(largest < 0, float("nan"), largest * _PER_CODE)  # below 0: nothing but NaN
    codes = (blocks / scale).half().float().round().nan_to_num(nan=0.0) + 0.0  # 0.0, not -0.0
    restored: torch.Tensor = (codes * scale.to(rows.dtype).float()).to(rows.dtype)
    return restored.reshape(rows.shape)


def _combined(**given: Any) -> torch.Tensor:
    arguments = {name: value for name, value in given.items() if name not in _OWN}
    arguments[_INDEX] = arguments.pop("expand_idx")
    try:
        result: torch.Tensor = getattr(torch.ops.ascend_moe, _COMBINE)(**arguments)
    except ArgumentError as error:
        # combine_v2 raised: use the names of the called operator in the message.
        message = str(error).replace(_COMBINE, _COMBINE_NORM).replace(_INDEX, "expand_idx")
        argument = "expand_idx" if error.argument == _INDEX else error.argument
        raise type(error)(message, **{**error.details, "argument": argument}) from None
    return result


def _normalised(
    acc: torch.Tensor, gamma: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = (acc * acc * (1.0 / max(acc.shape[-1], 1))).sum(-1, keepdim=True)
    rstd = 1.0 / torch.sqrt(mean + eps)
    return ((acc * rstd).to(dtype).float() * gamma.float()).to(dtype), rstd, acc.to(dtype)


def _normalised_active(
    acc: torch.Tensor, gamma: torch.Tensor, eps: float, dtype: torch.dtype, active: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `_normalised` without gradients of inactive tokens, whose NaN would reach gamma's gradient."""
    active = active[:, None, None]
    followed = _normalised(torch.where(active, acc, 1.0), gamma, eps, dtype)
    fixed = _normalised(acc.detach(), gamma.detach(), eps, dtype)
    y, rstd, x = (torch.where(active, *pair) for pair in zip(followed, fixed, strict=True))
    return y, rstd, x


_DISPATCH = "npu_moe_distribute_dispatch_v2"
# H and K of a dispatch without tokens: any valid values, equal on all ranks.
_HIDDEN, _TOPK = 16, 1


@with_typed_errors
def _npu_distribute_barrier(
    x_ref: torch.Tensor,
    group: str,
    world_size: int,
    *,
    time_out: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
) -> torch.Tensor:
    """Wait until every rank of the group has called this; return a copy of x_ref.

    Args:
        x_ref: any tensor that must not be used before all ranks have called.
        group: name of the EP group, as group_ep of dispatch; the same group is allowed.
        world_size: its number of ranks.
        time_out: int32 ``(1,)``, microseconds to wait for the others, above 0; CPU only. None:
            ASCEND_MOE_TIMEOUT_S, which also bounds the opening of the group's windows on first use.
        elastic_info: must be None.

    Returns:
        a copy of x_ref.

    Collective, and ordered with dispatch and combine of the same group: ConfigMismatch names a rank that
    calls one of those instead. On an NPU it is asynchronous, as they are: the device waits, and the
    next op or ``ascend_moe.check`` raises.

    Raises:
        ArgumentError: an argument of this rank breaks one of these rules.
        CommTimeout, PeerLost: a rank did not call in time, or its process ended; close the communicator.

    Source: torch_npu ``_npu_distribute_barrier``.
    """
    need_unset(elastic_info=elastic_info)
    comm.need_name("group", group)
    place = comm.size_and_rank(group)
    if place is None:
        text = f"group is {group!r}, which names no live communicator: use ascend_moe.comm_name(process_group)"
        raise ArgumentError(text, argument="group")
    world, rank = place
    need(world_size == world, "world_size", "is {} but group {!r} has {} ranks: pass that", world_size, group, world)
    if rank is None:
        text = f"group is {group!r}, a LocalCluster's: call this in the thread of a rank"
        raise ArgumentError(text, argument="group")
    need(time_out is None or not on_npu(x_ref), "time_out", "is supported on the CPU only: set ASCEND_MOE_TIMEOUT_S")
    rows = x_ref.new_empty((0, _HIDDEN), dtype=torch.bfloat16)
    ids = x_ref.new_empty((0, _TOPK), dtype=torch.int32)
    limit = contextlib.nullcontext() if time_out is None else callbacks.deadline(_microseconds(time_out))
    with limit:
        getattr(torch.ops.ascend_moe, _DISPATCH)(rows, ids, group, world, rank, world)
    return x_ref.clone(memory_format=torch.contiguous_format)


def _microseconds(time_out: torch.Tensor) -> int:
    need(time_out.numel() == 1, "time_out", "is {}; it must be (1,)", time_out.shape)
    need_dtype("time_out", time_out, torch.int32)
    value = int(time_out)
    need(value > 0, "time_out", "is {}; it must be above 0 microseconds", value)
    return value
