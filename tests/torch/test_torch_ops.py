"""The ops as torch sees them: schemas, callables, modes and tracers, opcheck, autograd, cost of a call."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch_calls import EXPERTS, VARIANTS, Call, Variant, local_addends, overload, run

import ascend_moe
from ascend_moe import npu
from ascend_moe.checkpoint import build_layer, load_layer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError

PLAIN, PLAIN_V2 = VARIANTS[0], VARIANTS[1]
PUBLIC = ascend_moe.npu_moe_distribute_dispatch
DISPATCH = overload(PLAIN.dispatch_name)
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def same(rows: Any, expected: Any) -> bool:
    """Dispatch's outputs in every bit that is defined."""
    count = int(expected[4][-1])
    forms = [[(out.dtype, out.shape, out.stride()) for out in outputs] for outputs in (rows, expected)]
    ends = (count, count, count, None, None, None)
    pairs = zip(rows, expected, ends, strict=False)
    return forms[0] == forms[1] and all(torch.equal(a[:end], b[:end]) for a, b, end in pairs)


# ---- calls


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


@pytest.mark.parametrize(("name", "third"), [("", "expand_idx"), ("_v2", "assist_info_for_combine")])
def test_outputs_have_names(name: str, third: str, group_ep: str) -> None:
    x, ids = torch.randn(2, 16), torch.tensor([[0], [1]], dtype=torch.int32)
    sent = getattr(ascend_moe, f"npu_moe_distribute_dispatch{name}")(x, ids, group_ep, 1, 0, 2)
    names = ["expand_x", "dynamic_scales", third, "expert_token_nums", "ep_recv_counts", "tp_recv_counts"]
    assert [*sent._fields] == [*names, "expand_scales"] and isinstance(sent, tuple)
    assert sent.expand_x is sent[0] and torch.equal(sent.expand_x, x) and sent.expert_token_nums.tolist() == [1, 1]


def test_wrong_calls_fail_with_torchs_class_in_one_line(group_ep: str) -> None:
    args, kwargs = PLAIN.dispatch(0, 1, group_ep)
    x, ids, *place = args
    for given, said in (
        ((x, ids, None, *place[1:]), "group_ep is of type NoneType; it must be str"),
        ((None, ids, *place), "x is None, it is required"),
        ((x, ids, *place[:-1], 2**70), "moe_expert_num does not fit in 64 bits"),
        ((x, ids, *place[:-1], "4"), "moe_expert_num is of type str; it must be int"),
        (([1.0], ids, *place), "x is of type list; it must be Tensor"),
        ((x, ids, "\ud800", *place[1:]), "group_ep cannot be encoded as UTF-8"),
        ((x, ids, "no group", *place[1:]), "group_ep='no group' names no live communicator"),
    ):
        with pytest.raises(Exception) as theirs:
            DISPATCH(*given, **kwargs)
        with pytest.raises(type(theirs.value)) as ours:
            PUBLIC(*given, **kwargs)
        text = str(ours.value).removeprefix(f"{PLAIN.dispatch_name}: ")
        assert isinstance(ours.value, ArgumentError) and text.startswith(said) and "\n" not in text
    unknown = {**kwargs, "no_such_argument": 1}
    for given, named in ((args, unknown), (args, {**kwargs, "x": x}), ((x,), kwargs), ((*args, 1), kwargs)):
        with pytest.raises(TypeError, match=rf"^{PLAIN.dispatch_name}\(\) "):
            PUBLIC(*given, **named)


