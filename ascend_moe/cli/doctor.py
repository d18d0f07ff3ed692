"""`ascend-moe doctor`: a look at this machine that can be pasted into an issue."""

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
from ascend_moe.doctor import ERROR, Diagnostic, error, fits, group_findings, text
from ascend_moe.errors import AscendMoeError
from ascend_moe.settings import DEFAULT_WINDOW_MIB

app = typer.Typer()


@app.command()
@options.with_configuration
def doctor(
    asked: dict[str, Any],
    rank_0: Annotated[str, typer.Option("--group", metavar="HOST:PORT", help="Whether rank 0 answers there.")] = "",
    as_json: options.Json = "",
) -> None:
    """Versions, variables, devices, memory; every finding with its fix.

    With options of `plan`: whether that configuration fits.

    Exit code 0: no errors. 1: something cannot work. 2: wrong options.
    """
    from ascend_moe.doctor import cann, machine, settings

    parts: list[Callable[[], Iterable[Diagnostic]]] = [
        machine.findings,
        cann.findings,
        settings.findings,
        lambda: group_findings(rank_0),
    ]
    if asked != options.USUAL_CONFIGURATION:
        asked["window"] = asked["window"] or _exported()
        request = options.request_of(**asked)
        parts.append(lambda: fits(request))
    findings = [finding for part in parts for finding in _findings(part)]
    found = {"version": version(), "findings": [asdict(finding) for finding in findings]}
    show(found, as_json, lambda: print(f"ascend-moe doctor, ascend_moe {version()}\n\n{text(findings)}"))
    raise typer.Exit(1 if any(finding.level == ERROR for finding in findings) else 0)


def _findings(part: Callable[[], Iterable[Diagnostic]]) -> list[Diagnostic]:
    """A part's findings; a part that breaks is a finding itself, and the others are still told."""
    findings: list[Diagnostic] = []
    try:
        findings += part()
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        what = f"{type(problem).__name__}: {problem} ({os.path.basename(where.filename)}:{where.lineno})"
        findings.append(error("doctor", what, "doctor itself failed here", "please report it with this output"))
    return findings


def _exported() -> int:
    """The window as the ops would open it; 0 when the variable is no number, which is told elsewhere."""
    try:
        return planning.exported_mib(DEFAULT_WINDOW_MIB)
    except AscendMoeError:
        return 0
