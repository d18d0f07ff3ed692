"""Codes that are written in place: floats are refused on every path to their memory, scales do not change alone."""

from __future__ import annotations

import copy
import io
import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bad_arguments import refused
from gloo_ranks import threads
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts.weights import Codes
from ascend_moe.interop import sglang
from ascend_moe.layer import MoEConfig, MoELayer

BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = MoEConfig(32, 16, 4, 2)


def layer(seed: int, bits: int = 8) -> MoELayer:
    made = MoELayer(CONFIG, AllToAllDispatcher(threads(1).groups[0], 4), dtype=BF16).init_weights(seed)
    return made.quantize_(bits) if bits else made


def ep_moe(seed: int) -> sglang.EPMoE:
    made = sglang.EPMoE(4, 2, 32, 16, BF16, quant_config=sglang.Fp8Config())
    generator = torch.Generator().manual_seed(seed)
    for name in ("w13_weight", "w2_weight"):
        getattr(made, name).data.copy_(torch.randn(getattr(made, name).shape, generator=generator) / 4)
    made.process_weights_after_loading()
    return made


#: kind -> module of a seed, and the name of codes in it
KINDS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "int8": (lambda seed: layer(seed), "w_down"),
    "int4": (lambda seed: layer(seed, 4), "w_down"),
    "fp8": (ep_moe, "w2_weight"),
}
#: ways to the memory of codes
PATHS: dict[str, Callable[[nn.Module, str], Tensor]] = {
    "attribute": getattr,
    "data": lambda module, name: getattr(module, name).data,
    "detach": lambda module, name: getattr(module, name).detach(),
    "state dict": lambda module, name: module.state_dict()[name],
    "kept variables": lambda module, name: module.state_dict(keep_vars=True)[name],
    "named parameters": lambda module, name: dict(module.named_parameters())[name],
}
#: parts of a tensor (L, rows, columns)
PARTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor[1],
    lambda tensor: tensor.narrow(1, 0, 2).transpose(1, 2),
    lambda tensor: tensor.unbind(0)[0].detach(),
    lambda tensor: tensor.split(2)[1].data,
)


def _set_item(own: Tensor, new: Tensor) -> None:
    own[...] = new


COPIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda own, new: own.copy_(new),
    "by keyword": lambda own, new: own.copy_(other=new, non_blocking=True),
    "set item": _set_item,
    "foreach": lambda own, new: torch._foreach_copy_([torch.zeros(2), own], [torch.ones(2), new]),
    "operator": lambda own, new: torch.ops.aten.copy_.default(own, new),
    "packet": lambda own, new: torch.ops.aten.copy_(own, new),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_floats_are_refused_on_every_path_and_codes_are_not(kind: str) -> None:
    make, name = KINDS[kind]
    made, other = make(1), make(2)
    draw, first = random.Random(kind), getattr(made, name).clone()
    for path, part, copies in itertools.product(PATHS.values(), PARTS, COPIES.values()):
        own, new = part(path(made, name)), part(path(other, name))
        dtype = draw.choice([BF16, FP32, torch.float64, torch.uint8])
        with pytest.raises(ArgumentError, match=rf"codes are {new.dtype}, and {dtype} is copied into them"):
            copies(own, new.float().to(dtype))
        assert torch.equal(getattr(made, name), first)
        copies(own, new)
        assert torch.equal(own, new) and not torch.equal(getattr(made, name), first)
        getattr(made, name).copy_(first)


