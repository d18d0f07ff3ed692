"""Two pictures of a run: round trip over payload, and round trip along a sweep. matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from ascend_moe._text import write_whole
from ascend_moe.bench.methods import BARE, GROUPS, LIMIT, METHODS
from ascend_moe.bench.results import CaseResult, Run

Value = Callable[[CaseResult], float]
#: sweep -> label and value of its axis
AXES: dict[str, tuple[str, Value]] = {
    "tokens": ("tokens a rank", lambda case: case.case.batch),
    "ranks": ("ranks", lambda case: case.case.world),
    "hidden": ("H", lambda case: case.case.hidden),
}


def draw(run: Run, path: Path, sweep: str = "") -> list[Path]:
    """Draw round trips over payload into ``path`` (a.svg), and over a ``sweep`` into a_SWEEP.svg; return the paths."""
    made = [
        _picture(
            _grouped(run, lambda case: f"{case.case.world} ranks"),
            "payload there and back, MB a rank",
            lambda case: (case.case.dispatch_bytes + case.case.combine_bytes) / 1e6,
            path,
        )
    ]
    if sweep:
        by_preset = _grouped(run, lambda case: case.case.preset)
        made.append(_picture(by_preset, *AXES[sweep], path.with_stem(f"{path.stem}_{sweep}")))
    return made


def _grouped(run: Run, key: Callable[[CaseResult], str]) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = {}
    for case in run.cases:
        groups.setdefault(key(case), []).append(case)
    return groups


def _picture(lines: dict[str, list[CaseResult]], label: str, value: Value, path: Path) -> Path:
    """A line a method and group of cases, with p10, p50 and p90 of round trips; limit and bare exchange in black."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ascend_moe", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    timed = [name for name in METHODS if name not in (*GROUPS[LIMIT], *GROUPS[BARE])]
    colours = {name: f"C{number % 10}" for number, name in enumerate(timed)}
    low = []
    for number, (group, cases) in enumerate(lines.items()):
        cases.sort(key=value)
        suffix = f", {group}" if len(lines) > 1 else ""
        for name in [LIMIT, BARE, *(row.name for row in cases[0].rows if row.name in colours)]:
            found = [(value(case), case.row(case.best.get(name, name))) for case in cases]
            trips = [(where, row.round_trip) for where, row in found if row is not None]
            bars = [[trip.p50 - trip.p10 for _, trip in trips], [trip.p90 - trip.p50 for _, trip in trips]]
            low += [trip.p50 if name == LIMIT else trip.p10 for _, trip in trips]
            axes.errorbar(
                [where for where, _ in trips],
                [trip.p50 for _, trip in trips],
                yerr=bars if name in colours else None,
                label=f"{name}{suffix}",
                color=colours.get(name, "black"),
                linestyle="--" if name == BARE else "-",
                marker="os^Dv"[number % 5] if name in colours else "",
                markersize=4,
                linewidth=0.8 if name in colours else 1.8,
            )
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="round trip, µs (p10 p50 p90)")
    axes.set_ylim(bottom=min(low) / 1.3)  # the picture begins where its lines do
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", alpha=0.25)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    # A hundredth of a point is enough, and halves the file.
    write_whole(path, re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", drawn.getvalue()))
    return path
