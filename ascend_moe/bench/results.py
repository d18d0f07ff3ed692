"""What a run found: the numbers of every table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ascend_moe.bench import published
from ascend_moe.bench.cases import Case
from ascend_moe.bench.methods import GROUPS, LIMIT, METHODS, OURS, PEER
from ascend_moe.bench.statistics import Spread, Times, ratio, spread, times, too_noisy
from ascend_moe.bench.timing import CaseMarks


@dataclass(frozen=True)
class Row:
    """One method of one case. µs; ratios of round trips, iteration by iteration.

    Attributes:
        gb_per_s: payload there and back over the median round trip, of one rank.
        to_limit: round trip / the limit's. p10_to_limit: the ratio of their p10, which load hardly moves.
        to_ours: / that of the case's reference among ours.
        exact: sums equal to the reference in every bit; else within what another order of addition allows.
        first_us: the first round trip, memory not touched before; in no other number.
        flag: what a reader must know about this row, or ''.
    """

    name: str
    kind: str
    dispatch: Spread
    combine: Spread
    round_trip: Spread
    gb_per_s: float
    to_limit: Spread
    p10_to_limit: float
    to_ours: Spread | None
    exact: bool
    first_us: float
    flag: str = ""

    @property
    def noisy(self) -> bool:
        return self.round_trip.noisy


@dataclass(frozen=True)
class CaseResult:
    """One case.

    Attributes:
        limit: the limit's copy method with the lowest median round trip here.
        ours: the method of ours that peers are compared with.
        faster: of ours -> tuned or plain peer -> the peer's round trip / ours.
        switched_out: per rank, times another process was given the core. page_faults: per rank.
    """

    case: Case
    rows: list[Row]
    limit: str
    ours: str
    faster: dict[str, dict[str, Spread]]
    missing: dict[str, str]
    switched_out: list[int]
    page_faults: list[int]
    load: float
    cores: int
    l2_bytes: int
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def oversubscribed(self) -> bool:
        return self.case.world > self.cores

    @property
    def cache_resident(self) -> bool:
        """The BS * K rows of the way back fit into one core's L2."""
        return self.case.combine_bytes <= self.l2_bytes

    @property
    def too_noisy(self) -> bool:
        return too_noisy([row.round_trip for row in self.rows])

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def best_peer(self) -> Row | None:
        """The peer with the lowest median round trip."""
        peers = [row for row in self.rows if row.kind == PEER]
        return min(peers, key=lambda row: row.round_trip.p50, default=None)


def evaluate(
    case: Case, marks: Sequence[CaseMarks], load: float, cores: int, l2_bytes: int = 0
) -> CaseResult:
    """From what every rank measured of the case."""
    measured = {name: times([one.marks[name] for one in marks]) for name in marks[0].marks}
    first = {name: times([[one.first[name]] for one in marks]) for name in measured}
    trips = {name: one.round_trip for name, one in measured.items()}
    limit = min((name for name in GROUPS[LIMIT] if name in trips), key=lambda name: spread(trips[name]).p50)
    ours = next((name for name in ("direct", "window") if name in trips), "")
    rows = []
    for name, one in measured.items():
        trip = spread(trips[name])
        p10_to_limit = trip.p10 / spread(trips[limit]).p10
        rows.append(
            Row(
                name=name,
                kind=METHODS[name].kind,
                dispatch=spread(one.dispatch),
                combine=spread(one.combine),
                round_trip=trip,
                gb_per_s=(case.dispatch_bytes + case.combine_bytes) / trip.p50 / 1e3,
                to_limit=ratio(trips[name], trips[limit]),
                p10_to_limit=p10_to_limit,
                to_ours=ratio(trips[name], trips[ours]) if ours else None,
                exact=all(name in rank.exact for rank in marks),
                first_us=float(first[name].round_trip[0]),
                flag=published.flag(case, name, p10_to_limit),
            )
        )
    faster = {
        mine: {peer: ratio(trips[peer], trips[mine]) for peer in GROUPS[PEER] if peer in trips}
        for mine in GROUPS[OURS]
        if mine in trips
    }
    return CaseResult(
        case=case,
        rows=rows,
        limit=limit,
        ours=ours,
        faster=faster,
        missing=marks[0].missing,
        switched_out=[one.switched_out for one in marks],
        page_faults=[one.page_faults for one in marks],
        load=load,
        cores=cores,
        l2_bytes=l2_bytes,
        samples={name: _samples(one) for name, one in measured.items()},
    )


def _samples(one: Times) -> dict[str, list[float]]:
    return {"dispatch": one.dispatch.tolist(), "combine": one.combine.tolist()}


@dataclass(frozen=True)
class Limits:
    """What the machine does with 1..W ranks at it. GB/s of all ranks together, ns of a flag one way.

    ``rates[what][ranks]``; ``bytes`` are those one rank copies or reads.
    """

    world: int
    case: str
    bytes: int
    rates: dict[str, dict[int, float]]
    flags_ns: dict[str, Spread]


def limits(world: int, found: Sequence[dict[str, Any]]) -> Limits:
    """From what every rank measured."""
    size = found[0]["bytes"]
    rates: dict[str, dict[int, float]] = {}
    for what, by_ranks in found[0]["spans"].items():
        rates[what] = {}
        for active in (int(text) for text in by_ranks):
            spans = [one["spans"][what][str(active)] for one in found[:active]]
            us = [
                (max(s[i][1] for s in spans) - min(s[i][0] for s in spans)) / 1e3
                for i in range(len(spans[0]))
            ]
            rates[what][active] = active * size / spread(us).p50 / 1e3
    flags = {how: spread(values) for how, values in found[0]["flags_ns"].items() if values}
    return Limits(world, found[0]["case"], size, rates, flags)


@dataclass
class Run:
    """Everything: environment, limits by number of ranks, cases."""

    about: dict[str, Any]
    limits: list[Limits] = field(default_factory=list)
    cases: list[CaseResult] = field(default_factory=list)
