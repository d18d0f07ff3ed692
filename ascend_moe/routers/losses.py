"""Losses that balance the load of a router's experts, their gradients, and the bias update of DeepSeek-V3.

A mask is True for active tokens everywhere. Megatron-LM's ``padding_mask`` is True for padding in some functions and
for valid tokens in another: here it means what it means in the function of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_moe.errors import need, need_dims, need_shape, with_typed_errors
from ascend_moe.native.torch_npu import compute_dtype
from ascend_moe.routers.topk import check_logits, normalised_scores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@with_typed_errors
def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: Tensor | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``coeff * E / (k * n^2) * sum over experts (sum over tokens of probs) * tokens_per_expert``.

    Args:
        probs: ``(T, E)`` float, this rank's scores; for a loss per sequence ``(S, B * E)``.
        tokens_per_expert: ``(E,)``, counted over the ranks or steps of the loss.
        total_num_tokens: n, tokens of the same ranks, a number or a one-element tensor.
        topk: k. num_experts: E.
        moe_aux_loss_coeff: the coefficient.
        fused: ignored, there is one implementation.
        mask: ``(T,)`` bool, True for active tokens. padding_mask: the same under Megatron-LM's name; not both.

    Returns:
        a scalar, float32 or float64; 0 without tokens.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``switch_load_balancing_loss_func``.
    """
    need_dims("probs", probs, 2)
    need_shape("tokens_per_expert", tokens_per_expert, (probs.shape[1],))
    active = _one_mask(mask, padding_mask, probs.shape[0])
    shares = _zeroed(probs, active).to(compute_dtype(probs.dtype)).sum(0)
    n = torch.as_tensor(total_num_tokens, dtype=shares.dtype, device=probs.device)
    return (shares * tokens_per_expert).sum() * (num_experts * moe_aux_loss_coeff / topk) / (n * n + (n == 0))


@with_typed_errors
def z_loss_func(
    logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None, *, mask: Tensor | None = None
) -> Tensor:
    """Return ``coeff`` times the mean over tokens of ``logsumexp(logits)^2``, which keeps logits small.

    Args:
        logits: ``(T, E)`` float.
        z_loss_coeff: the coefficient.
        mask: ``(T,)`` bool, True for tokens that count. padding_mask: True for tokens that do not; not both.

    Returns:
        a scalar, float32 or float64; 0 without tokens.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``z_loss_func``.
    """
    need_dims("logits", logits, 2)
    active = _one_mask(mask, _inverted(padding_mask), logits.shape[0])
    squares = torch.logsumexp(_zeroed(logits, active).to(compute_dtype(logits.dtype)), dim=-1).square()
    if active is None:
        return squares.sum() / max(squares.shape[0], 1) * z_loss_coeff
    return torch.where(active, squares, 0).sum() / active.sum().clamp(min=1) * z_loss_coeff


