"""Statistics of a timeline: its ops, the times of their steps, waits between ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import ARRIVAL, LAUNCH, PHASE, SYNC_ALL, WAIT, Event, Timeline, with_phases
from .chrome import Interval, arrows


@dataclass(frozen=True)
class OpRun:
    """The run ``number`` (from 0) of op ``name`` on all ranks. ``events`` are sorted by start and include phases."""

    name: str
    number: int
    events: Sequence[Event]
    start_ns: float
    end_ns: float

    @property
    def ns(self) -> float:
        return self.end_ns - self.start_ns

    @property
    def ranks(self) -> list[int]:
        return sorted({event.rank for event in self.events})

    @property
    def cores(self) -> int:
        """Cores per rank."""
        return 1 + max((event.core for event in self.events), default=0)

    @property
    def phases(self) -> list[str]:
        """Phases in the order in which they begin."""
        return list(dict.fromkeys(event.phase for event in self.events if event.name == PHASE))


@dataclass(frozen=True)
class PhaseRow:
    """One step of an op; times in ns, mean over the ranks.

    ``working``: time in which at least one core of a rank worked; ``worst``: that of the slowest rank; ``cores``: mean
    number of cores that worked in this time. ``sync_all``, ``wait``: time of a core in SyncAll, and in waits for other
    ranks, mean over the cores. ``bytes``: bytes that a rank moved between GM and UB.
    """

    phase: str
    working: float
    worst: float
    cores: float
    sync_all: float
    wait: float
    bytes: float


@dataclass(frozen=True)
class Waited:
    """A wait for a status block, the store that ended it, and the time at which the wait saw the block."""

    wait: Event
    store: Event
    seen_ns: float


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals as sorted, disjoint intervals."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def without(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Return the parts of ``intervals`` that lie in none of ``holes``, sorted and disjoint."""
    found: list[Interval] = []
    cuts = merged(holes)
    for start, end in merged(intervals):
        at = start
        for low, high in cuts:
            if high <= at or low >= end:
                continue
            if low > at:
                found.append((at, low))
            at = max(at, high)
        if at < end:
            found.append((at, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def op_runs(timeline: Timeline) -> list[OpRun]:
    """Return the runs of all ops by start. Run n of an op consists of the n-th launch of this op on every rank."""
    by_rank: dict[int, list[Event]] = {}
    for event in with_phases(timeline.events):
        by_rank.setdefault(event.rank, []).append(event)
    found: dict[tuple[str, int], list[Event]] = {}
    for own in by_rank.values():
        counts: dict[str, int] = {}
        own.sort(key=lambda e: e.start_ns)
        starts = [e.start_ns for e in own]
        for launch in [e for e in own if e.name == LAUNCH]:
            number = counts[launch.phase] = counts.get(launch.phase, -1) + 1
            low, high = bisect_left(starts, launch.start_ns), bisect_right(starts, launch.end_ns)
            inside = (e for e in own[low:high] if e.end_ns <= launch.end_ns)
            found.setdefault((launch.phase, number), []).extend(inside)
    runs = [
        OpRun(
            name,
            number,
            sorted(events, key=lambda e: (e.start_ns, -e.end_ns)),
            min(e.start_ns for e in events if e.name == LAUNCH),
            max(e.end_ns for e in events if e.name == LAUNCH),
        )
        for (name, number), events in found.items()
    ]
    return sorted(runs, key=lambda run: run.start_ns)


def working(run: OpRun, rank: int) -> dict[str, dict[int, list[Interval]]]:
    """Return phase -> core -> intervals in which this core of ``rank`` worked: not in SyncAll, not in a wait."""
    slices: dict[tuple[str, int], list[Interval]] = {}
    blocked: dict[int, list[Interval]] = {}
    for event in run.events:
        if event.rank != rank:
            continue
        if event.name == PHASE:
            slices.setdefault((event.phase, event.core), []).append((event.start_ns, event.end_ns))
        elif event.name in (SYNC_ALL, WAIT):
            blocked.setdefault(event.core, []).append((event.start_ns, event.end_ns))
    found: dict[str, dict[int, list[Interval]]] = {}
    for (phase, core), times in slices.items():
        found.setdefault(phase, {})[core] = without(times, blocked.get(core, ()))
    return found


def phase_rows(run: OpRun) -> list[PhaseRow]:
    """Return the statistics of each step of an op, in the order in which the steps begin."""
    ranks = run.ranks
    per_rank = {rank: working(run, rank) for rank in ranks}

    def mean_blocked(name: str, phase: str) -> float:
        times = (e.ns for e in run.events if e.name == name and e.phase == phase)
        return sum(times) / (len(ranks) * run.cores)

    rows = []
    for phase in run.phases:
        unions, sums = [], []
        for rank in ranks:
            cores = per_rank[rank].get(phase, {})
            unions.append(total(merged(piece for own in cores.values() for piece in own)))
            sums.append(sum(total(own) for own in cores.values()))
        moved = sum(e.bytes for e in run.events if e.phase == phase and e.name not in (LAUNCH, ARRIVAL))
        rows.append(
            PhaseRow(
                phase,
                sum(unions) / len(ranks),
                max(unions),
                sum(sums) / sum(unions) if sum(unions) else 0.0,
                mean_blocked(SYNC_ALL, phase),
                mean_blocked(WAIT, phase),
                moved / len(ranks),
            )
        )
    return rows


def longest_waits(run: OpRun) -> list[Waited]:
    """Return each rank's longest wait for a block of another rank whose store is recorded, in descending order."""
    found: dict[int, Waited] = {}
    last: dict[int, tuple[Event, Event, float]] = {}  # a wait is released by the last block that it saw
    for store, wait, seen in arrows(run.events):
        if id(wait) not in last or seen >= last[id(wait)][2]:
            last[id(wait)] = (store, wait, seen)
    for store, wait, seen in last.values():
        if store.rank != wait.rank and (wait.rank not in found or wait.ns > found[wait.rank].wait.ns):
            found[wait.rank] = Waited(wait, store, seen)
    return sorted(found.values(), key=lambda waited: -waited.wait.ns)
