"""Commands that need torch alone: their options by argparse, their output plain text, fit for an issue.

``ascend-moe`` hands them over before it looks for typer and rich; its help lists them beside the others.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .errors import AscendMoeError

# name -> (module with main(argv) -> exit code, line in the help)
COMMANDS = {
    "plan": ("ascend_moe.cli.plan", "What a configuration needs: window, HCCL_BUFFSIZE, UB, tiling, limits."),
    "predict": ("ascend_moe.cli.predict", "Predict times on NPUs by a model; its errors; its calibration."),
    "doctor": (
        "ascend_moe.cli.doctor",
        "Look at this machine: versions, variables, devices; every finding with its fix.",
    ),
    "trace": ("ascend_moe.cli.trace", "Where the time of dispatch and combine goes, measured or predicted."),
    "vnpu": ("ascend_moe.cli.vnpu", "Run a command with torch_npu on a virtual NPU of this machine."),
    "validate": (
        "ascend_moe.cli.validate",
        "Dispatch and combine against the reference, on whatever device is here.",
    ),
}


def run(name: str, argv: Sequence[str]) -> int:
    """Runs a command; returns its exit code. Errors of this package become one line on stderr."""
    module: Any = importlib.import_module(COMMANDS[name][0])
    try:
        code = int(module.main(list(argv)))
        sys.stdout.flush()
        return code
    except AscendMoeError as error:
        print(f"ascend-moe {name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Parser(argparse.ArgumentParser):
    """With the command's name, and -h as elsewhere."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(
            prog=f"ascend-moe {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Lines of a table: columns two blanks apart, numbers to the right; the last one is never padded."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    columns = max((len(row) for row in texts), default=0)
    widths = [max((len(row[i]) for row in texts if i < len(row)), default=0) for i in range(columns)]
    right = [
        all(isinstance(row[i], int) for row in rows if i < len(row) and row[i] != "") for i in range(columns)
    ]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(widths[i]) if right[i] else cell if i == columns - 1 else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _cell(value: object) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)
