"""SGLang's EPMoE: its steps against loops, its layer against dispatch and combine. S1 to S11 by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_processes, threads
from routed_tokens import ROUTED, randn, routed

from ascend_moe import LocalCluster, MoEConfig, MoELayer
from ascend_moe.dispatchers import WindowDispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_mlp
from ascend_moe.interop import sglang
from ascend_moe.interop.sglang import (
    FP8,
    EPMoE,
    ExpertPlacement,
    Fp8Config,
    GroupedGemmRunner,
    dynamic_scale,
    make_expert_params_mapping,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    select_experts,
    silu_and_mul,
)

FP32, BF16, NAN = torch.float32, torch.bfloat16, float("nan")
E, K, H, F = 8, 3, 32, 16


def test_s1_ep_takes_the_place_of_tp() -> None:
    assert [ExpertPlacement.contiguous(256, 8).range_of(rank) for rank in range(8)] == [
        (rank * 32, (rank + 1) * 32 - 1) for rank in range(8)
    ]
    for rank in range(4):
        layer = EPMoE(8, 2, 32, 16, tp_size=4, tp_rank=rank)
        assert (layer.start_expert_id, layer.end_expert_id) == (2 * rank, 2 * rank + 1)
        assert layer.w13_weight.shape == (2, 32, 32) and layer.w2_weight.shape == (2, 32, 16)
    for make in (ExpertPlacement.contiguous, lambda experts, ranks: EPMoE(experts, 2, 32, 16, tp_size=ranks)):
        with pytest.raises(ValueError, match=r"is 10; it must be a multiple of the 4 ranks"):
            make(10, 4)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 17])
def test_s2_select_experts(tokens: int, biased: bool, grouped: bool, renormalize: bool) -> None:
    logits, bias = randn(tokens, E), randn(E, seed=2) if biased else None
    given = {"topk_group": 2, "num_expert_group": 4} if grouped else {}
    weights, ids = select_experts(randn(tokens, 4), logits, K, grouped, renormalize, **given, correction_bias=bias)
    assert weights.dtype == FP32 and ids.dtype == torch.int32 and weights.shape == ids.shape == (tokens, K)
    for token in range(tokens):
        scores = logits[token].sigmoid() if biased else logits[token].softmax(0)
        choice = scores + bias if bias is not None else scores
        if grouped:
            best = [sum(sorted(group, reverse=True)[: 2 if biased else 1]) for group in choice.view(4, 2).tolist()]
            kept = sorted(range(4), key=lambda group: -best[group])[:2]
            choice = torch.tensor([v if i // 2 in kept else -1e9 for i, v in enumerate(choice.tolist())])
        expected = choice.argsort(descending=True)[:K]
        assert ids[token].tolist() == expected.tolist()
        share = scores[expected] / scores[expected].sum() if renormalize else scores[expected]
        torch.testing.assert_close(weights[token], share, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("given", [{}, {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}], ids=str)
def test_s2_weights_of_half_logits_are_not_rounded(given: dict[str, Any]) -> None:
    logits = randn(9, E, seed=3).to(BF16)
    for renormalize in (False, True):
        found = select_experts(randn(9, H), logits, K, renormalize=renormalize, **given)
        expected = select_experts(randn(9, H), logits.float(), K, renormalize=renormalize, **given)
        assert found[0].dtype == FP32 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_s2_select_experts_needs_both_groups_and_takes_a_function() -> None:
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "kind"), ROUTED)
def test_s3_preprocess(tokens: int, kind: str, dtype: torch.dtype) -> None:
    ids = routed(tokens, E, K, kind).to(dtype)
    ordered, src2dst, bounds = run_moe_ep_preproess(ids, E)
    assert (ordered.dtype, src2dst.dtype, bounds.dtype) == (dtype, torch.int32, torch.int64)
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: flat[pair])  # stable
    assert ordered.tolist() == [flat[pair] for pair in order]
    assert [src2dst[pair] for pair in order] == list(range(len(flat)))
    assert bounds.tolist() == [sum(i < e for i in flat) for e in range(E + 1)]
    assert bounds[0] == flat.count(-1) and bounds[E] == len(flat)


def test_s3_worked_example() -> None:
    ids = torch.tensor([1, 3, 2, 1, 0, 2, 3, 1, 2, 0]).view(10, 1)
    ordered, src2dst, bounds = run_moe_ep_preproess(ids, 4)
    assert ordered.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3] and bounds.tolist() == [0, 2, 5, 8, 10]
    assert src2dst.tolist() == [2, 8, 5, 3, 0, 6, 9, 4, 7, 1]
    weights = torch.tensor([0.6, 0.8, 0.7, 0.5, 0.9, 0.6, 0.7, 0.4, 0.8, 0.5]).view(10, 1)
    rows, out = randn(10, 4), torch.empty(10, 4)
    post_reorder(rows, out, src2dst, ids, weights, 0, 3, 1, 4)
    assert torch.equal(out[0], rows[2] * weights[0])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "kind"), ROUTED)
def test_s4_pre_reorder_writes_local_rows_only(tokens: int, kind: str, world: int, scaled: bool) -> None:
    """Local rows equal those that dispatch brings to the rank, if its source has all tokens."""
    x, ids, local = randn(tokens, H).to(BF16), routed(tokens, E, K, kind), E // world
    ordered, src2dst, bounds = run_moe_ep_preproess(ids, E)
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
        if not scaled:
            with LocalCluster(1) as cluster:
                own = torch.where((ids >= start) & (ids <= end), ids, -1)
                sent = cluster.run(lambda _, group, own=own: WindowDispatcher(group, 1, 0, E).dispatch(x, own))[0]
            first, last = bounds[start], bounds[end + 1]
            assert torch.equal(sent.expand_x[: last - first], rows[first:last])
            assert torch.equal(sent.expert_token_nums[start : end + 1], bounds[start : end + 2].diff())
    assert ordered.numel() == tokens * K


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_s5_dynamic_scale_is_of_the_magnitude(dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("split", SPLITS)
def test_s6_s7_grouped_gemm_on_segments(split: list[int], dtype: torch.dtype, kind: int) -> None:
    """``grouped_mlp`` equals a loop over segments; so does the runner, at absolute offsets."""
    w13, w2 = randn(4, 2 * F, H).to(dtype) / 6, randn(4, H, F, seed=1).to(dtype) / 4
    counts, first, after = torch.tensor(split), 3, 2
    rows = randn(sum(split), H, seed=2).to(dtype)
    expected = torch.zeros(sum(split), H, dtype=dtype)
    ends = [0, *counts.cumsum(0).tolist()]
    for expert, (start, stop) in enumerate(itertools.pairwise(ends)):
        gate, up = (rows[start:stop] @ w13[expert].T).float().chunk(2, 1)
        expected[start:stop] = (torch.nn.functional.silu(gate) * up).to(dtype) @ w2[expert].T
    groups = counts if kind else counts.cumsum(0)
    found = grouped_mlp(rows, w13.transpose(1, 2), w2.transpose(1, 2), groups, group_list_type=kind)
    torch.testing.assert_close(
        found, expected, rtol=1e-5 if dtype == FP32 else 2**-7, atol=1e-5 if dtype == FP32 else 2**-8
    )

    padded = torch.full((first + sum(split) + after, H), NAN, dtype=dtype)
    padded[first : first + sum(split)] = rows
    bounds = torch.tensor(ends) + first
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


def test_s6_fp8_products() -> None:
    a, b = (randn(5, H) * 20).to(FP8), (randn(3, F, H, seed=1) * 20).to(FP8)
    scale_a, scale_b = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 0.5, 0.25])
    c, bounds = torch.empty(5, F), torch.tensor([0, 2, 2, 5])
    given = {"use_fp8_w8a8": True, "scale_a": scale_a, "scale_b": scale_b}
    GroupedGemmRunner()(a, b, c, 3, True, bounds, **given)
    for rows, expert in ((slice(0, 2), 0), (slice(2, 5), 2)):
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


def test_s6_fp8_products_of_halves_are_scaled_in_float32() -> None:
    """Rounded once; codes end at +-448 where a static scale is too small."""
    a, b = (randn(5, H) * 20).to(FP8), (randn(1, F, H, seed=1) * 20).to(FP8)
    c, scale = torch.empty(5, F, dtype=BF16), torch.tensor([0.3])
    given = {"use_fp8_w8a8": True, "scale_a": scale, "scale_b": torch.tensor([0.7])}
    GroupedGemmRunner()(a, b, c, 1, True, torch.tensor([0, 5]), **given)
    assert torch.equal(c, ((a.float() @ b[0].float().T) * (scale * 0.7)).to(BF16))
    x, rows = torch.tensor([[1e4, -1e4, 1.0, 0.0]]), torch.empty(1, 4, dtype=FP8)
    pre_reorder(x, rows, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), scale, 0, 0, 1, 4)
    assert rows.float().tolist() == [[448.0, -448.0, 3.25, 0.0]]


def test_s7_silu_and_mul_divides_by_the_scale() -> None:
    x, ids = randn(6, 2 * F).to(BF16), torch.tensor([0, 1, 1, 2, 3, 3])
    out, scales = torch.full((6, F), NAN), torch.tensor([0.5, 3.0])
    silu_and_mul(x, out, 2 * F, ids, scales, 1, 2)
    gate, up = x.float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.equal(out[1:3], expected[1:3] * (1 / scales[0])) and torch.equal(out[3], expected[3] * (1 / scales[1]))
    assert bool(out[[0, 4, 5]].isnan().all())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "kind"), ROUTED)
def test_s8_post_reorder(tokens: int, kind: str, dtype: torch.dtype, world: int) -> None:
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


# ---- the layer


def fill(layer: EPMoE) -> EPMoE:
    """Weights by global expert, loaded as a checkpoint's."""
    dtype = layer.params_dtype
    for expert in range(layer.num_experts):
        for shard, shape in (("w1", (F, H)), ("w2", (H, F)), ("w3", (F, H))):
            weight = randn(*shape, seed=100 * expert + int(shard[1])).to(dtype) / shape[1] ** 0.5
            param = layer.w2_weight if shard == "w2" else layer.w13_weight
            param.weight_loader(param, weight, f"experts.{expert}.{shard}.weight", shard, expert)
    layer.process_weights_after_loading()
    return layer


