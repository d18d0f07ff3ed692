"""Predictions as text, as JSON and as a picture, each with the model's assumptions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ascend_moe._text import filled, write_whole
from ascend_moe.errors import need_one_of
from ascend_moe.plan import Request
from ascend_moe.plan.soc import cost_table, soc
from ascend_moe.predict import ALGORITHMS, OpPrediction, Prediction, check, runnable


def asked(request: Request, worlds: Sequence[int], algorithms: Sequence[str] = ()) -> list[tuple[Request, str]]:
    """Configuration and algorithm of every prediction: no algorithm named: all that can run there.

    Raises:
        ArgumentError: one of them cannot be predicted.
    """
    for name in algorithms:
        need_one_of("algorithm", name, ALGORITHMS)
    requests = [replace(request, ranks=world, cores=request.cores or soc(request.soc).aiv) for world in worlds]
    pairs = [(asked, name) for asked in requests for name in algorithms or runnable(asked)]
    for one, name in pairs:
        check(one, name)
    return pairs


def banner(name: str) -> str:
    """Return the assumptions that are printed with every prediction for this SoC."""
    costs = cost_table(name).values()
    published = sum(cost.kind == "published" for cost in costs)
    return (
        "model, not a measurement, not compared with an NPU: assumes uniform routing, ranks that start together, and "
        f"{len(costs) - published} of {len(costs)} hardware costs; the others are published"
    )


_COLUMNS = {
    "EP": 3, "algorithm": 10, "dispatch": 8, "combine": 7, "SyncAlls": 8, "polled": 6, "link": 4,
    "MTE": 4, "V": 4, "S": 4, "SyncAll": 7, "wait": 4,
}  # fmt: skip
"""Head and width of every column: rows are printed as they come, so no later one may widen a column.

SyncAlls, polled: meetings of a rank's cores in dispatch + combine, by SyncAll and by blocks that they poll."""


NOT_MODELLED = (
    "an op on an A2 opens and finalises HCCL's server once, also where no rank is on another server; how long that "
    "takes is not known, and no time here has it"
)


def server_opens(request: Request) -> int:
    """How often an op opens and finalises HCCL's server: the launch of an A2 starts it whatever the group is."""
    return int(soc(request.soc).window_holds_state)


def head(request: Request) -> list[str]:
    """Returns what is predicted, and the first line of the table."""
    rows = "int8 rows in dispatch" if request.quant_mode else "bf16 rows"
    about = (
        f"{request.soc}, {request.cores} cores, BS {request.batch}, H {request.hidden}, K {request.topk}, "
        f"E {request.experts}, {rows}, contract {request.contract}"
    )
    lines = [*filled(about.split()), *filled(banner(request.soc).split())]
    lines += filled(NOT_MODELLED.split()) if server_opens(request) else []
    lines += ["", "us of dispatch and combine"]
    return [*lines, _line([*_COLUMNS])]


def row(prediction: Prediction) -> str:
    """A line of the table."""
    times = [f"{prediction.dispatch_us:.1f}", f"{prediction.combine_us:.1f}"]
    return _line([str(prediction.request.ranks), prediction.algorithm, *times, *_met(prediction), *_use(prediction)])


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)).rstrip()


def steps(each: Prediction) -> list[str]:
    """Where its time goes, in lines."""
    lines = ["", f"EP {each.request.ranks}, {each.algorithm}: steps on the critical path, us"]
    for name, op in _ops(each):
        lines += filled([f"{step} {us:.1f}" for step, us in op.phases.items()], f"  {name:<8}  ", "  ")
    return lines


def _ops(predicted: Prediction) -> list[tuple[str, OpPrediction]]:
    return [("dispatch", predicted.dispatch), ("combine", predicted.combine)]


def _met(predicted: Prediction) -> list[str]:
    """How often the cores of a rank meet in dispatch and combine: by SyncAll, and by blocks that they poll."""
    ops = [op for _, op in _ops(predicted)]
    return [" + ".join(str(getattr(op, kind)) for op in ops) for kind in ("sync_alls", "meetings")]


def _use(predicted: Prediction) -> list[str]:
    """Busiest link, then shares of the critical paths by what S did or waited for."""
    link = max((share for name, share in predicted.link_use.items() if name != "memory"), default=0.0)
    total = predicted.dispatch_us + predicted.combine_us
    sums: dict[str, float] = {}
    for _, op in _ops(predicted):
        for name, us in op.pipes.items():
            sums[name] = sums.get(name, 0.0) + us / total
    mte = sums.get("MTE2", 0.0) + sums.get("MTE3", 0.0)
    shares = [link, mte, *(sums.get(name, 0.0) for name in ("V", "S", "SyncAll", "status"))]
    return [f"{share:.0%}" for share in shares]


def as_dict(predicted: Sequence[Prediction]) -> dict[str, object]:
    """For JSON."""

    def as_numbers(op: OpPrediction) -> dict[str, object]:
        return {
            "us": round(op.us, 3),
            "sync_alls": op.sync_alls,
            "meetings": op.meetings,
            "phases_us": {name: round(us, 3) for name, us in op.phases.items()},
            "pipes_us": {name: round(us, 3) for name, us in op.pipes.items()},
            "link_use": {name: round(share, 4) for name, share in op.link_use.items()},
        }

    shape = ("hidden", "topk", "experts", "quant_mode", "contract", "cores")
    return {
        "note": banner(predicted[0].request.soc),
        "predictions": [
            {
                "soc": each.request.soc,
                "ep": each.request.ranks,
                "bs": each.request.batch,
                **{name: getattr(each.request, name) for name in shape},
                "algorithm": each.algorithm,
                "server_opens": server_opens(each.request),  # an op; not modelled
                "dispatch": as_numbers(each.dispatch),
                "combine": as_numbers(each.combine),
            }
            for each in predicted
        ],
    }


def draw(predicted: Sequence[Prediction], path: Path) -> None:
    """A line an op and algorithm: microseconds over ranks, into an SVG file. matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ascend_moe", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(ALGORITHMS)}
    for algorithm in dict.fromkeys(each.algorithm for each in predicted):
        along = sorted((each for each in predicted if each.algorithm == algorithm), key=lambda one: one.request.ranks)
        for op, style in (("dispatch", "-"), ("combine", "--")):
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
    rows = "int8 rows in dispatch" if request.quant_mode else "bf16 rows"
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
