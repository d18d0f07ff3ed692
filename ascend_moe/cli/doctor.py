"""`ascend-moe doctor`: a report on this machine that can be pasted into an issue."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ascend_moe import plan as planning
from ascend_moe._text import show
from ascend_moe.cli import options
from ascend_moe.cli.root import version
from ascend_moe.doctor import ERROR, Diagnostic, error, fits, group_diagnostics, text
from ascend_moe.errors import AscendMoeError
from ascend_moe.settings import DEFAULT_WINDOW_MIB

app = typer.Typer()


@app.command()
@options.with_configuration
def doctor(
    asked: dict[str, Any],
    rank_0: Annotated[
        str, typer.Option("--group", metavar="HOST:PORT", help="Also check that rank 0 can be reached at this address.")
    ] = "",
    as_json: options.Json = "",
) -> None:
    """Check this machine: versions, variables, devices, memory. Each problem is shown with its fix.

    With options of `plan`, also check whether that configuration fits.

    Exit code 0: no errors. 1: at least one error. 2: wrong options.
    """
    from ascend_moe.doctor import cann, machine, settings

    parts: list[Callable[[], Iterable[Diagnostic]]] = [
        machine.diagnostics,
        cann.diagnostics,
        settings.diagnostics,
        lambda: group_diagnostics(rank_0),
    ]
    if asked != options.USUAL_CONFIGURATION:
        asked["window"] = asked["window"] or _exported()
        request = options.request_of(**asked)
        parts.append(lambda: fits(request))
    found = [each for part in parts for each in _diagnostics(part)]
    values = {"version": version(), "diagnostics": [asdict(each) for each in found]}
    show(values, as_json, lambda: print(f"ascend-moe doctor, ascend_moe {version()}\n\n{text(found)}"))
    raise typer.Exit(1 if any(each.level == ERROR for each in found) else 0)


def _diagnostics(part: Callable[[], Iterable[Diagnostic]]) -> list[Diagnostic]:
    """Diagnostics of one part. An exception in it becomes a diagnostic, so that the other parts are still shown."""
    found: list[Diagnostic] = []
    try:
        found += part()
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        what = f"{type(problem).__name__}: {problem} ({os.path.basename(where.filename)}:{where.lineno})"
        found.append(error("doctor", what, "doctor itself failed here", "please report it with this output"))
    return found


def _exported() -> int:
    """HCCL_BUFFSIZE as the ops read it, or 0 if it is invalid, which another diagnostic reports."""
    try:
        return planning.exported_mib(DEFAULT_WINDOW_MIB)
    except AscendMoeError:
        return 0
