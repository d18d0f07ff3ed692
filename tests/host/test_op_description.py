"""Checks that typed text agrees with the description of the operators, op_host/rules/op.h: Python's functions and their
schemas, their outputs' names, the lists of names that a CallSpec has, and the probe's operator in torch."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe.native import plans
from ascend_moe.native.library import native_source_root as source_root
from ascend_moe.ops.registration import NAMESPACE

sys.path.append(str(source_root() / "tools"))

import op_description

TEXT = (source_root() / "op_host/rules/op.h").read_text()
OPS = {op.type: op for op in op_description.operators(TEXT)}
NAMES = ("DistributeDispatch", "DistributeCombine", "Probe", "OneCard")
DISPATCH, COMBINE, PROBE, ONE_CARD = (OPS[f"AscendMoe{name}"] for name in NAMES)
FUNCTIONS = {
    "npu_moe_distribute_dispatch": (DISPATCH, "kV1"),
    "npu_moe_distribute_dispatch_v2": (DISPATCH, "kV2"),
    "npu_moe_distribute_combine": (COMBINE, "kV1"),
    "npu_moe_distribute_combine_v2": (COMBINE, "kV2"),
}
Parameter = tuple[str, str, Any]  # name, type as Python writes it, default


def parameters(op: op_description.Op, function: str) -> tuple[list[Parameter], list[Parameter]]:
    """Returns the parameters by place, and those by name only, of V1's or V2's function in the description."""
    by_place, by_name = [], []
    empty = inspect.Parameter.empty
    for row in [*op.inputs, *op.attributes]:
        if row.functions not in (function, "kBoth"):
            continue
        name = row.v2_name if function == "kV2" else row.name
        kind = "Tensor" if row in op.inputs else "str" if row.kind == "TEXT" else "int"
        if row.required:
            by_place.append((name, kind, empty))
        elif kind == "Tensor" or row.kind == "REFUSED":
            by_name.append((name, f"{kind} | None", None))
        else:
            by_name.append((name, kind, row.default))
    return by_place, by_name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_descriptions_parameters(name: str) -> None:
    """Names, order, types, defaults; what is required by place, the rest by name only."""
    by_place, by_name = parameters(*FUNCTIONS[name])
    function: Callable[..., Any] = getattr(ascend_moe, name)
    found: dict[Any, list[Parameter]] = {}
    for each in inspect.signature(function).parameters.values():
        found.setdefault(each.kind, []).append((each.name, each.annotation, each.default))
    assert found == {inspect.Parameter.POSITIONAL_OR_KEYWORD: by_place, inspect.Parameter.KEYWORD_ONLY: by_name}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_the_descriptions_outputs(name: str) -> None:
    op, function = FUNCTIONS[name]
    *outputs, record = [row.v2_name if function == "kV2" else row.name for row in op.outputs]
    assert record == "error_record"
    returned = inspect.signature(getattr(ascend_moe, name)).return_annotation
    assert outputs == (["x"] if returned == "Tensor" else list(getattr(ascend_moe.ops, returned)._fields))
    assert len(getattr(getattr(torch.ops, NAMESPACE), name).default._schema.returns) == len(outputs)


def test_a_call_has_a_place_for_every_argument() -> None:
    """And no place that no argument has; texts have none, nor what only a launch has."""
    ops = (DISPATCH, COMBINE)
    names = {name for op in ops for row in op.inputs for name in (row.name, row.v2_name)}
    assert names == set(plans.tensor_names())
    known = [row for op in ops for row in op.attributes if row.kind != "TEXT" and row.functions != "kNeither"]
    assert {row.name for row in known} == set(plans.attribute_names())


@pytest.mark.parametrize(("name", "op"), [("probe", PROBE), ("one_card", ONE_CARD)])
def test_an_operator_of_validate_has_the_descriptions_attributes(name: str, op: op_description.Op) -> None:
    """torch.ops.ascend_moe_npu.probe, one_card: schema, function, and call of the aclnn entry."""
    adapter = (source_root() / "csrc/npu/adapter.cpp").read_text()
    schema = re.search(rf'"({name}\(.*?)"\);', adapter, re.DOTALL)
    assert schema
    kinds = {"TEXT": "str", "INTEGER": "int"}
    wanted = ", ".join(f"{kinds[row.kind]} {row.name}" for row in op.attributes)
    assert re.sub(r'"\s*"', "", schema[1]) == f"{name}({wanted}, Tensor(a!) {op.outputs[0].name}) -> ()"
    function = re.search(rf"void {op.type.removeprefix('AscendMoe')}\((.*?)\) \{{(.*?)\n\}}", adapter, re.DOTALL)
    assert function
    kinds = {"TEXT": "c10::string_view", "INTEGER": "int64_t"}
    typed = [f"{kinds[row.kind]} {row.name}" for row in op.attributes]
    assert re.sub(r"\s+", " ", function[1]) == ", ".join([*typed, f"const at::Tensor& {op.outputs[0].name}"])
    given = [f"{row.name}_text" if row.kind == "TEXT" else row.name for row in op.attributes]
    call = re.search(r"EXEC_NPU_CMD_EXT\((.*?)\);", function[2], re.DOTALL)
    assert call and re.split(r",\s+", call[1]) == [f"aclnn{op.type}", *given, op.outputs[0].name]
