"""Moving rows to their experts and back, against scalar loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vendor_calls import ids, values

from ascend_moe.npu import (
    npu_moe_finalize_routing,
    npu_moe_gating_top_k_softmax,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)

HIDDEN = 8


def f32(value: float | np.ndarray) -> Any:
    return np.asarray(value, dtype=np.float32)


# ---- permute


def test_permute_of_torch_npus_documents() -> None:
    tokens = torch.tensor([[1, 1], [2, 2], [3, 3], [4, 4]], dtype=torch.float16)
    chosen = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 0]], dtype=torch.int32)
    rows, places = npu_moe_token_permute(tokens, chosen)
    assert places.tolist() == [0, 4, 5, 1, 2, 6, 7, 3] and places.dtype == torch.int32
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    probs = torch.full((4, 2), 0.5, dtype=torch.float16)
    assert torch.equal(npu_moe_token_unpermute(rows, places, probs), tokens)


@pytest.mark.parametrize("wanted", [None, 0, 4, 99, -3])
@pytest.mark.parametrize("topk", [0, 1, 3])  # 0: one dimension
@pytest.mark.parametrize("tokens", [3, 6])
def test_permute_is_a_stable_sort(tokens: int, topk: int, wanted: int | None) -> None:
    x = values(tokens, HIDDEN, dtype=torch.bfloat16)
    chosen = ids(*((tokens, topk) if topk else (tokens,)), top=3)
    rows, places = npu_moe_token_permute(x, chosen, wanted)
    flat = chosen.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    kept = order if not wanted else order[:wanted] if wanted > 0 else order[: len(order) + wanted]
    assert rows.shape == (len(kept), HIDDEN) and rows.dtype == torch.bfloat16
    for place, pair in enumerate(order):
        assert places[pair] == place
        if place < len(kept):
            assert torch.equal(rows[place], x[pair // max(topk, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_unpermute_sums_in_float32_in_the_order_of_k(dtype: torch.dtype, weighted: bool) -> None:
    tokens, topk = 6, 3 if weighted else 1
    rows = values(tokens * topk - 2, HIDDEN, dtype=dtype)
    places = torch.randperm(tokens * topk, generator=torch.Generator().manual_seed(1)).int()
    places[0] = -1  # no row, as the two places behind the last one
    probs = values(tokens, topk, seed=2, dtype=dtype) if weighted else None
    found = npu_moe_token_unpermute(rows, places, probs)
    assert found.dtype == dtype
    for t in range(tokens):
        total = f32(np.zeros(HIDDEN))
        for j in range(topk):
            place = int(places[t * topk + j])
            if 0 <= place < len(rows):
                weight = 1.0 if probs is None else probs[t, j].item()
                total = f32(total + f32(rows[place].float().numpy()) * f32(weight))
        assert torch.equal(found[t], torch.from_numpy(total).to(dtype))


def test_unpermute_takes_nothing_from_a_row_of_weight_zero() -> None:
    rows = torch.tensor([[float("nan")] * 2, [1.0, 2.0], [float("inf")] * 2])
    found = npu_moe_token_unpermute(
        rows, torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    )
    assert found.tolist() == [[2.0, 4.0], [3.0, 6.0]]
    nan = npu_moe_token_unpermute(rows, torch.tensor([0], dtype=torch.int32), torch.tensor([[1.0]]))
    assert bool(nan.isnan().all())


# ---- finalize


def finalized(
    rows: np.ndarray, places: np.ndarray, scales: Any, skips: list[Any], bias: Any, experts: Any, mode: int
) -> np.ndarray:
    """The formula of torch_npu's documents, element by element in float32. places is (T, K)."""
    tokens, topk = places.shape
    out = f32(np.zeros((tokens, rows.shape[-1])))
    for t in range(tokens):
        for h in range(rows.shape[-1]):
            total = f32(0)
            for skip in skips:
                total = total if skip is None else f32(total + skip[t, h])
            for j in range(topk):
                value = f32(0) if places[t, j] < 0 else f32(rows[places[t, j], h])
                if bias is not None:
                    value = f32(value + bias[experts[t, j], h])
                total = f32(total + (value if scales is None else f32(value * scales[t, j])))
            out[t, h] = total
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", ["none", "scales", "skip1", "all"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing_is_the_formula(mode: int, extras: str, dtype: torch.dtype) -> None:
    tokens, topk, experts, capacity = 5, 2, 3, 4
    count = experts * capacity if mode % 2 else tokens * topk
    rows = values(count, HIDDEN, dtype=dtype)
    flat = torch.randint(
        -1 if mode else 0, count, (tokens * topk,), generator=torch.Generator().manual_seed(3)
    )
    chosen = ids(tokens, topk, top=experts)
    everything = extras == "all"
    scales = values(tokens, topk, dtype=dtype, seed=4) if extras in ("scales", "all") else None
    skip1 = values(tokens, HIDDEN, dtype=dtype, seed=5) if extras in ("skip1", "all") else None
    skip2 = values(tokens, HIDDEN, dtype=dtype, seed=6) if everything else None
    bias = values(experts, HIDDEN, dtype=dtype, seed=7) if everything else None
    given = rows.reshape(experts, capacity, HIDDEN) if mode % 2 else rows
    found = npu_moe_finalize_routing(
        given, skip1, skip2, bias, scales, flat.int(), chosen if everything else None, mode, topk
    )
    places = flat.reshape(tokens, topk) if mode >= 2 else flat.reshape(topk, tokens).t()
    wide = [None if one is None else one.float().numpy() for one in (scales, skip1, skip2, bias)]
    expected = finalized(
        rows.float().numpy(), places.numpy(), wide[0], wide[1:3], wide[3], chosen.numpy(), mode
    )
    assert found.dtype == dtype and torch.equal(found, torch.from_numpy(expected).to(dtype))


