"""The ops as torch sees them: schemas, callables, opcheck, autograd, cost of a call."""

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


# ---- names


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_torch_npus(name: str) -> None:
    assert str(overload(name)._schema) == f"ascend_moe::{name}{TORCH_NPU[name]}"


@pytest.mark.parametrize("name", NAMES)
def test_public_callable_has_the_schemas_signature(name: str) -> None:
    parameters = inspect.signature(getattr(ascend_moe, name)).parameters.values()
    arguments = overload(name)._schema.arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        assert ("Tensor" in str(parameter.annotation)) == ("Tensor" in str(argument.type))


@pytest.mark.parametrize("name", NAMES)
def test_docstring_names_every_argument(name: str) -> None:
    function = getattr(ascend_moe, name)
    words = set(re.findall(r"\w+", function.__doc__))
    assert not set(inspect.signature(function).parameters) - words
    assert all(len(line) <= 110 for line in function.__doc__.splitlines())
    assert function.__name__ == function.__qualname__ == name


def test_positional_and_keyword_calls_are_the_same_op() -> None:
    def each(rank: int, group_ep: str) -> None:
        for variant in (PLAIN, PLAIN_V2):
            args, kwargs = variant.dispatch(rank, 1, group_ep)
            dispatch = getattr(ascend_moe, variant.dispatch_name)
            rows = dispatch(*args, **kwargs)
            named = dispatch(
                **dict(zip(inspect.signature(dispatch).parameters, args, strict=False)), **kwargs
            )
            assert isinstance(rows, tuple) and len(rows) == 7
            assert all(torch.equal(a, b) for a, b in zip(rows[2:6], named[2:6], strict=True))
            args, kwargs = variant.combine(rank, 1, group_ep, rows)
            combine = getattr(ascend_moe, variant.combine_name)
            named = combine(**dict(zip(inspect.signature(combine).parameters, args, strict=False)), **kwargs)
            assert torch.equal(combine(*args, **kwargs), named)
            with pytest.raises(TypeError, match="no_such_argument"):
                combine(*args, **kwargs, no_such_argument=1)

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)


def test_a_users_script_runs() -> None:
    assert torch_user.main() == 0


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_users_script_type_checks(tmp_path: Path) -> None:
    # torch itself is not followed: reading it takes a minute.
    config, script = tmp_path / "mypy.ini", tmp_path / "wrong.py"
    config.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    script.write_text("import ascend_moe\n\nname: str = ascend_moe.npu_moe_distribute_dispatch()\n", "utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path)]
    # As a package on the path, not as sources: its types count only if it has py.typed.
    path = os.pathsep.join(str(Path(entry).parent) for entry in ascend_moe.__path__)

    def check(file: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [*command, str(file)], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
        )

    right, wrong = check(Path(torch_user.__file__)), check(script)
    assert right.returncode == 0, right.stdout + right.stderr
    assert wrong.returncode == 1 and 'variable has type "str"' in wrong.stdout, wrong.stdout + wrong.stderr


# ---- any tensor


def odd_address(tensor: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return base[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)[..., 1].copy_(tensor)


@pytest.mark.parametrize("place", [odd_address, strided])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_tensors_of_any_address_and_stride(
    variant: Variant, place: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def moved(call: torch_calls.Call) -> torch_calls.Call:
        def move(value: Any) -> Any:
            return place(value) if isinstance(value, torch.Tensor) else value

        return tuple(map(move, call[0])), {name: move(value) for name, value in call[1].items()}

    def each(rank: int, group_ep: str) -> None:
        dispatched, expected = run(variant, rank, 1, group_ep)
        args, kwargs = moved(variant.dispatch(rank, 1, group_ep))
        rows = overload(variant.dispatch_name)(*args, **kwargs)
        count = int(dispatched[4][-1])
        assert all(torch.equal(a[:count], b[:count]) for a, b in zip(rows[:3], dispatched[:3], strict=True))
        args, kwargs = moved(variant.combine(rank, 1, group_ep, rows))
        assert torch.equal(overload(variant.combine_name)(*args, **kwargs), expected)

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)


def test_the_default_device_does_not_matter() -> None:
    def each(rank: int, group_ep: str) -> None:
        args, kwargs = PLAIN.dispatch(rank, 1, group_ep)
        with torch.device("meta"):
            rows = overload(PLAIN.dispatch_name)(*args, **kwargs)
        assert all(out.device.type == "cpu" for out in rows)

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)


# ---- opcheck


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_opcheck_is_clean_on_one_rank(variant: Variant) -> None:
    with ascend_moe.LocalCluster(1) as cluster:
        outcomes = cluster.run(lambda rank, group_ep: torch_calls.opcheck(variant, rank, 1, group_ep))[0]
    assert len(outcomes) == 8
    assert outcomes == dict.fromkeys(outcomes, "SUCCESS")


def test_opcheck_is_clean_on_two_ranks_in_lockstep(tmp_path: Path) -> None:
    for outcomes in run_processes(2, torch_calls.opcheck_all, tmp_path):
        assert list(outcomes) == [variant.name for variant in VARIANTS]
        for name, found in outcomes.items():
            assert len(found) == 8
            assert found == dict.fromkeys(found, "SUCCESS"), name


# ---- autograd


@pytest.mark.parametrize("variant", [PLAIN, PLAIN_V2, VARIANTS[2]], ids=lambda variant: variant.name)
def test_backward_through_dispatch_raises(variant: Variant) -> None:
    def each(rank: int, group_ep: str) -> None:
        dispatch = overload(variant.dispatch_name)
        (x, *rest), kwargs = variant.dispatch(rank, 1, group_ep)
        expected = dispatch(x, *rest, **kwargs)
        x.requires_grad_()
        rows = dispatch(x, *rest, **kwargs)
        assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))
        assert [out.requires_grad for out in rows[2:6]] == [False] * 4
        values = rows[1] if variant.quant_mode else rows[0]
        with pytest.raises(AscendMoeError, match=f"{variant.dispatch_name} is not differentiable yet"):
            # x has another way to the loss: the gradient of that one alone would be wrong.
            (values.float().sum() + x.float().sum()).backward()
        assert x.grad is None
        run(variant, rank, 1, group_ep)

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)


