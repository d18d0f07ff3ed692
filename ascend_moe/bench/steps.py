"""Which steps of an op the time goes to: the fast engine's own record of one round, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ascend_moe.bench.cases import Case
from ascend_moe.timed.roundtrip import TraceRequest, measured
from ascend_moe.timeline.stats import op_runs, phase_rows, rank_ns

ALGORITHMS = ("direct", "window")


@dataclass(frozen=True)
class Step:
    """µs, means over the ranks: a core works in it, or stands in SyncAll, or waits for another rank."""

    name: str
    working: float
    sync_all: float
    waiting: float


@dataclass(frozen=True)
class Profile:
    """One op. ``us``: of the launch, mean over the ranks, slowed by being recorded."""

    case: str
    algorithm: str
    op: str
    us: float
    steps: list[Step]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Profile:
        """Undoes ``as_dict``."""
        return cls(**{**values, "steps": [Step(**step) for step in values["steps"]]})


def profiles(cases: Sequence[Case], repeat: int) -> list[Profile]:
    """Dispatch and combine of each case and algorithm: the round at p10 of ``repeat``, ranks as threads."""
    found = []
    for case in cases:
        for algorithm in ALGORITHMS:
            request = TraceRequest(
                case.world, case.batch, case.hidden, case.topk, case.experts, bool(case.quant_mode),
                algorithm=algorithm, repeat=repeat,
            )  # fmt: skip
            for one in op_runs(measured(request)):
                ranks = rank_ns(one).values()
                steps = [
                    Step(row.phase or "before the first step", *(round(ns / 1e3, 2) for ns in times))
                    for row in phase_rows(one)
                    for times in [(row.working, row.sync_all, row.wait)]
                ]
                us = round(sum(ranks) / len(ranks) / 1e3, 2)
                found.append(Profile(case.name, algorithm, one.name, us, steps))
    return found


def table(one: Profile) -> list[list[str]]:
    """Head and rows, the largest share first."""
    rows = [["step", "works, µs", "SyncAll, µs", "waits, µs", "share of the op"]]
    for step in sorted(one.steps, key=lambda step: -step.working):
        share = f"{step.working / one.us:.0%}" if one.us else ""
        rows.append([step.name, f"{step.working:.1f}", f"{step.sync_all:.1f}", f"{step.waiting:.1f}", share])
    return rows
