"""Megatron-LM's routers as functions: the choice of experts, also by groups, and capacity limits."""

from __future__ import annotations

import math
from typing import Any

import torch

from ascend_moe.errors import need, need_dims, need_one_of, need_shape, with_typed_errors
from ascend_moe.routers.gating import SIGMOID, SOFTMAX, SQRT_SOFTPLUS, best, normalise
from ascend_moe.routers.replay import RouterReplay, divided, given_ids, taken

SCORE_FUNCTIONS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sqrtsoftplus": SQRT_SOFTPLUS}
DROP_POLICIES = ("probs", "position")
_MOST_ROUNDS = 1000  # of sinkhorn: few tokens and wide logits might not converge in float32


@with_typed_errors
def topk_routing_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    fused: bool = False,
    router_replay: RouterReplay | Any = None,
    dense_output: bool = False,
    precomputed_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities and experts of every token by Megatron-LM's router. Scores are float32.

    Args:
        logits: ``(T, E)`` float, float64 too.
        topk: k, experts per token.
        use_pre_softmax: softmax over all logits; the k largest are the weights. False: the k largest logits, softmax
            over these.
        num_groups, group_topk: as in `group_limited_topk`.
        scaling_factor: factor of the weights; None and 0: no factor.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus" (the square root of softplus). Weights of the last two
            are divided by their sum + 1e-20 if k is more than 1.
        expert_bias: ``(E,)``, added to the scores for the choice only; ignored with softmax.
        fused: ignored, there is one implementation.
        router_replay: a `RouterReplay`, or an object whose ``get_replay_topk(scores, topk, num_groups, group_topk,
            compute)`` returns scores and ids of the choice. None: no replay.
        dense_output: see Returns.
        precomputed_indices: ``(T, k)`` int16, int32 or int64: experts that replace the choice, also router_replay's;
            -1 is no expert (`ascend_moe.routers.replay`).

    Returns:
        probabilities ``(T, E)`` of the logits' type, 0 where not chosen, and the map ``(T, E)`` bool; with
        dense_output ``(T, k)`` and expert ids ``(T, k)`` int64, the best first. Of equal scores the lower id is
        chosen. Differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``topk_routing_with_score_function``.
    """
    check_logits(logits, topk, score_function)
    tokens, experts = logits.shape
    if expert_bias is not None:
        need_shape("expert_bias", expert_bias, (experts,))
    softmax = score_function == "softmax"
    late = softmax and not use_pre_softmax
    scores = logits if late else normalise(logits, SCORE_FUNCTIONS[score_function])
    if precomputed_indices is not None:
        ids = given_ids(precomputed_indices, tokens, topk, experts)
    else:
        choice = scores.detach()
        if expert_bias is not None and not softmax:
            choice = choice + expert_bias.detach().float()
        if router_replay is None:
            _, ids = _limited_topk(choice, topk, num_groups, group_topk)
        else:
            _, ids = router_replay.get_replay_topk(choice, topk, num_groups, group_topk, _limited_topk)
    given = precomputed_indices is not None or router_replay is not None
    weights = _weights_of(scores, ids, late, not softmax and topk > 1, given)
    if scaling_factor:
        weights = weights * scaling_factor
    weights = weights.to(logits.dtype)
    if dense_output:
        return weights, ids
    if given:  # ids of -1 go into a separate column
        columns = torch.where(ids < 0, experts, ids)
        chosen = logits.new_zeros(tokens, experts + 1, dtype=torch.bool).scatter(1, columns, True)
        return logits.new_zeros(tokens, experts + 1).scatter(1, columns, weights)[:, :-1], chosen[:, :-1]
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device=logits.device).scatter(1, ids, True)
    return torch.zeros_like(logits).scatter(1, ids, weights), chosen


@with_typed_errors
def sinkhorn(cost: torch.Tensor, tol: float = 0.0001) -> torch.Tensor:
    """Return scores ``(T, E)`` of logits, scaled alternately to row sums 1 / T and column sums 1 / E until convergence.

    Reads the error of each round on the host.

    Args:
        cost: ``(T, E)`` float logits.
        tol: limit of the mean change of the columns' factors; at most 1000 rounds are run.

    Raises:
        ArgumentError: cost has other dimensions.

    Source: Megatron-LM ``sinkhorn``.
    """
    need_dims("cost", cost, 2)
    tokens, experts = max(cost.shape[0], 1), cost.shape[1]
    cost, eps = torch.exp(cost), 1e-8
    columns = cost.new_ones(experts)
    for _ in range(_MOST_ROUNDS):
        rows = 1 / tokens / ((columns * cost).sum(1) + eps)
        before, columns = columns, 1 / experts / ((rows[:, None] * cost).sum(0) + eps)
        if not float((before - columns).abs().mean()) > tol:
            break
    return columns * cost * rows[:, None]


@with_typed_errors
def sinkhorn_routing(
    logits: torch.Tensor, topk: int, balance: bool = True, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by `sinkhorn` of the logits in float32; weights are sigmoids of the logits with k 1, else their softmax.

    Args:
        logits: ``(T, E)`` float.
        topk: k, experts per token.
        balance: False: choose by the weights, as outside of training.
        mask: ``(T,)`` bool, True for active tokens; the others do not affect their choice. None: all are active.

    Returns:
        probabilities ``(T, E)`` of the logits' type, 0 where not chosen, and the map ``(T, E)`` bool.

    Source: Megatron-LM ``TopKRouter.sinkhorn_load_balancing``.
    """
    check_logits(logits, topk, "softmax")
    if mask is not None:  # NaN of inactive tokens must not reach the gradients
        logits = torch.where(mask[:, None], logits, 0)
    weights = torch.sigmoid(logits) if topk == 1 else torch.softmax(logits, -1, dtype=torch.float32).to(logits.dtype)
    choice = weights.detach()
    if balance:
        choice = torch.zeros_like(choice, dtype=torch.float32)
        active = slice(None) if mask is None else mask
        choice[active] = sinkhorn(logits.detach().float()[active])
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best(choice, topk), True)
    return weights * chosen, chosen


