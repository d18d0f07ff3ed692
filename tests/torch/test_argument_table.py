"""docs/operators.md: its first table has every operator. "Argument by argument": its column of ours is what the
description of the operators has (op_host/rules/op.h), and what the calls take and refuse."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bad_arguments
import pytest

import ascend_moe
from ascend_moe import npu, plan
from ascend_moe.ops.registration import SCHEMAS, TORCH_NPU_SCHEMAS

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import op_description

ROOT = Path(__file__).resolve().parents[2]  # of the tree: an installed package has no pages

TEXT = op_description.DESCRIPTION.read_text()
WORLD = 2
ROWS_DTYPES = ("bf16", "fp16", "fp32")
NORM: Callable[..., Any] = npu.npu_moe_distribute_combine_add_rms_norm
OPS = {"D1": ("dispatch", "kV1"), "D2": ("dispatch_v2", "kV2"), "C1": ("combine", "kV1"), "C2": ("combine_v2", "kV2")}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{short: getattr(ascend_moe, f"npu_moe_distribute_{op}") for short, (op, _) in OPS.items()},
    "N": NORM,
}


@pytest.mark.parametrize("page", ["operators.md", "zh/operators.md"])
def test_the_first_table_has_every_operator(page: str) -> None:
    """A name that begins in the middle, "_v2", goes on from the last whole name."""
    found, whole = [], ""
    table = (ROOT / "docs" / page).read_text().split("\n## ")[0]
    for row in re.findall(r"^\| ([^|]*npu_[^|]*) \|", table, re.MULTILINE):
        for name in re.findall(r"[\w.]*(?:npu|_|\.)\w+", row):
            whole = name if "npu_" in name else whole
            found.append(whole if name == whole else whole + name)
    assert sorted(found) == sorted({*SCHEMAS, *TORCH_NPU_SCHEMAS})


@dataclass(frozen=True)
class Line:
    """An argument of one function, as the page has it: what ours takes, and what is said of that."""

    argument: str
    function: str
    takes: str
    said: str


def lines() -> list[Line]:
    section = (ROOT / "docs/operators.md").read_text().split("\n## Argument by argument\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    found = []
    for arguments, functions, a2, a3, ours in rows[1:]:
        assert a2 and a3, arguments
        takes, _, said = ours.partition(": ")
        found += [
            Line(argument, function, takes.partition(" (")[0], said)
            for argument in arguments.split(", ")
            for function in functions.replace("all", "D1 D2 C1 C2 N").split()
        ]
    assert len({(line.argument, line.function) for line in found}) == len(found)
    return found


OURS = [line for line in lines() if line.function != "S"]


def described(function: str) -> dict[str, op_description.Row]:
    """The arguments of a function in the description, by name."""
    op = next(op for op in op_description.operators(TEXT) if op.type.endswith("Dispatch") == (function[0] == "D"))
    contract = OPS[function][1]
    rows = [row for row in [*op.inputs, *op.attributes] if row.functions in (contract, "kBoth")]
    return {row.v2_name if contract == "kV2" else row.name: row for row in rows}


def reasons() -> dict[str, str]:
    """Why a function's argument takes no value, as the description says it."""
    macros = [f"ASCEND_MOE_{op}_{part}" for op in ("DISPATCH", "COMBINE") for part in ("INPUTS", "ATTRIBUTES")]
    rows = [row for macro in macros for row in op_description.cells(TEXT, macro) if row[0] == "REFUSED"]
    return {name: why.strip('"') for _, name, _, why in rows}


def test_it_has_every_argument_of_every_function() -> None:
    for function, called in FUNCTIONS.items():
        listed = {line.argument for line in OURS if line.function == function}
        assert listed == set(inspect.signature(called).parameters), function
        if function in OPS:
            assert listed == set(described(function)), function
    of_others = {line.argument for line in lines() if line.function == "S"}
    assert of_others == {"comm_type", "comm_cmd_info", "y", "quant_expand_x"}
    for op in ("dispatch", "combine"):
        assert not any(hasattr(ascend_moe, f"npu_moe_distribute_{op}_{half}") for half in ("setup", "teardown"))


def test_its_dtypes_and_reasons_are_the_descriptions() -> None:
    names = {"float": "fp32", "bf16": "bf16", "int32": "int32", "int64": "int64", "bool": "bool"}
    for function in OPS:
        for line in OURS:
            row = described(function).get(line.argument)
            if line.function != function or row is None:
                continue
            if row.kind == "REFUSED":
                assert (line.takes, line.said) == ("None", reasons()[line.argument]), line
            elif row.type and line.takes not in ("any", "None"):
                types = ROWS_DTYPES if row.type == "kRows" else (names[op_description.TYPES[row.type]],)
                assert tuple(line.takes.split(", ")) == types, line


def test_its_numbers_are_those_of_the_refusals() -> None:
    """That the calls refuse with these words is what test_bad_arguments.py runs."""
    table = bad_arguments.table(WORLD)
    for line in OURS:
        if line.function in OPS and re.fullmatch(r"[\d., ]+", line.takes):
            op = OPS[line.function][0]
            words = [word for bad in table if bad.op == op and [*bad.changes] == [line.argument] for word in bad.words]
            forms = {line.takes.replace(", ", between) for between in (" and ", "..")}
            assert any(form in word for form in forms for word in words), (line, {*words})


# ---- the numbers, here and in README


def test_its_numbers_and_readmes_are_the_limits() -> None:
    limits, takes = plan.limits(), {(line.argument, line.function): line for line in OURS}
    world, experts = limits["ep_world_size"], limits["moe_expert_num"]
    hidden, batch, topk = limits["hidden"], limits["batch"], limits["topk"]
    assert takes["ep_world_size", "D2"].takes == f"1..{world}"
    assert takes["moe_expert_num", "D2"].takes == f"1..{experts}"
    assert f"H 1..{hidden}," in takes["x", "D2"].said and f"BS 0..{batch}" in takes["x", "D2"].said
    assert f"K 1..{topk}," in takes["expert_ids", "D2"].said
    section = re.sub(r"\s+", " ", (ROOT / "README.md").read_text().split("\n## Limits\n")[1])
    assert section.lstrip().startswith(
        f"K 1..{topk} experts a token, H to {hidden} (rows are multiples of 32 bytes), BS to {batch} tokens a rank, "
        f"E to {experts} experts, W to {world} ranks;"
    )
    # Values that CANN has, or had, and that are refused here, and no more, are named there.
    named = set(re.findall(r"`(\w+)`(?! \d)", section.split("The following raise")[1].split("comm_alg")[0]))
    assert named == {"elastic_info"} and takes["elastic_info", "D2"].takes == "None"
    for argument, words in {
        "tp_world_size": "`tp_world_size` 2",
        "shared_expert_rank_num": "shared experts on dedicated ranks",
    }.items():
        assert takes[argument, "D2"].takes in ("0", "0, 1") and words in section
