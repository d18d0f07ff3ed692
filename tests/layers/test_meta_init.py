"""Layers that are made on the meta device and get their values later, copies of them, and layers saved whole."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from torch import Tensor, nn

from ascend_moe import LocalCluster
from ascend_moe.dispatchers import AllToAllDispatcher, MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.interop import megatron, sglang
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.placement import Balance
from ascend_moe.routers import RouteCapture

E, K, H, F = 16, 2, 32, 16
META = "meta"


class Kind(NamedTuple):
    """A public module: how it is made on a device, a call of it, and a name that its errors have."""

    make: Callable[[Any], nn.Module]
    call: Callable[[nn.Module], Any]
    named: str


def x() -> Tensor:
    return torch.randn(6, H, generator=torch.Generator().manual_seed(0))


def moe_layer(
    device: Any, bits: int = 0, copies: bool = False, capture: RouteCapture | None = None, **changes: Any
) -> MoELayer:
    reverse = torch.arange(E - 1, -1, -1)  # of one rank, which has no room for a second copy
    placement = Balance(reverse[None], reverse[None, :, None], torch.ones(1, E).long()) if copies else None
    dispatcher = AllToAllDispatcher(threads(1).groups[0], E)
    config = MoEConfig(H, F, E, K, **changes)
    given: dict[str, Any] = {"placement": placement, "capture": capture, "dtype": torch.float32, "device": device}
    made = MoELayer(config, dispatcher, **given)
    made = made.init_weights(1) if device is None else made
    return made.quantize_(bits) if bits else made


def ep_moe(device: Any, fp8: bool = False, process: bool = True) -> sglang.EPMoE:
    with torch.device(device or "cpu"):
        made = sglang.EPMoE(E, K, H, F, torch.float32, quant_config=sglang.Fp8Config() if fp8 else None)
    if device is None:
        fill(made)
    if process:
        made.process_weights_after_loading()
    return made


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if not name.endswith("scale"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def filled(make: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    def made(device: Any) -> nn.Module:
        module = make(device)
        if device is None:
            fill(module)
        return module

    return made


def router(device: Any) -> megatron.TopKRouter:
    config = megatron.RouterConfig(E, H, K, "global_aux_loss", 0.01, moe_router_enable_expert_bias=True)
    return megatron.TopKRouter(config, device=device)


def megatron_layer(device: Any) -> megatron.MoELayer:
    dispatcher = megatron.TokenDispatcher("alltoall", threads(1).groups[0], E, K)
    parts = megatron.GroupedMLP(E, H, F, dtype=torch.float32, device=device), shared(device)
    return megatron.MoELayer(router(device), dispatcher, *parts)


def shared(device: Any, gate: bool = True) -> megatron.SharedExpertMLP:
    return megatron.SharedExpertMLP(H, F, gate, dtype=torch.float32, device=device)


def logits() -> Tensor:
    return torch.randn(6, E, generator=torch.Generator().manual_seed(2))


def routed(module: nn.Module) -> list[Tensor]:
    """A router's results and the counts of two calls: what a new one has counted before is among them."""
    module.reset_global_aux_loss_tracker()  # type: ignore[operator]
    return [each for _ in range(2) for each in (*module(x()), *module.losses.values(), *module.buffers())]  # type: ignore[union-attr]


def captured(module: RouteCapture) -> list[Tensor]:
    module(torch.arange(6, dtype=torch.int32).view(3, K))
    return [module.ring, *module.last()]


