"""vLLM's experts take rows of any prepare; TopKWeightAndReduce weighs and sums them."""

from __future__ import annotations

import functools
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_runs import Clusters
from routed_tokens import randn, routed
from torch import Tensor
from vllm_parts import (
    BF16,
    FP32,
    E,
    F,
    H,
    K,
    computed,
    finished,
    impl_of,
    pair,
    part_of,
    prepared,
    three_calls,
    windows,
)

import ascend_moe
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_mlp, npu_dynamic_quant
from ascend_moe.interop.fused_moe import fused_experts
from ascend_moe.interop.vllm import FusedMoEQuantConfig, int8_w8a8_moe_quant_config, make_experts
from ascend_moe.interop.vllm.experts import activation_of


@windows
@pytest.mark.parametrize("w8a8", [False, True])
def test_work_follows_the_rows_that_arrived(clusters: Clusters, kind: str, w8a8: bool) -> None:
    seen: list[tuple[int, int]] = []

    def multiply(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((rank_of.rank, len(x[0])))
        return ascend_moe.npu.npu_grouped_matmul(x, *args, **kwargs)

    names = ("npu_swiglu", "npu_dequant_swiglu_quant")
    ops = SimpleNamespace(npu_grouped_matmul=multiply, **{name: getattr(ascend_moe.npu, name) for name in names})
    rank_of = threading.local()

    def run(rank: int, group: str) -> int:
        rank_of.rank = rank
        part = part_of(rank, 2, 3, w8a8=w8a8)
        way, _ = pair(kind, rank, 2, group)
        experts = make_experts(None, None, ops, part.config, E // 2, "batched" if kind == "batched" else "standard")
        came = prepared(way, part)
        assert len(came[0].reshape(-1, H)) > 90
        assert torch.equal(finished(way, experts, part, came), three_calls(part, rank, 2, group, 3))
        return int(came[2].expert_num_tokens.sum())

    arrived = clusters[2].run(run)
    assert sum(arrived) == 2 * 3 * K
    assert sorted(seen) == sorted([(rank, count) for rank, count in enumerate(arrived) for _ in range(2)])


def test_places_behind_the_rows_are_not_touched(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 3)
        for kind in ("mc2", "batched"):
            way, experts = pair(kind, 0, 1, group)
            came = prepared(way, part)
            made = computed(experts, part, came).reshape(-1, H)
            assert int((~made.isnan()).all(1).sum()) == 3 * K and int(made.isnan().all(1).sum()) == len(made) - 3 * K
            assert made.data_ptr() != came[0].data_ptr()

    clusters[1].run(run)


def test_an_entry_of_a_map_is_a_row_of_the_weights_or_minus_one() -> None:
    """40 maps by chance: with the formula's result, or refused by the name of the argument."""
    generator, part = random.Random(1), part_of(0, 1, 5, "random", FP32)
    given = (part.weights, part.ids)
    for _ in range(40):
        local = generator.randint(1, E)
        chosen = torch.tensor([generator.randrange(-1, local) for _ in range(E)], dtype=torch.int32)
        weights = part.w1[:local], part.w2[:local]
        experts, made = make_experts(None, None, None, None, local), torch.full((5 * K, H), torch.nan)
        blocks = functools.partial(fused_experts, part.x, *weights, *given, global_num_experts=E, expert_map=chosen)
        rows = functools.partial(
            experts.apply, made, part.x, *weights, *given, "silu", E, chosen, *(None,) * 5, False
        )  # fmt: skip
        rows()
        each = torch.stack([mlp(token, *weights) for token in part.x])  # (T, L, H)
        numbers = chosen[part.ids.long()].long()
        pairs = each.gather(1, numbers.clamp(min=0)[..., None].expand(-1, -1, H)) * (numbers >= 0)[..., None]
        torch.testing.assert_close(made.view(5, K, H), pairs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(blocks(), (pairs * part.weights[..., None]).sum(1), rtol=1e-4, atol=1e-5)
        chosen[generator.randrange(E)] = generator.choice((local, local + 5, E + 1000, -2))
        for call in (blocks, rows):
            with pytest.raises(ArgumentError, match="expert_map has entries from") as caught:
                call()
            assert caught.value.argument == "expert_map"


def mlp(token: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (w1 @ token).chunk(2, -1)
    return torch.einsum("lhf,lf->lh", w2, torch.nn.functional.silu(gate) * up)


def test_int8_rows_of_another_prepare_keep_their_scales() -> None:
    """Tokens in int8, a scale each, with K experts each: every pair has its token's."""
    part = part_of(0, 1, 7, "-1", FP32, w8a8=True)
    codes, scales = npu_dynamic_quant(part.x * torch.logspace(-2, 2, 7)[:, None])
    experts = make_experts(None, None, None, part.config, E)
    made = torch.full((7 * K, H), float("nan"))
    experts.apply(
        made, codes, part.w1, part.w2, part.weights, part.ids, "silu", E, None, scales[:, None], None, None, None, None,
        False,
    )  # fmt: skip
    mlp = (part.w1.transpose(1, 2), part.w2.transpose(1, 2))
    of_weights = {"w_gate_up_scale": part.config.w1_scale.squeeze(-1), "w_down_scale": part.config.w2_scale}
    for slot, expert in enumerate(part.ids.flatten().tolist()):
        if expert < 0:
            assert not made[slot].any()
            continue
        count = torch.zeros(E, dtype=torch.int64)
        count[expert], token = 1, slice(slot // K, slot // K + 1)
        own = grouped_mlp(codes[token], *mlp, count, dynamic_scales=scales[token], **of_weights, output_dtype=FP32)
        assert torch.equal(made[slot], own[0])


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_workspaces_in_both_forms(kind: str) -> None:
    experts = make_experts(None, None, None, None, 4, kind)
    rows = (4, 30) if kind == "batched" else (30,)
    expected = ((*rows, H), (*rows, F), (*rows, H))
    x, arrived = torch.zeros(5, H, dtype=BF16), torch.zeros(*rows, H, dtype=torch.int8)
    sizes = {"M": 30, "N": 2 * F, "K": H, "topk": 1, "global_num_experts": E, "local_num_experts": 4}
    assert experts.workspace_shapes(x, arrived, *sizes.values(), None) == (*expected, BF16)
    assert experts.workspace_shapes(a=x, aq=arrived, **sizes, expert_tokens_meta=None) == (*expected, BF16)
    assert experts.workspace_shapes(*sizes.values(), None, "silu") == expected
    assert experts.workspace_shapes(**sizes, expert_tokens_meta=None, activation="silu") == expected
    assert experts.workspace_dtype(BF16) == BF16
    if kind == "standard":
        assert experts.workspace_shapes(30, 5 * H, H, 2, E, 4, None, "silu")[0] == (60, 5 * H)
        assert experts.workspace_shapes(30, 8, H, 2, E, 4, None, "silu") == ((60, H), (60, 4), (60, H))


def test_experts_refuse() -> None:
    part, quantized = part_of(0, 1, 5), part_of(0, 1, 5, w8a8=True)
    experts = make_experts(None, None, None, None, E)

    def apply(made: Any = experts, **changed: Any) -> None:
        given = {"output": part.x.new_empty(5 * K, H), "hidden_states": part.x, "w1": part.w1, "w2": part.w2}
        given |= {"topk_weights": part.weights, "topk_ids": part.ids, "activation": "silu", "global_num_experts": E}
        given |= dict.fromkeys(("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"))
        made.apply(**given | {"expert_tokens_meta": None, "apply_router_weight_on_input": False} | changed)

    for changed, rule in (
        ({"activation": "silu_no_mul"}, "activation is 'silu_no_mul'; need one of silu, gelu"),
        ({"w1": part.w1[:4]}, r"w1 is \(4, 64, 64\); it must be \(8, 64, 64\)"),
        ({"w2": part.w2.float()}, "w2 is torch.float32"),
        ({"output": torch.empty(5, H)}, r"output is \(5, 64\)"),
        ({"hidden_states": part.x.to(torch.int8)}, "with this quant_config it must be bf16"),
        ({"a1q_scale": torch.ones(5)}, "a1q_scale must be passed with, and only with, int8 rows"),
        ({"hidden_states": part.x.view(1, 5, H)}, r"hidden_states is \(1, 5, 64\); it must be \(M, H\)"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            apply(**changed)
    batched = make_experts(None, None, None, None, E, "batched")
    with pytest.raises(ArgumentError, match="batched rows need counts of experts"):
        apply(batched, hidden_states=part.x.new_zeros(E, 2, H), output=part.x.new_zeros(E, 2, H))
    for config, rule in (
        (FusedMoEQuantConfig(torch.int8, True), "needs w1_scale and w2_scale"),
        (FusedMoEQuantConfig(w1_scale=torch.ones(1)), "has scales of weights but unquantized rows"),
        (FusedMoEQuantConfig(w1_bias=torch.ones(1)), "has w1_bias"),
        (SimpleNamespace(quant_dtype="mxfp4"), "has quant_dtype mxfp4"),
        (FusedMoEQuantConfig.make(block_shape=[128, 128]), "has block_shape"),
        (int8_w8a8_moe_quant_config(*[torch.ones(1)] * 2, None, None, per_act_token_quant=False), "without per_act"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            make_experts(None, None, None, config, E)
    moe = SimpleNamespace(swiglu_limit=10.0, swiglu_alpha=None)
    for given, name, rule in (
        ((SimpleNamespace(gemm1_alpha=1.702), None), "silu", r"has gemm1_alpha 1\.702, but .* parameter: pass 1 or"),
        ((None, moe), "gelu", r"moe_config has swiglu_limit 10\.0, but activation 'gelu' has no such parameter"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            apply(make_experts(None, None, None, given[0], E, moe_config=given[1]), activation=name)
    neutral = SimpleNamespace(gemm1_clamp_limit=None, gemm1_alpha=1.0, gemm1_beta=0.0)
    make_experts(None, None, None, neutral, E, moe_config=SimpleNamespace(swiglu_limit=None))
    both = SimpleNamespace(gemm1_clamp_limit=3.0), SimpleNamespace(swiglu_limit=5.0, swiglu_alpha=2.0)
    assert activation_of("swigluoai", *both).numbers == {"limit": 3.0, "alpha": 2.0}  # quant_config's go first
    scales = int8_w8a8_moe_quant_config(quantized.config.w1_scale[:, :3], quantized.config.w2_scale)
    with pytest.raises(ArgumentError, match=r"w1_scale is \(8, 3, 1\); it must be \(8, 64\) or \(8, 64, 1\) or"):
        apply(
            make_experts(None, None, None, scales, E), hidden_states=part.x.to(torch.int8), a1q_scale=torch.ones(5, 1),
            w1=quantized.w1, w2=quantized.w2,
        )  # fmt: skip


# ---- TopKWeightAndReduce


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
def test_weights_and_sums(tokens: int, on_input: bool, dtype: torch.dtype) -> None:
    ids, weights = routed(tokens, E, K), randn(tokens, K, seed=1)
    rows = randn(tokens, K, H).to(dtype)
    expected, whole = torch.zeros(tokens, H), torch.ones(tokens, K) if on_input else weights
    for k in range(K):
        expected = expected + rows[:, k].float() * whole[:, k, None]
    contiguous = impl_of("Contiguous")
    for shape in ((tokens, K, H), (tokens * K, H)):
        assert torch.equal(contiguous.apply(None, rows.reshape(shape), weights, ids, on_input), expected.to(dtype))
    output = torch.empty(tokens, H, dtype=dtype)
    assert contiguous.apply(output, rows, weights, ids, on_input) is output and torch.equal(output, expected.to(dtype))
    parts = []
    for rank in range(2):
        batched = torch.full((E // 2, 9, H), float("nan"), dtype=dtype)
        used = [0] * E
        for token in range(tokens):
            for k, expert in enumerate(ids[token].tolist()):
                if expert // (E // 2) == rank:
                    batched[expert % (E // 2), used[expert]] = rows[token, k]
                    used[expert] += 1
        parts.append(impl_of("NaiveBatched", rank).apply(None, batched.nan_to_num(7.0), weights, ids, on_input))
    torch.testing.assert_close(parts[0] + parts[1], expected.to(dtype), rtol=1e-2, atol=1e-2)
    no_op = impl_of("NoOP")
    assert no_op.apply(None, rows, weights, ids, on_input) is rows
    copy = torch.empty_like(rows)
    assert no_op.apply(copy, rows, weights, ids, on_input) is copy and torch.equal(copy, rows)


def test_delegate_leaves_the_choice_and_classes_compare() -> None:
    delegate = impl_of("Delegate")
    with pytest.raises(ArgumentError, match="leaves the choice to finalize"):
        delegate.apply(None, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), False)
    assert delegate == impl_of("Delegate") != impl_of("NoOP")
    assert impl_of("NaiveBatched", 1) == impl_of("NaiveBatched", 1) != impl_of("NaiveBatched", 2)
    assert len({delegate, impl_of("Delegate"), impl_of("Contiguous")}) == 2


@pytest.mark.parametrize("name", ["NoOP", "Contiguous"])
def test_standard_rows_take_any_of_them(clusters: Clusters, name: str) -> None:
    """A row is a token of one expert with weight 1 there."""

    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 4)
        way, experts = pair("mc2", 0, 1, group)
        came, made = prepared(way, part), torch.empty_like(part.x)
        way.finalize(made, computed(experts, part, came), came[4], came[3], False, impl_of(name))
        assert torch.equal(made, three_calls(part, 0, 1, group, 4))

    clusters[1].run(run)
