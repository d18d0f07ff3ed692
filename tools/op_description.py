#!/usr/bin/env python3
"""Generate files from the description of the operators, op_host/rules/op.h.

    python tools/op_description.py json          prints the JSON that msopgen takes
    python tools/op_description.py aclnn FOLDER  writes aclnn_ascend_moe.h and .cpp, the entry points, into FOLDER

Standard library only: any Python from 3.9 on runs it in the build.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = ROOT / "op_host" / "rules" / "op.h"
HEADER = ROOT / "op_host" / "op_api" / "aclnn_ascend_moe.h.in"
# msopgen's names of element types.
TYPES = {
    "kTypeBf16": "bf16",
    "kTypeFp16": "fp16",
    "kTypeFp32": "float",
    "kTypeInt8": "int8",
    "kTypeInt32": "int32",
    "kTypeInt64": "int64",
    "kTypeBool": "bool",
}
WIDTH = 120


@dataclass(frozen=True)
class Row:
    """A row: its kind, such as INPUT, and its fields."""

    kind: str
    name: str
    v2_name: str  # the same, where V2's function has no other
    type: str = ""  # tensors: an element type, kRows or kWireRows
    required: bool = True
    default: int | str = 0  # attributes
    functions: str = "kBoth"  # of torch_npu, that have it: kV1, kV2, kBoth, kNeither

    @property
    def camel(self) -> str:
        """Return the name in the aclnn entry points, without suffixes."""
        first, *others = self.name.split("_")
        return first + "".join(word.capitalize() for word in others)


@dataclass(frozen=True)
class Op:
    """An operator; ``columns``: types of kRows and kWireRows, a column of its dtype lists each."""

    type: str
    columns: list[tuple[str, str]]
    inputs: list[Row]
    outputs: list[Row]
    attributes: list[Row]


def cells(text: str, macro: str) -> list[list[str]]:
    """The rows of a macro of the description: name of the row, then its cells."""
    lines = iter(text.partition(f"#define {macro}(")[2].splitlines())
    line, found = next(lines, None), []
    if line is None:
        raise ValueError(f"{DESCRIPTION.name} has no {macro}")
    while line.endswith("\\"):
        line = next(lines)
        row = re.match(r" *([A-Z]+)\((.*)\)", line)
        if row is None:
            raise ValueError(f"{DESCRIPTION.name}: this line of {macro} is no row: {line}")
        found.append([row[1], *re.findall(r'"[^"]*"|[^,\s]+', row[2])])
    return found


def row_of(kind: str, *row: str) -> Row:
    """A row of inputs, outputs or attributes."""
    name = row[0]
    if kind == "REFUSED":
        return Row(kind, name, name, required=False, functions=row[1])
    if kind in ("INTEGER", "TEXT"):
        default = int(row[2]) if kind == "INTEGER" else row[2].strip('"')
        return Row(kind, name, name, "", row[1] == "kRequired", default, row[3])
    v2_name, element, *rest = row[1:] if kind == "RENAMED" else row
    need, functions = rest or ("kRequired", "kBoth")  # of outputs nothing is said
    return Row(kind, name, v2_name, element, need == "kRequired", functions=functions)


def operators(text: str) -> list[Op]:
    """All operators of the description."""
    columns = [(rows, wire) for _, rows, wire in cells(text, "ASCEND_MOE_COLUMNS")]
    found = []
    for _, _, op_type, stem, count in cells(text, "ASCEND_MOE_OPS"):
        parts = [
            [row_of(*row) for row in cells(text, f"ASCEND_MOE_{stem}_{part}")]
            for part in ("INPUTS", "OUTPUTS", "ATTRIBUTES")
        ]
        found.append(Op(op_type, columns[: int(count)], *parts))
    return found


def accepted(rows: list[Row]) -> list[Row]:
    """Return the rows that the operator itself has."""
    return [row for row in rows if row.kind != "REFUSED"]


# ---- msopgen's JSON


def tensor_json(op: Op, row: Row) -> dict[str, Any]:
    """An input or output."""
    rows = {"kRows": [rows for rows, _ in op.columns], "kWireRows": [wire for _, wire in op.columns]}
    return {
        "name": row.name,
        "param_type": "required" if row.required else "optional",
        "format": ["ND"] * len(op.columns),
        "type": [TYPES[each] for each in rows.get(row.type, [row.type] * len(op.columns))],
    }


def attribute_json(row: Row) -> dict[str, Any]:
    """An attribute, with its default if it has one."""
    found: dict[str, Any] = {
        "name": row.name,
        "param_type": "required" if row.required else "optional",
        "type": "int" if row.kind == "INTEGER" else "string",
    }
    return found if row.required else {**found, "default_value": row.default}


def describe(text: str) -> list[dict[str, Any]]:
    """All operators, as msopgen takes them."""
    return [
        {
            "op": op.type,
            "language": "cpp",
            "input_desc": [tensor_json(op, row) for row in accepted(op.inputs)],
            "output_desc": [tensor_json(op, row) for row in op.outputs],
            "attr": [attribute_json(row) for row in accepted(op.attributes)],
        }
        for op in operators(text)
    ]


# ---- the aclnn entry points


def parameters(op: Op) -> list[tuple[str, str, bool]]:
    """Type, name, and whether null is refused, of each parameter of phase one."""
    found = []
    for row in accepted(op.inputs):
        found.append(("const aclTensor*", row.camel + ("" if row.required else "Optional"), row.required))
    for row in accepted(op.attributes):
        kind = "int64_t" if row.kind == "INTEGER" else "const char*"
        found.append((kind, row.camel, row.required and row.kind == "TEXT"))
    found += [("const aclTensor*", row.camel + "Out", True) for row in op.outputs]
    return [*found, ("uint64_t*", "workspaceSize", True), ("aclOpExecutor**", "executor", True)]


def filled(head: str, words: list[str], tail: str) -> str:
    """``head``, the words with commas between, ``tail``: in one line, or in full ones below the head."""
    whole = f"{head}{', '.join(words)}{tail}"
    if len(whole) <= WIDTH:
        return whole
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    lines, line = [head], indent
    for word in [*(f"{word}," for word in words[:-1]), words[-1] + tail]:
        if len(line) + len(word) > WIDTH:
            lines.append(line.rstrip())
            line = indent
        line += word + " "
    return "\n".join([*lines, line.rstrip()])


LAUNCH = ["void* workspace", "uint64_t workspaceSize", "aclOpExecutor* executor", "aclrtStream stream"]


def phase_one(op: Op) -> tuple[str, list[str]]:
    """The head of its declaration, and the parameters."""
    return f"aclnnStatus aclnn{op.type}GetWorkspaceSize(", [f"{kind} {name}" for kind, name, _ in parameters(op)]


def aclnn_header(text: str) -> str:
    """aclnn_ascend_moe.h: the template with each operator's declarations in the place of their mark."""
    made = HEADER.read_text()
    for op in operators(text):
        phases = [phase_one(op), (f"aclnnStatus aclnn{op.type}(", LAUNCH)]
        declared = [filled(f"ASCEND_MOE_ACLNN_API {head}", words, ");") for head, words in phases]
        made = made.replace(f"@{op.type}@", "\n".join(declared))
    if "@" in made:
        raise ValueError(f"{HEADER.name} has a mark that is no operator's")
    return made


