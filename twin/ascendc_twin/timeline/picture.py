"""A timeline as SVG: for each rank the steps of an op, the use of its pipes, and its waits over time."""

from __future__ import annotations

from html import escape
from itertools import groupby

import numpy as np

from . import LAUNCH, MEASURED, SYNC_ALL, WAIT, Timeline
from .chrome import coverage
from .stats import OpRun, Waited, longest_waits, op_runs, without, working

WIDTH = 1160
_LEFT, _RIGHT = 92, 16
_PLOT = WIDTH - _LEFT - _RIGHT
_BINS = _PLOT // 2
_LANE_BINS = _PLOT // 4
_BAND, _LANE, _GAP = 24, 16, 26
_MOST_RANKS = 4

INK, MUTED, GRID, PAPER = "#1c2430", "#5b6675", "#e3e7ec", "#ffffff"
WAITING, CORE_BARRIER, IDLE = "#d64545", "#e3a008", "#eef1f4"
_PALETTE = ("#7f8fa3", "#3b6fb6", "#2a9d8f", "#8a5bb5", "#c77b30", "#4f9d4a", "#b5527f", "#5fa8c9", "#9c8a3d")
_LANES = (("MTE2", "#2f7fc1"), ("V", "#8a5bb5"), ("MTE3", "#2a9d8f"), ("wait", WAITING), ("SyncAll", CORE_BARRIER))
_HOW_MEASURED = (
    "Band: the step that the rank works in, its cores one after the other on one thread; hatched: it waits. "
    "Below: the share of its time in copies from and to GM, and in waits for others."
)
_HOW_PREDICTED = (
    "Band: the step that most working cores of the rank are in; hatched: none works. Below: the share of its "
    "cores whose pipe is busy, that wait for other ranks, that are in SyncAll."
)
_FONT = "font-family='Inter,Segoe UI,Helvetica,Arial,sans-serif'"


def svg(timeline: Timeline) -> str:
    """Return the text of an SVG file: ops one below the other, each with the (at most 4) ranks that end last."""
    runs = op_runs(timeline)
    names = dict.fromkeys(phase for run in runs for phase in run.phases)
    colours = {name: _PALETTE[i % len(_PALETTE)] for i, name in enumerate(names)}
    parts: list[str] = [_heading(timeline, colours)]
    top = 96 + 22 * ((len(colours) - 1) // 6)
    for run in runs:
        body, height = _op(run, colours, top, one_thread=timeline.source == MEASURED)
        parts.append(body)
        top += height
    height = top + 8
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' "
        f"height='{height}' {_FONT} font-size='12' fill='{INK}'>"
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
        f"orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker>"
        "<pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        f"<rect width='6' height='6' fill='{IDLE}'/><rect width='1.5' height='6' fill='#cdd4dc'/>"
        "</pattern></defs>"
        f"<rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {extra}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str, title: str = "", extra: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}' {extra}>{inside}</rect>"
    )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def phase_name(phase: str) -> str:
    return phase or "enter"


