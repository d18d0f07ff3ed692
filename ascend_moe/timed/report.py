"""Predictions as text and as JSON; how far the model is off, beside every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ascend_moe._text import filled, table
from ascend_moe.errors import need_one_of
from ascend_moe.plan import Request
from ascend_moe.timed import ALGORITHMS, OpPrediction, Prediction, calibration, predict, runnable

ERROR_HEAD = ["published time", "us", "model us", "error", "role", "trust"]


def predictions(request: Request, worlds: Sequence[int], algorithms: Sequence[str] = ()) -> list[Prediction]:
    """A prediction an algorithm and number of ranks; no algorithm named: all that can run there."""
    for name in algorithms:
        need_one_of("algorithm", name, ALGORITHMS)
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
    about = (
        f"{request.soc}, {request.cores} cores, BS {request.batch}, H {request.hidden}, K {request.topk}, "
        f"E {request.experts}, {rows}, contract {request.contract}"
    )
    lines = [*filled(about.split()), *filled(banner().split()), "", "us of dispatch and combine"]
    shares = ["MTE", "V", "S", "SyncAll", "wait"]
    head = ["EP", "algorithm", "dispatch", "combine", "SyncAlls", "link", *shares]
    body = [
        [
            one.request.ranks,
            one.algorithm,
            f"{one.dispatch_us:.1f}",
            f"{one.combine_us:.1f}",
            *_sync_alls(one),
            *_use(one),
        ]
        for one in predicted
    ]
    lines += table([head, *body], "")
    for each in predicted:
        lines += ["", f"EP {each.request.ranks}, {each.algorithm}: steps on the critical path, us"]
        for name, op in _ops(each):
            lines += filled([f"{step} {us:.1f}" for step, us in op.phases.items()], f"  {name:<8}  ", "  ")
    return lines


def _ops(predicted: Prediction) -> list[tuple[str, OpPrediction]]:
    return [("dispatch", predicted.dispatch), ("combine", predicted.combine)]


def _sync_alls(predicted: Prediction) -> list[str]:
    return [" + ".join(str(op.sync_alls) for _, op in _ops(predicted))]


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
            "phases_us": {name: round(us, 3) for name, us in op.phases.items()},
            "pipes_us": {name: round(us, 3) for name, us in op.pipes.items()},
            "link_use": {name: round(share, 4) for name, share in op.link_use.items()},
        }

    fitted, held_out = calibration.known_errors()
    shape = ("hidden", "topk", "experts", "quant", "contract", "cores")
    return {
        "note": banner(),
        "calibration_error": fitted,
        "held_out_error": held_out,
        "predictions": [
            {
                "soc": each.request.soc,
                "ep": each.request.ranks,
                "bs": each.request.batch,
                **{name: getattr(each.request, name) for name in shape},
                "algorithm": each.algorithm,
                "dispatch": as_numbers(each.dispatch),
                "combine": as_numbers(each.combine),
            }
            for each in predicted
        ],
    }


def error_rows(compared: Sequence[calibration.Compared]) -> list[list[str]]:
    """A row a published time, below ERROR_HEAD."""
    rows = []
    for each in compared:
        point, times = each.point, [f"{each.point.us:.0f}", f"{each.us:.1f}", f"{each.error:+.1%}"]
        rows.append([point.id, *times, point.role, point.trust])
    return rows
