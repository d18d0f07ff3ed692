"""Writes what pages of docs/ have from the code: `python tools/pages_from_code.py`.

settings.md is made whole, of the table in ascend_moe/settings.py. errors.md has the tables between its marks from the
docstrings of ascend_moe/errors.py, operators.md the arguments and schemas from op_host/rules/op.h and from what
ascend_moe registers with torch; docs/zh/operators.md has these too. checkpoints.md has the keys of a
quantization_config from ascend_moe/checkpoint/schemes.py.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import op_description

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- begin generated: {} -->", "<!-- end generated -->"

# ---- settings.md

SETTINGS_HEAD = """# Environment variables

For everybody who runs `ascend_moe`: every environment variable that it reads. `ascend-moe doctor` checks the
values that are set, and warns of names that it does not know.

A variable is read when its value is needed, so a change counts from the next call or the next communicator
on. An empty value counts as not set. A bad value is an error that states the rule.

This page is made from `ascend_moe/settings.py` by `tools/pages_from_code.py`.
"""


def table(*rows: tuple[str, ...]) -> str:
    """A table, its heading first."""
    head, *others = (re.sub(r"(?<=\|)  (?=\|)", " ", f"| {' | '.join(row)} |") for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def settings_page() -> str:
    """The text of docs/settings.md."""
    from ascend_moe.settings import TABLE

    parts = [SETTINGS_HEAD]
    for heading, group in TABLE.items():
        rows = [(f"`{setting.name}`", setting.help, setting.shown) for setting in group]
        parts.append(f"## {heading}\n\n{table(('variable', 'meaning', 'default'), *rows)}\n")
    return "\n".join(parts)


# ---- errors.md

ERRORS_HEAD = ("class", "when", "attributes", "what to do")
RAISED, ON_EVERY_RANK, TO_DO = "Raised where ", "Every rank raises it where ", "What to do: "
#: The tables of the page: the classes of each. In the second ArgumentError stands for what combine finds.
ERRORS = {
    "errors of one rank": ("ArgumentError", "WindowTooSmall", "WindowTensorError", "CommBusy", "CommClosed"),
    "errors of every rank": (
        *("InvalidExpertId", "RoutingOverflow", "ConfigMismatch", "ArgumentError", "RoutingMismatch"),
    ),
    "fatal errors": ("PeerLost", "CommTimeout", "CorruptStatus"),
    "errors of the machine": ("LibraryError", "KernelFault", "TwinFault", "TwinBuildError"),
}


def error_row(name: str, *, of_every_rank: bool = False) -> tuple[str, ...]:
    """The row of a class, from its docstring: when, attributes, what to do."""
    from ascend_moe import errors

    paragraphs = (inspect.getdoc(getattr(errors, name)) or "").split("\n\n")
    when, to_do = "", ""
    attributes: list[str] = []
    for text in paragraphs:
        line = " ".join(text.split())
        if line.startswith(RAISED):
            when = line.removeprefix(RAISED).removesuffix(".")
        elif line.startswith(TO_DO):
            to_do = to_do or line.removeprefix(TO_DO).removesuffix(".")
        elif line.startswith("Attributes:"):
            listed = re.findall(r"^ {4}(\w[\w, ]*):", text, re.MULTILINE)
            attributes = [attribute for names in listed for attribute in names.split(", ")]
        elif not line.startswith(ON_EVERY_RANK):
            when += f". {line.removesuffix('.')}"
        elif of_every_rank:
            when, _, to_do = line.removeprefix(ON_EVERY_RANK).removesuffix(".").partition(": ")
    if not when or not to_do:
        raise ValueError(f"the docstring of {name} does not say {RAISED!r} and {TO_DO!r}")
    cells = (f"`{name}`", when, ", ".join(f"`{attribute}`" for attribute in attributes), to_do)
    return tuple(re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", cell.replace("``", "`")) for cell in cells)


def errors_table(title: str) -> str:
    """One table of the page."""
    every = title == "errors of every rank"
    return table(ERRORS_HEAD, *(error_row(name, of_every_rank=every) for name in ERRORS[title]))


# ---- operators.md

FUNCTIONS = {"D1": ("Dispatch", "kV1"), "D2": ("Dispatch", "kV2"), "C1": ("Combine", "kV1"), "C2": ("Combine", "kV2")}
TYPES = {"float": "fp32"}  # of msopgen's names those that the page has otherwise
#: What the tables say, by language.
ENGLISH = {"argument": "argument", "output": "output", "type": "type", "none": "None only", "all": "all"}
CHINESE = {"argument": "参数", "output": "输出", "type": "类型", "none": "只能为 None", "all": "全部"}


def described() -> dict[str, op_description.Op]:
    """The operators of the description, by the end of their types."""
    ops = op_description.operators(op_description.DESCRIPTION.read_text())
    return {op.type.removeprefix("AscendMoeDistribute"): op for op in ops}


def type_of(op: op_description.Op, row: op_description.Row) -> str:
    """The types that a row may have."""
    if row.kind in ("INTEGER", "TEXT"):
        return "int" if row.kind == "INTEGER" else "str"
    if not row.type:
        return ""
    mixed = {"kRows": [rows for rows, _ in op.columns], "kWireRows": [wire for _, wire in op.columns]}
    names = [op_description.TYPES[each] for each in mixed.get(row.type, [row.type])]
    return ", ".join(dict.fromkeys(TYPES.get(name, name) for name in names))


def has(row: op_description.Row, function: str) -> bool:
    """Whether V1's or V2's function has a row."""
    return row.functions in (function, "kBoth")


def arguments_table(words: dict[str, str]) -> str:
    """The arguments of the four functions: type, and the place or the default in each."""
    ops, cells = described(), dict[str, dict[str, str]]()
    for short, (name, function) in FUNCTIONS.items():
        op, place = ops[name], 0
        rows = [row for row in [*op.inputs, *op.attributes] if has(row, function)]
        for row in sorted(rows, key=lambda row: not row.required):
            argument = row.v2_name if function == "kV2" else row.name
            place += row.required
            is_none = row.kind not in ("INTEGER", "TEXT")
            default = "None" if is_none else f'"{row.default}"' if row.kind == "TEXT" else str(row.default)
            shown = words["none"] if row.kind == "REFUSED" else f"{place}." if row.required else default
            line = cells.setdefault(argument, {"type": type_of(op, row)})
            line["type"] = line["type"] or type_of(op, row)
            line[short] = shown
    rows = [(name, *(line.get(column, "") for column in ("type", *FUNCTIONS))) for name, line in cells.items()]
    return table((words["argument"], words["type"], *FUNCTIONS), *rows)


def outputs_table(words: dict[str, str]) -> str:
    """What the functions return: type, and the place in each one's tuple."""
    ops, cells = described(), dict[str, dict[str, str]]()
    for short, (name, function) in FUNCTIONS.items():
        *outputs, _ = ops[name].outputs  # the last is returned by no function
        for place, row in enumerate(outputs, 1):
            output = row.v2_name if function == "kV2" else row.name
            line = cells.setdefault(output, {"type": type_of(ops[name], row)})
            line[short] = f"{place}." if len(outputs) > 1 else words["all"]
    rows = [(name, *(line.get(column, "") for column in ("type", *FUNCTIONS))) for name, line in cells.items()]
    return table((words["output"], words["type"], *FUNCTIONS), *rows)