def on_ranks(world: int, body: Callable[[int, str, dist.ProcessGroup], Any]) -> list[Any]:
    """body(rank, name of the windows, process group) on every rank."""
    groups = threads(world).groups
    with LocalCluster(world) as cluster:
        return cluster.run(lambda rank, name: body(rank, name, groups[rank]))


def logits_of(tokens: int, kind: str) -> torch.Tensor:
    logits = randn(tokens, E, seed=8)
    if kind == "one expert":
        logits[:, 1] += 100
    if kind == "an expert without tokens":
        logits[:, 0] -= 100
    return logits


def ways(world: int, x: torch.Tensor, logits: torch.Tensor, **given: Any) -> list[dict[str, torch.Tensor]]:
    def body(rank: int, name: str, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        found = {}
        for reduce in ("none", "all_reduce", "mc2"):
            options = {**given, "reduce": reduce, "group": group, "group_ep": name}
            found[reduce] = fill(EPMoE(E, given["top_k"], H, F, x.dtype, **without(options, "top_k")))(x, logits)
        return found

    return on_ranks(world, body)


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def assert_one_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = (1e-5, 1e-6) if found.dtype == FP32 else (2**-8, 2**-16)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("tokens", "kind"),
    [(13, "random"), (13, "one expert"), (13, "an expert without tokens"), (0, "random"), (1, "random")],
)
def test_s9_all_reduce_and_dispatch_agree(tokens: int, kind: str, dtype: torch.dtype, world: int) -> None:
    """Three ways to add up, and the layer of this package with the same weights: one result."""
    x, logits = randn(tokens, H).to(dtype), logits_of(tokens, kind)
    top_k = 1 if kind == "one expert" else K
    whole = fill(EPMoE(E, top_k, H, F, dtype))(x, logits)
    assert whole.shape == x.shape and whole.dtype == dtype and bool(whole.isfinite().all())
    found = ways(world, x, logits, top_k=top_k)
    for rank in found:
        assert torch.equal(rank["mc2"], whole)
        assert torch.equal(rank["all_reduce"], found[0]["all_reduce"])
        assert_one_rounding(rank["all_reduce"], whole)
    if world == 1:
        assert torch.equal(found[0]["none"], whole)
    parts = torch.stack([rank["none"].float() for rank in found]).sum(0)
    torch.testing.assert_close(
        parts, whole.float(), rtol=1e-5 if dtype == FP32 else 2**-6, atol=1e-5 if dtype == FP32 else 2**-6
    )

    config = MoEConfig(H, F, E, top_k)
    with LocalCluster(1) as cluster:

        def plain(rank: int, name: str) -> torch.Tensor:
            layer, same = (
                MoELayer(config, WindowDispatcher(name, 1, 0, E), dtype=dtype),
                fill(EPMoE(E, top_k, H, F, dtype)),
            )
            # The same strides: a product's last bits depend on them.
            layer.w_gate_up.data = same.w13_weight.transpose(1, 2)
            layer.w_down.data = same.w2_weight.transpose(1, 2)
            layer.route = lambda _: select_experts(x, logits, top_k)  # type: ignore[method-assign]
            return layer(x)

        assert torch.equal(cluster.run(plain)[0], whole)


