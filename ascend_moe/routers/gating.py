"""Routers: they choose the experts of every token, and the weights of the experts' rows.

Every router has three steps. It normalizes the logits in float32, chooses experts by their scores, optionally with a
bias, and weights them by the scores without the bias. Among equal scores the lowest id is chosen; experts with NaN
scores are chosen last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ascend_moe._tensors import FLOATS
from ascend_moe.errors import ArgumentError, need, need_dims, need_shape, with_typed_errors
from ascend_moe.native.torch_npu import lacking, npu_operator, on_npu
from ascend_moe.routers.replay import divided, given_ids, taken

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 0, 1, 2
BY_MAX, BY_TOP2_SUM = 0, 1


class Groups(NamedTuple):
    """Experts form ``number`` groups. A token chooses from the best ``chosen`` groups only.

    ``mode``: a group's score is its largest score (BY_MAX) or the sum of its two largest (BY_TOP2_SUM).
    """

    number: int = 1
    chosen: int = 1
    mode: int = BY_MAX

    @classmethod
    def of(cls, wanted: bool, number: int | None, chosen: int | None, mode: int = BY_MAX) -> Groups:
        """Return the groups for vLLM's and SGLang's use_grouped_topk (``wanted``), num_expert_group and topk_group.

        Raises ArgumentError if groups are wanted and one of the two numbers is None.
        """
        if not wanted:
            return cls()
        rule = "is {} and topk_group {}; use_grouped_topk needs both: pass both numbers"
        need(number is not None and chosen is not None, "num_expert_group", rule, number, chosen)
        return cls(int(number or 0), int(chosen or 0), mode)


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
    """Choose k experts for every token; if experts form groups, only from the token's best groups.

    Args:
        x: router logits ``(T, E)``, bf16, fp16 or fp32.
        k: experts per token, 1 to E / group_count * k_group.
        bias: ``(E,)`` in x's dtype, added to the normalized scores for the choice, not for the weights.
        input_ids, tid2eid: token ids ``(T,)`` and a table ``(V, k)`` of integers, both or none: token t is routed to
            the experts ``tid2eid[input_ids[t]]``, in that order, independent of scores, bias and groups
            (DeepSeek-V4's hash layers). renorm must be 0.
        k_group, group_count: consecutive experts form group_count groups; a token chooses from k_group of them.
        group_select_mode: a group's score is its largest score (0) or the sum of its two largest scores (1).
        renorm: 1 divides softmax weights by their sum, 0 does not. Weights of the other types are always divided.
        norm_type: 0 softmax, 1 sigmoid, 2 the square root of softplus.
        out_flag: return the normalized scores.
        routed_scaling_factor: factor of the weights.
        eps: added to the sum before the weights are divided by it.

    Returns:
        weights ``(T, k)`` in x's dtype, highest score first; expert ids ``(T, k)`` int32;
        normalized scores ``(T, E)`` float32. Without out_flag the scores are zeros here and undefined on the
        NPU. Weights are differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_gating_top_k``, which NPU tensors are passed to. There E is at most 2048, a group has
    more than two experts, and renorm=1 depends on the version.
    """
    _check_logits(x, (2,))
    if bias is not None:
        need_shape("bias", bias, (x.shape[1],), dtypes=(x.dtype,))
    hashed = {"input_ids": input_ids, "tid2eid": tid2eid}
    groups = Groups(group_count, k_group, group_select_mode)
    return gating_top_k(x, k, bias, groups, norm_type, renorm, routed_scaling_factor, eps, out_flag, **hashed)


def gating_top_k(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    groups: Groups,
    norm_type: int,
    renorm: int,
    routed_scaling_factor: float,
    eps: float,
    out_flag: bool,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `npu_moe_gating_top_k` in plain torch, on any device; the bias may have another float dtype than x.

    ids: ``(T, k)``, experts that replace the choice, also by tid2eid; see `ascend_moe.routers.replay`.
    """
    _check_logits(x, (2,))
    if bias is not None:
        need_shape("bias", bias, (x.shape[1],), dtypes=FLOATS)
    need(renorm in (0, 1), "renorm", "is {}; it must be 0 or 1", renorm)
    need(norm_type in (SOFTMAX, SIGMOID, SQRT_SOFTPLUS), "norm_type", "is {}; it must be 0, 1 or 2", norm_type)
    _check_choice(x.shape[1], k, groups)
    scores = normalise(x, norm_type)
    divide = norm_type != SOFTMAX or renorm == 1
    if ids is not None:
        chosen = given_ids(ids, x.shape[0], k, x.shape[1])
        weights = taken(scores, chosen)
        weights = (divided(weights, eps) if divide else weights) * routed_scaling_factor
    else:
        if input_ids is None and tid2eid is None:
            chosen = _choose(scores, bias, k, groups)
        else:
            need(renorm == 0, "renorm", "is {}; with tid2eid it must be 0", renorm)
            chosen = _look_up(input_ids, tid2eid, x.shape[0], k, x.shape[1])
        weights = _weigh(scores, chosen, divide, routed_scaling_factor, eps)
    return weights.to(x.dtype), chosen.to(torch.int32), scores if out_flag else torch.zeros_like(scores)


@npu_operator
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply softmax over the experts, then choose the k largest.

    Args:
        x: router logits ``(T, E)`` or ``(B, S, E)``, bf16, fp16 or fp32.
        finished: bool ``x.shape[:-1]``: all k ids of a True row are E, which is no expert. Its weights are computed as
            for other rows. None: no row is finished.
        k: experts per token, 0 to E.

    Returns:
        weights ``(..., k)`` of x's type, the largest first, not divided by their sum; expert ids
        ``(..., k)`` int32; row indices ``(..., k)`` int32: entry j of token t of T is
        j * T + t. Weights are differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_gating_top_k_softmax``; NPU tensors are passed there.
    """
    _check_logits(x, (2, 3))
    experts, shape = x.shape[-1], (*x.shape[:-1], k)
    need(0 <= k <= experts, "k", "is {}; it must be 0..{}, the number of experts", k, experts)
    if finished is not None:
        need_shape("finished", finished, tuple(x.shape[:-1]), dtypes=(torch.bool,))
    scores = normalise(x.reshape(-1, experts), SOFTMAX)
    ids = _choose(scores, None, k, Groups())
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
    """Apply softmax over all experts, then choose the k largest; or choose first, then apply softmax over these k.

    Args:
        x, k, finished: as `npu_moe_gating_top_k_softmax`.
        renorm: 0: softmax first. 1: the k largest first; their weights then sum up to 1.
        output_softmax: with renorm 0: return the softmax too.

    Returns:
        weights ``(..., k)`` of x's type, the largest first; expert ids ``(..., k)`` int32; softmax float32 of
        x's shape, ``(0,)`` without output_softmax. Weights and softmax are differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_gating_top_k_softmax_v2``; NPU tensors are passed there.
    """
    need(renorm in (None, 0, 1), "renorm", "is {}; it must be 0 or 1", renorm)
    weights, ids, _ = npu_moe_gating_top_k_softmax(x, finished, k)
    if renorm == 1:
        # Softmax may round two different logits to one score, so the choice is repeated on the logits.
        chosen = best(x.detach().float().reshape(-1, x.shape[-1]), k).reshape(ids.shape)
        weights = torch.softmax(x.float().gather(-1, chosen), dim=-1).to(x.dtype)
        ids = torch.where(ids == x.shape[-1], ids, chosen.to(torch.int32))
    softmax = torch.softmax(x.float(), dim=-1) if output_softmax and not renorm else x.new_zeros(0).float()
    return weights, ids, softmax


@with_typed_errors
def softmax_topk(
    logits: torch.Tensor,
    k: int,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    *,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by softmax as Mixtral (renormalize True) or Qwen2/3-MoE (renormalize is its norm_topk_prob).

    Args:
        logits: ``(T, E)`` float.
        k: experts per token.
        renormalize: divide the k weights by their sum.
        bias: ``(E,)``, added to the softmax for the choice only (ERNIE-4.5).
        ids: ``(T, k)``, experts that replace the choice; see `ascend_moe.routers.replay`.

    Returns:
        weights ``(T, k)`` float32, the largest (biased) score first, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: logits are not ``(T, E)`` float, or k is not in 1..E.
    """
    _check_logits(logits, (2,))
    _check_choice(logits.shape[1], k, Groups())
    if ids is not None:
        chosen = given_ids(ids, logits.shape[0], k, logits.shape[1])
        weights = taken(normalise(logits, SOFTMAX), chosen)
        return (divided(weights) if renormalize else weights), chosen.int()
    if bias is None:
        weights, chosen, _ = npu_moe_gating_top_k_softmax(logits.float(), None, k)
    else:
        weights, chosen, _ = npu_moe_gating_top_k(logits.float(), k, bias=bias.float())
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), chosen