def schemas_block() -> str:
    """The schemas of torch_npu's other operators, as torch has them."""
    import ascend_moe.npu  # noqa: F401  it registers them
    from ascend_moe.ops.schemas import TORCH_NPU_SCHEMAS

    lines: list[str] = []
    for name in sorted(TORCH_NPU_SCHEMAS):
        lines += textwrap.wrap(name + TORCH_NPU_SCHEMAS[name], 118, subsequent_indent="    ")
    return "\n".join(["```", *lines, "```"])


# ---- checkpoints.md

#: The values that compressed-tensors 0.20 has for keys of a group and of its weights.
PUBLISHED: dict[str, tuple[object, ...]] = {
    "format": (
        *("int-quantized", "float-quantized", "pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
        *("nvfp4-pack-quantized", "mxfp6-pack-quantized", "naive-quantized", "mixed-precision", "dense"),
        *("sparse-bitmask", "sparse-24-bitmask", "marlin-24"),
    ),
    "num_bits": (1, 2, 3, 4, 5, 6, 7, 8),
    "type": ("int", "float"),
    "strategy": ("channel", "group", "tensor", "block", "token", "tensor_group", "attn_head"),
    "dynamic": (False, True, "local"),
    "actorder": (None, False, "weight", "static", "group", "dynamic", True),
}


def is_read(key: str, value: object) -> bool:
    """Whether a value of ``PUBLISHED`` is read with some format."""
    from ascend_moe.checkpoint.schemes import FORMS, KEYS

    if isinstance(allowed := KEYS["weights"].get(key), tuple):
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
    if key == "format":
        return value in FORMS
    return any(value in {"num_bits": f.bits, "type": (f.type,), "strategy": f.strategies}[key] for f in FORMS.values())


def coded(values: Iterable[object]) -> str:
    """Values as JSON has them."""
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def keys_table() -> str:
    """The keys of a quantization_config, and of each the values that are read."""
    from ascend_moe.checkpoint.schemes import KEYS

    rows = [(where, f"`{key}`", coded(allowed) if isinstance(allowed, tuple) else str(allowed))
            for where, keys in KEYS.items() for key, allowed in keys.items()]  # fmt: skip
    return table(("object", "key", "value"), *rows)


def values_table() -> str:
    """The published values of a group's keys: those that are read, and those that are refused."""
    rows = []
    for key, values in PUBLISHED.items():
        sides = [coded(value for value in values if is_read(key, value) is read) for read in (True, False)]
        rows.append((f"`{key}`", *sides))
    return table(("key", "read", "refused"), *rows)


def formats_table() -> str:
    """The formats of compressed-tensors that are read, and what their weights may be."""
    from ascend_moe.checkpoint.schemes import FORMS

    rows = [(f"`{name}`", *map(coded, (form.bits, (form.type,), form.strategies, form.symmetric)))
            for name, form in FORMS.items()]  # fmt: skip
    return table(("format", "num_bits", "type", "strategy", "symmetric"), *rows)


# ---- pages with marks

Part = Callable[[], str]


def parts_of_operators(words: dict[str, str]) -> dict[str, Part]:
    """The generated parts of operators.md in one language."""
    return {
        "arguments": lambda: arguments_table(words),
        "outputs": lambda: outputs_table(words),
        "schemas of the others": schemas_block,
    }


GENERATED: dict[str, dict[str, Part]] = {
    "errors.md": {title: partial(errors_table, title) for title in ERRORS},
    "operators.md": parts_of_operators(ENGLISH),
    "zh/operators.md": parts_of_operators(CHINESE),
    "checkpoints.md": {"keys": keys_table, "values": values_table, "formats": formats_table},
}


def filled(page: str, text: str) -> str:
    """A page's text with each generated part in the place of what stands between its marks."""
    for title, make in GENERATED[page].items():
        begin = BEGIN.format(title)
        head, found, rest = text.partition(f"{begin}\n")
        if not found or END not in rest:
            raise ValueError(f"docs/{page} has no {begin} with {END} behind it")
        text = f"{head}{begin}\n\n{make()}\n\n{END}{rest.partition(END)[2]}"
    return text


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that this tool writes, and its text."""
    yield DOCS / "settings.md", settings_page()
    for page in GENERATED:
        yield DOCS / page, filled(page, (DOCS / page).read_text())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, text in pages():
        path.write_text(text)