def _weights_of(scores: torch.Tensor, ids: torch.Tensor, late: bool, divide: bool, given: bool) -> torch.Tensor:
    """Return the weights ``(T, k)`` of chosen experts, or of given ones, which may include ids of -1."""
    weights = taken(scores, ids, -torch.inf if late else 0.0) if given else scores.gather(1, ids)
    if late:
        nothing = (ids < 0).all(-1, keepdim=True) if given else None
        weights = weights if nothing is None else weights.masked_fill(nothing, 0.0)
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32)
        return weights if not given else torch.where(ids >= 0, weights, 0.0)
    if divide:
        return divided(weights, 1e-20) if given else weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights


def check_logits(logits: torch.Tensor, topk: int, score_function: str) -> None:
    """Raise ArgumentError unless logits are ``(T, E)``, topk is 1 to E, and score_function in SCORE_FUNCTIONS."""
    need_dims("logits", logits, 2)
    need_one_of("score_function", score_function, SCORE_FUNCTIONS)
    experts = logits.shape[1]
    need(1 <= topk <= experts, "topk", "is {}; it must be 1..{}, the number of experts", topk, experts)


def _limited_topk(
    scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if group_topk:
        need(num_groups is not None, "num_groups", "is None with group_topk {}; pass both or none", group_topk)
        return group_limited_topk(scores, topk, scores.shape[0], scores.shape[1], int(num_groups or 0), group_topk)
    ids = best(scores, topk)
    return scores.gather(1, ids), ids


@with_typed_errors
def group_limited_topk(
    scores: torch.Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k best experts from each token's best groups; a group's score is the sum of its k // group_topk best.

    Args:
        scores: ``(T, E)`` float.
        topk: k. num_tokens: T. num_experts: E.
        num_groups: consecutive experts form this many groups of equal size.
        group_topk: groups that a token chooses from.

    Returns:
        scores ``(T, k)`` and expert ids ``(T, k)`` int64, the best first. Of equal ones the lower id.

    Raises:
        ArgumentError: an argument breaks one of these rules, or a group has fewer than k // group_topk experts.

    Source: Megatron-LM ``group_limited_topk``.
    """
    need_shape("scores", scores, (num_tokens, num_experts))
    divides = num_groups >= 1 and num_experts % num_groups == 0
    need(divides, "num_groups", "is {}; it must divide the {} experts", num_groups, num_experts)
    need(1 <= group_topk <= num_groups, "group_topk", "is {}; it must be 1..{}, the groups", group_topk, num_groups)
    members = num_experts // num_groups
    each = topk // group_topk
    fits = 1 <= each <= members and topk <= members * group_topk
    rule = "is {}; from {} groups of {} experts it must be {}..{}"
    need(fits, "topk", rule, topk, group_topk, members, group_topk, members * group_topk)
    grouped = scores.reshape(num_tokens, num_groups, members)
    heads = grouped.detach().topk(each, dim=-1).values.sum(-1)
    kept = torch.zeros_like(heads, dtype=torch.bool).scatter(1, best(heads, group_topk), True)
    ids = best(grouped.detach().masked_fill(~kept.unsqueeze(-1), -torch.inf).reshape(scores.shape), topk)
    return scores.gather(1, ids), ids


def normalised_scores(logits: torch.Tensor, topk: int, score_function: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores ``(T, E)`` float32 with sum 1 per token, and the ids ``(T, k)`` of the k best."""
    scores = normalise(logits, SCORE_FUNCTIONS[score_function])
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores, best(scores.detach(), topk)


@with_typed_errors
def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return the capacity of an expert: ceil(num_tokens / num_experts * capacity_factor), at least min_capacity.

    Args:
        num_tokens: rows of a rank: T * k.
        num_experts: E.
        capacity_factor: factor of the rows per expert in a balanced distribution.
        min_capacity: lower limit; None: 0.

    Raises:
        ArgumentError: num_experts is below 1, or capacity_factor below 0.

    Source: Megatron-LM ``get_capacity``.
    """
    need(num_experts >= 1, "num_experts", "is {}; need at least 1", num_experts)
    need(capacity_factor >= 0, "capacity_factor", "is {}; need at least 0", capacity_factor)
    return max(math.ceil((num_tokens / num_experts) * capacity_factor), min_capacity or 0)


@with_typed_errors
def apply_router_token_dropping(
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Limit every expert to its capacity C, from `get_capacity` for T * k rows, inactive tokens included.

    Args:
        routing_probs: ``(T, E)`` float. routing_map: ``(T, E)`` bool.
        router_topk: k.
        capacity_factor: as in `get_capacity`.
        drop_policy: keep the C tokens with the highest probabilities ("probs"), or the first C tokens ("position").
        pad_to_capacity: fill up each expert to C rows with other active tokens, with their routing_probs (usually 0).
        mask: ``(T,)`` bool, True for active tokens. The others are removed.

    Returns:
        probabilities and map of the remaining rows. If C is more than T nothing is dropped, and with pad_to_capacity
        every expert has T rows; with a mask the number of active tokens, if it is less than C.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``apply_router_token_dropping``, whose "position" may keep any C of the tokens.
    """
    need_dims("routing_probs", routing_probs, 2)
    need_shape("routing_map", routing_map, tuple(routing_probs.shape))
    need_one_of("drop_policy", drop_policy, DROP_POLICIES)
    tokens, experts = routing_probs.shape
    capacity = get_capacity(tokens * router_topk, experts, capacity_factor)
    chosen, active = routing_map.bool(), torch.ones_like(routing_map, dtype=torch.bool)
    if mask is not None:
        need_shape("mask", mask, (tokens,), dtypes=(torch.bool,))
        active = mask[:, None].expand_as(active)
        chosen = chosen & active
    kept = active
    if capacity <= tokens:
        # Rows in the map come first, then other active tokens.
        best_first = routing_probs.detach() if drop_policy == "probs" else torch.zeros_like(routing_probs)
        last = torch.full_like(best_first, torch.inf).masked_fill(active, torch.finfo(best_first.dtype).max)
        rank = torch.where(chosen, -best_first, last)
        first = torch.sort(rank, dim=0, stable=True).indices[:capacity]
        kept = torch.zeros_like(chosen).scatter(0, first, True) & active
    final = kept if pad_to_capacity else kept & chosen
    return torch.where(final, routing_probs, 0), final
