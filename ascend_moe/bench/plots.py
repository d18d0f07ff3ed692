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
#: sweep -> label and value of its axis
AXES: dict[str, tuple[str, Callable[[CaseResult], int]]] = {
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
    made = [roofline(run, folder / "roofline.svg")]
    if sweep:
        made.append(scaling(run, sweep, folder / f"scaling_{sweep}.svg"))
    return made


def roofline(run: Run, path: Path) -> Path:
    """Round trip over payload: a point a method and case; lines: the same run's limit."""
    figure, axes = _figure()
    worlds = sorted({case.case.world for case in run.cases})
    for number, world in enumerate(worlds):
        cases = sorted((case for case in run.cases if case.case.world == world), key=_payload)
        suffix = f", {world} ranks" if len(worlds) > 1 else ""
        where = [_payload(case) for case in cases]
        limit = [_trip(case, case.limit).p50 for case in cases]
        axes.plot(where, limit, ("k-", "k--", "k-.", "k:")[number % 4], label=f"limit{suffix}")
        for name in [row.name for row in cases[0].rows if row.kind != LIMIT]:
            trips = [_trip(case, name) for case in cases]
            axes.errorbar(
                where,
                [trip.p50 for trip in trips],
                yerr=[[trip.p50 - trip.p10 for trip in trips], [trip.p90 - trip.p50 for trip in trips]],
                color=_INK.get(name, "#444444"),
                marker="os^Dv"[number % 5],
                markersize=4,
                linewidth=0.8,
                elinewidth=0.6,
                label=f"{name}{suffix}",
            )
    label = "payload there and back, MB a rank"
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="round trip, µs (p10 p50 p90)")
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, path)


def scaling(run: Run, sweep: str, path: Path) -> Path:
    """Round trip along the sweep: the limit with a line of slope 1 through its end, ours, the best peer."""
    label, value = AXES[sweep]
    figure, axes = _figure()
    presets = sorted({case.case.preset for case in run.cases})
    for preset in presets:
        suffix = f", {preset}" if len(presets) > 1 else ""
        cases = sorted((case for case in run.cases if case.case.preset == preset), key=value)
        where = [value(case) for case in cases]
        limit = [_trip(case, case.limit).p50 for case in cases]
        axes.plot(where, limit, "k-", label=f"limit{suffix}")
        axes.plot(where, [limit[-1] * width / where[-1] for width in where], "k:", alpha=0.3)
        for name in [row.name for row in cases[0].rows if row.kind == OURS]:
            trips = [_trip(case, name).p50 for case in cases]
            axes.plot(where, trips, "o-", color=_INK.get(name), markersize=3, label=f"{name}{suffix}")
        best = [row.round_trip.p50 for case in cases if (row := case.best_peer())]
        if len(best) == len(cases):
            axes.plot(where, best, "o-", color="#c25700", markersize=3, label=f"best peer{suffix}")
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="round trip, µs (p50)")
    axes.set_xticks(where, [str(width) for width in where])
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _figure() -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
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


def _payload(case: CaseResult) -> float:
    return (case.case.dispatch_bytes + case.case.combine_bytes) / 1e6


def _trip(case: CaseResult, name: str) -> Spread:
    row = case.row(name)
    return row.round_trip if row else spread([])
