"""Rows of cases: few of them under `make test`, all under `make soak`, and one line a row in the end.

A test that belongs to a row takes ``numbers`` (the cases it is to run, each made from its number alone) and
``tally`` from ``row``; a test that is one case by itself is marked ``@pytest.mark.row("kill")``. The session
ends with a table of all rows. ASCEND_MOE_SOAK=full selects the full counts, ASCEND_MOE_SOAK_CASE=17 runs
case 17 alone, ASCEND_MOE_SOAK_REPORT=path writes the table as JSON.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

FULL = os.environ.get("ASCEND_MOE_SOAK", "") == "full"
_ONE = os.environ.get("ASCEND_MOE_SOAK_CASE", "")
_SHOWN = 5  # failures a test prints in full

# In the order of the table.
ROWS = (
    *("twin = reference", "invalid arguments", "configuration mismatch", "kill", "stop"),
    *("corrupt status", "window size", "special values", "back to back", "op order"),
    *("kill, explored", "stop, explored", "slow, explored", "corrupt status, explored"),
    *("window size, explored", "configuration mismatch, explored"),
)

Test = TypeVar("Test", bound=Callable[..., Any])
Count = TypeVar("Count")


def pick(quick: Count, full: Count) -> Count:
    """The count of this run."""
    return full if FULL else quick


def row(name: str, quick: int, full: int, chunk: int = 10**9) -> Callable[[Test], Test]:
    """A test of a row. ``chunk``: most cases at once, so that processes share the work and the waiting."""
    assert name in ROWS
    total = pick(quick, full)
    parts = [range(first, min(first + chunk, total)) for first in range(0, total, chunk)]
    if _ONE:
        parts = [range(int(_ONE), int(_ONE) + 1)]

    def mark(test: Test) -> Test:
        numbers = pytest.mark.parametrize("numbers", parts, ids=lambda part: f"{part.start}-{part[-1]}")
        return pytest.mark.row(name)(numbers(test))  # type: ignore[no-any-return]

    return mark


class Tally:
    """Counts the cases of one test; its numbers travel with the test's report."""

    def __init__(self, row: str, test: str) -> None:
        self.row = row
        self.test = test
        self.cases = 0
        self.failed: list[str] = []
        self.worst = 0.0
        self.kinds: Counter[str] = Counter()

    def count(self, kind: str = "", *, cases: int = 1, seconds: float = 0.0) -> None:
        """Cases that are right. ``kind``: what became of them, in words; ``seconds``: what took longest."""
        self.cases += cases
        self.worst = max(self.worst, seconds)
        if kind:
            self.kinds[kind] += cases

    def each(self, numbers: Iterable[int], case: Callable[[int], Any]) -> None:
        """Runs every case, also after one has failed; then fails with what reproduces those that did.

        ``case(number)`` returns None, what became of it, or a pair of that and a time in seconds.
        """
        for number in numbers:
            try:
                found = case(number)
            except Exception as error:
                self.cases += 1
                self.failed.append(self._how(number, error))
                if len(self.failed) > 20:
                    break
            else:
                kind, seconds = found if isinstance(found, tuple) else (found or "", 0.0)
                self.count(kind, seconds=seconds)
        if self.failed:
            shown = "\n".join(self.failed[:_SHOWN])
            pytest.fail(f"{len(self.failed)} of {self.cases} cases failed\n{shown}", pytrace=False)

    def _how(self, number: int, error: Exception) -> str:
        text = "".join(traceback.format_exception(error)[-6:]).strip()
        return f"{text}\nreproduce: ASCEND_MOE_SOAK_CASE={number} pytest {self.test}"

    def numbers(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "cases": self.cases,
            "failed": len(self.failed),
            "worst": self.worst,
            "kinds": dict(self.kinds),
        }


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began
