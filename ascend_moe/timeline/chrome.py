"""Timelines as trace-event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank; its threads are the cores' tracks: phases with waits inside them, then one track a pipe.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import ARRIVAL, LAUNCH, PHASE, PIPES, SYNC_ALL, WAIT, Event, Timeline, with_phases

Record = dict[str, Any]
Writer = Callable[[Timeline], str]
_TRACKS = 1 + len(PIPES)  # a core's: phases, then its pipes
_LAUNCH_TRACK = 0
_ON_PHASES = (PHASE, WAIT, SYNC_ALL)
_COUNTER_BINS = 200


def write(timeline: Timeline, path: str | Path) -> None:
    """Writes the file whole or not at all.

    Raises:
        OSError: it cannot be written there.
    """
    write_whole(Path(path), text(timeline))


def text(timeline: Timeline, zero: float | None = None) -> str:
    """The file's text."""
    return json.dumps(document(timeline, zero), separators=(",", ":"))


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step, so that no reader sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def document(timeline: Timeline, zero: float | None = None) -> Record:
    """The JSON object: ``traceEvents``, times in microseconds since ``zero`` ns; None: the first event."""
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


def _track_name(track: int) -> str:
    if track == _LAUNCH_TRACK:
        return "ops"
    core, inner = divmod(track - 1, _TRACKS)
    return f"core {core}" if inner == 0 else f"core {core} {PIPES[inner - 1]}"


def _names(events: Sequence[Event], source: str) -> Iterator[Record]:
    for rank in sorted({event.rank for event in events}):
        yield _meta(rank, 0, "process_name", {"name": f"rank {rank} ({source})"})
        yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
    for rank, track in sorted({(event.rank, _track(event)) for event in events if event.name != ARRIVAL}):
        yield _meta(rank, track, "thread_name", {"name": _track_name(track)})
        yield _meta(rank, track, "thread_sort_index", {"sort_index": track})


def _meta(rank: int, track: int, name: str, args: Record) -> Record:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": args}


def _slices(events: Sequence[Event], zero: float) -> Iterator[Record]:
    """Complete events. On one track they follow or enclose each other: a reader drops what overlaps."""
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
            args: Record = {}
            if event.name not in (LAUNCH, PHASE):
                args["phase"] = event.phase
            if event.bytes:
                args["bytes"] = event.bytes
            if event.peer >= 0:
                args["peer"] = event.peer
            yield {
                "ph": "X",
                "pid": rank,
                "tid": track,
                "ts": _us(event.start_ns - zero),
                "dur": (round(end - zero) - round(event.start_ns - zero)) / 1000,
                "name": label(event),
                "cat": "phase" if event.name in (LAUNCH, PHASE) else event.pipe,
                "args": args,
            }


def label(event: Event) -> str:
    """What a slice is called: a phase or an op by its own name."""
    return event.phase or "enter" if event.name in (LAUNCH, PHASE) else event.name


def _us(ns: float) -> float:
    """Whole nanoseconds, as microseconds: what encloses something before does so after rounding."""
    return round(ns) / 1000


def arrows(events: Sequence[Event]) -> Iterator[tuple[Event, Event, float]]:
    """Store of a status block, the wait that it released, and when the wait saw it."""
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
        wait = next(
            (
                one
                for one in waits.get((event.rank, event.core), ())
                if one.start_ns <= event.end_ns <= one.end_ns
            ),
            None,
        )
        if before and wait is not None:
            yield max(before, key=lambda store: store.start_ns), wait, event.end_ns


def _flows(events: Sequence[Event], zero: float) -> Iterator[Record]:
    for number, (store, wait, at) in enumerate(arrows(events), start=1):
        common = {"name": "status", "cat": "status", "id": number}
        # Inside the slices that they bind to. A store may be seen before its rank has noted that it ended.
        end = max(wait.start_ns, min(at, wait.end_ns - min(10.0, wait.ns / 2)))
        begin = max(store.start_ns, min(store.start_ns + store.ns / 2, end))
        yield {**common, "ph": "s", "pid": store.rank, "tid": _track(store), "ts": _us(begin - zero)}
        yield {**common, "ph": "f", "bp": "e", "pid": wait.rank, "tid": _track(wait), "ts": _us(end - zero)}


def _link_use(events: Sequence[Event], zero: float, start: float, end: float) -> Iterator[Record]:
    """Counters: what each rank moves to and from the windows of others, GB/s."""
    moves = [event for event in events if event.peer >= 0 and event.bytes]
    if not moves or end <= start:
        return
    width = (end - start) / _COUNTER_BINS
    for rank in sorted({event.rank for event in moves}):
        own = [event for event in moves if event.rank == rank]
        peers = sorted({event.peer for event in own})
        bins = [dict.fromkeys(peers, 0.0) for _ in range(_COUNTER_BINS + 1)]
        for event in own:
            _spread(bins, event, start, width)
        for i, rates in enumerate(bins):
            if i == 0 or rates != bins[i - 1]:
                args = {f"rank {peer}": round(moved / width, 3) for peer, moved in rates.items()}
                yield {
                    "ph": "C",
                    "pid": rank,
                    "name": "windows of peers, GB/s",
                    "ts": _us(start - zero + i * width),
                    "args": args,
                }


def _spread(bins: list[dict[int, float]], event: Event, zero: float, width: float) -> None:
    """Adds a copy's bytes to the bins that it lies in, each its share."""
    first, last = (event.start_ns - zero) / width, (event.end_ns - zero) / width
    low, high = int(first), min(int(last), _COUNTER_BINS - 1)
    if last - first < 1e-9:
        bins[min(low, high)][event.peer] += event.bytes
        return
    for i in range(low, high + 1):
        share = (min(last, i + 1) - max(first, i)) / (last - first)
        bins[i][event.peer] += event.bytes * max(0.0, share)
