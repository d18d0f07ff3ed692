"""The ops as torch sees them: schemas, callables, modes and tracers, opcheck, autograd, cost of a call."""

from __future__ import annotations

import cProfile
import importlib.util
import inspect
import os
import pstats
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_calls
import torch_user
from gloo_ranks import run_processes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_calls import NAMES, VARIANTS, Variant, overload, run

import ascend_moe
from ascend_moe.errors import AscendMoeError
from ascend_moe.ops import calls

# As torch_npu declares them.
_PLACE = "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
_RANKS = (
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
    "int shared_expert_num=1, int shared_expert_rank_num=0, "
)
_DISPATCH = f"(Tensor x, Tensor expert_ids, {_PLACE}Tensor? scales=None, Tensor? x_active_mask=None, "
_QUANT = "int quant_mode=0, int global_bs=0, int expert_token_nums_type=1"
_SPECIAL = 'str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0'
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
TORCH_NPU = {
    "npu_moe_distribute_dispatch": (f"{_DISPATCH}Tensor? expert_scales=None, {_RANKS}{_QUANT}) -> {_SEVEN}"),
    "npu_moe_distribute_dispatch_v2": (
        f"{_DISPATCH}Tensor? expert_scales=None, Tensor? elastic_info=None, Tensor? performance_info=None, "
        f"{_RANKS}{_QUANT}, {_SPECIAL}, "
        f"int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None) -> {_SEVEN}"
    ),
    "npu_moe_distribute_combine": (
        "(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, "
        f"Tensor expert_scales, {_PLACE}Tensor? tp_send_counts=None, Tensor? x_active_mask=None, "
        "Tensor? activation_scale=None, Tensor? weight_scale=None, Tensor? group_list=None, "
        f"Tensor? expand_scales=None, Tensor? shared_expert_x=None, {_RANKS}"
        "int global_bs=0, int out_dtype=0, int comm_quant_mode=0, int group_list_type=0) -> Tensor"
    ),
    "npu_moe_distribute_combine_v2": (
        "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, Tensor ep_send_counts, "
        f"Tensor expert_scales, {_PLACE}Tensor? tp_send_counts=None, Tensor? x_active_mask=None, "
        "Tensor? expand_scales=None, Tensor? shared_expert_x=None, Tensor? elastic_info=None, "
        "Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, "
        f"Tensor? const_expert_v=None, Tensor? performance_info=None, {_RANKS}"
        f"int global_bs=0, int comm_quant_mode=0, {_SPECIAL}) -> Tensor"
    ),
}
PLAIN, PLAIN_V2 = VARIANTS[0], VARIANTS[1]
PUBLIC = ascend_moe.npu_moe_distribute_dispatch
DISPATCH = overload(PLAIN.dispatch_name)
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def same(rows: Any, expected: Any) -> bool:
    """Dispatch's outputs in every bit that is defined."""
    count = int(expected[4][-1])
    forms = [[(out.dtype, out.shape, out.stride()) for out in outputs] for outputs in (rows, expected)]
    pairs = list(zip(rows, expected, strict=True))
    return forms[0] == forms[1] and all(
        torch.equal(a[:count] if i < 3 else a, b[:count] if i < 3 else b)
        for i, (a, b) in enumerate(pairs[:6])
    )


# ---- names


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_torch_npus_and_the_public_callables(name: str) -> None:
    assert str(overload(name)._schema) == f"ascend_moe::{name}{TORCH_NPU[name]}"
    function = getattr(ascend_moe, name)
    parameters = inspect.signature(function).parameters.values()
    arguments = overload(name)._schema.arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        assert ("Tensor" in str(parameter.annotation)) == ("Tensor" in str(argument.type))
        assert re.search(rf"\b{argument.name}\b", function.__doc__)
    assert function.__name__ == function.__qualname__ == name


def test_however_the_arguments_are_given(group_ep: str) -> None:
    """The same op, and no reference to an argument is kept."""
    args, kwargs = PLAIN.dispatch(0, 1, group_ep)
    names = list(inspect.signature(PUBLIC).parameters)
    named = dict(zip(names, args, strict=False)) | kwargs
    rows = PUBLIC(*args, **kwargs)
    assert isinstance(rows, tuple) and len(rows) == 7
    for given in (named, dict(reversed(named.items())), {**named, "scales": None, "global_bs": 0}):
        assert same(PUBLIC(**given), rows)
    held = [sys.getrefcount(value) for value in (*args[:2], *names, None)][:-1]
    for _ in range(100):
        PUBLIC(*args, **kwargs)
    assert [sys.getrefcount(value) for value in (*args[:2], *names, None)][:-1] == held
    args, kwargs = PLAIN_V2.combine(0, 1, group_ep, run(PLAIN_V2, 0, 1, group_ep)[0])
    combine = ascend_moe.npu_moe_distribute_combine_v2
    named = dict(zip(inspect.signature(combine).parameters, args, strict=False)) | kwargs
    assert torch.equal(combine(*args, **kwargs), combine(**named))


