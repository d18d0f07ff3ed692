"""Timelines of an engine: phases, waits and instructions of every core of every rank."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

MEASURED = "measured on this CPU"
PREDICTED = "predicted (model)"
PIPES = ("S", "V", "MTE2", "MTE3")

# Names of events other than calls of the AscendC API.
LAUNCH, PHASE, WAIT, SYNC_ALL, ARRIVAL = "launch", "phase", "wait", "SyncAll", "arrival"

# twin::TimelineEvent (twin/include/twin/engine/timeline.h).
_NAMES = ("start_ns", "end_ns", "bytes", "flow", "rank", "core", "peer", "pipe", "name", "phase")
_LAYOUT = np.dtype([*zip(_NAMES, ("f8", "f8", "u8", "u8", "i4", "u4", "i4", "u4", "u8", "u8"), strict=True)])
EVENT_BYTES = _LAYOUT.itemsize


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction, wait or phase of one core.

    Attributes:
        rank, core: the rank and the core.
        pipe: one of ``PIPES``.
        name: the API call, or ``launch`` (a whole op; ``phase`` is the op's name), ``phase`` (a step of it),
            ``wait``, ``SyncAll``, ``arrival`` (a status block seen by a wait).
        phase: the step of the op, "" before the first.
        start_ns, end_ns: times on one clock for all ranks.
        bytes: bytes moved between GM and UB, or 0.
        peer: the other rank whose window a copy reads or writes, else -1; of an ``arrival``: the sender.
        flow: number shared by the store of a status block and the wait that it releases; 0 for none.
    """

    rank: int
    core: int
    pipe: str
    name: str
    phase: str
    start_ns: float
    end_ns: float
    bytes: int = 0
    peer: int = -1
    flow: int = 0

    @property
    def ns(self) -> float:
        """Duration in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass
class Timeline:
    """Events of ops on all ranks, sorted by start. ``title`` and ``details`` describe the run.

    ``source``: ``MEASURED`` or ``PREDICTED``. ``dropped``: number of events that did not fit into the buffer.
    """

    source: str
    events: list[Event] = field(default_factory=list)
    title: str = ""
    details: Mapping[str, str] = field(default_factory=dict)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.events = sorted(self.events, key=lambda event: (event.start_ns, -event.end_ns))

    @property
    def ranks(self) -> list[int]:
        """Ranks with events, in order."""
        return sorted({event.rank for event in self.events})

    @property
    def start_ns(self) -> float:
        """Start of the first event in nanoseconds, or 0 if there are no events."""
        return min((event.start_ns for event in self.events), default=0.0)

    @property
    def end_ns(self) -> float:
        """End of the last event in nanoseconds, or 0 if there are no events."""
        return max((event.end_ns for event in self.events), default=0.0)

    def launches(self) -> list[Event]:
        """Return the ``launch`` events, one per op and rank, by start."""
        return [event for event in self.events if event.name == LAUNCH]

    def between(self, start_ns: float, end_ns: float) -> Timeline:
        """Return a timeline of the events that lie entirely between start_ns and end_ns."""
        inside = [event for event in self.events if start_ns <= event.start_ns and event.end_ns <= end_ns]
        return replace(self, events=inside)


def from_native(address: int, count: int) -> list[Event]:
    """Return the events in a C++ array of ``twin::TimelineEvent``.

    Args:
        address: address of the array.
        count: number of events.
    """
    if count == 0:
        return []
    raw = (ctypes.c_char * (count * EVENT_BYTES)).from_address(address)
    rows = np.frombuffer(memoryview(raw), dtype=_LAYOUT)
    pointers = np.unique(np.concatenate([rows["name"], rows["phase"]])).tolist()
    text = {pointer: ctypes.string_at(pointer).decode() if pointer else "" for pointer in pointers}
    columns = [rows[name].tolist() for name in _NAMES]
    return [
        Event(rank, core, PIPES[pipe], text[name], text[phase], start, end, moved, peer, flow)
        for start, end, moved, flow, rank, core, peer, pipe, name, phase in zip(*columns, strict=True)
    ]


def with_phases(events: Sequence[Event]) -> list[Event]:
    """Return the events; if no ``phase`` event is among them, add one for every step of every core.

    A step lasts from its first scalar work, or else its first instruction, to the next step.
    """
    if any(event.name == PHASE for event in events):
        return list(events)
    by_core: dict[tuple[int, int], list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start_ns):
        if event.name != LAUNCH:
            by_core.setdefault((event.rank, event.core), []).append(event)
    phases = []
    for (rank, core), own in by_core.items():
        lead = [event for event in own if event.pipe == "S"] or own
        steps = [(phase, next(group).start_ns) for phase, group in groupby(lead, lambda event: event.phase)]
        ends = [start for _, start in steps[1:]] + [max(event.end_ns for event in own)]
        for (phase, start), end in zip(steps, ends, strict=True):
            phases.append(Event(rank, core, "S", PHASE, phase, start, end))
    return [*events, *phases]
