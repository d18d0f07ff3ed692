"""Predictions as text, as JSON and as a picture; how far the model is off, beside every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ascend_moe._text import table
from ascend_moe.errors import ArgumentError
from ascend_moe.plan import Request
from ascend_moe.timed import ALGORITHMS, OpPrediction, Prediction, calibration, predict, runnable

ERROR_HEAD = ["published time", "us", "model us", "error", "role", "trust"]
# Alike steps of the algorithms have one colour.
_COLOURS = {
    "launch": "#9aa0a6",
    "SendBuffInit": "#c5b0d5",
    "BuffInit": "#c5b0d5",
    "AlltoAllDispatch": "#4c78a8",
    "SetWaitTpStatusAndDisPatch": "#4c78a8",
    "PublishRows": "#4c78a8",
    "SetStatus": "#e45756",
    "WaitStatus": "#f2cf5b",
    "LocalWindowCopy": "#54a24b",
}
_MORE_COLOURS = ("#72b7b2", "#b279a2", "#ff9da6", "#9d755d", "#eeca3b", "#88d27a", "#d67195")


def predictions(request: Request, worlds: Sequence[int], algorithms: Sequence[str] = ()) -> list[Prediction]:
    """A prediction an algorithm and number of ranks; no algorithm named: all that can run there."""
    for name in algorithms:
        if name not in ALGORITHMS:
            text = f"algorithm is {name!r}; need one of {', '.join(ALGORITHMS)}"
            raise ArgumentError(text, argument="algorithm")
    return [
        predict(request, world=world, algorithm=name)
        for world in worlds
        for name in algorithms or runnable(replace(request, ranks=world))
    ]


def banner() -> str:
    """What stands beside every predicted number."""
    fitted, held_out = calibration.known_errors()
    return (
        f"model, not a measurement: fitted to published times of CANN-style kernels on A3 within "
        f"{fitted:.0%}, off by {held_out:.0%} at most on held-out ones"
    )


def text(predicted: Sequence[Prediction]) -> list[str]:
    """The predictions in lines: times, then where each went."""
    request = predicted[0].request
    rows = "int8 rows in dispatch" if request.quant else "bf16 rows"
    lines = [
        f"{request.soc}, {request.cores} cores, BS {request.batch}, H {request.hidden}, K {request.topk}, "
        f"E {request.experts}, {rows}, contract {request.contract}",
        banner(),
        "",
    ]
    head = ["EP", "algorithm", "dispatch us", "combine us", "link use", "MTE", "V", "S", "SyncAll", "status"]
    body = [
        [each.request.ranks, each.algorithm, f"{each.dispatch_us:.1f}", f"{each.combine_us:.1f}", *_use(each)]
        for each in predicted
    ]
    lines += table([head, *body])
    for each in predicted:
        lines += ["", f"EP {each.request.ranks}, {each.algorithm}: steps on the critical path, us"]
        steps = [[name, *(f"{step} {us:.1f}" for step, us in op.phases.items())] for name, op in _ops(each)]
        lines += table(steps, "  ")
    return lines


def _ops(predicted: Prediction) -> list[tuple[str, OpPrediction]]:
    return [("dispatch", predicted.dispatch), ("combine", predicted.combine)]


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
            "phases_us": {name: round(us, 3) for name, us in op.phases.items()},
            "pipes_us": {name: round(us, 3) for name, us in op.pipes.items()},
            "link_use": {name: round(share, 4) for name, share in op.link_use.items()},
        }

    fitted, held_out = calibration.known_errors()
    return {
        "note": banner(),
        "calibration_error": fitted,
        "held_out_error": held_out,
        "predictions": [
            {
                "soc": each.request.soc,
                "ep": each.request.ranks,
                "bs": each.request.batch,
                "hidden": each.request.hidden,
                "topk": each.request.topk,
                "experts": each.request.experts,
                "quant": each.request.quant,
                "contract": each.request.contract,
                "cores": each.request.cores,
                "algorithm": each.algorithm,
                "dispatch": as_numbers(each.dispatch),
                "combine": as_numbers(each.combine),
            }
            for each in predicted
        ],
    }


def error_rows(compared: Sequence[calibration.Compared]) -> list[list[str]]:
    """A row a published time, below ERROR_HEAD."""
    return [
        [
            each.point.id,
            f"{each.point.us:.0f}",
            f"{each.us:.1f}",
            f"{each.error:+.1%}",
            each.point.role,
            each.point.trust,
        ]
        for each in compared
    ]


def draw(predicted: Sequence[Prediction], path: Path) -> None:
    """A stacked bar an op, algorithm and EP, its parts the kernel's steps. matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ascend_moe", "font.size": 8})
    import matplotlib.pyplot as plt

    names = dict.fromkeys(name for each in predicted for _, op in _ops(each) for name in op.phases)
    spare = iter(_MORE_COLOURS * len(names))
    colours = {name: _COLOURS.get(name) or next(spare) for name in names}
    labels = [f"EP {each.request.ranks} {each.algorithm}" for each in predicted]
    figure, panels = plt.subplots(1, 2, figsize=(2 + 0.6 * len(predicted), 4.5), sharey=True)
    for number, axes in enumerate(panels):
        ops = [_ops(each)[number][1] for each in predicted]
        axes.set_title(_ops(predicted[0])[number][0])
        bottom = [0.0] * len(ops)
        for name in names:
            heights = [max(op.phases.get(name, 0.0), 0.0) for op in ops]
            label = name if number == 0 else f"_{name}"
            axes.bar(range(len(ops)), heights, bottom=bottom, color=colours[name], label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for at, op in enumerate(ops):
            axes.text(at, bottom[at], f"{op.us:.0f}", ha="center", va="bottom", fontsize=7)
        axes.set_xticks(range(len(ops)), labels, rotation=60, ha="right")
        axes.spines[["top", "right"]].set_visible(False)
    request = predicted[0].request
    shape = f"BS {request.batch}, H {request.hidden}, K {request.topk}, E {request.experts}"
    figure.suptitle(f"{request.soc}, {shape}: us by step\n{banner()}", fontsize=8, x=0.01, ha="left")
    figure.legend(loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.06 + 0.03 * (len(names) // 4), 1, 0.97))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