def test_wrong_calls_fail_as_torchs(group_ep: str) -> None:
    args, kwargs = PLAIN.dispatch(0, 1, group_ep)
    x, ids, *place = args
    for given in (
        (x, ids, None, *place[1:]),
        (None, ids, *place),
        (x, ids, *place[:-1], 2**70),
        (x, ids, *place[:-1], "4"),
        ([1.0], ids, *place),
        (x, ids, "\ud800", *place[1:]),
        (x, ids, "no group", *place[1:]),
    ):
        with pytest.raises(Exception) as theirs:
            DISPATCH(*given, **kwargs)
        with pytest.raises(type(theirs.value)) as ours:
            PUBLIC(*given, **kwargs)
        assert str(ours.value) == str(theirs.value)
    unknown = {**kwargs, "no_such_argument": 1}
    for given, named in ((args, unknown), (args, {**kwargs, "x": x}), ((x,), kwargs), ((*args, 1), kwargs)):
        with pytest.raises(TypeError, match=rf"^{PLAIN.dispatch_name}\(\) "):
            PUBLIC(*given, **named)


def test_a_users_script_runs() -> None:
    assert torch_user.main() == 0


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_users_script_type_checks(tmp_path: Path) -> None:
    # torch itself is not followed: reading it takes a minute.
    config, script = tmp_path / "mypy.ini", tmp_path / "wrong.py"
    config.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    script.write_text("import ascend_moe\n\nname: str = ascend_moe.npu_moe_distribute_dispatch()\n", "utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path)]
    # As a package on the path, not as sources: its types count only if it has py.typed.
    path = os.pathsep.join(str(Path(entry).parent) for entry in ascend_moe.__path__)

    def check(file: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [*command, file], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    right, wrong = check(torch_user.__file__), check(str(script))
    assert right.returncode == 0, right.stdout + right.stderr
    assert wrong.returncode == 1 and 'variable has type "str"' in wrong.stdout, wrong.stdout + wrong.stderr


# ---- any tensor


def odd_address(tensor: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return base[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)[..., 1].copy_(tensor)


@pytest.mark.parametrize("place", [odd_address, strided])
@EACH_VARIANT
def test_tensors_of_any_address_and_stride(
    variant: Variant, place: Callable[[torch.Tensor], torch.Tensor], group_ep: str
) -> None:
    def moved(call: torch_calls.Call) -> torch_calls.Call:
        def move(value: Any) -> Any:
            return place(value) if isinstance(value, torch.Tensor) else value

        return tuple(map(move, call[0])), {name: move(value) for name, value in call[1].items()}

    dispatched, expected = run(variant, 0, 1, group_ep)
    args, kwargs = moved(variant.dispatch(0, 1, group_ep))
    rows = overload(variant.dispatch_name)(*args, **kwargs)
    assert same(rows, dispatched)
    args, kwargs = moved(variant.combine(0, 1, group_ep, rows))
    assert torch.equal(overload(variant.combine_name)(*args, **kwargs), expected)


class Sub(torch.Tensor):
    """Of another type, with nothing of its own."""


class Marked(torch.Tensor):
    asked: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_go_by_torch_and_the_default_device_does_not_matter(group_ep: str) -> None:
    (x, *rest), kwargs = PLAIN.dispatch(0, 1, group_ep)
    expected = PUBLIC(x, *rest, **kwargs)
    Marked.asked = []
    for kind in (Sub, Marked):
        PUBLIC(x.as_subclass(kind), *rest, **kwargs)
    assert DISPATCH in Marked.asked
    assert same(PUBLIC(torch.nn.Parameter(x, requires_grad=False), *rest, **kwargs), expected)
    with torch.device("meta"):
        assert same(DISPATCH(x, *rest, **kwargs), expected)


# ---- modes, tracers, transforms


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_the_op(group_ep: str) -> None:
    args, kwargs = PLAIN.dispatch(0, 1, group_ep)
    expected = PUBLIC(*args, **kwargs)
    for mode in (Seen, SeenFunctions):
        with mode() as watching:
            rows = PUBLIC(*args, **kwargs)
        assert same(rows, expected) and DISPATCH in watching.ops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        PUBLIC(*args, **kwargs)
    assert any(event.name == f"ascend_moe::{PLAIN.dispatch_name}" for event in profile.events())


def test_tracers_get_the_op(group_ep: str) -> None:
    (x, ids, *place), kwargs = PLAIN.dispatch(0, 1, group_ep)

    def rows(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = PUBLIC(x, ids, *place, **kwargs)[0]
        return made

    graphs = [torch.fx.symbolic_trace(rows).graph, make_fx(rows)(x, ids).graph]
    for graph in [*graphs, make_fx(rows, tracing_mode="fake")(x, ids).graph]:
        assert sum(node.target is DISPATCH for node in graph.nodes) == 1
    with FakeTensorMode() as fake:
        made = PUBLIC(fake.from_tensor(x), fake.from_tensor(ids), *place, **kwargs)
    assert all(isinstance(one, FakeTensor) for one in made)


def test_vmap_is_torchs(group_ep: str) -> None:
    (x, *rest), kwargs = PLAIN.dispatch(0, 1, group_ep)
    both = torch.func.vmap(lambda one: PUBLIC(one, *rest, **kwargs)[4])(torch.stack([x, x]))
    assert torch.equal(both, PUBLIC(x, *rest, **kwargs)[4].expand(2, -1))


# ---- opcheck


@EACH_VARIANT
def test_opcheck_is_clean(variant: Variant, group_ep: str) -> None:
    outcomes = torch_calls.opcheck(variant, 0, 1, group_ep)
    assert len(outcomes) == 8 and outcomes == dict.fromkeys(outcomes, "SUCCESS")


@pytest.mark.nightly
def test_opcheck_is_clean_on_two_ranks_in_lockstep(tmp_path: Path) -> None:
    for outcomes in run_processes(2, torch_calls.opcheck_all, tmp_path):
        assert list(outcomes) == [variant.name for variant in VARIANTS]
        for name, found in outcomes.items():
            assert len(found) == 8 and found == dict.fromkeys(found, "SUCCESS"), name


# ---- autograd


@pytest.mark.parametrize(
    ("variant", "wanting"),
    [
        *((variant, "x") for variant in VARIANTS[:3]),
        *((variant, name) for variant in (PLAIN, VARIANTS[3]) for name in ("expand_x", "expert_scales")),
        (VARIANTS[3], "shared_expert_x"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_backward_raises_and_leaves_no_gradient(variant: Variant, wanting: str, group_ep: str) -> None:
    name, (args, kwargs) = variant.dispatch_name, variant.dispatch(0, 1, group_ep)
    if wanting != "x":
        rows = overload(name)(*args, **kwargs)
        name, (args, kwargs) = variant.combine_name, variant.combine(0, 1, group_ep, rows)
    tensor = {"x": args[0], "expand_x": args[0], "expert_scales": args[4]}.get(wanting, kwargs.get(wanting))
    expected = overload(name)(*args, **kwargs)
    tensor.requires_grad_()
    outputs = overload(name)(*args, **kwargs)
    if wanting == "x":
        assert same(outputs, expected) and not any(out.requires_grad for out in outputs[2:6])
        y = outputs[1] if variant.quant_mode else outputs[0]
    else:
        y = outputs
        assert torch.equal(y, expected)
    with pytest.raises(AscendMoeError, match=f"{name} is not differentiable yet"):
        # The tensor has another way to the loss: the gradient of that one alone would be wrong.
        (y.float().sum() + tensor.float().sum()).backward()
    assert tensor.grad is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            first = overload(name)(*args, **kwargs)
        first = first[0] if wanting == "x" else first
        assert not first.requires_grad and first.is_inference() == (mode is torch.inference_mode)


# ---- cost of a call


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=lambda variant: variant.name)
def test_an_equal_call_plans_nothing_and_runs_little_python(
    variant: Variant, group_ep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    combine = variant.combine(0, 1, group_ep, run(variant, 0, 1, group_ep)[0])
    monkeypatch.setattr(calls, "describe", lambda *_: pytest.fail("planned again"))
    for name, (args, kwargs) in (
        (variant.dispatch_name, variant.dispatch(0, 1, group_ep)),
        (variant.combine_name, combine),
    ):
        overload(name)(*args, **kwargs)
        profile = cProfile.Profile()
        profile.runcall(overload(name), *args, **kwargs)
        # Functions called, C ones too; about 130 to 145.
        assert pstats.Stats(profile).total_calls <= 170  # type: ignore[attr-defined]
