"""`ascend-moe doctor`: a look at this machine that can be pasted into an issue."""

from __future__ import annotations

import importlib.metadata
import json
import os
import traceback
from collections.abc import Callable, Iterable

from .._text import Parser
from ..comm.communicator import DEFAULT_WINDOW_MIB
from ..doctor import cann, settings
from ..doctor import group as doctor_group
from ..doctor import machine as doctor_machine
from ..doctor.finding import ERROR, Finding, as_dicts, error, text
from ..errors import AscendMoeError
from .plan import add_options, exported_mib, request_of

_ASKED = ("preset", "ranks", "batch", "global_bs", "hidden", "topk", "experts", "quant", "smooth", "window")


def main(argv: list[str]) -> int:
    """Exit code 0: no errors. 1: something cannot work. 2: wrong options."""
    about = (
        "Versions, variables, devices, memory; every finding with its fix.\n"
        "With options of `plan`: whether that configuration fits."
    )
    parser = Parser("doctor", about)
    add_options(parser)
    parser.add_argument("--group", metavar="HOST:PORT", default="", help="whether rank 0 answers there")
    parser.add_argument("--plain", action="store_true", help="no difference: the output is always plain text")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args(argv)
    parts: list[Callable[[], Iterable[Finding]]] = [
        doctor_machine.findings,
        cann.findings,
        settings.findings,
        lambda: doctor_group.findings(options.group),
    ]
    if any(getattr(options, name) for name in _ASKED):
        request = request_of(options, _exported())
        parts.append(lambda: doctor_group.fits(request))
    findings = [one for part in parts for one in _looked(part)]
    if options.json:
        print(json.dumps({"version": _version(), "findings": as_dicts(findings)}, indent=2))
    else:
        print(f"ascend-moe doctor, ascend_moe {_version()}\n\n{text(findings)}")
    return 1 if any(one.level == ERROR for one in findings) else 0


def _looked(part: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A part's findings; a part that breaks is one itself, and the others are still told."""
    found: list[Finding] = []
    try:
        found += part()
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        what = f"{type(problem).__name__}: {problem} ({os.path.basename(where.filename)}:{where.lineno})"
        found.append(error("doctor", what, "doctor itself failed here", "please report it with this output"))
    return found


def _exported() -> int:
    """The window as the ops would open it; 0 when the variable is no number, which is told elsewhere."""
    try:
        return exported_mib(DEFAULT_WINDOW_MIB)
    except AscendMoeError:
        return 0


def _version() -> str:
    try:
        return importlib.metadata.version("ascend_moe")
    except importlib.metadata.PackageNotFoundError:
        return "(a source tree, not installed)"
