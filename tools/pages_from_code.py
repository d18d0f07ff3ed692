"""Write generated tables into pages of docs/: `python tools/pages_from_code.py`.

debugging.md has the errors, from the docstrings of ascend_moe/errors.py, and the environment variables, from
ascend_moe/settings.py; checkpoints.md has the keys of a quantization_config from ascend_moe/checkpoint/schemes.py. A
table stands between two comments that name it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- begin generated: {} -->", "<!-- end generated -->"


def table(*rows: tuple[str, ...]) -> str:
    """A table, its heading first."""
    head, *others = (re.sub(r"(?<=\|)  (?=\|)", " ", f"| {' | '.join(row)} |") for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def settings_table() -> str:
    """The environment variables, by group."""
    from ascend_moe.settings import TABLE

    parts = []
    for heading, group in TABLE.items():
        rows = [(f"`{setting.name}`", setting.help, setting.shown) for setting in group]
        parts.append(f"### {heading}\n\n{table(('variable', 'meaning', 'default'), *rows)}")
    return "\n\n".join(parts)


# ---- errors

ERRORS_HEAD = ("class", "when", "attributes", "what to do")
RAISED, ON_EVERY_RANK, TO_DO = "Raised where ", "Every rank raises it where ", "What to do: "
#: The tables of the page: the classes of each. In the second ArgumentError stands for what combine finds.
ERRORS = {
    "errors of one rank": ("ArgumentError", "WindowTooSmall", "WindowTensorError", "CommBusy", "CommClosed"),
    "errors of every rank": (
        *("InvalidExpertId", "RoutingOverflow", "ConfigMismatch", "ArgumentError", "RoutingMismatch"),
        "ReferenceMismatch",
    ),
    "fatal errors": ("PeerLost", "CommTimeout", "CorruptStatus"),
    "errors of the machine": ("LibraryError", "KernelFault"),
}


def error_row(name: str, *, of_every_rank: bool = False) -> tuple[str, ...]:
    """Return the row of a class from its docstring: cause, attributes, fix."""
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


# ---- checkpoints


def coded(values: Iterable[object]) -> str:
    """Values as JSON has them."""
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def keys_table() -> str:
    """The keys of a quantization_config by object: those that are read, those with allowed values, and the others."""
    from ascend_moe.checkpoint.schemes import KEYS, READ

    rows = []
    for where, keys in KEYS.items():
        values = [f"`{key}`: {coded(allowed)}" for key, allowed in keys.items() if isinstance(allowed, tuple)]
        others = {key: allowed for key, allowed in keys.items() if not isinstance(allowed, tuple)}
        read, unused = (
            ", ".join(f"`{key}`" for key, allowed in others.items() if (allowed == READ) is wanted)
            for wanted in (True, False)
        )
        rows.append((where, read, "; ".join(values), unused))
    return table(("object", "read", "allowed values", "accepted, no effect"), *rows)


def formats_table() -> str:
    """Return the supported formats of compressed-tensors and their weights."""
    from ascend_moe.checkpoint.schemes import FORMS

    rows = [(f"`{name}`", *map(coded, (form.bits, (form.type,), form.strategies, form.symmetric)))
            for name, form in FORMS.items()]  # fmt: skip
    return table(("format", "num_bits", "type", "strategy", "symmetric"), *rows)


# ---- pages with marks

GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "debugging.md": {**{title: partial(errors_table, title) for title in ERRORS}, "variables": settings_table},
    "checkpoints.md": {"keys": keys_table, "formats": formats_table},
}


def filled(page: str, text: str) -> str:
    """Return a page's text with each generated part between its marks."""
    for title, make in GENERATED[page].items():
        begin = BEGIN.format(title)
        head, found, rest = text.partition(f"{begin}\n")
        if not found or END not in rest:
            raise ValueError(f"docs/{page} has no {begin} with {END} behind it")
        text = f"{head}{begin}\n\n{make()}\n\n{END}{rest.partition(END)[2]}"
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition(":")[0]).parse_args()  # every page, so no arguments
    sys.path.insert(0, str(ROOT))
    for page in GENERATED:
        (DOCS / page).write_text(filled(page, (DOCS / page).read_text()))
