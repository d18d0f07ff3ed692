"""Megatron-LM's permute, unpermute and sort of chunks equal loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron_layers import BF16, ROUTINGS, E, H, K, close, logits_of
from routed_tokens import randn

from ascend_moe.interop.megatron import (
    permute,
    sort_chunks_by_idxs,
    topk_routing_with_score_function,
    unpermute,
)


@pytest.mark.parametrize("sizes", [[3, 0, 2, 4], [0, 0, 0, 0], [1, 5, 0, 1], [7]])
def test_chunks_are_sorted_and_sorted_back(sizes: list[int]) -> None:
    rows, probs = randn(sum(sizes), 4).requires_grad_(), randn(sum(sizes))
    for order in itertools.permutations(range(len(sizes))):
        found, weights = sort_chunks_by_idxs(rows, torch.tensor(sizes), torch.tensor(order), probs)
        chunks, parts = rows.split(sizes), probs.split(sizes)
        assert torch.equal(found, torch.cat([chunks[i] for i in order])) and weights is not None
        assert torch.equal(weights, torch.cat([parts[i] for i in order]))
        back = torch.tensor(order).argsort()
        again, _ = sort_chunks_by_idxs(found, torch.tensor(sizes)[list(order)], back)
        assert torch.equal(again, rows)  # The inverse
        (gradient,) = torch.autograd.grad(found.sum(), rows)
        assert bool((gradient == 1).all())


@pytest.mark.parametrize("tokens", [0, 9])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_permute_sorts_rows_by_expert_and_unpermute_adds_them_up(tokens: int, routing: str) -> None:
    probs, chosen = topk_routing_with_score_function(logits_of(tokens, 11, routing), K)
    x = randn(tokens, H).requires_grad_()
    rows, weights, sources, _, counts = permute(x, chosen, probs, num_out_tokens=tokens * K)
    expected = [t for e in range(E) for t in range(tokens) if chosen[t, e]]
    assert sources.tolist() == expected and torch.equal(rows, x[expected]) and counts is None
    assert weights is not None
    assert weights.tolist() == [float(probs[t, e]) for e in range(E) for t in range(tokens) if chosen[t, e]]
    assert torch.equal(permute(x, chosen)[0], rows)
    close(unpermute(rows, sources, x.shape), K * x)
    close(unpermute(rows, sources, x.shape, probs, chosen), probs.sum(1, keepdim=True) * x)
    half = unpermute(rows.to(BF16), sources, x.shape, probs, chosen)
    assert half.dtype == BF16
    (gradient,) = torch.autograd.grad(rows.sum(), x)
    assert bool((gradient == K).all())
    with pytest.raises(ValueError, match="align_size is 16"):
        permute(x, chosen, align_size=16)