@with_typed_errors
def deepseek_v2(
    logits: torch.Tensor,
    k: int,
    n_group: int = 1,
    topk_group: int = 1,
    scaling: float = 1.0,
    *,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as DeepSeek-V2: softmax; a group's score is its best expert's; weights are not divided by their sum.

    Args:
        logits: ``(T, E)`` float.
        k: experts per token.
        n_group, topk_group: a token chooses from topk_group of n_group groups (1, 1: "greedy").
        scaling: routed_scaling_factor.
        ids: ``(T, k)``, experts that replace the choice; see `ascend_moe.routers.replay`.

    Returns:
        weights ``(T, k)`` float32, the largest first, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: as `npu_moe_gating_top_k`.
    """
    if ids is not None:
        groups = Groups(n_group, topk_group)
        return gating_top_k(logits.float(), k, None, groups, SOFTMAX, 0, scaling, 1e-20, False, ids=ids)[:2]
    weights, chosen, _ = npu_moe_gating_top_k(
        logits.float(), k, k_group=topk_group, group_count=n_group, routed_scaling_factor=scaling
    )
    return weights, chosen


@with_typed_errors
def deepseek_v3(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    n_group: int = 1,
    topk_group: int = 1,
    renorm: bool = True,
    scaling: float = 1.0,
    *,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as DeepSeek-V3: sigmoid; a bias for the choice; a group's score is the sum of its two best experts.

    Args:
        logits: ``(T, E)`` float.
        bias: e_score_correction_bias ``(E,)``; the weights are without it.
        k: experts per token.
        n_group, topk_group: a token chooses from topk_group of n_group groups.
        renorm: norm_topk_prob: divide the k weights by their sum.
        scaling: routed_scaling_factor.
        ids: ``(T, k)``, experts that replace the choice; see `ascend_moe.routers.replay`.

    Returns:
        weights ``(T, k)`` float32, the highest biased score first, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: as `npu_moe_gating_top_k`.
    """
    if ids is not None:
        _check_logits(logits, (2,))
        chosen = given_ids(ids, logits.shape[0], k, logits.shape[1])
        weights = taken(normalise(logits, SIGMOID), chosen)
        return (divided(weights, 1e-20) if renorm else weights) * scaling, chosen.int()
    weights, chosen, scores = npu_moe_gating_top_k(
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
        # The operator always divides sigmoid weights by their sum, so return undivided scores.
        weights = scores.gather(1, chosen.to(torch.int64)) * scaling
    return weights, chosen


@with_typed_errors
def deepseek_v4(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    scaling: float = 1.0,
    *,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as DeepSeek-V4: the square root of softplus; weights divided by their sum; ids by score or from a table.

    Args:
        logits: ``(T, E)`` float.
        k: experts per token.
        bias: e_score_correction_bias ``(E,)`` for the choice; the weights are without it.
        scaling: routed_scaling_factor.
        input_ids, tid2eid: in a hash layer: token ids ``(T,)`` and the experts ``(V, k)`` of each id.
        ids: ``(T, k)``, experts that replace the choice; see `ascend_moe.routers.replay`.

    Returns:
        weights ``(T, k)`` float32 and expert ids ``(T, k)`` int32; a hash layer's in the table's order.

    Raises:
        ArgumentError: as `npu_moe_gating_top_k`.
    """
    hashed: dict[str, Any] = {"input_ids": input_ids, "tid2eid": tid2eid}
    by_table = on_npu(logits) and tid2eid is not None and bool(lacking("npu_moe_gating_top_k", hashed))
    if ids is not None or by_table:
        given: dict[str, Any] = {"ids": ids} if ids is not None else hashed
        return gating_top_k(logits.float(), k, None, Groups(), SQRT_SOFTPLUS, 0, scaling, 1e-20, False, **given)[:2]
    weights, chosen, _ = npu_moe_gating_top_k(
        logits.float(), k, bias=None if bias is None else bias.float(), norm_type=SQRT_SOFTPLUS,
        routed_scaling_factor=scaling, **hashed,
    )  # fmt: skip
    return weights, chosen


@with_typed_errors
def sigmoid_of_topk(
    logits: torch.Tensor, k: int, *, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as Llama-4: the k largest logits, weighted by their sigmoids without normalization.

    Args:
        logits: ``(T, E)`` float.
        k: experts per token.
        ids: ``(T, k)``, experts that replace the choice; see `ascend_moe.routers.replay`.

    Returns:
        weights ``(T, k)`` float32, the largest first or in the order of ``ids``, and expert ids ``(T, k)`` int32.

    Raises:
        ArgumentError: logits are not ``(T, E)`` float, k is not in 1..E, or ids do not fit, see `given_ids`.
    """
    _check_logits(logits, (2,))
    _check_choice(logits.shape[1], k, Groups())
    if ids is not None:
        chosen = given_ids(ids, logits.shape[0], k, logits.shape[1])
        return taken(torch.sigmoid(logits.float()), chosen), chosen.int()
    chosen = best(logits.detach().float(), k)
    return torch.sigmoid(logits.float().gather(1, chosen)), chosen.to(torch.int32)


@with_typed_errors
def sparsemixer(
    logits: torch.Tensor,
    k: int = 2,
    jitter_eps: float = 0.01,
    *,
    ids: torch.Tensor | None = None,
    training: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as Phi-3.5-MoE: choose the expert with the largest logit, then the one with the largest of the others.

    The weight of each is its softmax over the experts left to choose from, without those whose logit is below the
    largest by more than ``2 * jitter_eps * max(largest, |logit|)``.

    In training each expert is sampled from that softmax instead (Gumbel). If it is not the most likely one, its weight
    is multiplied by a third with probability 3/4, but keeps its whole gradient: Heun's third-order estimate.

    Args:
        logits: ``(T, E)`` float.
        k: 2.
        jitter_eps: router_jitter_noise.
        ids: ``(T, 2)``, experts that replace the choice; see `ascend_moe.routers.replay`. Their logits then replace the
            largest one in the rule above.
        training: sample with torch's generator.

    Returns:
        weights ``(T, 2)`` float32, not divided by their sum, and expert ids ``(T, 2)`` int32.

    Raises:
        ArgumentError: logits are not ``(T, E)`` float, E is 1, or k is not 2.

    Source: transformers ``phimoe``.
    """
    _check_logits(logits, (2,))
    need(k == 2, "k", "is {}; the sparse mixer chooses 2 experts: pass 2", k)
    _check_choice(logits.shape[1], k, Groups())
    left = scores = logits.float()
    given = None if ids is None else given_ids(ids, logits.shape[0], k, logits.shape[1])
    weights, taken_ids = [], []
    for place in range(k):
        if given is None:
            chosen = expert = best(left.detach(), 1)
        else:
            expert = given[:, place : place + 1]
            chosen = expert.clamp(min=0)
        largest = left.detach().gather(1, chosen)
        factor = torch.maximum(scores.detach().abs(), largest)
        excluded = (largest - scores.detach()) / factor > 2 * jitter_eps
        candidates = left.masked_fill(excluded, -torch.inf)
        if training and given is None:
            drawn = candidates.detach() - torch.empty_like(candidates).exponential_().log()
            chosen = expert = drawn.max(-1, keepdim=True).indices
        probs = torch.softmax(candidates, -1)
        weight = probs.gather(1, chosen) if given is None else taken(probs, expert)
        weights.append(_estimated(weight, probs.detach(), chosen) if training else weight)
        taken_ids.append(expert)
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, 1), torch.cat(taken_ids, 1).to(torch.int32)


# Heun's third-order method, with the digits in the model's code.
_KEPT, _THIRD, _REST = 0.75, 0.3333, 0.6667


def _estimated(weight: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return weight ``(T, 1)``, or a third of it, with the gradient of the whole."""
    likeliest = probs.max(-1, keepdim=True).indices
    whole = (chosen == likeliest) | (torch.rand_like(weight) > _KEPT)
    share = torch.add(_THIRD, whole.to(weight.dtype), alpha=_REST)
    return weight.detach() * share + (weight - weight.detach())


def _check_logits(x: torch.Tensor, dims: tuple[int, ...]) -> None:
    if x.dim() not in dims or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        rule = f"they must be {' or '.join(f'{d}-D' for d in dims)}, bf16, fp16 or fp32"
        raise ArgumentError(f"the logits are {tuple(x.shape)} {x.dtype}; {rule}", argument="x")


def _check_choice(experts: int, k: int, groups: Groups) -> None:
    number, chosen, mode = groups
    rule = "is {}; it must be 0 (largest) or 1 (two largest)"
    need(mode in (BY_MAX, BY_TOP2_SUM), "group_select_mode", rule, mode)
    smallest = 2 if mode == BY_TOP2_SUM and number > 1 else 1
    fits = number >= 1 and experts % number == 0 and experts // number >= smallest
    rule = "is {} for {} experts; it must divide them into groups of at least {}"
    need(fits, "group_count", rule, number, experts, smallest)
    need(1 <= chosen <= number, "k_group", "is {}; it must be 1..{}, the number of groups", chosen, number)
    limit = experts // number * chosen
    need(1 <= k <= limit, "k", "is {}; it must be 1..{}, the number of experts to choose from", k, limit)


def normalise(x: torch.Tensor, norm_type: int) -> torch.Tensor:
    """Return the scores of logits in float32: by ``norm_type`` 0 softmax, 1 sigmoid, 2 the square root of softplus."""
    x = x.float()
    if norm_type == SQRT_SOFTPLUS:
        return torch.nn.functional.softplus(x).sqrt()
    return torch.softmax(x, dim=-1) if norm_type == SOFTMAX else torch.sigmoid(x)


def _look_up(
    input_ids: torch.Tensor | None, table: torch.Tensor | None, tokens: int, k: int, experts: int
) -> torch.Tensor:
    """Return the experts ``(T, k)`` int64 in the table for the tokens' ids."""
    whole = (torch.int32, torch.int64)
    need(input_ids is not None, "tid2eid", "is given without input_ids; pass both or none")
    need(table is not None, "input_ids", "is given without tid2eid; pass both or none")
    assert input_ids is not None and table is not None
    need_shape("input_ids", input_ids, (tokens,), dtypes=whole)
    need_dims("tid2eid", table, 2, dtypes=whole)
    need_shape("tid2eid", table, (len(table), k))
    checked = input_ids.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere nothing is read
    size = table.shape[0]
    outside = checked and bool(((input_ids < 0) | (input_ids >= size)).any())
    need(not outside, "input_ids", "contains an id outside 0..{}, the rows of tid2eid", size - 1)
    ids = table[input_ids.long()].long()
    outside = checked and bool(((ids < 0) | (ids >= experts)).any())
    need(not outside, "tid2eid", "contains an expert outside 0..{}", experts - 1)
    return ids


def _choose(scores: torch.Tensor, bias: torch.Tensor | None, k: int, groups: Groups) -> torch.Tensor:
    """Return ids ``(T, k)`` int64 of the k best experts by their (biased) scores, the best first."""
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().float()
    if groups.chosen < groups.number:
        members = choice.reshape(choice.shape[0], groups.number, choice.shape[1] // groups.number)
        largest = members.topk(2 if groups.mode == BY_TOP2_SUM else 1, dim=-1).values
        group_scores = largest.sum(-1)
        dropped = torch.ones_like(group_scores, dtype=torch.bool)
        dropped.scatter_(1, best(group_scores, groups.chosen), False)
        choice = members.masked_fill(dropped.unsqueeze(-1), -torch.inf).reshape(choice.shape)
    return best(choice, k)


def best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return ids ``(T, k)`` int64 of the k largest of ``(T, E)`` values, in descending order; ties: lower id first."""
    # topk may order equal values in any way; a stable sort keeps them by index. Negated values put NaN last.
    return torch.sort(-values, dim=-1, stable=True).indices[:, :k]


def _weigh(scores: torch.Tensor, ids: torch.Tensor, divide: bool, scaling: float, eps: float) -> torch.Tensor:
    weights = scores.gather(1, ids)
    if divide:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scaling
