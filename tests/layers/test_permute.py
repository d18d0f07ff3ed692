"""Rows by expert against loops: any ids, aligned blocks, rows to their places and back."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from bad_arguments import refused
from routed_tokens import aligned, randn

from ascend_moe.errors import ArgumentError
from ascend_moe.permute import (
    batched_moe_align_block_size,
    moe_align_block_size,
    padded_places,
    permute,
    rows_at,
    segment_of_rows,
    sort_by_expert,
    sort_chunks_by_idxs,
    sum_rows,
    unpermute,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def any_ids(draw: random.Random, tokens: int, topk: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Experts, and in between ids that are none, up to the ends of the dtype."""
    ends = torch.iinfo(dtype)
    none = [-1, -2, experts, experts + 1, 2 * experts, ends.min, ends.max]
    ids = [draw.choice(none) if draw.random() < 0.3 else draw.randrange(experts) for _ in range(tokens * topk)]
    return torch.tensor(ids, dtype=dtype).reshape(tokens, topk)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_ids_that_are_no_experts_are_in_no_block(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    tokens, topk, experts, block = draw.randint(0, 9), draw.randint(1, 4), draw.randint(1, 6), draw.choice([1, 2, 4, 7])
    ids = any_ids(draw, tokens, topk, experts, dtype)
    here = draw.sample(range(experts), draw.randint(0, experts))
    expert_map = torch.full((experts,), -1, dtype=dtype)
    expert_map[here] = torch.arange(len(here), dtype=dtype)
    for given, ignore in ((None, False), (expert_map, False), (expert_map, True)):
        ordered, owners, total = moe_align_block_size(ids, block, experts, given, ignore_invalid_experts=ignore)
        blocks, expected = aligned(ids, block, experts, given, ignore)
        assert int(total) == len(blocks) * block and ordered[: int(total)].view(-1, block).tolist() == blocks
        assert bool((ordered[int(total) :] == ids.numel()).all())
        assert owners[: len(blocks)].tolist() == expected
        behind = 0 if given is None or ignore else int(given[0])
        assert owners[len(blocks) :].tolist() == [behind] * (len(owners) - len(blocks))
        length, padded = ids.numel() + experts * (block - 1), moe_align_block_size(ids, block, experts, given, True)
        length = min(length, ids.numel() * block) if ids.numel() < experts else length
        assert len(ordered) == length and len(padded[0]) == len(owners) * block == -(-length // block) * block
        assert ordered.dtype == total.dtype == torch.int32 and total.shape == (1,)
    order = sort_by_expert(ids, experts)
    flat = ids.flatten().tolist()
    assert order.order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert order.places[order.order].tolist() == list(range(len(flat)))
    bounds = [sum(each < expert for each in flat) for expert in range(experts + 1)]
    assert order.bounds.tolist() == bounds and order.expert_ids.tolist() == sorted(flat)
    for sizes, named in (((block, 0), "num_experts"), ((0, experts), "block_size")):
        refused(named, moe_align_block_size, ids, *sizes, says=f"{named} is 0")


@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_rows_that_lie_by_expert(seed: int) -> None:
    draw = random.Random(seed)
    experts, most, block = draw.randint(1, 5), draw.randint(1, 9), draw.choice([1, 2, 4, 16])
    given = [draw.choice([0, most, draw.randint(0, most), -1, most + 1, 2**40]) for _ in range(experts)]
    rows, owners, total = batched_moe_align_block_size(most, block, torch.tensor(given))
    counts = [min(max(count, 0), most) for count in given]
    expected, blocks = [], []
    for expert, count in enumerate(counts):
        padded = -(-count // block) * block
        expected += [expert * most + row if row < count else experts * most for row in range(padded)]
        blocks += [expert] * (padded // block)
    length = experts * -(-most // block) * block
    assert len(rows) == length and int(total) == len(expected)
    assert rows.tolist() == expected + [experts * most] * (length - len(expected))
    assert owners.tolist() == blocks + [-1] * (length // block - len(blocks))


def by_loop(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    total = torch.zeros(len(places), rows.shape[1], dtype=wide)
    for token in range(len(places)):
        for k, place in enumerate(places[token].tolist()):
            if not 0 <= place < len(rows):
                continue
            weight = None if weights is None else weights[token, k].to(wide)
            row = rows[place].to(wide)
            if weight is not None:
                row = torch.where((weight == 0) & ~row.isfinite(), 0, row) * weight
            total[token] = total[token] + row
    return total


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_wide_and_rounded_once(weighted: bool, dtype: torch.dtype) -> None:
    """k ascending; places outside of the rows, at both sides, count nothing; an infinite row of weight 0 neither."""
    rows = (randn(7, 16, seed=1) * 100).to(dtype)
    rows[2], rows[3, 1] = math.inf, math.nan
    places = torch.tensor([[0, 1, 4], [-1, 5, 7], [6, 2, 3], [-7, 99, -1], [4, 4, 0]])
    weights = randn(5, 3, seed=2) if weighted else None
    if weights is not None:
        weights[2, 1:] = 0
    wide = FP64 if dtype == FP64 else FP32
    expected = by_loop(rows, places, weights, wide)
    for result in (None, FP32, BF16):
        found = sum_rows(rows, places, weights, result)
        assert found.dtype == (result or dtype)
        torch.testing.assert_close(found, expected.to(result or dtype), rtol=0, atol=0, equal_nan=True)
    assert weights is None or bool(expected.isfinite().all())
    assert not sum_rows(rows[:0], places, weights).any()
    assert torch.equal(rows_at(rows, places[:, 0])[[1, 3]], torch.zeros(2, 16, dtype=dtype))


# ---- Megatron-LM's permute


@pytest.mark.parametrize("seed", range(8))
def test_padded_rows_go_there_and_back(seed: int) -> None:
    """C below T, at T; experts with fewer tokens, and none."""
    draw = random.Random(seed)
    tokens, experts = draw.randint(1, 9), draw.randint(1, 5)
    capacity = draw.choice([0, 1, tokens, draw.randint(0, tokens)])
    x, probs = randn(tokens, 4, seed=seed), randn(tokens, experts, seed=seed + 20)
    chosen = randn(tokens, experts, seed=seed + 40) > draw.choice([-1.0, 0.0, 1.0])
    chosen[:, 0] = draw.random() < 0.5
    sources = []
    for expert in range(experts):
        own = chosen[:, expert].tolist()
        sources += sorted(range(tokens), key=lambda token: (not own[token], token))[:capacity]
    owners = [expert for expert in range(experts) for _ in range(capacity)]
    given = {"num_out_tokens": experts * capacity, "drop_and_pad": True}
    rows, weights, places, _, _ = permute(x, chosen, probs, **given)
    assert places.tolist() == sources and torch.equal(rows, x[sources]) and weights is not None
    assert torch.equal(weights, probs[sources, owners])
    expected = torch.zeros(tokens, 4).index_add(0, places, rows * weights[:, None])
    found = unpermute(rows, places, x.shape, probs, chosen, drop_and_pad=True)
    assert torch.equal(found, expected)
    for wrong in (experts * capacity + 1, experts * (tokens + 1)):
        if wrong % experts or wrong > experts * tokens:
            with pytest.raises(ArgumentError, match="with drop_and_pad need a multiple of"):
                permute(x, chosen, probs, num_out_tokens=wrong, drop_and_pad=True)


@pytest.mark.parametrize("tokens", [0, 9])
def test_permute_sorts_rows_by_expert_and_unpermute_adds_them_up(tokens: int) -> None:
    x, probs, chosen = randn(tokens, 4), randn(tokens, 5, seed=1), randn(tokens, 5, seed=2) > 0
    rows, weights, sources, _, counts = permute(x, chosen, probs, num_out_tokens=int(chosen.sum()))
    pairs = [(token, expert) for expert in range(5) for token in range(tokens) if chosen[token, expert]]
    assert sources.tolist() == [token for token, _ in pairs] and torch.equal(rows, x[sources]) and counts is None
    assert weights is not None and weights.tolist() == [float(probs[pair]) for pair in pairs]
    assert torch.equal(permute(x, chosen)[0], rows)
    torch.testing.assert_close(unpermute(rows, sources, x.shape), x * chosen.sum(1, keepdim=True))
    refused("align_size", permute, x, chosen, align_size=16, says="align_size is 16")


def test_rows_are_weighed_and_added_in_the_wider_type() -> None:
    """Rounded once, to the rows' type."""
    x, probs = randn(6, 8, seed=3).bfloat16(), randn(6, 5, seed=4)
    chosen = torch.ones(6, 5, dtype=torch.bool)
    rows, _, places, _, _ = permute(x, chosen)
    found = unpermute(rows, places, x.shape, probs, chosen)
    products = (x.float()[:, None] * probs[:, :, None]).unbind(1)
    assert torch.equal(found, sum(products[1:], products[0]).bfloat16()) and found.dtype == BF16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_chunks_may_be_empty_and_rows_none(dtype: torch.dtype) -> None:
    sizes, order = torch.tensor([0, 3, 0, 2, 0], dtype=dtype), torch.tensor([4, 3, 2, 1, 0], dtype=dtype)
    found, probs = sort_chunks_by_idxs(torch.arange(5.0), sizes, order, torch.arange(5.0))
    assert found.tolist() == [3, 4, 0, 1, 2] and probs is not None and torch.equal(found, probs)
    assert sort_chunks_by_idxs(torch.empty(0, 4), sizes * 0, order)[0].shape == (0, 4)
    rows, parts = randn(9, 4).requires_grad_(), torch.tensor([3, 0, 2, 4], dtype=dtype)
    for each in itertools.permutations(range(4)):
        order = torch.tensor(each, dtype=dtype)
        found, _ = sort_chunks_by_idxs(rows, parts, order)
        assert torch.equal(found, torch.cat([rows.split(parts.tolist())[i] for i in each]))
        assert torch.equal(sort_chunks_by_idxs(found, parts[order.long()], order.argsort())[0], rows)
        assert bool((torch.autograd.grad(found.sum(), rows)[0] == 1).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0], [4], [0, 1, 0]])
def test_packed_rows_have_places_in_segments_of_a_width(counts: list[int], dtype: torch.dtype) -> None:
    ends = torch.tensor(counts, dtype=dtype).cumsum(0, dtype=dtype)
    behind, width = 2, 4  # rows that belong to no segment
    expected = [(segment, segment * width + row) for segment, count in enumerate(counts) for row in range(count)]
    expected += [(len(counts), len(counts) * width)] * behind
    found = segment_of_rows(ends, len(expected)), padded_places(ends, len(expected), width)
    assert list(zip(*(each.tolist() for each in found), strict=True)) == expected