@pytest.mark.parametrize("name", [name for name in npu.__all__ if name != "patch_torch_npu"])
def test_a_misspelt_argument_is_one_line_with_the_right_name(name: str) -> None:
    function = getattr(npu, name)
    names = list(inspect.signature(function).parameters)
    x = torch.randn(2, 16)
    for wrong in [f"{right}_" for right in names[-2:]]:
        with pytest.raises(TypeError) as raised:
            function(x, **{wrong: 2})
        said = rf"{name}\(\) got an unexpected keyword argument '{wrong}'. Did you mean '(\w+)'\?"
        near = re.fullmatch(said, str(raised.value))
        assert near and near[1] in names
        assert "".join(traceback.format_exception(raised.value)).count("Traceback") == 1, "torch's text stands above it"
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such_argument'$"):
        function(x, no_such_argument=1)


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [
        (torch.ops.ascend_moe.npu_moe_distribute_dispatch_v2, "quant_mod", "quant_mode"),
        (torch.ops.ascend_moe.npu_moe_distribute_combine.default, "expert_scale", "expert_scales"),
        (ascend_moe.LocalCluster, "window_mb", "window_mib"),
        (ascend_moe.MoELayer, "dtyp", "dtype"),
        (ascend_moe.window_empty, "group", "group_ep"),
        (MC2Dispatcher, "num_expert", "num_experts"),
        (build_layer, "global_batch", "global_bs"),
        (load_layer, "word", "world"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_so_do_torchs_ops_and_the_functions_around_the_ops(function: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"argument '{wrong}'\. Did you mean '{right}'\?$"):
        function(**{wrong: 1})


TYPED = """
import torch, ascend_moe
x = torch.ones(2, 32)
rows: tuple[torch.Tensor, ...] = ascend_moe.npu_moe_distribute_dispatch(x, x.int(), "g", 2, 0, 4)
with ascend_moe.LocalCluster(2) as cluster:
    ranks: list[int] = cluster.run(lambda rank, group_ep: rank)
back: torch.Tensor = ascend_moe.npu_moe_distribute_combine(x, x, x, x, x, "g", "2", 0, 4)  # wrong
"""


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_users_script_type_checks(tmp_path: Path) -> None:
    # torch itself is not followed: reading it takes a minute.
    config, script = tmp_path / "mypy.ini", tmp_path / "script.py"
    config.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    script.write_text(TYPED, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path)]
    # As a package on the path, not as sources: its types count only if it has py.typed.
    path = os.pathsep.join(str(Path(entry).parent) for entry in ascend_moe.__path__)
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, script], capture_output=True, text=True, env=env, cwd=tmp_path)
    (error,) = [line for line in done.stdout.splitlines() if "error:" in line]
    assert error.startswith("script.py:7:") and 'incompatible type "str"; expected "int"' in error


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
    def moved(call: Call) -> Call:
        return pytree.tree_map_only(torch.Tensor, place, call)

    dispatched, expected = run(variant, 0, 1, group_ep)
    args, kwargs = moved(variant.dispatch(0, 1, group_ep))
    rows = overload(variant.dispatch_name)(*args, **kwargs)
    assert same(rows, dispatched)
    args, kwargs = moved(variant.combine(0, 1, group_ep, rows))
    assert torch.equal(overload(variant.combine_name)(*args, **kwargs), expected)


# ---- modes, tracers, transforms


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_the_op_and_the_default_device_does_not_matter(group_ep: str) -> None:
    args, kwargs = PLAIN.dispatch(0, 1, group_ep)
    expected = PUBLIC(*args, **kwargs)
    with Seen() as watching:
        assert same(PUBLIC(*args, **kwargs), expected)
    assert DISPATCH in watching.ops
    with torch.device("meta"):
        assert same(DISPATCH(*args, **kwargs), expected)


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
    assert all(isinstance(tensor, FakeTensor) for tensor in made)


# ---- opcheck


@EACH_VARIANT
def test_opcheck_is_clean(variant: Variant, group_ep: str) -> None:
    args, kwargs = variant.dispatch(0, 1, group_ep)
    rows = overload(variant.dispatch_name)(*args, **kwargs)
    assert len(torch.library.opcheck(overload(variant.dispatch_name), args, kwargs)) == 4
    if not variant.quant_mode:  # int8 rows have no gradient
        args[0].requires_grad_()
        assert len(torch.library.opcheck(overload(variant.dispatch_name), args, kwargs)) == 4
    args, kwargs = variant.combine(0, 1, group_ep, rows)
    assert len(torch.library.opcheck(overload(variant.combine_name), args, kwargs)) == 4
    rows = args[0].detach().clone()
    rows[int(args[3][EXPERTS - 1]) :] = 0  # opcheck compares gradients, and NaN is not equal to itself
    for tensor in (args[4], rows):
        tensor.requires_grad_()
    assert len(torch.library.opcheck(overload(variant.combine_name), (rows, *args[1:]), kwargs)) == 4


# ---- autograd


@pytest.mark.parametrize(
    ("variant", "wanting"),
    [
        *((variant, "x") for variant in VARIANTS[:2]),
        *((variant, name) for variant in (PLAIN, VARIANTS[3]) for name in ("expand_x", "expert_scales")),
        *((VARIANTS[3], name) for name in local_addends(None)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_gradients_are_followed_where_they_are_wanted(variant: Variant, wanting: str, group_ep: str) -> None:
    name, (args, kwargs) = variant.dispatch_name, variant.dispatch(0, 1, group_ep)
    if wanting != "x":
        rows = overload(name)(*args, **kwargs)
        name, (args, kwargs) = variant.combine_name, variant.combine(0, 1, group_ep, rows)
    tensor = {"x": args[0], "expand_x": args[0], "expert_scales": args[4]}.get(wanting, kwargs.get(wanting))
    expected = overload(name)(*args, **kwargs)
    tensor.requires_grad_()
    outputs = overload(name)(*args, **kwargs)
    if wanting == "x":
        assert same(outputs, expected) and not any(out.requires_grad for out in outputs[1:])
    else:
        assert torch.equal(outputs, expected)
    y = outputs[0] if wanting == "x" else outputs
    y[:1].float().sum().backward()
    assert tensor.grad is not None and tensor.grad.dtype == tensor.dtype and bool((tensor.grad != 0).any())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            first = overload(name)(*args, **kwargs)
        first = first[0] if wanting == "x" else first
        assert not first.requires_grad and first.is_inference() == (mode is torch.inference_mode)
