"""Megatron-LM's choice of experts and their capacity equal loops."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from routed_tokens import randn
from router_logits import BF16, FP32, FP64, E, K, close
from torch import Tensor

from ascend_moe.errors import ArgumentError
from ascend_moe.routers import (
    apply_router_token_dropping,
    get_capacity,
    group_limited_topk,
    topk_routing_with_score_function,
)

# ---- Megatron-LM's choice


def choose_by_loop(
    logits: Tensor, topk: int, pre: bool, groups: tuple[int, int] | None, scale: float, function: str, bias: Any
) -> tuple[Tensor, Tensor]:
    """Weights and ids of one token."""
    wide = logits.float()
    scores = {
        "softmax": wide.softmax(0),
        "sigmoid": wide.sigmoid(),
        "sqrtsoftplus": (1 + wide.exp()).log().sqrt(),
    }[function]
    choice = wide if function == "softmax" and not pre else scores
    if bias is not None and function != "softmax":
        choice = choice + bias
    allowed = list(range(len(logits)))
    if groups is not None:
        number, kept = groups
        size = len(logits) // number
        heads = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[::-1][: topk // kept]) for g in range(number)]
        best = sorted(range(number), key=lambda group: -heads[group])[:kept]
        allowed = [expert for expert in allowed if expert // size in best]
    ids = torch.tensor(sorted(allowed, key=lambda expert: -float(choice[expert].detach()))[:topk])
    weights = scores[ids]
    if function == "softmax" and not pre:
        weights = wide[ids].softmax(0)
    elif function != "softmax" and topk > 1:
        weights = weights / (weights.sum() + 1e-20)
    return (weights * scale if scale else weights), ids


@pytest.mark.parametrize(
    "function, pre", [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
)
@pytest.mark.parametrize("topk, groups", [(1, None), (3, None), (4, (4, 2)), (2, (2, 1)), (6, (4, 3))])
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16])
def test_scores_and_choice_are_those_of_a_loop(function: str, pre: bool, topk: int, groups: Any, dtype: Any) -> None:
    for tokens, bias, scale in itertools.product((0, 9), (None, randn(E, seed=3)), (0.0, 2.5)):
        logits = randn(tokens, E, seed=4).to(dtype).requires_grad_()
        number, kept = groups or (None, None)
        given = {"use_pre_softmax": pre, "num_groups": number, "group_topk": kept, "scaling_factor": scale}
        options: dict[str, Any] = given | {"score_function": function, "expert_bias": bias}
        weights, ids = topk_routing_with_score_function(logits, topk, dense_output=True, **options)
        probs, chosen = topk_routing_with_score_function(logits, topk, **options)
        assert probs.dtype == weights.dtype == dtype and ids.shape == weights.shape == (tokens, topk)
        assert torch.equal(probs.gather(1, ids), weights) and torch.equal(chosen, (probs != 0))
        (weights * torch.arange(1, topk + 1)).sum().backward()
        own = logits.detach().clone().requires_grad_()
        for token in range(tokens):
            expected, numbers = choose_by_loop(own[token], topk, pre, groups, scale, function, bias)
            assert ids[token].tolist() == numbers.tolist()
            tolerance = 2**-8 if dtype == BF16 else 1e-5
            close(weights[token].double(), expected.double(), rtol=tolerance)
            (expected * torch.arange(1, topk + 1)).sum().backward()
            assert logits.grad is not None and own.grad is not None
            close(
                logits.grad[token].double(),
                own.grad[token].double(),
                rtol=tolerance,
                atol=2e-3 if dtype == BF16 else 1e-6,
            )


@pytest.mark.parametrize("seed", range(12))
def test_ids_that_are_given_have_the_weights_of_a_choice_dense_or_not(seed: int) -> None:
    """-1 has the weight 0, also in tokens that have no other id, and is in no column."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    numbers: dict[str, Any] = {
        "score_function": draw.choice(["softmax", "sigmoid", "sqrtsoftplus"]), "use_pre_softmax": draw.random() < 0.5,
        "scaling_factor": draw.choice([None, 2.5]),
    }  # fmt: skip
    logits = randn(7, E)
    weights, ids = topk_routing_with_score_function(logits, K, dense_output=True, **numbers)
    dense = topk_routing_with_score_function(logits, K, dense_output=True, precomputed_indices=ids, **numbers)
    close(dense[0], weights)
    ids[torch.rand(ids.shape) < 0.4], ids[0] = -1, -1
    weights, _ = topk_routing_with_score_function(logits, K, dense_output=True, precomputed_indices=ids, **numbers)
    probs, chosen = topk_routing_with_score_function(logits, K, precomputed_indices=ids, **numbers)
    assert torch.equal(weights == 0, ids < 0) and torch.equal(chosen.sum(1), (ids >= 0).sum(1))
    for token, (row, own) in enumerate(zip(ids.tolist(), weights, strict=True)):
        assert all(torch.equal(probs[token, each], weight) for each, weight in zip(row, own, strict=True) if each >= 0)
    assert torch.equal(probs != 0, chosen)


