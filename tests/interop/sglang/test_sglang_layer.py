"""SGLang's EPMoE against dispatch and combine, its weights, scales and quantization configs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad_arguments import refused
from gloo_ranks import threads
from routed_tokens import randn
from sglang_layers import BF16, FP32, E, F, H, K, logits_of

from ascend_moe import LocalCluster, MoEConfig, MoELayer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts.quant import FP8
from ascend_moe.interop.sglang import (
    EPMoE,
    Fp8Config,
    Fp8EPMoEMethod,
    UnquantizedEPMoEMethod,
    make_expert_params_mapping,
    select_experts,
)


def fill(layer: EPMoE) -> EPMoE:
    """Weights by global expert, loaded as a checkpoint's."""
    for expert, shard, weight in checkpoint(layer.num_experts):
        load(layer, expert, shard, weight=weight.to(layer.params_dtype))
    layer.process_weights_after_loading()
    return layer


def checkpoint(experts: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Each expert's weights by shard."""
    for expert, shard in itertools.product(range(experts), ("w1", "w2", "w3")):
        shape = (H, F) if shard == "w2" else (F, H)
        yield expert, shard, randn(*shape, seed=100 * expert + int(shard[1])) / shape[1] ** 0.5


def load(layer: EPMoE, expert: int, shard: str, **values: torch.Tensor) -> None:
    """Load a weight and its scales as SGLang's loader does."""
    for kind, value in values.items():
        param = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
        param.weight_loader(param, value, f"experts.{expert}.{shard}.{kind}", shard, expert)


def on_ranks(world: int, body: Callable[[int, str, dist.ProcessGroup], Any]) -> list[Any]:
    """body(rank, name of the windows, process group) on every rank."""
    groups = threads(world).groups
    with LocalCluster(world) as cluster:
        return cluster.run(lambda rank, name: body(rank, name, groups[rank]))


def ways(
    world: int, x: torch.Tensor, logits: torch.Tensor, top_k: int = K, **given: Any
) -> list[dict[str, torch.Tensor]]:
    def body(rank: int, name: str, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        found = {}
        for reduce in ("none", "all_reduce", "mc2"):
            options = {**given, "reduce": reduce, "group": group, "group_ep": name}
            found[reduce] = fill(EPMoE(E, top_k, H, F, x.dtype, **options))(x, logits)
        return found

    return on_ranks(world, body)


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
    found = ways(world, x, logits, top_k)
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
    for sign, choose in ((1, None), (-1, lambda **given: select_experts(x, -given["gating_output"], given["topk"]))):
        layer = fill(EPMoE(E, K, H, F, FP32, custom_routing_function=choose))
        expected = dense(layer, x, sign * logits)
        torch.testing.assert_close(layer(x, logits).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 9])
def test_fp8_weights_with_dynamic_scales_are_near_the_dense_sum(tokens: int, world: int) -> None:
    x, logits = -randn(tokens, H).abs().to(BF16), logits_of(tokens, "random")
    found = ways(world, x, logits, quant_config=Fp8Config())
    exact = dense(fill(EPMoE(E, K, H, F, BF16)), x, logits)
    for rank in found:
        # Each rank scales the input of its down products by its own largest value, in both ways alike.
        assert torch.equal(rank["mc2"], found[0]["mc2"])
        assert_one_rounding(rank["all_reduce"], rank["mc2"])
        error = (rank["mc2"].double() - exact).norm()
        assert tokens == 0 or 0 < error < 0.08 * exact.norm()


def test_wrong_arguments_of_the_layer_are_refused() -> None:
    refused("group", EPMoE, E, K, H, F, reduce="mc2", says="reduce 'mc2' needs a process group")
    refused("num_fused_shared_experts", EPMoE, E, K, H, F, num_fused_shared_experts=1, says="is 1, but shared experts")
    refused("reduce", EPMoE, E, K, H, F, reduce="sum", says="is 'sum'; need one of none, all_reduce, mc2")
    refused("tp_size", EPMoE, E, K, H, F, reduce="all_reduce", group=threads(2).groups[0], tp_size=4, says="is 4")
    layer = EPMoE(E, K, H, F, quant_config=Fp8Config())
    with pytest.raises(ArgumentError, match=r"process_weights_after_loading"):
        layer(randn(2, H), randn(2, E))
    layer = EPMoE(E, K, H, F, FP32, routed_scaling_factor=2.5)
    for x, logits, name in ((randn(2, 5), randn(2, E), "hidden_states"), (randn(2, H), randn(3, E), "router_logits")):
        with pytest.raises(ArgumentError, match=name):
            layer(x, logits)


# ---- weights of checkpoints, fp8 scales and quantization configs


def test_a_rank_loads_the_weights_of_its_experts() -> None:
    state = {f"experts.{expert}.{shard}.weight": weight for expert, shard, weight in checkpoint(4)}
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


def test_fp8_scales_of_a_checkpoint_are_loaded() -> None:
    layer = EPMoE(2, 1, H, F, FP32, quant_config=Fp8Config(True, "static"))
    scales = {"w1": 0.5, "w2": 0.25, "w3": 0.125}
    whole = {}
    for expert, shard, weight in checkpoint(2):
        codes = (weight * 4).to(FP8)
        whole[expert, shard] = codes.float() * scales[shard]
        load(layer, expert, shard, weight=codes, weight_scale=torch.tensor(scales[shard]))
    assert layer.w13_weight_scale.tolist() == [[0.5, 0.125]] * 2 and layer.w2_weight_scale.tolist() == [0.25] * 2
    with pytest.raises(ArgumentError, match=r"w13_input_scale has not been loaded"):
        EPMoE.process_weights_after_loading(layer)

    for expert in range(2):
        load(layer, expert, "w1", input_scale=torch.tensor([0.02]))
        with pytest.raises(ValueError, match=r"is 0.03 for experts.\d.w3.input_scale, but 0.02 was loaded before"):
            load(layer, expert, "w3", input_scale=torch.tensor([0.03]))
        load(layer, expert, "w3", input_scale=torch.tensor([0.02 + 5e-6]))
    load(layer, 0, "w2", input_scale=torch.tensor([0.05]))
    with pytest.raises(ArgumentError, match=r"w2_input_scale has not been loaded"):
        EPMoE.process_weights_after_loading(layer)
    load(layer, 1, "w2", input_scale=torch.tensor([0.05]))
    for _ in range(2):  # the second time without effect
        layer.process_weights_after_loading()
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
def test_a_quant_config_of_any_form_gives_the_same_bits(number: int, serialized: bool) -> None:
    """The same bits as with `Fp8Config`, whether the checkpoint has fp8 weights or others."""
    config = CONFIGS[number]
    scheme = config["activation_scheme"] if isinstance(config, dict) else config.activation_scheme
    x, logits = randn(5, H).to(BF16), logits_of(5, "random")
    made = []
    for given in (config, Fp8Config(serialized, scheme)):
        layer = EPMoE(E, K, H, F, BF16, quant_config=given)
        assert layer.activation_scheme == scheme and layer.use_fp8_w8a8
        for expert, shard, weight in checkpoint(E):
            scale = 0.01 * (1 + expert)
            kinds = {"weight": (weight / scale).clamp(-448, 448).to(FP8) if serialized else weight.to(BF16)}
            kinds |= {"weight_scale": torch.tensor(scale)} if serialized else {}
            kinds |= {"input_scale": torch.tensor(0.02)} if scheme == "static" else {}
            load(layer, expert, shard, **kinds)
        layer.quant_method.process_weights_after_loading(layer)  # as SGLang's loader
        assert layer.w13_weight.dtype == layer.w2_weight.dtype == FP8
        made.append(layer(x, logits))
    assert torch.equal(*made) and made[0].isfinite().all() and made[0].any()


def test_quant_methods_make_the_parameters_of_any_layer() -> None:
    """By SGLang's names and arguments, as EPMoE has them; every parameter has the attributes that are given."""
    sizes = {"num_experts_per_partition": 2, "hidden_size": H, "intermediate_size": F, "params_dtype": BF16}
    for config in (None, Fp8Config(True, "static"), Fp8Config(False, "dynamic")):
        method = UnquantizedEPMoEMethod() if config is None else Fp8EPMoEMethod(config)
        layer, whole = torch.nn.Module(), EPMoE(4, 1, H, F, BF16, quant_config=config, tp_size=2, tp_rank=0)
        assert type(whole.quant_method) is type(method)
        method.create_weights(layer, **sizes, weight_loader="theirs", quant_method="tensor")
        made, expected = (dict(each.named_parameters()) for each in (layer, whole))
        assert list(made) == list(expected)
        static = config is not None and config.activation_scheme == "static"
        assert [name for name in made if "input" in name] == ["w13_input_scale", "w2_input_scale"] * static
        for name, value in made.items():
            assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
            assert (value.weight_loader, value.quant_method) == ("theirs", "tensor") and not value.requires_grad


def test_quant_configs_that_are_not_computed_are_refused() -> None:
    for given, rule in (
        ({"quant_method": "awq", "activation_scheme": "dynamic"}, "has quant_method 'awq'; need 'fp8'"),
        ({"quant_method": "fp8"}, "has activation_scheme None"),
        ({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "weight_block_size .*; a weight must have"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e5m2"}, "has fmt 'e5m2'; need 'e4m3'"),
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


def test_the_larger_scale_of_gate_and_up_is_that_of_both() -> None:
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


def test_static_scales_are_used() -> None:
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


def weights_of(number: int) -> torch.Tensor:
    return randn(*((2, 2 * F, H), (2, H, F))[number], seed=number) / 4


def fill_fp8(layer: EPMoE, scale: float) -> EPMoE:
    layer.w13_weight.data.copy_(weights_of(0)), layer.w2_weight.data.copy_(weights_of(1))
    layer.w13_input_scale.data.fill_(scale), layer.w2_input_scale.data.fill_(scale)
    return layer
