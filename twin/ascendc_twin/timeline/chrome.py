"""Timelines as trace-event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank; its threads are the tracks of the cores: phases that contain waits, then one track per pipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from . import ARRIVAL, LAUNCH, PHASE, PIPES, SYNC_ALL, WAIT, Event, Timeline, with_phases

Record = dict[str, Any]
Interval = tuple[float, float]
_TRACKS = 1 + len(PIPES)  # a core's: phases, then its pipes
_LAUNCH_TRACK = 0
_ON_PHASES = (PHASE, WAIT, SYNC_ALL)
_COUNTER_BINS = 200


def text(timeline: Timeline, zero: float | None = None) -> str:
    """Return `document` as JSON text."""
    return json.dumps(document(timeline, zero), separators=(",", ":"))


def document(timeline: Timeline, zero: float | None = None) -> Record:
    """Return the trace as a JSON object. ``zero``: ns of the timeline that become time 0; None: the first event."""
    zero = timeline.start_ns if zero is None else zero
    events = with_phases(timeline.events)
    details = {"title": timeline.title, "source": timeline.source, "dropped events": timeline.dropped}
    return {
        "displayTimeUnit": "ns",
        "otherData": {**details, **timeline.details},
        "traceEvents": [
            *_names(events, timeline.source),
            *_slices(events, zero),
            *_flows(events, zero),
            *_link_use(events, zero, timeline.start_ns, timeline.end_ns),
        ],
    }


def _track(event: Event) -> int:
    if event.name == LAUNCH:
        return _LAUNCH_TRACK
    inner = 0 if event.name in _ON_PHASES else 1 + PIPES.index(event.pipe)
    return 1 + event.core * _TRACKS + inner


def _names(events: Sequence[Event], source: str) -> Iterator[Record]:
    for rank in sorted({event.rank for event in events}):
        yield _meta(rank, 0, "process_name", {"name": f"rank {rank} ({source})"})
        yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
    for rank, track in sorted({(event.rank, _track(event)) for event in events if event.name != ARRIVAL}):
        core, inner = divmod(track - 1, _TRACKS)
        name = "ops" if track == _LAUNCH_TRACK else f"core {core}{f' {PIPES[inner - 1]}' if inner else ''}"
        yield _meta(rank, track, "thread_name", {"name": name})
        yield _meta(rank, track, "thread_sort_index", {"sort_index": track})


def _meta(rank: int, track: int, name: str, args: Record) -> Record:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": args}


def _slices(events: Sequence[Event], zero: float) -> Iterator[Record]:
    """Return complete events, which follow or enclose each other on a track, as viewers require."""
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event.name != ARRIVAL:
            tracks.setdefault((event.rank, _track(event)), []).append(event)
    for (rank, track), own in tracks.items():
        own.sort(key=lambda event: (event.start_ns, -event.end_ns, event.name != PHASE))
        open_ends: list[float] = []
        for event in own:
            while open_ends and open_ends[-1] <= event.start_ns:
                open_ends.pop()
            end = min(event.end_ns, open_ends[-1]) if open_ends else event.end_ns
            open_ends.append(end)
            whole = event.name in (LAUNCH, PHASE)
            args: Record = {} if whole else {"phase": event.phase}
            args |= {"bytes": event.bytes} if event.bytes else {}
            args |= {"peer": event.peer} if event.peer >= 0 else {}
            yield {
                "ph": "X",
                "pid": rank,
                "tid": track,
                "ts": _us(event.start_ns - zero),
                "dur": (round(end - zero) - round(event.start_ns - zero)) / 1000,
                "name": label(event),
                "cat": "phase" if whole else event.pipe,
                "args": args,
            }


def label(event: Event) -> str:
    """Return the name to show: a launch's op, a phase's step ("enter" before the first), else the event's own name."""
    return event.phase or "enter" if event.name in (LAUNCH, PHASE) else event.name