def test_ids_that_are_given_and_what_is_refused() -> None:
    logits = randn(6, E)
    ids = logits.argsort(1)[:, :2]
    probs, chosen = topk_routing_with_score_function(logits, 2, precomputed_indices=ids)
    assert torch.equal(chosen, torch.zeros(6, E).scatter(1, ids, 1).bool())
    close(probs.gather(1, ids), logits.gather(1, ids).softmax(1))

    class Replay:
        def get_replay_topk(self, scores: Tensor, topk: int, groups: Any, kept: Any, compute: Any) -> Any:
            assert torch.equal(compute(scores, topk, groups, kept)[1], scores.argsort(1, descending=True)[:, :topk])
            return scores.gather(1, ids), ids

    replayed = topk_routing_with_score_function(logits, 2, router_replay=Replay())
    assert torch.equal(replayed[0], probs) and torch.equal(replayed[1], chosen)
    with pytest.raises(ValueError, match="score_function is 'tanh'"):
        topk_routing_with_score_function(logits, 2, score_function="tanh")
    with pytest.raises(ValueError, match="topk is 9"):
        topk_routing_with_score_function(logits, 9)


def test_a_choice_without_any_score_has_weights_of_zero() -> None:
    """Sigmoids vanish; a bias may be negative; a scale of 0 is none."""
    weights, _ = topk_routing_with_score_function(
        torch.full((2, E), -200.0), 2, score_function="sigmoid", dense_output=True
    )
    assert torch.equal(weights, torch.zeros(2, 2))
    bias = torch.zeros(E)
    bias[:6] = -1.0
    chosen = topk_routing_with_score_function(torch.zeros(1, E), 2, score_function="sigmoid", expert_bias=bias)[1]
    assert chosen[0].nonzero().flatten().tolist() == [6, 7]


def test_groups_with_negative_scores_are_left_out_and_wrong_groups_refused() -> None:
    scores = torch.tensor([[-1.0, -2.0, -9.0, -9.0]])
    assert group_limited_topk(scores, 2, 1, 4, 2, 1)[1].tolist() == [[0, 1]]
    for wrong in ((4, 3, 1), (4, 4, 5), (6, 4, 2), (1, 4, 2)):
        with pytest.raises(ValueError):
            group_limited_topk(randn(20, E), wrong[0], 20, E, *wrong[1:])


# ---- capacity


def dropped_by_loop(
    probs: Tensor, chosen: Tensor, capacity: int, policy: str, pad: bool, mask: Tensor | None = None
) -> Tensor:
    kept = torch.zeros_like(chosen)
    active = [True] * len(probs) if mask is None else mask.tolist()
    for expert in range(probs.shape[1]):
        own = [token for token in range(len(probs)) if active[token] and chosen[token, expert]]
        if policy == "probs":
            own.sort(key=lambda token: -float(probs[token, expert].detach()))
        others = [token for token in range(len(probs)) if active[token] and not chosen[token, expert]]
        kept[(own + (others if pad else []))[:capacity], expert] = True
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_capacity_is_a_share_of_the_pairs_and_drops_nothing_where_it_is_large(policy: str) -> None:
    for tokens, factor in itertools.product((0, 1, 16), (0.5, 1.0, 1.5)):
        assert get_capacity(tokens * K, E, factor) == math.ceil(tokens * K / E * factor)
    assert get_capacity(4, E, 1.0, 3) == 3
    probs, chosen = topk_routing_with_score_function(randn(4, E, seed=7), K)
    for pad in (False, True):  # C = 6 is more than T: nothing is dropped, padding is all T
        found, kept = apply_router_token_dropping(probs, chosen, K, 4.0, policy, pad)
        assert torch.equal(found, probs) and torch.equal(kept, torch.ones_like(kept) if pad else chosen)
    with pytest.raises(ValueError, match="drop_policy is 'first'"):
        apply_router_token_dropping(probs, chosen, K, 1.0, "first")


def test_the_map_says_who_takes_a_place() -> None:
    """Not the probabilities of tokens that the map does not have; a probability of 0 is one."""
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.0], [0.4, 0.2], [0.8, 0.0]])
    chosen = torch.tensor([[False, True], [True, True], [True, False], [False, True]])
    found, final = apply_router_token_dropping(probs, chosen, 1, 1.0)  # C = 2
    assert final.tolist() == [[False, True], [True, True], [True, False], [False, False]]
    assert torch.equal(found, probs * final)


@pytest.mark.parametrize("seed", range(12))
def test_inactive_tokens_take_no_place(seed: int) -> None:
    """Sizes are drawn, whatever the inactive rows hold; the capacity stays that of all tokens."""
    draw = random.Random(seed)
    tokens, experts = draw.choice([1, 4, 9, 17]), draw.choice([2, 4, 8])
    topk, factor = draw.randint(1, experts), draw.choice([0.25, 0.5, 1.0, 1.5, 4.0])
    logits, mask = randn(tokens, experts, seed=seed), randn(tokens, seed=seed + 50) < draw.choice([-0.5, 0.0, 0.8])
    probs, chosen = topk_routing_with_score_function(logits, topk, score_function=draw.choice(["softmax", "sigmoid"]))
    probs = torch.where(mask[:, None], probs, draw.choice([0.0, 100.0, math.nan])).requires_grad_()
    capacity = get_capacity(tokens * topk, experts, factor)
    for policy, pad in itertools.product(("probs", "position"), (False, True)):
        found, kept = apply_router_token_dropping(probs, chosen, topk, factor, policy, pad, mask=mask)
        assert torch.equal(kept, dropped_by_loop(probs, chosen, capacity, policy, pad, mask))
        assert torch.equal(found, torch.where(kept, probs, 0))
        (gradient,) = torch.autograd.grad(found.sum(), probs)
        assert torch.equal(gradient, kept.float())
        if mask.all():
            assert torch.equal(kept, apply_router_token_dropping(probs, chosen, topk, factor, policy, pad)[1])
    with pytest.raises(ArgumentError, match="mask is"):
        apply_router_token_dropping(probs, chosen, topk, factor, mask=mask[1:])
