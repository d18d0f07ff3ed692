"""The steps of SGLang's EPMoE equal loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from routed_tokens import ROUTED, randn, routed
from sglang_layers import BF16, FP32, NAN, E, F, H, K

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_mlp
from ascend_moe.experts.quant import FP8
from ascend_moe.interop.sglang import (
    GroupedGemmRunner,
    dynamic_scale,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    select_experts,
    silu_and_mul,
)
from ascend_moe.routers import deepseek_v2, deepseek_v3


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 17])
def test_selected_experts_are_those_of_the_routers(tokens: int, biased: bool, grouped: bool, renormalize: bool) -> None:
    logits, bias = randn(tokens, E), randn(E, seed=2) if biased else None
    given = {"topk_group": 2, "num_expert_group": 4} if grouped else {}
    weights, ids = select_experts(randn(tokens, 4), logits, K, grouped, renormalize, **given, correction_bias=bias)
    assert weights.dtype == FP32 and ids.dtype == torch.int32 and weights.shape == ids.shape == (tokens, K)
    groups = (4, 2) if grouped else (1, 1)
    if biased:
        expected = deepseek_v3(logits, bias, K, *groups, renormalize)
    else:
        scores, chosen = deepseek_v2(logits, K, *groups)
        expected = (scores / scores.sum(1, keepdim=True) if renormalize else scores), chosen
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("given", [{}, {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}], ids=str)
def test_weights_of_half_logits_are_not_rounded(given: dict[str, Any]) -> None:
    logits = randn(9, E, seed=3).to(BF16)
    for renormalize in (False, True):
        found = select_experts(randn(9, H), logits, K, renormalize=renormalize, **given)
        expected = select_experts(randn(9, H), logits.float(), K, renormalize=renormalize, **given)
        assert found[0].dtype == FP32 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_select_experts_needs_both_groups_and_takes_a_function() -> None:
    logits = randn(4, E)
    for given in ({"topk_group": 2}, {"num_expert_group": 4}, {}):
        with pytest.raises(ArgumentError, match=r"use_grouped_topk needs both"):
            select_experts(logits, logits, K, use_grouped_topk=True, **given)

    def first(
        hidden_states: Any, gating_output: Any, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert topk == K and renormalize
        return gating_output[:, :topk], torch.arange(topk).expand(len(hidden_states), topk)

    weights, ids = select_experts(logits, logits, K, custom_routing_function=first)
    assert torch.equal(weights, logits[:, :K]) and ids.dtype == torch.int32 and ids[3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "kind"), ROUTED)
def test_pre_reorder_writes_local_rows_only(tokens: int, kind: str, world: int, scaled: bool) -> None:
    x, ids, local = randn(tokens, H).to(BF16), routed(tokens, E, K, kind), E // world
    ordered, src2dst, _ = run_moe_ep_preproess(ids, E)
    for rank in range(world):
        start, end = rank * local, rank * local + local - 1
        scales = torch.arange(1, local + 1) / 3 if scaled else None
        rows = torch.full((tokens * K, H), NAN, dtype=BF16)
        pre_reorder(x, rows, src2dst, ids, scales, start, end, K, H)
        for token in range(tokens):
            for k in range(K):
                expert, row = int(ids[token, k]), rows[src2dst[token * K + k]]
                if start <= expert <= end:
                    factor = 1.0 if scales is None else 1 / scales[expert - start]
                    assert torch.equal(row, (x[token].float() * factor).to(BF16))
                else:
                    assert bool(row.isnan().all())
    assert ordered.numel() == tokens * K


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dynamic_scale_is_of_the_magnitude(dtype: torch.dtype) -> None:
    x = -randn(5, 7).abs().to(dtype) - 1
    scale = dynamic_scale(x, 3)
    assert scale.tolist() == [float(x.abs().max().float() / 448)] * 3 and scale.dtype == FP32
    rows = torch.empty(5, 7, dtype=FP8)
    pre_reorder(x, rows, torch.arange(5), torch.zeros(5, 1).int(), scale, 0, 2, 1, 7)
    assert bool(rows.float().isfinite().all()) and rows.float().min() == -448
    torch.testing.assert_close(rows.float() * scale[0], x.float(), rtol=2**-4, atol=0)
    assert dynamic_scale(x[:0], 2).tolist() == dynamic_scale(torch.zeros(2, 2), 2).tolist() == [1.0, 1.0]
    assert dynamic_scale(torch.tensor([1.0, -896.0]), 1).tolist() == [2.0]


SPLITS = [[3, 0, 4, 1], [0, 0, 8, 0], [0, 0, 0, 0], [2, 2, 2, 2]]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("split", SPLITS)
def test_grouped_gemm_equals_grouped_mlp_over_segments(split: list[int], dtype: torch.dtype) -> None:
    """Products of rows at absolute offsets are those of ``grouped_mlp``."""
    w13, w2 = randn(4, 2 * F, H).to(dtype) / 6, randn(4, H, F, seed=1).to(dtype) / 4
    counts, first, after = torch.tensor(split), 3, 2
    rows = randn(sum(split), H, seed=2).to(dtype)
    found = grouped_mlp(rows, w13.transpose(1, 2), w2.transpose(1, 2), counts, group_list_type=1)
    padded = torch.full((first + sum(split) + after, H), NAN, dtype=dtype)
    padded[first : first + sum(split)] = rows
    bounds = torch.tensor([0, *counts.cumsum(0).tolist()]) + first
    ids = torch.cat([torch.full((first,), 1), torch.arange(4).repeat_interleave(counts) + 2, torch.full((after,), 6)])
    run, gate_up = GroupedGemmRunner(), torch.full((len(padded), 2 * F), NAN, dtype=dtype)
    assert run(padded, w13, gate_up, 4, True, bounds, torch.arange(4)) is gate_up
    hidden, out = torch.full((len(padded), F), NAN, dtype=dtype), torch.full((len(padded), H), NAN, dtype=dtype)
    silu_and_mul(gate_up, hidden, 2 * F, ids, None, 2, 5)
    run(hidden, w2, out, 4, seg_indptr=bounds)
    assert torch.equal(out[first : first + sum(split)], found)
    for buffer in (gate_up, hidden, out):
        assert bool(buffer[:first].isnan().all()) and bool(buffer[first + sum(split) :].isnan().all())
    swapped = torch.tensor([3, 1, 0, 2])
    again = run(padded, w13[swapped.argsort()], torch.empty_like(gate_up), 4, True, bounds, swapped)
    assert torch.equal(again[first : first + sum(split)], gate_up[first : first + sum(split)])


def test_fp8_products_are_scaled() -> None:
    a, b = (randn(5, H) * 20).to(FP8), (randn(3, F, H, seed=1) * 20).to(FP8)
    scale_a, scale_b = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 0.5, 0.25])
    c, bounds = torch.empty(5, F), torch.tensor([0, 2, 2, 5])
    given = {"use_fp8_w8a8": True, "scale_a": scale_a, "scale_b": scale_b}
    for order in (None, torch.tensor([2, 0, 1])):
        GroupedGemmRunner()(a, b, c, 3, True, bounds, order, **given)
        for rows, segment in ((slice(0, 2), 0), (slice(2, 5), 2)):
            expert = segment if order is None else int(order[segment])
            expected = a[rows].double() @ b[expert].double().T * float(scale_a[expert] * scale_b[expert])
            torch.testing.assert_close(c[rows].double(), expected, rtol=1e-5, atol=1e-3)
    for changed, name in (
        ({"scale_a": None}, "scale_a"),
        ({"use_fp8_w8a8": False}, "scale_a"),
        ({"scale_b": scale_b[:2]}, "scale_b"),
        ({"block_shape": [128, 128]}, "block_shape"),
        ({"weight_column_major": False}, "weight_column_major"),
    ):
        with pytest.raises(ArgumentError, match=name):
            GroupedGemmRunner()(a, b, c, 3, **{"seg_indptr": bounds, **given, **changed})


def test_fp8_products_of_halves_are_scaled_in_float32() -> None:
    """Rounded once; codes end at +-448 where a static scale is too small."""
    a, b = (randn(5, H) * 20).to(FP8), (randn(1, F, H, seed=1) * 20).to(FP8)
    c, scale = torch.empty(5, F, dtype=BF16), torch.tensor([0.3])
    given = {"use_fp8_w8a8": True, "scale_a": scale, "scale_b": torch.tensor([0.7])}
    GroupedGemmRunner()(a, b, c, 1, True, torch.tensor([0, 5]), **given)
    assert torch.equal(c, ((a.float() @ b[0].float().T) * (scale * 0.7)).to(BF16))
    x, rows = torch.tensor([[1e4, -1e4, 1.0, 0.0]]), torch.empty(1, 4, dtype=FP8)
    pre_reorder(x, rows, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), scale, 0, 0, 1, 4)
    assert rows.float().tolist() == [[448.0, -448.0, 3.25, 0.0]]


def test_silu_and_mul_divides_by_the_scale() -> None:
    x, ids = randn(6, 2 * F).to(BF16), torch.tensor([0, 1, 1, 2, 3, 3])
    out, scales = torch.full((6, F), NAN), torch.tensor([0.5, 3.0])
    silu_and_mul(x, out, 2 * F, ids, scales, 1, 2)
    gate, up = x.float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    silu_and_mul(x, ones := torch.ones(6, F), 2 * F, ids, None, 0, 3, "gelu")
    torch.testing.assert_close(ones, torch.nn.functional.gelu(gate, approximate="tanh") * up)
    assert torch.equal(out[1:3], expected[1:3] * (1 / scales[0])) and torch.equal(out[3], expected[3] * (1 / scales[1]))
    assert bool(out[[0, 4, 5]].isnan().all())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "kind"), ROUTED)
def test_post_reorder_adds_local_rows_up(tokens: int, kind: str, dtype: torch.dtype, world: int) -> None:
    ids, weights, local = routed(tokens, E, K, kind), randn(tokens, K).softmax(1), E // world
    _, src2dst, bounds = run_moe_ep_preproess(ids, E)
    filled = randn(tokens * K, H, seed=3).to(dtype)
    for rank in range(world):
        start, end = rank * local, rank * local + local - 1
        rows = torch.full_like(filled, NAN)
        rows[bounds[start] : bounds[end + 1]] = filled[bounds[start] : bounds[end + 1]]
        out = torch.full((tokens, H), NAN, dtype=dtype)
        post_reorder(rows, out, src2dst, ids, weights, start, end, K, H)
        for token in range(tokens):
            total = torch.zeros(H)
            for k in range(K):
                if start <= ids[token, k] <= end:
                    total = total + rows[src2dst[token * K + k]].float() * weights[token, k]
            assert torch.equal(out[token], total.to(dtype))
