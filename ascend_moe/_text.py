"""Plain-text tables, atomic file writes, package versions, and the choices of command-line options."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# ---- choices of command-line options: help needs neither their modules nor torch

# ascend-moe run
BACKENDS = ("threads", "processes")
DEFAULT_TEXT = "alice.txt"

# ascend-moe bench
SKEWS = ("uniform", "zipf", "hot")
SWEEPS = ("tokens", "ranks", "hidden")

# ascend-moe validate
DEVICES = ("auto", "npu", "cpu")

# ascend-moe predict
PREDICTED = ("window", "direct", "zero-copy", "hierarchy")

# ascend-moe trace
OPS = ("dispatch", "combine", "both")
TRACED = ("auto", *PREDICTED)
PICKS = ("fastest", "p10", "p50", "p90")

# ascend-moe explore
POLICIES = ("late", "random", "lazy", "pct", "replay", "exhaustive", "mixed")
USUAL_CASE = "w2,c2,l1,k2,b2,u2,v1,s0,bf16,none,mask:none,ids:any,unequal,DCDC"


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Return the lines of a table: columns two blanks apart, integers as "12 345", their columns right-aligned."""
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
    """Wrap words, joined by ``between``, to lines of ``width``: the first after ``head``, the others indented alike."""
    lines = [head]
    for word in words:
        first = lines[-1] == head or not lines[-1].strip()
        if not first and len(lines[-1]) + len(between) + len(word) > width:
            lines.append(" " * len(head) + word)
        else:
            lines[-1] += word if first else between + word
    return lines


def _cell(value: object) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def installed_version(package: str) -> str:
    """Return the installed version of a distribution, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, (2, 13, 0) for 2.13.0+cpu; () if it begins with none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def show(values: object, target: str, report: Callable[[], object]) -> None:
    """Print by ``report``, and write ``values`` as JSON to the file ``target``, if any; "-": only print the JSON."""
    if target == "-":
        print(json.dumps(values, indent=2))
        return
    report()
    if target:
        write_whole(Path(target), json.dumps(values, indent=2) + "\n")


def unwritable(path: Path) -> str:
    """Return why `write_whole` would fail for this path, or "" if no reason is known."""
    if not path.absolute().parent.is_dir():
        return f"there is no folder {path.absolute().parent}"
    if not os.access(path.absolute().parent, os.W_OK):
        return f"the folder {path.absolute().parent} is not writable"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "is a link or no regular file, and is not replaced"
    return ""


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to a file atomically, by renaming a temporary file in its folder.

    Raises OSError if the folder does not exist, ``path`` is a link, folder or device, or writing fails.
    """
    if why := unwritable(path):
        raise OSError(errno.EINVAL, why, str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def reason(error: OSError) -> str:
    """Return the file of an error and what is wrong with it, such as "x.json: No space left on device"."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