def test_finalize_routing_undoes_both_ways_of_expanding() -> None:
    """SGLang's two pairs: init_routing with columns (0), init_routing_v2 with rows (2)."""
    tokens, topk, experts = 6, 3, 4
    x = values(tokens, HIDDEN)
    weights, chosen, names = npu_moe_gating_top_k_softmax(values(tokens, experts), None, topk)
    expected = x * weights.sum(1, keepdim=True)
    rows, places, _ = npu_moe_init_routing(x, names, chosen, tokens)
    by_columns = npu_moe_finalize_routing(rows, None, None, None, weights, places, chosen)
    rows, places, _, _ = npu_moe_init_routing_v2(x, chosen, expert_num=experts)
    by_rows = npu_moe_finalize_routing(rows, None, None, None, weights, places, chosen, 2)
    assert torch.equal(by_columns, by_rows) and torch.allclose(by_rows, expected, rtol=1e-5)


def test_finalize_routing_of_a_part_of_the_experts_sums_up() -> None:
    """Ranks with a range of experts each: -1 for pairs of the others, and their sum is the whole."""
    tokens, topk, experts = 6, 3, 4
    x, weights, chosen = values(tokens, HIDDEN), values(tokens, topk, seed=2), ids(tokens, topk, top=experts)
    total = torch.zeros_like(x)
    for first in (0, 2):
        rows, places, _, _ = npu_moe_init_routing_v2(
            x, chosen, expert_num=experts, active_expert_range=[first, first + 2]
        )
        assert -1 in places.tolist()
        total += npu_moe_finalize_routing(rows, None, None, None, weights, places, chosen, 2)
    assert torch.allclose(total, x * weights.sum(1, keepdim=True), atol=1e-5)


# ---- re-routing


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (4, 1), (1, 5)])
def test_re_routing_is_a_loop_over_ranks(shape: tuple[int, int], tail: int, dtype: torch.dtype) -> None:
    counts = ids(*shape, top=4)
    counts[0, 0] = 0 if shape != (1, 1) else 2
    total = int(counts.sum())
    tokens = (values(total + tail, HIDDEN) * 9).to(dtype)
    scales = values(total + tail, seed=3)
    found, moved, index, sums = npu_moe_re_routing(tokens, counts, per_token_scales=scales)
    source: dict[tuple[int, int], list[int]] = {}
    row = 0
    for rank in range(shape[0]):
        for expert in range(shape[1]):
            source[expert, rank] = list(range(row, row + int(counts[rank, expert])))
            row += int(counts[rank, expert])
    order = [row for key in sorted(source) for row in source[key]]
    assert index.dtype == torch.int32 and index.tolist() == order + [0] * tail
    assert torch.equal(found[:total], tokens[order]) and torch.equal(moved[:total], scales[order])
    assert not found[total:].any() and not moved[total:].any()
    assert sums.dtype == counts.dtype and sums.tolist() == counts.sum(0).tolist()
    plain = npu_moe_re_routing(tokens, counts)
    assert torch.equal(plain[0], found) and plain[1].shape == (len(tokens),)