def arguments(like: Tensor) -> list[tuple[Any, ...]]:
    """What tensors' methods take that write values: floats and fractions are among them."""
    floats, rows = torch.full(like.shape, 2.7), torch.zeros(like.shape, dtype=torch.long)
    mask, first = torch.ones(like.shape, dtype=torch.bool), torch.tensor([0])
    return [
        (floats,), (0.7,), (floats, floats), (0.7, 0.9), (floats, 0.5), (mask, 0.7), (mask, floats), (0, first, 0.7),
        (0, first, floats[:1]), (0, rows, floats), (0, rows, 0.7), ((first,), floats[:1]), (rows, floats),
        (0, first, floats[:1], "sum"), (floats[0], floats[0]),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_no_method_of_a_tensor_puts_floats_into_codes(kind: str) -> None:
    """Each that writes in place and each of the lists', with every form of arguments; torch refuses many itself."""
    make, name = KINDS[kind]
    made = make(1)
    refused, before = 0, getattr(made, name).clone()
    methods = [each for each in dir(Tensor) if each.endswith("_") and not each.endswith("__")] + ["__setitem__"]
    lists = [each for each in dir(torch) if each.startswith("_foreach_") and each.endswith("_")]
    for method in methods:
        for given in arguments(before):
            own = made.state_dict()[name]
            try:
                getattr(own, method)(*given)
            except ArgumentError:
                refused += 1
            except Exception:  # what torch refuses
                continue
            assert torch.equal(getattr(made, name), before), (method, given)
    for method in lists:
        for value in ([torch.full(before.shape, 2.7)], 0.7, [0.7]):
            try:
                getattr(torch, method)([made.state_dict()[name]], value)
            except ArgumentError:
                refused += 1
            except Exception:
                continue
            assert torch.equal(getattr(made, name), before), method
    with pytest.raises((ArgumentError, RuntimeError, TypeError)):
        torch.cat([torch.ones(before.shape)], out=made.state_dict()[name])
    assert torch.equal(getattr(made, name), before) and refused > 20


@torch.no_grad()
def test_another_tensor_in_the_place_of_codes_is_refused_before_anything_is_sent() -> None:
    made, floats = layer(1), layer(2, 0)
    with pytest.raises(ArgumentError, match=r"codes are torch.int8, and torch.bfloat16 is copied into them"):
        made.w_down.data = floats.w_down.data
    refused("codes", made.init_weights, 2, says=r"codes are torch.int8")
    made.w_gate_up = floats.w_gate_up
    made.dispatcher.dispatch = None  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"w_gate_up is torch.bfloat16, but w_gate_up_scale belongs to codes"):
        made(torch.ones(3, 32, dtype=BF16))


@pytest.mark.parametrize("path", ["attribute", "data", "state dict"])
def test_compiled_functions_take_codes(path: str) -> None:
    torch._dynamo.reset()
    made = layer(1)
    own = PATHS[path](made, "w_down")
    doubled = torch.compile(lambda codes: codes.float() * 2, backend="aot_eager", fullgraph=True)(own)
    assert type(doubled) is Tensor and torch.equal(doubled, made.w_down.float() * 2)


# ---- files


@pytest.fixture
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about a checkpoint of one process
        yield


@pytest.mark.parametrize("bits", [8, 4])
def test_distributed_checkpoints_bring_codes_and_refuse_floats(bits: int, tmp_path: Path, quiet: None) -> None:
    source, made, floats = layer(2, bits), layer(1, bits), layer(3, 0)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "codes")
    dcp.save({"layer": floats}, checkpoint_id=tmp_path / "floats")
    before = copy.deepcopy(made.state_dict())
    partly = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"layer": made.state_dict()}, checkpoint_id=tmp_path / "floats", planner=partly)
    error = caught.value.failures[0][0]
    assert bits == 4 or (isinstance(error, ArgumentError) and "codes are torch.int8" in str(error))
    assert all(torch.equal(made.state_dict()[name], before[name]) for name in before if name.startswith("w_"))
    state = made.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "codes")  # into the layer's own memory
    x = torch.randn(5, 32).to(BF16)
    assert torch.equal(made(x), source(x))
    made.load_state_dict(state)
    assert torch.equal(made(x), source(x))


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_dicts_are_plain(kind: str, keep_vars: bool, tmp_path: Path) -> None:
    """Files of torch.save need no class of this package, also not with weights_only; those of safetensors too."""
    safetensors = pytest.importorskip("safetensors.torch")
    make, name = KINDS[kind]
    source, made = make(1), make(2)
    kept = source.state_dict(keep_vars=keep_vars)
    torch.save(
        kept if isinstance(source, MoELayer) else {name: kept[name]}, tmp_path / "state.pt"
    )  # others have loaders
    state = source.state_dict() | torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(state[name]) is (nn.Parameter if keep_vars else Tensor)
    assert type(copy.deepcopy(source.state_dict())[name]) is Tensor
    safetensors.save_file(source.state_dict(), tmp_path / "state.safetensors")
    for given in (state, safetensors.load_file(tmp_path / "state.safetensors")):
        made.load_state_dict(make(2).state_dict())
        made.load_state_dict(given)
        assert isinstance(getattr(made, name), Codes)
        assert all(torch.equal(value, source.state_dict()[key]) for key, value in made.state_dict().items())


