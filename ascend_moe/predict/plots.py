"""A picture of predictions: times of dispatch and of combine along EP. matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from .._text import write_whole
from . import ALGORITHMS, Prediction

_LINES = {"dispatch": "-", "combine": "--"}


def draw(predicted: Sequence[Prediction], path: Path) -> None:
    """A line an op and algorithm: microseconds over ranks, into an SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ascend_moe", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(ALGORITHMS)}
    for algorithm in dict.fromkeys(each.algorithm for each in predicted):
        along = sorted((each for each in predicted if each.algorithm == algorithm), key=lambda one: one.request.ranks)
        for op, style in _LINES.items():
            axes.plot(
                [each.request.ranks for each in along],
                [getattr(each, op).us for each in along],
                label=f"{op}, {algorithm}",
                color=colours[algorithm],
                linestyle=style,
                marker="o",
                markersize=3,
                linewidth=1,
            )
    worlds = sorted({each.request.ranks for each in predicted})
    axes.set(xscale="log", xlabel="EP ranks", ylabel="µs, model")
    axes.set_xticks(worlds, [str(world) for world in worlds], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    request = predicted[0].request
    rows = "int8 rows in dispatch" if request.quant else "bf16 rows"
    axes.set_title(
        f"{request.soc}, {request.cores} cores, BS {request.batch}, H {request.hidden}, K {request.topk}, "
        f"E {request.experts}, {rows}: a model, not a measurement",
        fontsize=8,
        loc="left",
    )
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_whole(path, drawn.getvalue())
