"""Two pictures of a run: round trip over payload, and round trip along a sweep. matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ascend_moe.bench.methods import LIMIT, OURS
from ascend_moe.bench.results import CaseResult, Run, Spread, spread

_INK = {
    "direct-zero-copy": "#0a6e4f",
    "direct": "#1a9e73",
    "window": "#7fc8a9",
    "mpi-a2a-tuned": "#c25700",
    "mpi-a2a": "#e6a15c",
    "gloo-a2a-tuned": "#5b4aa0",
    "gloo-a2a": "#9d90cf",
    "gloo-ag-rs": "#8a8a8a",
}
Value = Callable[[CaseResult], float]
#: sweep -> label and value of its axis
AXES: dict[str, tuple[str, Value]] = {
    "tokens": ("tokens a rank", lambda case: case.case.batch),
    "ranks": ("ranks", lambda case: case.case.world),
    "hidden": ("H", lambda case: case.case.hidden),
}


def draw(run: Run, folder: Path, sweep: str = "") -> list[Path]:
    """``roofline.svg``, and ``scaling_<sweep>.svg`` of a sweep, in ``folder``; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ascend_moe", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)
    made = [_roofline(run, folder / "roofline.svg")]
    if sweep:
        made.append(_scaling(run, sweep, folder / f"scaling_{sweep}.svg"))
    return made


def _roofline(run: Run, path: Path) -> Path:
    """Round trip over payload: a point a method and case; lines: the same run's limit."""

    def payload(case: CaseResult) -> float:
        return (case.case.dispatch_bytes + case.case.combine_bytes) / 1e6

    figure, axes = _figure()
    for number, (where, cases, suffix) in enumerate(
        _lines(run, lambda case: case.case.world, payload, " ranks")
    ):
        _limit(axes, where, cases, ("k-", "k--", "k-.", "k:")[number % 4], suffix)
        for name in [row.name for row in cases[0].rows if row.kind != LIMIT]:
            trips = [_trip(case, name) for case in cases]
            bars = [[trip.p50 - trip.p10 for trip in trips], [trip.p90 - trip.p50 for trip in trips]]
            style: dict[str, Any] = {"marker": "os^Dv"[number % 5], "markersize": 4, "linewidth": 0.8}
            style |= {"elinewidth": 0.6, "color": _INK.get(name, "#444444"), "label": f"{name}{suffix}"}
            axes.errorbar(where, [trip.p50 for trip in trips], yerr=bars, **style)
    axes.set(xlabel="payload there and back, MB a rank", ylabel="round trip, µs (p10 p50 p90)")
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, path)


def _scaling(run: Run, sweep: str, path: Path) -> Path:
    """Round trip along the sweep: the limit with a line of slope 1 through its end, ours, the best peer."""
    label, value = AXES[sweep]
    figure, axes = _figure()
    style: dict[str, Any] = {"marker": "o", "markersize": 3}
    for where, cases, suffix in _lines(run, lambda case: case.case.preset, value, ""):
        limit = _limit(axes, where, cases, "k-", suffix)
        axes.plot(where, [limit[-1] * width / where[-1] for width in where], "k:", alpha=0.3)
        for name in [row.name for row in cases[0].rows if row.kind == OURS]:
            trips = [_trip(case, name).p50 for case in cases]
            axes.plot(where, trips, color=_INK.get(name), label=f"{name}{suffix}", **style)
        best = [row.round_trip.p50 for case in cases if (row := case.best_peer())]
        if len(best) == len(cases):
            axes.plot(where, best, color="#c25700", label=f"best peer{suffix}", **style)
        axes.set_xticks(where, [str(width) for width in where])
    axes.set(xlabel=label, ylabel="round trip, µs (p50)")
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _lines(run: Run, key: Callable[[CaseResult], Any], value: Value, unit: str) -> list[Any]:
    """Of every ``key``: where its cases lie on the axis, the cases, what its labels end with."""
    keys = sorted({key(case) for case in run.cases})
    found = []
    for one in keys:
        cases = sorted((case for case in run.cases if key(case) == one), key=value)
        found.append(([value(case) for case in cases], cases, f", {one}{unit}" if len(keys) > 1 else ""))
    return found


def _limit(axes: Any, where: list[float], cases: list[CaseResult], line: str, suffix: str) -> list[float]:
    limit = [_trip(case, case.limit).p50 for case in cases]
    axes.plot(where, limit, line, label=f"limit{suffix}")
    return limit


def _trip(case: CaseResult, name: str) -> Spread:
    row = case.row(name)
    return row.round_trip if row else spread([])


def _figure() -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set(xscale="log", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", alpha=0.25)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    for axes in figure.axes:
        axes.minorticks_off()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # A hundredth of a point is enough, and halves the file.
    path.write_text(re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path.read_text()))
    return path