@with_typed_errors
def compute_routing_scores_for_aux_loss(
    logits: Tensor,
    topk: int,
    score_function: str,
    fused: bool = False,
    padding_mask: Tensor | None = None,
    *,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the inputs of a balancing loss: plain scores and their k best experts, without bias, groups and dropping.

    Args:
        logits: ``(T, E)`` float.
        topk: k.
        score_function: "softmax"; "sigmoid" or "sqrtsoftplus", then divided by their sum + 1e-20.
        fused: ignored, there is one implementation.
        mask: ``(T,)`` bool, True for tokens that count. padding_mask: True for tokens that do not; not both.

    Returns:
        the map ``(T, E)`` bool and the scores ``(T, E)`` float32, both zero for tokens that do not count.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``compute_routing_scores_for_aux_loss``.
    """
    check_logits(logits, topk, score_function)
    active = _one_mask(mask, _inverted(padding_mask), logits.shape[0])
    scores, ids = normalised_scores(_zeroed(logits, active), topk, score_function)
    chosen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(1, ids, True)
    if active is not None:
        chosen, scores = chosen & active[:, None], torch.where(active[:, None], scores, 0)
    return chosen, scores


@with_typed_errors
def get_tokens_per_expert_and_token_count(
    routing_map: Tensor, reduce_group: ProcessGroup | None, topk: int | None = None, with_padding_mask: bool = False
) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """Return the number of rows of each expert over a group, and the numbers of tokens of this rank and of the group.

    Args:
        routing_map: ``(T, E)`` bool; for a loss per sequence ``(S, B * E)``.
        reduce_group: ranks to sum over; None: this rank only.
        topk: k, or B * k: the group's tokens are rows / topk, so that ranks may have different T. None: T * ranks.
        with_padding_mask: T may include inactive tokens, which are not in the map: this rank's tokens are rows / topk
            too, instead of T. Needs topk.

    Returns:
        rows ``(E,)`` int64, the tokens of this rank, the tokens of the group.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``get_tokens_per_expert_and_token_count``, which assumes equal T.
    """
    need_dims("routing_map", routing_map, 2)
    rule = "is None; with_padding_mask needs it to derive tokens from rows: pass k, or B * k"
    need(topk is not None or not with_padding_mask, "topk", rule)
    local = routing_map.sum(0)
    rows = local
    if reduce_group is not None and reduce_group.size() > 1:
        rows = local.clone()
        dist.all_reduce(rows, group=reduce_group)
    size = 1 if reduce_group is None else reduce_group.size()
    if topk is None:
        return rows, routing_map.shape[0], routing_map.shape[0] * size
    here = local.sum().float() / topk if with_padding_mask else routing_map.shape[0]
    return rows, here, rows.sum().float() / topk


@with_typed_errors
def get_updated_expert_bias(
    tokens_per_expert: Tensor,
    expert_bias: Tensor,
    expert_bias_update_rate: float,
    tp_dp_cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return ``bias + rate * sign(mean of rows - rows)``, by which experts with few rows are chosen more often.

    Args:
        tokens_per_expert: ``(..., E)``, rows of each expert on this rank in the whole step; not modified.
        expert_bias: ``(..., E)`` float32 or float64, also in bf16 and fp16 models, whose dtype would lose the step.
        expert_bias_update_rate: the rate.
        tp_dp_cp_group: ranks to sum the rows over. None: the default process group, if there is one: correct
            without pipeline stages, which have other layers.

    Returns:
        the new bias, of expert_bias's type.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``get_updated_expert_bias``, which sums into its argument.
    """
    need_shape("expert_bias", expert_bias, tuple(tokens_per_expert.shape))
    rule = "is {}, in which a step of {} may be lost; keep the bias torch.float32"
    wide = (torch.float32, torch.float64)
    need(expert_bias.dtype in wide, "expert_bias", rule, expert_bias.dtype, expert_bias_update_rate)
    with torch.no_grad():
        narrow = tokens_per_expert.dtype in (torch.bfloat16, torch.float16)  # sums over ranks would be rounded
        rows = tokens_per_expert.float() if narrow else tokens_per_expert.clone()
        if tp_dp_cp_group is not None or dist.is_initialized():
            dist.all_reduce(rows, group=tp_dp_cp_group)
        rows = rows.double()
        sign = torch.sign(rows.mean(-1, keepdim=True) - rows)
        return expert_bias + sign.to(expert_bias.dtype) * expert_bias_update_rate


@torch.library.custom_op("ascend_moe_routing::aux_loss_gradient", mutates_args=())
def _aux_loss_gradient(aux_loss: Tensor, grad_output: Tensor) -> Tensor:
    """Return the scale of `MoEAuxLossAutoScaler`, with the shape and dtype of aux_loss.

    It is an operator because a compiled backward must read the scale in each run. It takes grad_output so that
    compilers do not move it into the forward, before the scale is set.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    gradient = torch.ones_like(aux_loss)
    return gradient if scale is None else (gradient * scale.to(gradient)).view_as(aux_loss)


@_aux_loss_gradient.register_fake
def _(aux_loss: Tensor, grad_output: Tensor) -> Tensor:
    return torch.empty_like(aux_loss)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Autograd function: ``apply(output, aux_loss)`` returns output; aux_loss gets the gradient of `set_loss_scale`.

    So aux_loss takes part in the backward of the main loss without being added to it.
    Source: Megatron-LM ``MoEAuxLossAutoScaler``.
    """

    #: The factor of the main loss before its backward; None: 1.
    main_loss_backward_scale: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        (aux_loss,) = ctx.saved_tensors
        return grad_output, _aux_loss_gradient(aux_loss, grad_output)

    @staticmethod
    def set_loss_scale(scale: Tensor) -> None:
        """Set the gradient of every aux_loss in this process, a tensor ``()`` or ``(1,)``, from the next backward on.

        ``scale`` is copied into the same memory each time, which a graph may have captured. Initially it is 1.
        """
        held = MoEAuxLossAutoScaler.main_loss_backward_scale
        if held is None or held.shape != scale.shape:
            MoEAuxLossAutoScaler.main_loss_backward_scale = scale.detach().clone()
        else:
            held.copy_(scale.detach())


def _inverted(padding_mask: Tensor | None) -> Tensor | None:
    return None if padding_mask is None else ~padding_mask.bool()


def _zeroed(values: Tensor, active: Tensor | None) -> Tensor:
    """Return values (T, E) with zeros for inactive tokens, whose NaN would otherwise reach the gradients."""
    return values if active is None else torch.where(active[:, None], values, 0)


def _one_mask(mask: Tensor | None, other: Tensor | None, tokens: int) -> Tensor | None:
    need(mask is None or other is None, "mask", "and padding_mask are given; pass one of them")
    active = other if mask is None else mask
    if active is not None:
        need_shape("mask", active, (tokens,))
        active = active.bool()
    return active