SOURCE = """// Made by tools/op_description.py from op_host/rules/op.h: the entry points, around those with the prefix
// aclnnInner that CANN generates from the op definition.
#include "aclnn_ascend_moe.h"
#include "phases.h"
"""
SOURCE_OF_OP = """
extern "C" decltype(aclnn{op}GetWorkspaceSize)
    aclnnInner{op}GetWorkspaceSize;
extern "C" decltype(aclnn{op}) aclnnInner{op};

{phase_one}
{require}
{call}
}}

{phase_two}
    ASCEND_MOE_REQUIRE(executor);
{server}    return aclnnInner{op}(workspace, workspaceSize, executor, stream);
}}
"""


def aclnn_source(text: str) -> str:
    """aclnn_ascend_moe.cpp."""
    made = SOURCE
    for op in operators(text):
        given = [name if need or kind != "const char*" else f"TextOf({name})" for kind, name, need in parameters(op)]
        made += SOURCE_OF_OP.format(
            op=op.type,
            phase_one=filled(*phase_one(op), ") {"),
            require=filled("    ASCEND_MOE_REQUIRE(", [name for _, name, need in parameters(op) if need], ");"),
            call=filled(f"    return aclnnInner{op.type}GetWorkspaceSize(", given, ");"),
            server="    SetServerType(executor);\n" if any(row.name == "group_ep" for row in op.attributes) else "",
            phase_two=filled(f"aclnnStatus aclnn{op.type}(", LAUNCH, ") {"),
        )
    return made


def main() -> int:
    """The command line."""
    try:
        text = DESCRIPTION.read_text()
        if sys.argv[1:] == ["json"]:
            print(json.dumps(describe(text), indent=2))
        elif len(sys.argv) == 3 and sys.argv[1] == "aclnn":
            folder = Path(sys.argv[2])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "aclnn_ascend_moe.h").write_text(aclnn_header(text))
            (folder / "aclnn_ascend_moe.cpp").write_text(aclnn_source(text))
        else:
            sys.exit(__doc__)
    except (OSError, ValueError) as error:
        sys.exit(f"op_description: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
