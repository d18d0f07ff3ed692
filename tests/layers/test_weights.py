"""Weights that come later: other state dicts, dtypes and copies for layers of every class, int8 and fp8 ones too."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from torch import Tensor, nn

from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import quantize_weight
from ascend_moe.experts.weights import Codes
from ascend_moe.interop import sglang
from ascend_moe.interop.megatron import GroupedMLP, RouterConfig, SharedExpertMLP, TopKRouter
from ascend_moe.layer import MoEConfig, MoELayer

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CONFIG = MoEConfig(32, 16, 4, 2, router="deepseek_v3", shared_intermediate_size=16)
EXPERTS = ("w_gate_up", "w_down")


def layer(seed: int = 1, dtype: torch.dtype = BF16, quantized: bool = False, bits: int = 8) -> MoELayer:
    made = MoELayer(CONFIG, AllToAllDispatcher(threads(1).groups[0], CONFIG.num_experts), dtype=dtype)
    made.init_weights(seed)
    return made.quantize_(bits) if quantized else made


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(ours: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bits, dtypes and names."""
    alike = [each.dtype == other[name].dtype and torch.equal(each, other[name]) for name, each in ours.items()]
    return ours.keys() == other.keys() and all(alike)


def rows(dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


# ---- state dicts for the int8 layer


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
@pytest.mark.parametrize("how", [(8,), (4, (4, 2))], ids=str)
def test_floats_for_a_quantized_layer_are_quantized(how: tuple[Any, ...], options: dict[str, Any]) -> None:
    """As a new layer is that gets them first and is quantized then, in every bit."""
    made = layer(1).quantize_(*how)
    for given in (BF16, FP32, torch.float64):
        other = {name: value.to(given) for name, value in layer(2, FP32).state_dict().items()}
        expected = layer(3)
        expected.load_state_dict(other)
        made.load_state_dict(other, **options)
        assert same(values(made), values(expected.quantize_(*how)))
        assert torch.equal(made(rows()), expected(rows()))


@pytest.mark.parametrize("assign", [False, True])
def test_codes_load_behind_a_prefix(assign: bool) -> None:
    source, inside = layer(2, quantized=True), nn.Sequential(layer(3, quantized=True))
    inside.load_state_dict({f"0.{name}": value for name, value in source.state_dict().items()}, assign=assign)
    assert same(values(inside[0]), values(source)) and isinstance(inside[0].w_down, Codes)


def test_a_part_of_the_weights_is_quantized_alone() -> None:
    before, other = layer(1, quantized=True), layer(2)
    made = layer(1, quantized=True)
    made.load_state_dict({"w_down": other.w_down, "gate_bias": other.gate_bias}, strict=False)
    codes, scale = quantize_weight(other.w_down)
    assert torch.equal(made.w_down, codes) and torch.equal(made.w_down_scale, scale)
    assert torch.equal(made.w_gate_up, before.w_gate_up) and torch.equal(made.gate_bias, other.gate_bias)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "codes alone": (lambda s: s.pop("w_down_scale"), "w_down is int8 without w_down_scale"),
    "scales alone": (lambda s: s.pop("w_gate_up"), "w_gate_up_scale is given without w_gate_up"),
    "floats with scales": (
        lambda s: s.update(w_down=s["w_down"].bfloat16()),
        r"w_down_scale is given with w_down of torch.bfloat16",
    ),
    "fp8": (
        lambda s: s.update(w_down=s["w_down"].to(FP8)),
        "w_down is torch.float8_e4m3fn; it must be int8 or bfloat16",
    ),
    "integer scales": (
        lambda s: s.update(w_down_scale=s["w_down_scale"].to(torch.uint8)),
        "w_down_scale is torch.uint8; it must be float32 or bfloat16",
    ),
    "one scale": (lambda s: s.update(w_down_scale=s["w_down_scale"][:1]), r"w_down_scale is \(1, 32\)"),
    "transposed": (lambda s: s.update(w_down=s["w_down"].mT), r"w_down is \(4, 32, 16\); it must be \(4, 16, 32\)"),
    "an integer gate": (lambda s: s.update(gate_weight=s["gate_weight"].int()), "gate_weight is torch.int32"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("strict", [False, True])
def test_state_dicts_that_do_not_fit_an_int8_layer_change_nothing(case: str, strict: bool) -> None:
    made, (change, message) = layer(1, quantized=True), WRONG[case]
    given, before = values(layer(2, quantized=True)), values(made)
    change(given)
    refused(message.split()[0], made.load_state_dict, given, strict=strict, says=message)
    assert same({name: before[name] for name in EXPERTS}, {name: values(made)[name] for name in EXPERTS})


def test_a_gradient_keeps_the_dtype_of_its_weight() -> None:
    made = layer(1)
    made.gate_weight.grad = torch.full_like(made.gate_weight, 0.3)
    grad = made.half().gate_weight.grad
    assert grad is not None and torch.equal(grad, torch.full_like(made.gate_weight, 0.3))


# ---- casts and copies of a layer


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [FP16, FP32, BF16], ids=str)
def test_a_cast_layer_computes_in_the_new_dtype(dtype: torch.dtype, quantized: bool) -> None:
    made = layer(1, quantized=quantized)
    before, expected = values(made), made(rows()).float()
    for cast in (lambda: made.to(dtype), lambda: made.to("cpu", dtype), lambda: made.type(dtype)):
        assert cast() is made and made.dtype == dtype
        kept = [name for name, value in before.items() if value.dtype in (FP32, torch.int8)]
        assert "gate_weight" in kept and (not quantized or "w_down" in kept)
        for name, value in values(made).items():
            assert value.dtype == (before[name].dtype if name in kept else dtype), name
            assert name not in kept or torch.equal(value, before[name]), name
        found = made(rows(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_a_dtype_that_no_layer_has_is_refused_before_anything_changes() -> None:
    for made in (layer(1), layer(1, quantized=True)):
        before = values(made)
        refused("dtype", made.double, says=r"is torch.float64; need torch.bfloat16, torch.float16 or torch.float32")
        assert same(values(made), before) and made.dtype == BF16


@pytest.mark.parametrize("seed", range(16))
def test_any_order_of_loads_casts_and_copies(seed: int) -> None:
    """Whatever has been refused in between, the layer is the one that a new layer with the same weights is."""
    draw = random.Random(seed)
    made, number, quantized, dtype, bits = layer(1), 1, False, BF16, draw.choice([8, 8, 4])
    for _ in range(8):
        step = draw.choice(["load", "load", "quantize", "cast", "copy", "codes", "wrong copy", "round trip"])
        assign = draw.random() < 0.5
        if step == "load":
            number = draw.randrange(2, 9)
            made.load_state_dict(layer(number, dtype).state_dict(), assign=assign)
        elif step == "codes" and quantized:
            number = draw.randrange(2, 9)
            made.load_state_dict(layer(number, dtype, True, bits).state_dict(), assign=assign)
        elif step == "codes":
            with pytest.raises(ArgumentError):
                made.load_state_dict(
                    layer(9, dtype, True, bits).state_dict(), assign=assign, strict=draw.random() < 0.5
                )
        elif step == "quantize":
            quantized = True
            made.quantize_(bits)
        elif step == "cast" and not quantized:  # of codes the new dtype is that of the results alone
            dtype = draw.choice([FP16, FP32, BF16])
            made.to(dtype)
            made.load_state_dict(layer(number, dtype).state_dict())
        elif step == "copy":
            made = copy.deepcopy(made)
        elif step == "wrong copy" and quantized:
            with pytest.raises(ArgumentError), torch.no_grad():
                made.w_gate_up.data[0].copy_(layer(9).w_gate_up[0])
        elif step == "round trip":
            made.load_state_dict(values(made), assign=assign)
        expected = layer(number, dtype, quantized, bits)
        assert same(values(made), values(expected)), step
        assert torch.equal(made(rows(dtype)), expected(rows(dtype))), step


# ---- the classes of frameworks


def ep_moe(fp8: bool = False, serialised: bool = False, seed: int = 1) -> sglang.EPMoE:
    config = sglang.Fp8Config(serialised) if fp8 else None
    made = sglang.EPMoE(4, 2, 32, 16, BF16, quant_config=config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        given = torch.randn(parameter.shape, generator=generator) / 4
        parameter.data.copy_((given.abs() if name.endswith("scale") else given).to(parameter.dtype))
    made.process_weights_after_loading()
    return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "GroupedMLP": lambda: GroupedMLP(2, 32, 16),
    "TopKRouter": lambda: TopKRouter(RouterConfig(4, 32, moe_router_enable_expert_bias=True)),
    "SharedExpertMLP": lambda: SharedExpertMLP(32, 16, True),
    "EPMoE": ep_moe,
    "MoELayer": layer,
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_every_class_takes_floats_and_no_codes(name: str, strict: bool) -> None:
    module = MODULES[name]()
    inside = nn.ModuleDict({"moe": module})
    own = {key: value.dtype for key, value in module.state_dict().items()}
    new = {f"moe.{key}": torch.rand(value.shape, dtype=torch.float64) for key, value in module.state_dict().items()}
    for assign in (False, True):
        inside.load_state_dict(new, strict=strict, assign=assign)
        assert {key: value.dtype for key, value in module.state_dict().items()} == own
        assert all(torch.equal(value, new[f"moe.{key}"].to(own[key])) for key, value in module.state_dict().items())
    for key, wrong in ((key, wrong) for key in own for wrong in (torch.int8, FP8, torch.int32, torch.uint8)):
        with pytest.raises(ArgumentError, match=f"moe.{key} is .*{str(wrong).removeprefix('torch.')}"):
            inside.load_state_dict({**new, f"moe.{key}": new[f"moe.{key}"].to(wrong)}, strict=strict)
    with pytest.raises(RuntimeError, match="size mismatch"):
        key = next(iter(new))
        inside.load_state_dict({**new, key: new[key].flatten()[:1]}, strict=strict)
    assert same(values(copy.deepcopy(module)), values(module))


@pytest.mark.parametrize("serialised", [False, True])
def test_fp8_weights_keep_their_scales(serialised: bool) -> None:
    made, other = ep_moe(True, serialised), ep_moe(True, serialised, seed=2)
    x, logits = rows()[:5], torch.eye(5, 4)
    before, expected = values(made), made(x, logits)
    assert isinstance(made.w13_weight, Codes)
    plain = ep_moe().state_dict()
    for given, message in (
        (plain, "w13_weight and its scale belong together"),
        ({**before, "w2_weight": before["w2_weight"].bfloat16()}, "w2_weight is torch.bfloat16; it must be float8"),
        ({"w2_weight_scale": before["w2_weight_scale"]}, "w2_weight and its scale belong together"),
    ):
        refused(message.split()[0], made.load_state_dict, given, strict=False, says=message)
    with pytest.raises(ArgumentError, match=r"param is of weights that have been processed with their scales"):
        made.w13_weight.weight_loader(made.w13_weight, torch.zeros(16, 32, dtype=BF16), "w", "w1", 0)
    assert same(values(made), before) and torch.equal(made(x, logits), expected)
    twin = copy.deepcopy(made)
    for assign in (False, True):
        made.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(made(x, logits), other(x, logits)) and isinstance(made.w2_weight, Codes)
    assert torch.equal(twin(x, logits), expected) and twin.w2_weight.weight_loader.__self__ is twin
    twin.half()
    assert same(values(twin), before) and twin.params_dtype == FP16
    difference = (twin(x.half(), logits).float() - expected.float()).norm()
    assert float(difference) < 0.05 * float(expected.float().norm())
    refused("params_dtype", twin.double, says=r"params_dtype is torch.float64")


def test_weight_loader_takes_the_parameters_kind_only() -> None:
    plain, codes = ep_moe(), sglang.EPMoE(4, 2, 32, 16, BF16, quant_config=sglang.Fp8Config(True))
    for made, wrong, right in ((plain, FP8, BF16), (plain, torch.int8, FP32), (codes, BF16, FP8)):
        given = torch.ones(16, 32)
        with pytest.raises(ArgumentError, match=f"gate is {wrong}; it must be"):
            made.weight_loader(made.w13_weight, given.to(wrong), "gate", "w1", 1)
        made.weight_loader(made.w13_weight, given.to(right), "gate", "w1", 1)
        assert bool((made.w13_weight[1, :16].float() == 1).all())
    with pytest.raises(ArgumentError, match=r"w.weight_scale is torch.uint8; it must be bfloat16"):
        codes.weight_loader(codes.w2_weight_scale, torch.ones(1, dtype=torch.uint8), "w.weight_scale", "w2", 0)


def test_a_cast_ep_moe_computes_in_the_new_dtype() -> None:
    made, logits = ep_moe(), torch.randn(5, 4)
    x = torch.randn(5, 32)
    expected = made(x.bfloat16(), logits)
    found = made.to(FP32)(x.bfloat16().float(), logits)
    torch.testing.assert_close(found, expected.float(), rtol=0.05, atol=0.02)
    mlp = GroupedMLP(2, 32, 16)
    with pytest.raises(ArgumentError, match=r"w1 is torch.int8"):
        mlp.load_experts(torch.ones(2, 32, 32, dtype=torch.int8), torch.ones(2, 16, 32))
