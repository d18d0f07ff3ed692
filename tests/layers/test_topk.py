"""Megatron-LM's choice of experts and their capacity equal loops; losses follow their formulas."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from routed_tokens import randn
from torch import Tensor

from ascend_moe.errors import ArgumentError
from ascend_moe.routers import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_tokens_per_expert_and_token_count,
    get_updated_expert_bias,
    group_limited_topk,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
E, K = 8, 3


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


# ---- Megatron-LM's choice


def choose_by_loop(
    logits: Tensor, topk: int, pre: bool, groups: tuple[int, int] | None, scale: float, function: str, bias: Any
) -> tuple[Tensor, Tensor]:
    """Weights and ids of one token."""
    wide = logits.float()
    scores = {"softmax": wide.softmax(0), "sigmoid": wide.sigmoid(), "sqrtsoftplus": (1 + wide.exp()).log().sqrt()}[
        function
    ]
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
    refused("topk", topk_routing_with_score_function, logits, 9, says="topk is 9")


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
    for topk, groups, kept, named in ((4, 3, 1, "num_groups"), (4, 4, 5, "group_topk"), (6, 4, 2, "topk")):
        refused(named, group_limited_topk, randn(20, E), topk, 20, E, groups, kept)


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


def test_a_capacity_is_a_share_of_the_pairs() -> None:
    for tokens, factor in itertools.product((0, 1, 16), (0.5, 1.0, 1.5)):
        assert get_capacity(tokens * K, E, factor) == math.ceil(tokens * K / E * factor)
    assert get_capacity(4, E, 1.0, 3) == 3
    with pytest.raises(ValueError, match="drop_policy is 'first'"):
        apply_router_token_dropping(randn(4, E), randn(4, E) > 0, K, 1.0, "first")


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
    refused("mask", apply_router_token_dropping, probs, chosen, topk, factor, mask=mask[1:])


# ---- losses


def test_the_expert_bias_moves_to_the_mean_of_all_ranks() -> None:
    counts = [torch.tensor([3.0, 1, 0, 4]), torch.tensor([1.0, 3, 2, 2])]
    bias = torch.tensor([0.5, -0.5, 0.0, 1.0])

    def run(rank: int, group: Any) -> Tensor:
        before = counts[rank].clone()
        new = get_updated_expert_bias(counts[rank], bias, 0.1, group)
        assert torch.equal(counts[rank], before)
        return new

    for found in threads(2).run(run):  # sums 4 4 2 6, mean 4
        close(found, torch.tensor([0.5, -0.5, 0.1, 0.9]))
    # Sums of 257, 256 and 255, of which bf16 has no 257.
    counts = [torch.tensor(rows, dtype=torch.bfloat16) for rows in ([256, 256, 255], [1, 0, 0])]
    bias = torch.zeros(3)
    assert [found.sign().tolist() for found in threads(2).run(run)] == [[-1, 0, 1]] * 2


def test_each_layer_has_a_mean_of_its_own() -> None:
    """The bias of several layers at once; counts of halves and large ones are not rounded."""
    counts = torch.tensor([[3.0, 1, 0, 4], [100.0, 300, 200, 200], [0.25, 0.5, 0.5, 0.75]])
    bias = torch.zeros(3, 4)
    found = get_updated_expert_bias(counts, bias, 0.5)
    assert found.tolist() == [[-0.5, 0.5, 0.5, -0.5], [0.5, -0.5, 0.0, 0.0], [0.5, 0.0, 0.0, -0.5]]
    large = torch.tensor([2**24 + 1, 2**24, 2**24, 2**24 - 1])
    assert torch.equal(get_updated_expert_bias(large, torch.zeros(4), 1.0).sign(), torch.tensor([-1.0, 0, 0, 1]))


def test_a_bias_in_which_the_step_is_lost_is_refused() -> None:
    counts = torch.tensor([40841.0, 40839, 40840, 40840])
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ArgumentError, match=f"expert_bias is {dtype}, in which a step of 0.001 may be lost; keep"):
            get_updated_expert_bias(counts, torch.ones(4, dtype=dtype), 1e-3)
    assert get_updated_expert_bias(counts, torch.ones(4, dtype=torch.float64), 1e-3).tolist() == [0.999, 1.001, 1, 1]


def switch_by_loop(scores: Tensor, rows: Tensor, tokens: int, topk: int, coeff: float) -> Tensor:
    total = sum(float(rows[e]) * float(scores[:, e].double().sum()) for e in range(scores.shape[1]))
    return torch.tensor(scores.shape[1] * coeff / (topk * tokens**2) * total)


def test_switch_loss_is_the_formula_in_float32() -> None:
    scores, mask = randn(300, E, seed=12).softmax(1), torch.arange(300) % 3 > 0
    rows = torch.arange(1.0, E + 1)
    for given in (scores, scores.bfloat16()):
        for options, used in (({}, given), ({"mask": mask}, given[mask]), ({"padding_mask": mask}, given[mask])):
            found = switch_load_balancing_loss_func(given, rows, 250, K, E, 0.3, **options)
            assert found.dtype == FP32
            close(found, switch_by_loop(used, rows, 250, K, 0.3))
    with_nan = scores.clone()
    with_nan[~mask] = torch.nan
    close(
        switch_load_balancing_loss_func(with_nan, rows, 250, K, E, 0.3, mask=mask),
        switch_by_loop(scores[mask], rows, 250, K, 0.3),
    )
    for tokens in (0, torch.tensor(0)):
        assert float(switch_load_balancing_loss_func(scores[:0], rows, tokens, K, E, 0.3)) == 0.0


def test_z_loss_is_in_float32_and_of_no_token_0() -> None:
    logits = (20 + randn(40, E, seed=13)).bfloat16()
    expected = logits.double().logsumexp(1).square()
    close(z_loss_func(logits, 0.1), (expected.mean() * 0.1).float())
    mask = torch.arange(40) % 4 > 0
    close(z_loss_func(logits, 0.1, mask=mask), (expected[mask].mean() * 0.1).float())
    assert torch.equal(z_loss_func(logits, 0.1, padding_mask=~mask), z_loss_func(logits, 0.1, mask=mask))
    for given, active in ((logits, torch.zeros(40, dtype=torch.bool)), (logits[:0], None)):
        assert float(z_loss_func(given, 0.1, mask=active)) == 0.0
    refused("mask", z_loss_func, logits, 0.1, mask, mask=mask, says="mask and padding_mask are given")


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_what_a_balancing_loss_looks_at(function: str) -> None:
    """Scores that sum up to 1, without bias; neither map nor scores have tokens that do not count."""
    logits, mask = randn(9, E, seed=14), torch.arange(9) % 3 > 0
    plain = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "sqrtsoftplus": logits.exp().log1p().sqrt()}
    scores = plain[function] / plain[function].sum(1, keepdim=True)
    chosen = torch.zeros(9, E).scatter(1, logits.argsort(1, descending=True)[:, :K], 1).bool()
    for options, active in (({}, mask | True), ({"mask": mask}, mask), ({"padding_mask": ~mask}, mask)):
        found, weights = compute_routing_scores_for_aux_loss(logits, K, function, **options)
        assert torch.equal(found, chosen & active[:, None])
        close(weights, torch.where(active[:, None], scores, 0))
    refused("topk", compute_routing_scores_for_aux_loss, logits, 9, function)


def test_counts_of_a_group_of_ranks() -> None:
    """Rows and tokens of all ranks, tokens of this rank alone, with masks and without; the map stays as it is."""
    maps = [randn(tokens, E, seed=80 + tokens) > 0.5 for tokens in (4, 6)]
    maps = [torch.zeros_like(each).scatter(1, each.float().argsort(1)[:, :K], True) for each in maps]
    maps[1][2:4] = False  # inactive

    def run(rank: int, group: Any) -> None:
        rows = (maps[0].sum(0) + maps[1].sum(0)).tolist()
        found, here, total = get_tokens_per_expert_and_token_count(maps[rank], group, K, True)
        assert found.tolist() == rows and float(here) == (4, 4)[rank] and float(total) == 8
        found, here, total = get_tokens_per_expert_and_token_count(maps[rank], group, K)
        assert found.tolist() == rows and here == (4, 6)[rank] and float(total) == 8
        found, here, total = get_tokens_per_expert_and_token_count(maps[0], group)
        assert found.tolist() == (2 * maps[0].sum(0)).tolist() and (here, total) == (4, 8)
        with pytest.raises(ArgumentError, match="topk is None; with_padding_mask needs it"):
            get_tokens_per_expert_and_token_count(maps[rank], group, with_padding_mask=True)

    threads(2).run(run)
    found, here, total = get_tokens_per_expert_and_token_count(maps[1], None, K, True)
    assert found.tolist() == maps[1].sum(0).tolist() and float(here) == float(total) == 4


@pytest.fixture
def loss_scale(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Sets the scale of this test's losses; 1 until then."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    return MoEAuxLossAutoScaler.set_loss_scale


def test_aux_loss_enters_by_the_gradient(loss_scale: Callable[[Tensor], None]) -> None:
    for scale in (None, 8.0, 0.25):
        if scale is not None:
            loss_scale(torch.tensor(scale))
        probs, aux = randn(4, E).requires_grad_(), randn(3).requires_grad_()
        out = MoEAuxLossAutoScaler.apply(probs, aux.sum())
        assert torch.equal(out, probs)
        (out * 2).sum().backward()
        assert probs.grad is not None and bool((probs.grad == 2).all())
        assert aux.grad is not None and aux.grad.tolist() == [scale or 1.0] * 3


def test_the_scale_stays_in_its_memory(loss_scale: Callable[[Tensor], None]) -> None:
    """A captured graph reads it there; and it is no tensor of the caller's."""
    first = torch.tensor(2.0)
    loss_scale(first)
    held = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert held is not None and held.data_ptr() != first.data_ptr()
    first.fill_(9.0)
    assert float(held) == 2.0
    loss_scale(torch.tensor(3.0))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is held and float(held) == 3.0
    with_graph = torch.tensor(4.0, requires_grad=True) * 1
    loss_scale(with_graph)
    assert float(held) == 4.0 and not held.requires_grad
    loss_scale(torch.tensor([5.0]))  # of another shape
    aux = torch.ones(1, requires_grad=True)
    MoEAuxLossAutoScaler.apply(torch.ones(2, requires_grad=True), aux).sum().backward()
    assert aux.grad is not None and aux.grad.tolist() == [5.0]
