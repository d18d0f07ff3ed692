"""Predictions as text, JSON and a chart, each with the model's assumptions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ascend_moe._text import filled, write_whole
from ascend_moe.errors import need_one_of
from ascend_moe.plan import Request, soc_of
from ascend_moe.predict import ALGORITHMS, OpPrediction, Prediction, check, runnable
from ascendc_twin.soc import cost_table


def asked(request: Request, worlds: Sequence[int], algorithms: Sequence[str] = ()) -> list[tuple[Request, str]]:
    """Return (configuration, algorithm) of each prediction, for each number of ranks; no ``algorithms``: all runnable.

    Raises:
        ArgumentError: a configuration cannot be predicted.
    """
    for name in algorithms:
        need_one_of("algorithm", name, ALGORITHMS)
    requests = [replace(request, ranks=world, cores=request.cores or soc_of(request.soc).aiv) for world in worlds]
    pairs = [(asked, name) for asked in requests for name in algorithms or runnable(asked)]
    for one, name in pairs:
        check(one, name)
    return pairs


def banner(name: str) -> str:
    """Return the assumptions of every prediction for the SoC ``name``, as one sentence."""
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
"""Heading and width of each column; fixed, because rows are printed one by one.

SyncAlls, polled: core barriers of a rank in dispatch + combine, by SyncAll and by polled blocks."""


NOT_MODELLED = (
    "an op on an A2 opens and finalizes HCCL's server once, even within one server; its duration is unknown and not "
    "included"
)


def server_opens(request: Request) -> int:
    """Return how often an op opens and finalizes HCCL's communication server: 1 on an A2 with any group, else 0."""
    return int(soc_of(request.soc).window_holds_state)


def posting(request: Request) -> str:
    """Return a sentence on the time for posting BatchWrite items (RDMA writes), for ops between servers."""
    cost = cost_table(request.soc)["post_ns"]
    return f"a rank posts its BatchWrite items one after another, {cost.value / 1e3} us each ({cost.kind})"


def _about(request: Request) -> str:
    rows = "int8 rows in dispatch" if request.quant_mode else "bf16 rows"
    shape = f"BS {request.batch}, H {request.hidden}, K {request.topk}, E {request.experts}"
    return f"{request.soc}, {request.cores} cores, {shape}, {rows}"


def head(request: Request) -> list[str]:
    """Return the lines above the table: configuration, assumptions, and the headings of its columns."""
    lines = [*filled(f"{_about(request)}, contract {request.contract}".split()), *filled(banner(request.soc).split())]
    if server_opens(request):
        lines += [*filled(NOT_MODELLED.split()), *filled(posting(request).split())]
    lines += ["", "us of dispatch and combine"]
    return [*lines, _line([*_COLUMNS])]


def row(prediction: Prediction) -> str:
    """Return the line of the table for a prediction."""
    ops = prediction.dispatch, prediction.combine
    times = [f"{op.us:.1f}" for op in ops]
    barriers = [f"{a} + {b}" for a, b in (zip(*((op.sync_alls, op.polled_barriers) for op in ops), strict=True))]
    return _line([str(prediction.request.ranks), prediction.algorithm, *times, *barriers, *_use(prediction)])


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)).rstrip()


def steps(each: Prediction) -> list[str]:
    """Return lines with the times of both ops: steps on the critical path, busy resources, and `shares`."""
    lines = ["", f"EP {each.request.ranks}, {each.algorithm}: steps on the critical path, us"]
    for name, op in _ops(each):
        lines += filled([f"{step} {us:.1f}" for step, us in op.phases.items()], f"  {name:<8}  ", "  ")
        lines += filled([f"{part} {us:.1f}" for part, us in _busy(op).items()], "    busy    ", "  ")
        lines += filled([f"{part} {share:.0%}" for part, share in shares(op).items()], "    share   ", "  ")
    return lines


def shares(op: OpPrediction) -> dict[str, float]:
    """Return shares of an op's time by name, which may overlap.

    link: the busiest link carries bytes. V: the vector unit of the busiest core works. S: scalar instructions on the
    critical path. wait: waits on the critical path, for the launch, other cores, other ranks and HCCL's server.
    """
    link = max(_links(op).values(), default=0.0)
    wait = sum(op.pipes.get(cause, 0.0) for cause in ("launch", "SyncAll", "status", "post"))
    times = {"link": link, "V": op.vector_us, "S": op.pipes.get("S", 0.0), "wait": wait}
    return {name: us / op.us for name, us in times.items()}


def _links(op: OpPrediction) -> dict[str, float]:
    return {name: us for name, us in op.link_us.items() if name != "memory"}


def _busy(op: OpPrediction) -> dict[str, float]:
    """Microseconds of the busiest link of each kind, of the busiest vector unit, and of posting BatchWrite items."""
    post = {"post": op.pipes["post"]} if "post" in op.pipes else {}
    return {**_links(op), "V": op.vector_us, **post}


def _ops(predicted: Prediction) -> list[tuple[str, OpPrediction]]:
    return [("dispatch", predicted.dispatch), ("combine", predicted.combine)]


def _use(predicted: Prediction) -> list[str]:
    """Use of the busiest link, then shares of the critical path by what the scalar unit did or waited for."""
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
    """Return the predictions, at least one and all for one SoC, as a dict for JSON."""

    def as_numbers(op: OpPrediction) -> dict[str, object]:
        return {
            "us": round(op.us, 3),
            "sync_alls": op.sync_alls,
            "polled_barriers": op.polled_barriers,
            "phases_us": {name: round(us, 3) for name, us in op.phases.items()},
            "pipes_us": {name: round(us, 3) for name, us in op.pipes.items()},
            "link_use": {name: round(share, 4) for name, share in op.link_use.items()},
            "busy_us": {name: round(us, 3) for name, us in _busy(op).items()},
            "shares": {name: round(share, 4) for name, share in shares(op).items()},
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
                "server_opens": server_opens(each.request),  # per op; not modelled
                "dispatch": as_numbers(each.dispatch),
                "combine": as_numbers(each.combine),
            }
            for each in predicted
        ],
    }


def draw(predicted: Sequence[Prediction], path: Path) -> None:
    """Write an SVG chart of microseconds over ranks, one line per op and algorithm. Needs matplotlib."""
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
    axes.set_title(f"{_about(predicted[0].request)}: a model, not a measurement", fontsize=8, loc="left")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_whole(path, drawn.getvalue())
