#!/usr/bin/env python3
"""Prints the description of the ops that msopgen takes, from the tables in op_host/rules/op.h."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parent.parent / "op_host" / "rules" / "op.h"
ROWS = ["bf16", "fp16", "float"]
# msopgen's names, one a column of the op definition's dtype lists.
TYPES = {"kFp32": "float", "kInt32": "int32", "kInt64": "int64", "kBool": "bool"}
# Stem of an op's tables, columns of its dtype lists, whether it has inputs.
OPS = {
    "AscendMoeDistributeDispatch": ("Dispatch", 6, True),
    "AscendMoeDistributeCombine": ("Combine", 3, True),
    "AscendMoeProbe": ("Probe", 1, False),
}


def table(text: str, name: str) -> str:
    """The rows of one table of the header."""
    match = re.search(rf"\b{name}\[\] = {{(.*?)\n}};", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{TABLES.name} has no table {name}")
    return match[1]


def column_types(kind: str, columns: int) -> list[str]:
    """The dtype list of a tensor."""
    if kind == "kRows":
        return (ROWS * 2)[:columns]
    if kind == "kWireRows":
        return [*ROWS, "int8", "int8", "int8"][:columns]
    return [TYPES[kind]] * columns


def tensor(name: str, kind: str, required: bool, columns: int) -> dict[str, Any]:
    """An input or output."""
    return {
        "name": name,
        "param_type": "required" if required else "optional",
        "format": ["ND"] * columns,
        "type": column_types(kind, columns),
    }


def attribute(name: str, required: str, number: str, text: str) -> dict[str, Any]:
    """An attribute, with its default where it has one."""
    kind = "int" if text == "nullptr" else "string"
    found: dict[str, Any] = {
        "name": name,
        "param_type": "required" if required == "true" else "optional",
        "type": kind,
    }
    if required != "true":
        found["default_value"] = int(number) if kind == "int" else text.strip('"')
    return found


def describe(text: str) -> list[dict[str, Any]]:
    """All ops."""
    found = []
    for op_type, (stem, columns, has_inputs) in OPS.items():
        rows = table(text, f"k{stem}OpInputs") if has_inputs else ""
        inputs = re.findall(r"ASCEND_MOE_INPUT\((\w+), (\w+), (\w+)\)", rows)
        outputs = re.findall(r"ASCEND_MOE_OUTPUT\((\w+), (\w+)\)", table(text, f"k{stem}OpOutputs"))
        attributes = re.findall(
            r'{"(\w+)", (true|false), (-?\d+), ("[^"]*"|nullptr)}', table(text, f"k{stem}OpAttributes")
        )
        found.append(
            {
                "op": op_type,
                "language": "cpp",
                "input_desc": [tensor(name, kind, need == "true", columns) for name, kind, need in inputs],
                "output_desc": [tensor(name, kind, True, columns) for name, kind in outputs],
                "attr": [attribute(*row) for row in attributes],
            }
        )
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(describe(TABLES.read_text()), indent=2))
    except (OSError, ValueError) as error:
        sys.exit(f"opp_json: {error}")