def _us(ns: float) -> float:
    """Convert to microseconds, rounded to nanoseconds so that slices still enclose each other."""
    return round(ns) / 1000


def arrows(events: Sequence[Event]) -> Iterator[tuple[Event, Event, float]]:
    """Yield the store of each status block, the wait that it released, and the ns at which the wait saw it."""
    stores: dict[int, list[Event]] = {}
    waits: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event.name == WAIT:
            waits.setdefault((event.rank, event.core), []).append(event)
        elif event.flow and event.name != ARRIVAL:
            stores.setdefault(event.flow, []).append(event)
    seen = [event for event in events if event.flow and event.name == ARRIVAL]
    if not seen:
        seen = [event for event in events if event.flow and event.name == WAIT]
    for event in seen:
        before = [store for store in stores.get(event.flow, ()) if store.start_ns <= event.end_ns]
        own = waits.get((event.rank, event.core), ())
        ended = [wait for wait in own if wait.start_ns <= event.end_ns <= wait.end_ns]
        if before and ended:
            yield max(before, key=lambda store: store.start_ns), ended[0], event.end_ns


def _flows(events: Sequence[Event], zero: float) -> Iterator[Record]:
    for number, (store, wait, at) in enumerate(arrows(events), start=1):
        common = {"name": "status", "cat": "status", "id": number}
        # Inside the slices that they bind to. A store may be seen before its rank has noted that it ended.
        end = max(wait.start_ns, min(at, wait.end_ns - min(10.0, wait.ns / 2)))
        begin = max(store.start_ns, min(store.start_ns + store.ns / 2, end))
        yield {**common, "ph": "s", "pid": store.rank, "tid": _track(store), "ts": _us(begin - zero)}
        yield {**common, "ph": "f", "bp": "e", "pid": wait.rank, "tid": _track(wait), "ts": _us(end - zero)}


def _link_use(events: Sequence[Event], zero: float, start: float, end: float) -> Iterator[Record]:
    """Return counters of GB/s between each rank and the windows of others."""
    moves = [event for event in events if event.peer >= 0 and event.bytes]
    if not moves or end <= start:
        return
    width = (end - start) / _COUNTER_BINS
    for rank in sorted({event.rank for event in moves}):
        own = [event for event in moves if event.rank == rank]
        moved = {f"rank {peer}": np.zeros(_COUNTER_BINS) for peer in sorted({event.peer for event in own})}
        for event in own:  # a copy's bytes spread over its time
            last = max(event.end_ns, event.start_ns + (end - start) * 1e-9)
            share = coverage([(event.start_ns, last)], start, end, _COUNTER_BINS)
            moved[f"rank {event.peer}"] += event.bytes * share / max(share.sum(), 1e-12)
        # In every bin, and 0 at the end.
        rates = {peer: [*(sums / (end - start) * _COUNTER_BINS).round(3).tolist(), 0.0] for peer, sums in moved.items()}
        before = None
        for i, values in enumerate(zip(*rates.values(), strict=True)):
            if values != before:
                yield {
                    "ph": "C",
                    "pid": rank,
                    "name": "windows of peers, GB/s",
                    "ts": _us(start - zero + i * width),
                    "args": dict(zip(rates, values, strict=True)),
                }
            before = values


def coverage(intervals: Iterable[Interval], start: float, end: float, bins: int) -> Any:
    """Divide start to end into equal bins; return the share of each that intervals cover, summed over the intervals.

    Returns:
        float64 array (bins,).
    """
    spans = np.array(list(intervals), dtype=float).reshape(-1, 2)
    edges = np.clip((spans - start) / (end - start) * bins, 0, bins)
    marks, upto = np.arange(bins + 1)[:, None], np.zeros(bins + 1)
    step = 4_000_000 // bins  # bounds memory
    for at in range(0, len(edges), step):
        low, high = edges[at : at + step].T
        upto += np.clip(marks - low, 0, high - low).sum(axis=1)  # the integral up to each bin's end
    return np.diff(upto)
