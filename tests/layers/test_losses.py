"""Balancing and z losses follow their formulas, and enter by the gradient, scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_ranks import threads
from routed_tokens import randn
from router_logits import FP32, E, K, close
from torch import Tensor

from ascend_moe.errors import ArgumentError
from ascend_moe.routers import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)


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
    with pytest.raises(ValueError, match="mask and padding_mask are given"):
        z_loss_func(logits, 0.1, mask, mask=mask)


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
