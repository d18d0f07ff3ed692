"""Routers: which experts a token goes to, and with what weights.

One core serves every router: normalise the logits in float32, choose by the (biased) scores, weigh by the
unbiased ones. Equal scores go to the lower expert id; NaN scores come last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ascend_moe._torch_npu import npu_operator
from ascend_moe.errors import ArgumentError, need, need_unset

SOFTMAX, SIGMOID = 0, 1
BY_MAX, BY_TOP2_SUM = 0, 1


class _Groups(NamedTuple):
    """Group-limited choice: only experts of the best ``kept`` of ``number`` groups may be chosen."""

    number: int = 1
    kept: int = 1
    mode: int = BY_MAX


@npu_operator
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = BY_MAX,
    renorm: int = 0,
    norm_type: int = SOFTMAX,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose k experts a token, within the best groups of experts where asked.

    Args:
        x: router logits ``(T, E)``, bf16, fp16 or fp32.
        k: experts a token, 1 to E / group_count * k_group.
        bias: ``(E,)`` of x's type, added to the normalised scores for the choice only.
        input_ids, tid2eid: routing by token id; NPU only.
        k_group, group_count: consecutive experts form group_count groups; the best k_group take part.
        group_select_mode: a group's score is its largest score (0) or the sum of its two largest (1).
        renorm: 1 divides softmax weights by their sum; 0 does not. Sigmoid weights always are divided.
        norm_type: 0 softmax, 1 sigmoid.
        out_flag: return the normalised scores.
        routed_scaling_factor: multiplies the weights.
        eps: added to the sum that weights are divided by.

    Returns:
        weights ``(T, k)`` of x's type, by falling choice score; expert ids ``(T, k)`` int32; normalised
        scores ``(T, E)`` float32, which are zeros here and unspecified on the NPU without out_flag.
        Weights are differentiable.

    Raises:
        ArgumentError: a rule above is broken.

    Source: torch_npu ``npu_moe_gating_top_k``; NPU tensors go there, and there E is at most 2048, a group
    has more than two experts, and renorm=1 depends on the version.
    """
    need_unset(input_ids=input_ids, tid2eid=tid2eid)
    _check_logits(x, (2,))
    if bias is not None:
        rule = f"is {tuple(bias.shape)} {bias.dtype}; it must be {(x.shape[1],)} {x.dtype}, as x is"
        need(tuple(bias.shape) == (x.shape[1],) and bias.dtype == x.dtype, "bias", rule)
    for name, value in (("renorm", renorm), ("norm_type", norm_type)):
        need(value in (0, 1), name, f"is {value}; it must be 0 or 1")
    groups = _Groups(group_count, k_group, group_select_mode)
    _check_choice(x.shape[1], k, groups)
    scores = _normalise(x, norm_type)
    ids = _choose(scores, bias, k, groups)
    divide = norm_type == SIGMOID or renorm == 1
    weights = _weigh(scores, ids, divide, routed_scaling_factor, eps).to(x.dtype)
    return weights, ids.to(torch.int32), scores if out_flag else torch.zeros_like(scores)


@npu_operator
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over the experts, then the k largest.

    Args:
        x: router logits ``(T, E)`` or ``(B, S, E)``, bf16, fp16 or fp32.
        finished: bool ``x.shape[:-1]``: True rows get expert id E, which is no expert. Their weights are
            those of the logits all the same.
        k: experts a token, 0 to E.

    Returns:
        weights ``(..., k)`` of x's type, falling, not renormalised; expert ids ``(..., k)`` int32; row
        indices ``(..., k)`` int32: entry j of token t is j * T + t, T the number of tokens.
        Weights are differentiable.

    Raises:
        ArgumentError: a rule above is broken.

    Source: torch_npu ``npu_moe_gating_top_k_softmax``; NPU tensors go there.
    """
    _check_logits(x, (2, 3))
    experts, shape = x.shape[-1], (*x.shape[:-1], k)
    need(0 <= k <= experts, "k", f"is {k}; it must be 0..{experts}, the number of experts")
    if finished is not None:
        rule = f"is {tuple(finished.shape)} {finished.dtype}; it must be {tuple(x.shape[:-1])} bool"
        need(finished.shape == x.shape[:-1] and finished.dtype == torch.bool, "finished", rule)
    scores = _normalise(x.reshape(-1, experts), SOFTMAX)
    ids = _choose(scores, None, k, _Groups())
    weights = _weigh(scores, ids, False, 1.0, 0.0).to(x.dtype)
    if finished is not None:
        ids = ids.masked_fill(finished.reshape(-1, 1), experts)
    rows = torch.arange(ids.numel(), dtype=torch.int32, device=x.device).reshape(k, ids.shape[0]).t()
    return weights.reshape(shape), ids.to(torch.int32).reshape(shape), rows.reshape(shape)


@npu_operator
def npu_moe_gating_top_k_softmax_v2(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over the experts, then the k largest; or the k largest, then softmax over those.

    Args:
        x, k, finished: as `npu_moe_gating_top_k_softmax`.
        renorm: 0 softmax first; 1 the k largest first, so that the weights sum up to 1.
        output_softmax: with renorm 0: return the softmax too.

    Returns:
        weights ``(..., k)`` of x's type, falling; expert ids ``(..., k)`` int32; softmax float32 of x's
        shape, or ``(0,)`` where it is not asked for. Weights and softmax are differentiable.

    Raises:
        ArgumentError: a rule above is broken.

    Source: torch_npu ``npu_moe_gating_top_k_softmax_v2``; NPU tensors go there.
    """
    need(renorm in (None, 0, 1), "renorm", f"is {renorm}; it must be 0 or 1")
    weights, ids, _ = npu_moe_gating_top_k_softmax(x, finished, k)
    if renorm == 1:
        # Chosen anew by x itself: softmax may round two values to one and would take the lower id.
        chosen = _best(x.detach().float().reshape(-1, x.shape[-1]), k).reshape(ids.shape)
        weights = torch.softmax(x.float().gather(-1, chosen), dim=-1).to(x.dtype)
        ids = torch.where(ids == x.shape[-1], ids, chosen.to(torch.int32))
    softmax = torch.softmax(x.float(), dim=-1) if output_softmax and not renorm else x.new_zeros(0).float()
    return weights, ids, softmax