def in_a_process(rank: int) -> list[torch.Tensor]:
    """One rank's results of both ways, with nothing given but the default group; must be importable by name."""
    x, logits = randn(7, H).to(BF16), logits_of(7, "random")
    layers = [fill(EPMoE(E, K, H, F, BF16, reduce=reduce)) for reduce in ("all_reduce", "mc2")]
    assert all((layer.tp_size, layer.tp_rank) == (2, rank) for layer in layers)
    return [layer(x, logits) for layer in layers for _ in range(2)]


def test_s9_processes_of_the_default_group(tmp_path: Path) -> None:
    whole = fill(EPMoE(E, K, H, F, BF16))(randn(7, H).to(BF16), logits_of(7, "random"))
    for found in run_processes(2, in_a_process, tmp_path):
        for reduced in found[:2]:
            assert_one_rounding(reduced, whole)
        assert torch.equal(found[2], whole) and torch.equal(found[3], whole)


def dense(layer: EPMoE, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The layer's definition in float64, from a whole layer's weights as they were before fp8."""
    weights, ids = select_experts(x, logits, layer.top_k)
    out = torch.zeros(len(x), H, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (layer.w13_weight[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (layer.w2_weight[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


def test_s9_the_layer_is_the_dense_sum() -> None:
    x, logits = randn(9, H), logits_of(9, "random")
    layer = fill(EPMoE(E, K, H, F, FP32))
    torch.testing.assert_close(layer(x, logits).double(), dense(layer, x, logits), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 9])
def test_s9_fp8_weights_with_dynamic_scales(tokens: int, world: int) -> None:
    x, logits = -randn(tokens, H).abs().to(BF16), logits_of(tokens, "random")
    found = ways(world, x, logits, top_k=K, quant_config=Fp8Config())
    exact = dense(fill(EPMoE(E, K, H, F, BF16)), x, logits)
    for rank in found:
        # Each rank scales the input of its down products by its own largest value, in both ways alike.
        assert torch.equal(rank["mc2"], found[0]["mc2"])
        assert_one_rounding(rank["all_reduce"], rank["mc2"])
        error = (rank["mc2"].double() - exact).norm()
        assert tokens == 0 or 0 < error < 0.08 * exact.norm()


def test_s9_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"reduce 'mc2' needs a process group"):
        EPMoE(E, K, H, F, reduce="mc2")
    with pytest.raises(ArgumentError, match=r"reduce is 'sum'; need one of none, all_reduce, mc2"):
        EPMoE(E, K, H, F, reduce="sum")
    with pytest.raises(ArgumentError, match=r"tp_size is 4"):
        EPMoE(E, K, H, F, reduce="all_reduce", group=threads(2).groups[0], tp_size=4)
    layer = EPMoE(E, K, H, F, quant_config=Fp8Config())
    with pytest.raises(ArgumentError, match=r"process_weights_after_loading"):
        layer(randn(2, H), randn(2, E))
    for config, rule in ((Fp8Config(activation_scheme="no"), "'no'"), (object(), "activation_scheme None")):
        with pytest.raises(ArgumentError, match=rule):
            EPMoE(E, K, H, F, quant_config=config)
    layer = EPMoE(E, K, H, F, FP32)
    for x, logits, name in ((randn(2, 5), randn(2, E), "hidden_states"), (randn(2, H), randn(3, E), "router_logits")):
        with pytest.raises(ArgumentError, match=name):
            layer(x, logits)


def test_s10_weight_loading_by_rank() -> None:
    state = {
        f"experts.{expert}.{shard}.weight": randn(*shape, seed=10 * expert + int(shard[1]))
        for expert in range(4)
        for shard, shape in (("w1", (F, H)), ("w2", (H, F)), ("w3", (F, H)))
    }
    mapping = make_expert_params_mapping("w1", "w2", "w3", 4)
    for rank in range(2):
        layer = EPMoE(4, 2, H, F, FP32, tp_size=2, tp_rank=rank)
        parameters = {f"experts.{name}": value for name, value in layer.named_parameters()}
        for name, weight in state.items():
            start, part, expert, shard = next(entry for entry in mapping if entry[1] in name)
            param = parameters[name.replace(part, start)]
            param.weight_loader(param, weight, name, shard, expert)
        for local in range(2):
            expert = 2 * rank + local
            assert torch.equal(layer.w13_weight[local, :F], state[f"experts.{expert}.w1.weight"])
            assert torch.equal(layer.w13_weight[local, F:], state[f"experts.{expert}.w3.weight"])
            assert torch.equal(layer.w2_weight[local], state[f"experts.{expert}.w2.weight"])
    with pytest.raises(ValueError, match=r"shard_id is 'w4'; need one of w1, w2, w3"):
        layer.weight_loader(layer.w2_weight, state["experts.0.w2.weight"], "experts.0.w2.weight", "w4", 3)
    with pytest.raises(ValueError, match=r"loaded_weight is \(5,\)"):
        layer.weight_loader(layer.w2_weight, torch.zeros(5), "experts.3.w2.weight", "w2", 3)


def test_s10_fp8_scales_of_a_checkpoint() -> None:
    layer = EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config(True, "static"))
    scales = {"w1": 0.5, "w2": 0.25, "w3": 0.125}
    whole = {}
    for expert in range(2):
        for shard, shape in (("w1", (F, H)), ("w2", (H, F)), ("w3", (F, H))):
            codes = randn(*shape, seed=10 * expert + int(shard[1])).to(FP8)
            whole[expert, shard] = codes.float() * scales[shard]
            part = "w2" if shard == "w2" else "w13"
            for kind, value in (("weight", codes), ("weight_scale", torch.tensor(scales[shard]))):
                param = getattr(layer, f"{part}_{kind}")
                layer.weight_loader(param, value, f"experts.{expert}.{shard}.{kind}", shard, expert)
    assert layer.w13_weight_scale.tolist() == [[0.5, 0.125]] * 2 and layer.w2_weight_scale.tolist() == [0.25] * 2
    with pytest.raises(ArgumentError, match=r"w13_input_scale has not been loaded"):
        EPMoE.process_weights_after_loading(layer)

    def load(shard: str, value: float, expert: int) -> None:
        param = layer.w2_input_scale if shard == "w2" else layer.w13_input_scale
        layer.weight_loader(param, torch.tensor([value]), f"experts.{expert}.{shard}.input_scale", shard, expert)

    for expert in range(2):
        load("w1", 0.02, expert)
        with pytest.raises(ValueError, match=r"is 0.03 for experts.\d.w3.input_scale, but 0.02 came before"):
            load("w3", 0.03, expert)
        load("w3", 0.02 + 5e-6, expert)
        load("w2", 0.05, expert)
    layer = layer_of(layer)
    x, logits = randn(3, H), randn(3, 2)
    exact = EPMoE(2, 1, H, F, FP32)
    for expert in range(2):
        exact.w13_weight.data[expert] = torch.cat([whole[expert, "w1"], whole[expert, "w3"]])
        exact.w2_weight.data[expert] = whole[expert, "w2"]
    assert layer.w13_weight_scale.tolist() == [0.5] * 2
    found, expected = layer(x, logits), exact(x, logits)
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


CONFIGS = (
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": None},
    SimpleNamespace(quant_method="fp8", activation_scheme="static"),
    SimpleNamespace(activation_scheme="dynamic"),
    SimpleNamespace(activation_scheme="static", is_checkpoint_fp8_serialized=None, get_name=lambda: "fp8"),
)


@pytest.mark.parametrize("serialized", [False, True])
@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_s10_a_quant_config_of_any_form(number: int, serialized: bool) -> None:
    """The same bits as with `Fp8Config`, whether the checkpoint has fp8 weights or others."""
    config = CONFIGS[number]
    scheme = config["activation_scheme"] if isinstance(config, dict) else config.activation_scheme
    x, logits = randn(5, H).to(BF16), logits_of(5, "random")
    made = []
    for given in (config, Fp8Config(serialized, scheme)):
        layer = EPMoE(E, K, H, F, BF16, quant_config=given)
        assert layer.activation_scheme == scheme and layer.use_fp8_w8a8
        for expert, (shard, shape) in itertools.product(range(E), (("w1", (F, H)), ("w2", (H, F)), ("w3", (F, H)))):
            weight = randn(*shape, seed=100 * expert + int(shard[1])) / shape[1] ** 0.5
            part, scale = "w2" if shard == "w2" else "w13", 0.01 * (1 + expert)
            kinds = {"weight": (weight / scale).clamp(-448, 448).to(FP8) if serialized else weight.to(BF16)}
            kinds |= {"weight_scale": torch.tensor(scale)} if serialized else {}
            kinds |= {"input_scale": torch.tensor(0.02)} if scheme == "static" else {}
            for kind, value in kinds.items():
                name = f"experts.{expert}.{shard}.{kind}"
                layer.weight_loader(getattr(layer, f"{part}_{kind}"), value, name, shard, expert)
        layer.quant_method.process_weights_after_loading(layer)  # as SGLang's loader
        assert layer.w13_weight.dtype == layer.w2_weight.dtype == FP8
        made.append(layer(x, logits))
    assert torch.equal(*made) and made[0].isfinite().all() and made[0].any()


def test_s10_quant_configs_that_are_not_computed() -> None:
    for given, rule in (
        ({"quant_method": "awq", "activation_scheme": "dynamic"}, "has quant_method 'awq'; need 'fp8'"),
        ({"quant_method": "fp8"}, "has activation_scheme None"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e5m2"}, "has fmt 'e5m2'; weights are e4m3"),
        ("fp8", "has activation_scheme None"),
    ):
        with pytest.raises(ArgumentError, match=rule) as caught:
            EPMoE(E, K, H, F, quant_config=given)
        assert caught.value.argument == "quant_config"
    layer = EPMoE(1, 1, H, F, BF16, quant_config=CONFIGS[1])
    layer.weight_loader(layer.w2_weight, randn(H, F).to(FP8), "experts.0.w2.weight", "w2", 0)
    with pytest.raises(ArgumentError, match="w13_weight_scale has not been loaded"):  # codes are no weights
        layer.process_weights_after_loading()
    plain = EPMoE(E, K, H, F, FP32)
    assert plain.activation_scheme is None and plain.quant_method.quant_config is None
    plain.quant_method.process_weights_after_loading(plain)


def test_s10_the_larger_scale_of_gate_and_up_is_that_of_both() -> None:
    """Whichever it is: else the codes of the other half would end at 448. Weights of zero have a scale too."""
    for scales in ((0.5, 0.125), (0.125, 0.5)):
        layer = EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config(True))
        codes = (randn(2, 2 * F, H) * 100).to(FP8)
        layer.w13_weight.data.copy_(codes)
        layer.w2_weight.data.copy_(torch.zeros(2, H, F).to(FP8))
        layer.w13_weight_scale.data[:] = torch.tensor(scales)
        layer.w2_weight_scale.data.fill_(1.0)
        layer.process_weights_after_loading()
        assert layer.w13_weight_scale.tolist() == [0.5, 0.5]
        found = layer.w13_weight.float() * 0.5
        expected = codes.float() * torch.tensor(scales).repeat_interleave(F)[:, None]
        torch.testing.assert_close(found, expected, rtol=2**-4, atol=2**-9)
    empty = EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config())
    for parameter in (empty.w13_weight, empty.w2_weight):
        parameter.data.zero_()
    empty.process_weights_after_loading()
    assert empty.w13_weight_scale.tolist() == [1.0, 1.0] and not empty(randn(3, H), randn(3, 2)).any()


def test_s10_static_scales_are_used() -> None:
    """Of tokens and of the second product's input: what they have rounded to codes once stays as it is."""

    def layer(scale: float) -> EPMoE:
        made = fill_fp8(EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config(False, "static")), scale)
        made.process_weights_after_loading()
        return made

    x, logits = randn(5, H), randn(5, 2)
    rounded = (x * (1 / torch.tensor(0.3))).to(FP8).float() * 0.3
    fine, coarse = layer(0.3), layer(3.0)
    torch.testing.assert_close(fine(rounded, logits), fine(x, logits))
    dynamic = EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config())
    dynamic.w13_weight.data.copy_(weights_of(0)), dynamic.w2_weight.data.copy_(weights_of(1))
    dynamic.process_weights_after_loading()
    assert not torch.equal(dynamic(x, logits), fine(x, logits))
    assert not torch.equal(coarse(x, logits), fine(x, logits))
    with pytest.raises(ArgumentError, match="w13_input_scale has not been loaded"):
        fill_fp8(EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config(False, "static")), NAN).process_weights_after_loading()


def weights_of(number: int) -> torch.Tensor:
    return randn(*((2, 2 * F, H), (2, H, F))[number], seed=number) / 4


def fill_fp8(layer: EPMoE, scale: float) -> EPMoE:
    layer.w13_weight.data.copy_(weights_of(0)), layer.w2_weight.data.copy_(weights_of(1))
    layer.w13_input_scale.data.fill_(scale), layer.w2_input_scale.data.fill_(scale)
    return layer


def layer_of(layer: EPMoE) -> EPMoE:
    layer.process_weights_after_loading()
    layer.process_weights_after_loading()  # has no further effect
    return layer


def test_s11_expert_params_mapping() -> None:
    mapping = EPMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2)
    assert mapping == make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2)
    assert sorted(mapping) == sorted(
        entry
        for i in range(2)
        for entry in (
            ("experts.w13_", f"experts.{i}.gate_proj.", i, "w1"),
            ("experts.w2_", f"experts.{i}.down_proj.", i, "w2"),
            ("experts.w13_", f"experts.{i}.up_proj.", i, "w3"),
        )
    )


def test_public_names_are_all_here() -> None:
    assert all(hasattr(sglang, name) for name in sglang.__all__)
