"""SGLang's EPMoE gives what dispatch and combine give, and what a dense sum gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_processes, threads
from routed_tokens import randn
from sglang_layers import BF16, FP32, E, F, H, K, logits_of

from ascend_moe import LocalCluster, MoEConfig, MoELayer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.interop.sglang import EPMoE, Fp8Config, select_experts


def test_ep_takes_the_place_of_tp() -> None:
    for rank in range(4):
        layer = EPMoE(8, 2, 32, 16, tp_size=4, tp_rank=rank)
        assert (layer.start_expert_id, layer.end_expert_id) == (2 * rank, 2 * rank + 1)
        assert layer.w13_weight.shape == (2, 32, 32) and layer.w2_weight.shape == (2, 32, 16)
    with pytest.raises(ValueError, match=r"is 10; it must be a multiple of the 4 ranks"):
        EPMoE(10, 2, 32, 16, tp_size=4)


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
def test_all_reduce_and_dispatch_agree(tokens: int, kind: str, dtype: torch.dtype, world: int) -> None:
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
                MoELayer(config, MC2Dispatcher(name, 1, 0, E), dtype=dtype),
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


def test_processes_of_the_default_group_give_the_whole_layer(tmp_path: Path) -> None:
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


def test_the_layer_is_the_dense_sum() -> None:
    x, logits = randn(9, H), logits_of(9, "random")
    layer = fill(EPMoE(E, K, H, F, FP32))
    torch.testing.assert_close(layer(x, logits).double(), dense(layer, x, logits), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 9])
def test_fp8_weights_with_dynamic_scales_are_near_the_dense_sum(tokens: int, world: int) -> None:
    x, logits = -randn(tokens, H).abs().to(BF16), logits_of(tokens, "random")
    found = ways(world, x, logits, top_k=K, quant_config=Fp8Config())
    exact = dense(fill(EPMoE(E, K, H, F, BF16)), x, logits)
    for rank in found:
        # Each rank scales the input of its down products by its own largest value, in both ways alike.
        assert torch.equal(rank["mc2"], found[0]["mc2"])
        assert_one_rounding(rank["all_reduce"], rank["mc2"])
        error = (rank["mc2"].double() - exact).norm()
        assert tokens == 0 or 0 < error < 0.08 * exact.norm()


def test_wrong_arguments_of_the_layer_are_refused() -> None:
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