def _heading(timeline: Timeline, colours: dict[str, str]) -> str:
    source = f"font-size='14' font-weight='600' text-anchor='end' fill='{WAITING}'"
    how = _HOW_MEASURED if timeline.source == MEASURED else _HOW_PREDICTED
    parts = [
        _text(16, 28, timeline.title or "Timeline", "font-size='18' font-weight='600'"),
        _text(WIDTH - _RIGHT, 28, timeline.source, source),
        _text(16, 48, how, f"fill='{MUTED}'"),
    ]
    for i, (phase, colour) in enumerate(colours.items()):
        x, y = 16 + (i % 6) * 188, 62 + 22 * (i // 6)
        parts.append(_box(x, y, 14, 14, colour, extra="rx='3'") + _text(x + 20, y + 11.5, phase_name(phase)))
    return "".join(parts)


def _op(run: OpRun, colours: dict[str, str], top: int, *, one_thread: bool) -> tuple[str, int]:
    """Draw one op: heading, axis, ranks, arrows. Return the elements and their height."""
    scale = _PLOT / run.ns
    ends = {event.rank: event.end_ns for event in run.events if event.name == LAUNCH}
    shown = sorted(sorted(run.ranks, key=lambda rank: -ends.get(rank, 0))[:_MOST_RANKS])
    hidden = len(run.ranks) - len(shown)
    # cores that share a thread are in SyncAll because others run
    seen = {event.pipe for event in run.events if event.pipe != "S"} | {event.name for event in run.events}
    lanes = [lane for lane in _LANES if lane[0] in seen and not (one_thread and lane[0] == SYNC_ALL)]
    shares = 1 if one_thread else run.cores
    each = _BAND + len(lanes) * _LANE + _GAP
    first = top + 62
    bottom = first + each * len(shown) - _GAP + 6
    note = f"; {hidden} faster ranks are left out" if hidden else ""
    shape = f"{_count(len(run.ranks), 'rank')}, {_count(run.cores, 'core')}"
    parts = [
        _text(
            16,
            top + 16,
            f"{run.name}: {run.ns / 1000:.1f} µs, {shape} each{note}",
            "font-size='15' font-weight='600'",
        ),
        _axis(run, top + 40, bottom),
    ]
    places: dict[int, float] = {}
    for i, rank in enumerate(shown):
        y = first + i * each
        places[rank] = y
        parts.append(_text(16, y + 16, f"rank {rank}", "font-weight='600'"))
        parts.append(_band(run, rank, colours, y, scale))
        for j, (lane, colour) in enumerate(lanes):
            parts.append(_lane(run, rank, lane, colour, y + _BAND + 3 + j * _LANE, shares))
    parts += [_arrow(run, waited, places, scale) for waited in longest_waits(run)]
    return "".join(parts), int(bottom - top + 26)


def _axis(run: OpRun, y: float, bottom: float) -> str:
    step = tick_step(run.ns / 1000)
    parts = []
    at = 0.0
    while at <= run.ns / 1000 * 1.0001:
        x = _LEFT + at * 1000 / run.ns * _PLOT
        parts.append(
            f"<line x1='{x:.1f}' y1='{y + 6:.1f}' x2='{x:.1f}' y2='{bottom:.1f}' stroke='{GRID}'/>"
            + _text(x, y, f"{at:g}", f"text-anchor='middle' fill='{MUTED}' font-size='11'")
        )
        at = round(at + step, 9)
    parts.append(_text(_LEFT - 12, y, "µs", f"text-anchor='end' fill='{MUTED}' font-size='11'"))
    return "".join(parts)


def tick_step(span: float, most: int = 12) -> float:
    """Return the least of 1, 2 or 5 times a power of ten of which at most ``most`` fit into ``span``."""
    step = 10.0 ** np.floor(np.log10(max(span, 1e-9) / most))
    return next((float(step * m) for m in (1, 2, 5, 10) if span / (step * m) <= most), float(step * 10))


def _band(run: OpRun, rank: int, colours: dict[str, str], y: float, scale: float) -> str:
    """Draw boxes of the step that most working cores are in."""
    by_phase = {
        phase: coverage((piece for own in cores.values() for piece in own), run.start_ns, run.end_ns, _BINS)
        for phase, cores in working(run, rank).items()
    }
    own = [event for event in run.events if event.rank == rank and event.name == LAUNCH]
    names = list(by_phase)
    parts = []
    if own:
        x = _LEFT + (own[0].start_ns - run.start_ns) * scale
        parts.append(_box(x, y, own[0].ns * scale, _BAND, "url(#idle)"))
    if not names:
        return "".join(parts)
    stack = np.stack([by_phase[name] for name in names])
    most = np.where(stack.max(axis=0) > 0.02, stack.argmax(axis=0), -1)
    width = _PLOT / _BINS
    at = 0
    for which, group in groupby(most.tolist()):
        count = len(list(group))
        if which >= 0:
            name, x, wide = phase_name(names[which]), _LEFT + at * width, count * width
            micros = wide / _PLOT * run.ns / 1000
            parts.append(_box(x, y, wide, _BAND, colours[names[which]], f"{name}: {micros:.1f} µs"))
            if wide >= 7 * len(name) + 8:
                parts.append(_text(x + 5, y + 16, name, "fill='#ffffff' font-size='11.5'"))
        at += count
    return "".join(parts)


def _lane(run: OpRun, rank: int, lane: str, colour: str, y: float, shares: int) -> str:
    """Draw an area chart of the share of the rank's cores, or of its one thread, that is busy."""
    spans = [
        (event.start_ns, event.end_ns)
        for event in run.events
        if event.rank == rank and lane == (event.name if lane in (WAIT, SYNC_ALL) else event.pipe)
    ]
    if shares == 1 and lane == WAIT:  # a core that waits holds up no other
        busy = working(run, rank).values()
        spans = without(spans, (piece for cores in busy for own in cores.values() for piece in own))
    share = np.clip(coverage(spans, run.start_ns, run.end_ns, _LANE_BINS) / shares, 0, 1)
    height, width = _LANE - 3, _PLOT / _LANE_BINS
    base = y + height
    points = "".join(f"L{_LEFT + (i + 0.5) * width:.1f},{base - v * height:.1f}" for i, v in enumerate(share.round(2)))
    mean = f"{lane}: {100 * float(share.mean()):.1f} % of the time"
    return (
        _box(_LEFT, y, _PLOT, height, IDLE)
        + f"<path d='M{_LEFT},{base:.1f}{points}L{_LEFT + _PLOT},{base:.1f}z' fill='{colour}'>"
        + f"<title>{escape(mean)}</title></path>"
        + _text(_LEFT - 12, base - 2, lane, f"text-anchor='end' fill='{MUTED}' font-size='10.5'")
    )


def _arrow(run: OpRun, waited: Waited, places: dict[int, float], scale: float) -> str:
    """Draw arrows from the store of a status block to the wait that it released."""
    wait, store = waited.wait, waited.store
    if wait.rank not in places or store.rank not in places:
        return ""
    x0 = _LEFT + (store.start_ns - run.start_ns) * scale
    x1 = _LEFT + (waited.seen_ns - run.start_ns) * scale
    y0 = places[store.rank] + (_BAND if places[store.rank] < places[wait.rank] else 0)
    y1 = places[wait.rank] + (0 if places[store.rank] < places[wait.rank] else _BAND)
    middle = (y0 + y1) / 2
    title = f"rank {wait.rank} waited {wait.ns / 1000:.1f} µs for rank {store.rank}"
    curve = f"C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    return (
        f"<path d='M{x0:.1f},{y0:.1f} {curve}' fill='none' stroke='{INK}' stroke-width='1.4' "
        f"marker-end='url(#head)'><title>{escape(title)}</title></path>"
        + _text(
            x1 - 8 if x1 > WIDTH / 2 else x1 + 8,
            places[wait.rank] - 6,
            title,
            f"text-anchor='{'end' if x1 > WIDTH / 2 else 'start'}' font-size='11'",
        )
    )
