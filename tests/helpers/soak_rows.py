"""Rows of cases: few of them under `make test`, all under `make soak`, and one line a row in the end.

A test of a row is marked ``row(name)``; it is one case, or counts its cases with ``tally``. The decorator
``row`` also gives it ``numbers``: the cases to run, each made from its number alone. ASCEND_MOE_SOAK=full
selects the full counts, ASCEND_MOE_SOAK_CASE=17 runs case 17 alone, ASCEND_MOE_SOAK_REPORT=path writes the
table as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

FULL = os.environ.get("ASCEND_MOE_SOAK", "") == "full"
_ONE = os.environ.get("ASCEND_MOE_SOAK_CASE", "")
_PROPERTY = "row of cases"

Test = TypeVar("Test", bound=Callable[..., Any])
Count = TypeVar("Count")


def pick(quick: Count, full: Count) -> Count:
    """The count of this run."""
    return full if FULL else quick


def row(name: str, quick: int, full: int, chunk: int = 10**9) -> Callable[[Test], Test]:
    """A test of a row. ``chunk``: most cases at once, so that processes share the work and the waiting."""
    total = pick(quick, full)
    parts = [range(first, min(first + chunk, total)) for first in range(0, total, chunk)]
    if _ONE:
        parts = [range(int(_ONE), int(_ONE) + 1)]

    def mark(test: Test) -> Test:
        numbers = pytest.mark.parametrize("numbers", parts, ids=lambda part: f"{part.start}-{part[-1]}")
        return pytest.mark.row(name)(numbers(test))  # type: ignore[no-any-return]

    return mark


class Tally:
    """Counts the right cases of one test by what became of them."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def count(self, kind: str = "", *, cases: int = 1) -> None:
        self.kinds[kind or "right"] += cases

    def each(self, numbers: Iterable[int], case: Callable[[int], str | None]) -> None:
        """Runs every case; ``case(number)`` may return what became of it. A failure says its number."""
        for number in numbers:
            try:
                self.count(case(number) or "")
            except Exception as error:
                error.add_note(f"reproduce with ASCEND_MOE_SOAK_CASE={number}")
                raise


@pytest.fixture(autouse=True)
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Returns the tally of the row that the test is marked with."""
    made, marker = Tally(), request.node.get_closest_marker("row")
    yield made
    if marker is not None:
        found = (marker.args[0], dict(made.kinds or {"right": 1}))
        request.node.user_properties.append((_PROPERTY, found))


class _Rows:
    """Sums over the session, also of tests that workers of xdist have run."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.table: dict[str, dict[str, Any]] = {}

    def add(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        for name, found in report.user_properties:
            if name == _PROPERTY and report.when == "teardown":
                title, kinds = found  # type: ignore[misc]
                sums = self.table.setdefault(title, {"cases": 0, "failed": 0, "kinds": Counter()})
                sums["cases"] += sum(kinds.values())
                sums["failed"] += report.nodeid in self.failed
                sums["kinds"].update(kinds)


_rows = _Rows()
pytest_runtest_logreport = _rows.add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _rows.table:
        return
    scale = "full" if FULL else "quick"
    terminalreporter.section(f"rows of cases, {scale} counts")
    for name, sums in _rows.table.items():
        outcome = "FAILED" if sums["failed"] else "ok    "
        kinds = ", ".join(f"{kind} {count}" for kind, count in sums["kinds"].most_common())
        terminalreporter.line(f"{outcome} {name:<33}{sums['cases']:>9} cases  {kinds}")
    path = os.environ.get("ASCEND_MOE_SOAK_REPORT", "")
    if path:
        Path(path).write_text(json.dumps({"counts": scale, "rows": _rows.table}, indent=1) + "\n")