@pytest.mark.parametrize("flag", ["swap", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_stay_where_torch_replaces_parameters(kind: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, f"_{flag}_module_params_on_conversion", True)
    make, name = KINDS[kind]
    made = make(1)
    before = getattr(made, name).clone()
    for convert in (made.cpu, made.half, made.bfloat16, made.share_memory):
        convert()
        assert isinstance(getattr(made, name), Codes) and torch.equal(getattr(made, name), before)


def test_a_saved_ep_moe_keeps_codes_and_loaders() -> None:
    source, file = ep_moe(1), io.BytesIO()
    torch.save(source, file)
    file.seek(0)
    made = torch.load(file, weights_only=False)
    x, logits = torch.randn(5, 32).to(BF16), torch.randn(5, 4)
    assert torch.equal(made(x, logits), source(x, logits))
    assert isinstance(made.w2_weight, Codes) and made.w2_weight.weight_loader.__self__ is made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_buffers": True},
        {"multi_avg_fn": get_ema_multi_avg_fn()},
        {"avg_fn": lambda mean, new, n: (mean + new) / 2},
    ],
    ids=["mean", "buffers", "ema", "own"],
)
def test_averages_of_codes_are_refused(options: dict[str, Any]) -> None:
    source = layer(1)
    mean = AveragedModel(source, **options)
    mean.update_parameters(source)  # a copy
    refused("codes", mean.update_parameters, source, says=r"codes are torch.int8")
    x = torch.randn(5, 32).to(BF16)
    assert torch.equal(mean.module(x), source(x))


# ---- scales


def _scaled(module: nn.Module, name: str) -> None:
    torch._foreach_mul_([module.state_dict()[name]], 2.0)


SCALES: dict[str, Callable[[nn.Module, str], Any]] = {
    "state dict": lambda module, name: module.state_dict()[name].copy_(module.state_dict()[name] * 2),
    "detach": lambda module, name: getattr(module, name).detach().mul_(2),
    "in another order": lambda module, name: getattr(module, name).copy_(getattr(module, name).flip(0)),
    "a part": lambda module, name: getattr(module, name)[1].fill_(3.0),
    "foreach": _scaled,
    "set": lambda module, name: getattr(module, name).set_(module.state_dict()[name] * 2),
}


def output(module: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 160).view(5, 32).to(BF16)
    result: Tensor = module(x) if isinstance(module, MoELayer) else module(x, torch.eye(5, 4))
    return result


@pytest.mark.parametrize("way", SCALES)
@pytest.mark.parametrize(("kind", "part"), [*((kind, "scale") for kind in KINDS), ("int4", "correction")])
@torch.no_grad()
def test_scales_and_corrections_that_were_written_alone_are_refused(kind: str, part: str, way: str) -> None:
    make, name = KINDS[kind]
    made, other, scale = make(1), make(2), f"{name}_{part}"
    expected, kept = output(make(1)), made.state_dict()[scale].clone()
    SCALES[way](made, scale)
    for _ in range(2):
        refused(scale, output, made, says=rf"{scale} was written without {name}: load codes and scales together")
    made.state_dict()[scale].copy_(kept)  # the same values again, as DDP writes them
    assert torch.equal(output(made), expected)
    SCALES[way](made, scale)
    for key, value in made.state_dict().items():
        value.copy_(other.state_dict()[key])  # all of them
    assert torch.equal(output(made), output(other))
    SCALES[way](made, scale)
    made.load_state_dict(make(1).state_dict())
    assert torch.equal(output(made), expected)


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        made = layer(1)
        made.w_down_scale.mul_(1)
        assert torch.equal(output(made), output(layer(1)))
