"""Tables of plain text, fit for a terminal and for an issue; files that are written whole; versions of packages."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# ---- words that options of commands choose from: the help needs neither their modules nor torch

# ascend-moe run
BACKENDS = ("threads", "processes")
DEFAULT_TEXT = "alice.txt"

# ascend-moe bench
SKEWS = ("uniform", "zipf", "hot")
SWEEPS = ("tokens", "ranks", "hidden")

# ascend-moe validate
DEVICES = ("auto", "npu", "cpu")

# ascend-moe predict
PREDICTED = ("window", "direct", "zero-copy")

# ascend-moe trace
OPS = ("dispatch", "combine", "both")
TRACED = ("auto", *PREDICTED)
PICKS = ("fastest", "p10", "p50", "p90")

# ascend-moe explore
POLICIES = ("late", "random", "lazy", "pct", "replay", "exhaustive", "mixed")
USUAL_CASE = "w2,c2,l1,k2,b2,u2,v1,s0,bf16,none,mask:none,ids:any,unequal,DCDC"


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Lines of a table: columns two blanks apart, numbers to the right; the last one is never padded."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    columns = max((len(row) for row in texts), default=0)
    widths = [max((len(row[i]) for row in texts if i < len(row)), default=0) for i in range(columns)]
    right = [all(isinstance(row[i], int) for row in rows if i < len(row) and row[i] != "") for i in range(columns)]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(widths[i]) if right[i] else cell if i == columns - 1 else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def filled(words: Sequence[str], head: str = "", between: str = " ", width: int = 80) -> list[str]:
    """Lines of at most ``width``: the head and the words behind it, each whole, further lines below the first word."""
    lines = [head]
    for word in words:
        fresh = lines[-1] == head or not lines[-1].strip()
        if not fresh and len(lines[-1]) + len(between) + len(word) > width:
            lines.append(" " * len(head) + word)
        else:
            lines[-1] += word if fresh else between + word
    return lines


def _cell(value: object) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def installed_version(package: str) -> str:
    """Returns the installed version of a distribution; "" when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show(values: object, target: str, tell: Callable[[], object]) -> None:
    """Calls ``tell``, and writes the values as JSON into the file ``target``; "-": prints them instead."""
    if target == "-":
        print(json.dumps(values, indent=2))
        return
    tell()
    if target:
        write_whole(Path(target), json.dumps(values, indent=2) + "\n")


def unwritable(path: Path) -> str:
    """Why `write_whole` cannot write a file there, as far as one can tell before; "" where it can."""
    if not path.absolute().parent.is_dir():
        return f"there is no folder {path.absolute().parent}"
    return irreplaceable(path)


def irreplaceable(path: Path) -> str:
    """Why a file there is not replaced: a link, or a device; "" where it may be."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return f"{path} is a link or no regular file, and is not replaced"
    return ""


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step, so that no reader sees half of it; never a link or a device.

    Raises:
        OSError: it cannot be written.
    """
    if why := unwritable(path):
        raise OSError(errno.EINVAL, why)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
