"""Pictures of a run: roofline over payload, and how time grows with tokens, ranks and H. matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascend_moe.bench.methods import LIMIT, OURS
from ascend_moe.bench.results import CaseResult, Limits, Run

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
    svg = path.suffix == ".svg"
    figure.savefig(path, metadata={"Date": None} if svg else None)
    plt.close(figure)
    if svg:  # a hundredth of a point is enough, and halves the file
        path.write_text(re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path.read_text()))
    return path


def roofline(run: Run, path: Path) -> Path:
    """Round trip over payload: a point a method and case; lines: the same run's limit, flags."""
    figure, axes = _figure()
    by_world = sorted({case.case.world for case in run.cases})
    for number, world in enumerate(by_world):
        mine = sorted((c for c in run.cases if c.case.world == world), key=_payload)
        marker = "os^Dv"[number % 5]
        _limit_line(axes, mine, world, number)
        for name in _names(mine):
            found = [(case, case.row(name)) for case in mine]
            points = [(_payload(case), row.round_trip) for case, row in found if row is not None]
            label = f"{name}, {world} ranks" if len(by_world) > 1 else name
            axes.errorbar(
                [at for at, _ in points],
                [one.p50 for _, one in points],
                yerr=[[one.p50 - one.p10 for _, one in points], [one.p90 - one.p50 for _, one in points]],
                color=_INK.get(name, "#444444"),
                marker=marker,
                markersize=4,
                linewidth=0.8,
                elinewidth=0.6,
                label=label,
            )
    floor = _flag_floor(run.limits)
    if floor:
        axes.axhline(floor, color="#b00020", linewidth=0.8, linestyle=":", label="two flags, one way each")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="payload there and back, MB a rank",
        ylabel="round trip, µs (p10 p50 p90)",
    )
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, path)


def _limit_line(axes: Any, cases: Sequence[CaseResult], world: int, number: int) -> None:
    rows = [(case, case.row(case.limit)) for case in cases]
    points = [(_payload(case), row.round_trip.p50) for case, row in rows if row is not None]
    style = ["-", "--", "-.", ":"][number % 4]
    axes.plot(*zip(*points, strict=True), color="black", linestyle=style, label=f"limit, {world} ranks")


def _flag_floor(limits: Sequence[Limits]) -> float:
    """µs of the flags alone: dispatch and combine each wait for one flag of a peer, both ways at once."""
    spins = [one.flags_ns["spin"].p50 for one in limits if "spin" in one.flags_ns]
    return 2 * min(spins) / 1e3 if spins else 0.0


def scaling(run: Run, sweep: str, path: Path) -> Path:
    """Round trip along the sweep for ours and for the limit, and a line of slope 1 from the limit's end."""
    label, at = AXES[sweep]
    figure, axes = _figure()
    presets = sorted({case.case.preset for case in run.cases})
    for preset in presets:
        suffix = f", {preset}" if len(presets) > 1 else ""
        mine = sorted((case for case in run.cases if case.case.preset == preset), key=at)
        where = [at(case) for case in mine]
        limit = [_p50(case, case.limit) for case in mine]
        axes.plot(where, limit, color="black", label=f"limit{suffix}")
        axes.plot(where, [limit[-1] * w / where[-1] for w in where], color="black", alpha=0.3, linestyle=":")
        for name in (one for one in _names(mine) if mine[0].row(one) and _kind(mine, one) == OURS):
            axes.plot(
                where,
                [_p50(case, name) for case in mine],
                color=_INK.get(name),
                marker="o",
                markersize=3,
                label=f"{name}{suffix}",
            )
        best = [case.best_peer() for case in mine]
        if all(best):
            axes.plot(
                where,
                [row.round_trip.p50 for row in best if row],
                color="#c25700",
                marker="x",
                markersize=4,
                label=f"best peer{suffix}",
            )
        for case in mine:
            if case.oversubscribed and sweep == "ranks":
                axes.axvspan(case.cores * 1.15, max(where) * 1.15, color="#000000", alpha=0.04)
                break
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="round trip, µs (p50)")
    axes.set_xticks(where, [str(value) for value in where])
    axes.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _payload(case: CaseResult) -> float:
    return (case.case.dispatch_bytes + case.case.combine_bytes) / 1e6


def _names(cases: Sequence[CaseResult]) -> list[str]:
    return [row.name for row in cases[0].rows if row.kind != LIMIT]


def _kind(cases: Sequence[CaseResult], name: str) -> str:
    row = cases[0].row(name)
    return row.kind if row else ""


def _p50(case: CaseResult, name: str) -> float:
    row = case.row(name)
    return row.round_trip.p50 if row else float("nan")
