"""The numbers of a run: times over all ranks, percentiles, ratios per iteration; and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_moe.bench.cases import Case
from ascend_moe.bench.methods import BARE, GROUPS, LIMIT, METHODS, OURS, PEER
from ascend_moe.bench.rank import CaseMarks

NOISY = 1.5  # p50 / p10
_HINDERED = 1.25  # x as long
SCHEMA = "ascend-moe-bench/3"  # changes with the meaning of a field of the JSON

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Percentiles p10, p50 (median) and p90 of n samples; NaN without samples."""

    p10: float
    p50: float
    p90: float
    n: int

    @property
    def noisy(self) -> bool:
        return self.p50 > NOISY * self.p10


def spread(samples: Sequence[float] | Floats) -> Spread:
    values = np.asarray(samples, dtype=np.float64)
    low, middle, high = np.percentile(values, [10, 50, 90]) if values.size else [np.nan] * 3
    return Spread(float(low), float(middle), float(high), int(values.size))


def times(marks_by_rank: Sequence[Sequence[Sequence[int]]]) -> tuple[Floats, Floats]:
    """Return the times of n iterations in µs, (n,) of dispatch and (n,) of combine: first rank's begin to last's end.

    ``marks_by_rank[rank][iteration]`` = (dispatch begins, ends, combine begins, ends) in ns. The duration on one rank
    would be too short if ranks share a core, because it starts when the rank is scheduled.
    """
    marks = np.asarray(marks_by_rank, dtype=np.int64).reshape(len(marks_by_rank), -1, 2, 2)
    spans: Floats = (marks[..., 1].max(axis=0) - marks[..., 0].min(axis=0)) / 1e3
    return spans[:, 0], spans[:, 1]


@dataclass(frozen=True)
class Ratios:
    """Ratios of a method's round trips to another's, per iteration; ``p10``: of their p10, less sensitive to load."""

    cold: Spread
    p10: float
    warm: Spread


@dataclass(frozen=True)
class Row:
    """Results of one method in a case. Times in µs; ratios of round trips per iteration.

    ``to``: ratios to the bare exchange ("bare") and to the limit ("limit"), each the fastest method of that kind.
    ``warm``: round trips after calls of the same method; the other times follow a call of another method. ``faster``:
    for this package's methods, peer -> the peer's round trip / this method's. ``exact``: sums equal the reference bit
    for bit on all ranks. ``first_us``: the first round trip, not part of the other times. ``samples``: all times by op.
    """

    name: str
    kind: str
    dispatch: Spread
    combine: Spread
    round_trip: Spread
    gb_per_s: float
    to: dict[str, Ratios]
    warm: Spread
    faster: dict[str, Spread]
    exact: bool
    first_us: float
    samples: dict[str, list[float]]


@dataclass(frozen=True)
class CaseResult:
    """Results of a case. ``best``: the methods of kind "bare" and "limit" with the lowest median round trip.

    ``missing``: method -> why it did not run. ``load``: load average when the ranks ended. ``cores``: CPU cores.
    ``hindrance``: factor by which computation slows down while all ranks compute, the largest of all ranks.
    ``latency_ns``: of a flag between the ranks' cores, before and after the case.
    """

    case: Case
    rows: list[Row]
    best: dict[str, str]
    missing: dict[str, str]
    load: float
    cores: int
    hindrance: float = 1.0
    latency_ns: tuple[float, float] = (0.0, 0.0)

    @property
    def oversubscribed(self) -> bool:
        return self.case.world > self.cores

    @property
    def hindered(self) -> bool:
        """Whether ranks slow each other down by more than a quarter (``hindrance``), although each has a core."""
        return self.hindrance > _HINDERED and not self.oversubscribed

    @property
    def too_noisy(self) -> bool:
        """Whether more than half of the rows are noisy, so that ratios are not meaningful."""
        return 2 * sum(row.round_trip.noisy for row in self.rows) > len(self.rows)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def best_peer(self) -> Row | None:
        """Return the row of the peer (gloo or MPI) with the lowest median round trip; None: no peer was timed."""
        peers = [row for row in self.rows if row.kind == PEER]
        return min(peers, key=lambda row: row.round_trip.p50, default=None)


def evaluate(case: Case, marks: Sequence[CaseMarks], load: float, cores: int) -> CaseResult:
    """Return a case's times and ratios from ``marks[rank]``; ratios are per iteration, so load affects both."""
    measured = {name: times([rank.marks[name] for rank in marks]) for name in marks[0].marks}
    trips = {name: dispatch + combine for name, (dispatch, combine) in measured.items()}
    spreads = {name: spread(trip) for name, trip in trips.items()}
    warm = {name: np.sum(times([rank.warm[name] for rank in marks]), axis=0) for name in marks[0].marks}
    warm_spreads = {name: spread(trip) for name, trip in warm.items()}
    best, warm_best = ({kind: _fastest(kind, of) for kind in (BARE, LIMIT)} for of in (spreads, warm_spreads))
    rows = []
    for name, (dispatch, combine) in measured.items():
        kind, trip = METHODS[name].kind, spreads[name]
        to = {
            kind: Ratios(
                spread(trips[name] / trips[other]),
                trip.p10 / spreads[other].p10,
                spread(warm[name] / warm[warm_best[kind]]),
            )
            for kind, other in best.items()
        }
        peers = [peer for peer in GROUPS[PEER] if peer in trips and kind == OURS]
        rows.append(
            Row(
                name,
                kind,
                spread(dispatch),
                spread(combine),
                trip,
                gb_per_s=(case.dispatch_bytes + case.combine_bytes) / trip.p50 / 1e3,
                to=to,
                warm=warm_spreads[name],
                faster={peer: spread(trips[peer] / trips[name]) for peer in peers},
                exact=all(name in rank.exact for rank in marks),
                first_us=float(np.sum(times([[rank.first[name]] for rank in marks]))),
                samples={"dispatch": dispatch.tolist(), "combine": combine.tolist()},
            )
        )
    hindrance = max(rank.hindrance for rank in marks)
    return CaseResult(case, rows, best, marks[0].missing, load, cores, hindrance, marks[0].latency_ns)


def _fastest(kind: str, spreads: dict[str, Spread]) -> str:
    return min((name for name in GROUPS[kind] if name in spreads), key=lambda name: spreads[name].p50)


@dataclass
class Run:
    """Result of a run of the benchmark: ``about`` the machine and versions, and the result of each case."""

    about: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as a dict for JSON, including the times of dispatch and combine in each iteration."""
        cases = [
            {**asdict(case), "oversubscribed": case.oversubscribed, "too_noisy": case.too_noisy} for case in self.cases
        ]
        return {"schema": SCHEMA, "about": self.about, "cases": cases}