@pytest.mark.parametrize("variant", [PLAIN, VARIANTS[3]], ids=lambda variant: variant.name)
@pytest.mark.parametrize("wanting", ["expand_x", "expert_scales", "shared_expert_x"])
def test_backward_through_combine_raises(variant: Variant, wanting: str) -> None:
    if wanting == "shared_expert_x" and not variant.version:
        pytest.skip("v1 takes none")

    def each(rank: int, group_ep: str) -> None:
        combine = overload(variant.combine_name)
        args, kwargs = variant.combine(rank, 1, group_ep, run(variant, rank, 1, group_ep)[0])
        expected = combine(*args, **kwargs)
        tensor = {"expand_x": args[0], "expert_scales": args[4]}.get(wanting, kwargs.get(wanting))
        tensor.requires_grad_()
        y = combine(*args, **kwargs)
        assert torch.equal(y, expected)
        with pytest.raises(AscendMoeError, match=f"{variant.combine_name} is not differentiable yet"):
            (y.float().sum() + tensor.float().sum()).backward()
        assert tensor.grad is None

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_may_require_grad_where_no_gradient_is_asked_for(mode: Callable[[], Any]) -> None:
    def each(rank: int, group_ep: str) -> None:
        args, kwargs = PLAIN.dispatch(rank, 1, group_ep)
        args[0].requires_grad_()
        with mode():
            rows = overload(PLAIN.dispatch_name)(*args, **kwargs)
        assert not any(out.requires_grad for out in rows)

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)


# ---- cost of a call


@pytest.mark.parametrize("variant", VARIANTS[:4], ids=lambda variant: variant.name)
def test_an_equal_call_plans_nothing_and_runs_little_python(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def each(rank: int, group_ep: str) -> tuple[int, int]:
        args, kwargs = variant.dispatch(rank, 1, group_ep)
        dispatch = overload(variant.dispatch_name)
        combine_args, combine_kwargs = variant.combine(rank, 1, group_ep, run(variant, rank, 1, group_ep)[0])
        combine = overload(variant.combine_name)
        monkeypatch.setattr(calls, "describe", lambda *_: pytest.fail("planned again"))
        counts = []
        for op, a, k in ((dispatch, args, kwargs), (combine, combine_args, combine_kwargs)):
            op(*a, **k)
            profile = cProfile.Profile()
            profile.runcall(op, *a, **k)
            counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
        return counts[0], counts[1]

    with ascend_moe.LocalCluster(1) as cluster:
        dispatched, combined = cluster.run(each)[0]
    # Functions called, C ones too; about 130 to 145.
    assert dispatched <= 170
    assert combined <= 170
