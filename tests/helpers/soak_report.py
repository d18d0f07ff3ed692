"""What the rows of ``soak_rows`` have counted, carried from the tests to the end of the session."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import soak_rows
from soak_rows import Tally

PROPERTY = "row of cases"


@dataclass
class Row:
    """Sums of one row over its tests."""

    cases: int = 0
    failed: int = 0
    worst: float = 0.0
    seconds: float = 0.0  # that its tests took
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, found: dict[str, Any], seconds: float) -> None:
        self.cases += found["cases"]
        self.failed += found["failed"]
        self.worst = max(self.worst, found["worst"])
        self.seconds += seconds
        self.kinds.update(found["kinds"])

    def line(self, name: str) -> str:
        worst = f"worst {self.worst:.2f} s" if self.worst else ""
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        verdict = "ok    " if not self.failed else "FAILED"
        return (
            f"{verdict} {name:<33}{self.cases:>9} cases {self.failed:>4} failed  {worst:<13} {kinds}".rstrip()
        )


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Of the row that the test is marked with."""
    marker = request.node.get_closest_marker("row")
    test = f"{request.path.name}::{getattr(request.node, 'originalname', request.node.name)}"
    made = Tally(marker.args[0], test)
    request.node.stash[_KEY] = made
    yield made


_KEY = pytest.StashKey[Tally]()
_rows: dict[str, Row] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Puts the counts into the report of the call, which also comes from a worker of xdist."""
    marker = item.get_closest_marker("row")
    if marker is None or call.when != "call" or _skipped(call):
        return
    made = item.stash.get(_KEY, None)
    if made is None:
        made = Tally(marker.args[0], item.name)
    if made.cases == 0:
        made.cases = 1
    found = made.numbers()
    if call.excinfo is not None:
        found["failed"] = max(found["failed"], 1)
    item.user_properties.append((PROPERTY, found))


def _skipped(call: pytest.CallInfo[None]) -> bool:
    return call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        for name, found in report.user_properties:
            if name == PROPERTY and isinstance(found, dict):
                _rows.setdefault(found["row"], Row()).add(found, report.duration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = {name: _rows[name] for name in soak_rows.ROWS if name in _rows}
    if not rows:
        return
    scale = "full" if soak_rows.FULL else "quick"
    terminalreporter.section(f"rows of cases, {scale} counts")
    for name, one in rows.items():
        terminalreporter.line(one.line(name))
    path = os.environ.get("ASCEND_MOE_SOAK_REPORT", "")
    if path:
        table = {name: {**vars(one), "kinds": dict(one.kinds)} for name, one in rows.items()}
        Path(path).write_text(json.dumps({"counts": scale, "rows": table}, indent=1) + "\n")