def softmax_topk(logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of Mixtral (renormalize) and of Qwen2/3-MoE (as its norm_topk_prob says).

    Args:
        logits: ``(T, E)`` float.
        k: experts a token.
        renormalize: divide the k weights by their sum.

    Returns:
        weights ``(T, k)`` float32, falling, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: logits are not ``(T, E)`` float or k is not in 1..E.
    """
    _check_logits(logits, (2,))
    _check_choice(logits.shape[1], k, _Groups())
    weights, ids, _ = npu_moe_gating_top_k_softmax(logits.float(), None, k)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


def deepseek_v2(
    logits: torch.Tensor, k: int, n_group: int = 1, topk_group: int = 1, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V2's router: softmax, groups ranked by their best expert, no renormalisation.

    Args:
        logits: ``(T, E)`` float.
        k: experts a token.
        n_group, topk_group: groups of experts, and how many of them take part (1, 1: "greedy").
        scaling: routed_scaling_factor.

    Returns:
        weights ``(T, k)`` float32, falling, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: as `npu_moe_gating_top_k`.
    """
    weights, ids, _ = npu_moe_gating_top_k(
        logits.float(), k, k_group=topk_group, group_count=n_group, routed_scaling_factor=scaling
    )
    return weights, ids


def deepseek_v3(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    n_group: int = 1,
    topk_group: int = 1,
    renorm: bool = True,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's router: sigmoid, biased choice, groups ranked by the sum of their two best.

    Args:
        logits: ``(T, E)`` float.
        bias: e_score_correction_bias ``(E,)``, for the choice only.
        k: experts a token.
        n_group, topk_group: groups of experts, and how many of them take part.
        renorm: norm_topk_prob: divide the k weights by their sum.
        scaling: routed_scaling_factor.

    Returns:
        weights ``(T, k)`` float32, by falling biased score, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: as `npu_moe_gating_top_k`.
    """
    weights, ids, scores = npu_moe_gating_top_k(
        logits.float(),
        k,
        bias=None if bias is None else bias.float(),
        k_group=topk_group,
        group_count=n_group,
        group_select_mode=BY_TOP2_SUM if n_group > 1 else BY_MAX,
        norm_type=SIGMOID,
        out_flag=not renorm,
        routed_scaling_factor=scaling,
    )
    if not renorm:
        # The operator always divides sigmoid weights by their sum; the undivided ones are among its scores.
        weights = scores.gather(1, ids.to(torch.int64)) * scaling
    return weights, ids


def _check_logits(x: torch.Tensor, dims: tuple[int, ...]) -> None:
    if x.dim() not in dims or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(
            f"the logits are {tuple(x.shape)} {x.dtype}; they must be {' or '.join(f'{d}-D' for d in dims)}, "
            "bf16, fp16 or fp32",
            argument="x",
        )


def _check_choice(experts: int, k: int, groups: _Groups) -> None:
    number, kept, mode = groups
    rule = f"is {mode}; it must be 0 (largest) or 1 (two largest)"
    need(mode in (BY_MAX, BY_TOP2_SUM), "group_select_mode", rule)
    smallest = 2 if mode == BY_TOP2_SUM and number > 1 else 1
    fits = number >= 1 and experts % number == 0 and experts // number >= smallest
    rule = f"is {number} for {experts} experts; it must divide them into groups of at least {smallest}"
    need(fits, "group_count", rule)
    need(1 <= kept <= number, "k_group", f"is {kept}; it must be 1..{number}, the number of groups")
    limit = experts // number * kept
    need(1 <= k <= limit, "k", f"is {k}; it must be 1..{limit}, the experts that take part")


def _normalise(x: torch.Tensor, norm_type: int) -> torch.Tensor:
    return torch.softmax(x.float(), dim=-1) if norm_type == SOFTMAX else torch.sigmoid(x.float())


def _choose(scores: torch.Tensor, bias: torch.Tensor | None, k: int, groups: _Groups) -> torch.Tensor:
    """Ids ``(T, k)`` int64 of the k best experts, by falling (biased) score."""
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().float()
    if groups.kept < groups.number:
        members = choice.reshape(choice.shape[0], groups.number, choice.shape[1] // groups.number)
        largest = members.topk(2 if groups.mode == BY_TOP2_SUM else 1, dim=-1).values
        group_scores = largest.sum(-1)
        dropped = torch.ones_like(group_scores, dtype=torch.bool)
        dropped.scatter_(1, _best(group_scores, groups.kept), False)
        choice = members.masked_fill(dropped.unsqueeze(-1), -torch.inf).reshape(choice.shape)
    return _best(choice, k)


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    # topk orders equal values as it likes; a stable sort keeps them by index. Negated, so that NaN is last.
    return torch.sort(-values, dim=-1, stable=True).indices[:, :k]


def _weigh(scores: torch.Tensor, ids: torch.Tensor, divide: bool, scaling: float, eps: float) -> torch.Tensor:
    weights = scores.gather(1, ids)
    if divide:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scaling