KINDS: dict[str, Kind] = {
    "MoELayer": Kind(moe_layer, lambda m: m(x()), "gate_weight"),
    "MoELayer, copies": Kind(lambda device: moe_layer(device, copies=True), lambda m: m(x()), "gate_weight"),
    "MoELayer, int8": Kind(lambda device: moe_layer(device, 8, True), lambda m: m(x()), "gate_weight"),
    "MoELayer, int4": Kind(lambda device: moe_layer(device, 4), lambda m: m(x()), "gate_weight"),
    "MoELayer, capture": Kind(
        lambda device: moe_layer(device, capture=RouteCapture(6, K, steps=2, device=device)),
        lambda m: [m(x()), *m.capture.last()],  # type: ignore[union-attr,operator]
        "gate_weight",
    ),
    "MoELayer, hash": Kind(
        lambda device: moe_layer(device, router="hash", vocab_size=9),
        lambda m: m(x(), input_ids=torch.arange(6)),
        "gate_weight",
    ),
    "RouteCapture": Kind(lambda device: RouteCapture(6, K, steps=2, device=device), captured, "ring"),
    "EPMoE": Kind(ep_moe, lambda m: m(x(), logits()), "w13_weight"),
    "EPMoE, fp8": Kind(lambda device: ep_moe(device, True), lambda m: m(x(), logits()), "w13_weight"),
    "TopKRouter": Kind(filled(router), routed, "weight"),
    "GroupedMLP": Kind(
        filled(lambda device: megatron.GroupedMLP(2, H, F, dtype=torch.float32, device=device)),
        lambda m: m(x(), torch.tensor([2, 4]))[0],
        "weight1",
    ),
    "SharedExpertMLP": Kind(filled(shared), lambda m: m(x()), "gate_weight"),
    "SharedExpertMLP, no gate": Kind(filled(lambda device: shared(device, False)), lambda m: m(x()), "weight"),
    "Megatron's MoELayer": Kind(filled(megatron_layer), lambda m: m(x())[0], "weight"),
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return len(found) == len(expected) and all(map(same, found, expected))


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds what no module can take for its values."""
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty(*args, **kwargs).fill_(77))


@pytest.mark.parametrize("name", KINDS)
def test_a_module_on_meta_says_what_to_do(name: str) -> None:
    kind = KINDS[name]
    module = kind.make(META)
    assert any(tensor.is_meta for tensor in module.state_dict().values() or module.buffers())
    rule = rf"^{kind.named} is on meta, without values: load a state dict with assign=True, or call to_empty\(device=.*"
    refused(kind.named, kind.call, module, says=rule)


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.filterwarnings("ignore:.*which is a no-op")
def test_any_steps_from_meta_to_values(seed: int, garbage: None) -> None:
    """Copies, casts, loads and empty memory in a drawn order; with the weights loaded last it is the source again."""
    draw = random.Random(seed)
    kind = KINDS[draw.choice([*KINDS])]
    source = kind.make(None)
    state, expected = copy.deepcopy(source.state_dict()), kind.call(source)
    module = kind.make(draw.choice([None, META]))
    for step in draw.choices(["copy", "empty", "meta", "cast", "load", "assign"], k=draw.randrange(1, 6)):
        if step == "copy":
            module = copy.deepcopy(module)
        elif step in ("empty", "meta"):
            module.to_empty(device="cpu" if step == "empty" else META)
        elif step == "cast":
            module.to(torch.float32)
        else:
            module.load_state_dict(state, assign=step == "assign")
    if any(tensor.is_meta for tensor in module.buffers()) or any(tensor.is_meta for tensor in module.parameters()):
        module.to_empty(device="cpu")
    module.load_state_dict(copy.deepcopy(state), assign=draw.random() < 0.5)
    if not state:
        module.clear()  # type: ignore[operator]
    assert same(kind.call(module), expected)


def test_empty_memory_gets_the_bias_of_a_new_router(garbage: None) -> None:
    """Training begins with it, without any state dict."""
    bias = router(META).to_empty(device="cpu").expert_bias
    assert bias is not None and not bool(bias.any())


def test_a_cast_keeps_what_was_counted() -> None:
    """Only memory without values is filled anew: a router's counts, a capture's steps and the copies stay in a move."""
    counts, capture = router(None), RouteCapture(6, K)
    fill(counts)
    counts.train()(x())
    capture(torch.zeros(3, K, dtype=torch.int32))
    for module in (counts, capture):
        before = [buffer.clone() for buffer in module.buffers()]
        assert bool(before[-1].any()) and same([*module.to("cpu", torch.bfloat16).buffers()], before)
    layer = moe_layer(None, copies=True)
    before = layer.copies.clone()  # type: ignore[union-attr]
    assert torch.equal(layer.half().float().copies, before)  # type: ignore[arg-type]


def test_scales_that_were_not_loaded_are_found_behind_meta(garbage: None) -> None:
    module = sglang.EPMoE(E, K, H, F, torch.float32, quant_config=sglang.Fp8Config(True)).to(META)
    module.to_empty(device="cpu")
    with pytest.raises(ArgumentError, match="w13_weight_scale has not been loaded for every expert"):
        module.process_weights_after_loading()
    other = sglang.EPMoE(E, K, H, F, torch.float32, quant_config=sglang.Fp8Config(None)).to(META)
    floats = ep_moe(None, process=False).state_dict()
    other.load_state_dict(floats, strict=False, assign=True)
    other.process_weights_after_loading()
    assert same(other(x(), logits()), ep_moe(None, True)(x(), logits()))
    for each in (module, other):
        assert all(parameter.weight_loader.__self__ is each for parameter in each.parameters())


# ---- saved whole


def test_saving_a_layer_whole_says_to_save_its_state_dict() -> None:
    """Also one with groups alone; what has neither a group nor a dispatcher can be saved."""
    group = threads(1).groups[0]
    groups = SimpleNamespace(tp_cp=group, tp_dp_cp=None)
    wholes: list[Any] = [moe_layer(None), nn.Sequential(moe_layer(None)), megatron_layer(None)]
    wholes += [megatron.TopKRouter(megatron.RouterConfig(E, H), groups), AllToAllDispatcher(group, E)]
    wholes.append(ep_moe(None))
    wholes[-1].group = group
    with LocalCluster(1) as cluster:
        wholes += cluster.run(lambda rank, name: MC2Dispatcher(name, 1, rank, E))
    for whole in wholes:
        with pytest.raises(
            ArgumentError, match=r"is a \w+ of this process and cannot be saved: save the layer's state_"
        ):
            torch.save(whole, io.BytesIO())
    torch.save([router(None), shared(None), ep_moe(None), RouteCapture(6, K)], io.BytesIO())
