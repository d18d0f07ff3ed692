"""`ascend-moe predict`: times of dispatch and combine on NPUs, from a model; its errors; its calibration."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from .._text import Parser, table
from ..errors import ArgumentError
from ..plan import Request
from ..plan.soc import DEFAULT_SOC
from ..timed import ALGORITHMS, OpPrediction, Prediction, calibration, calibration_fit, predict, runnable
from ..timed.calibration import Compared
from ..timed.costs import known_socs
from . import options as shape_options
from .options import shape_of

ABOUT = """Times of dispatch and combine on NPUs, predicted: our kernels run on the timed engine, all ranks
and cores in this process. A model, not a measurement."""


def main(argv: list[str]) -> int:
    """Exit code 0; --check: 1 when a held-out error is over its limit; 2: wrong options."""
    options = _options(argv)
    if options.write is not None and not options.calibrate:
        raise ArgumentError("--write goes with --calibrate", argument="write")
    if options.calibrate:
        return _calibrate(options.write)
    if options.check:
        return _check(options.json)
    if options.docs is not None:
        from . import predict_docs

        predict_docs.write(options.docs)
        return 0
    found = run(
        _request(options), _numbers(options.ep), options.algorithm.split(",") if options.algorithm else []
    )
    if options.plot is not None:
        from . import predict_plot

        options.plot.write_text(predict_plot.stacked(found), encoding="utf-8")
    print(json.dumps(as_dict(found), indent=2) if options.json else "\n".join(text(found)))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser("predict", ABOUT)
    add = parser.add_argument
    add(
        "--soc", default=DEFAULT_SOC, metavar="NAME", help=f"{', '.join(known_socs())}; default {DEFAULT_SOC}"
    )
    add("--ep", default="8,16,32,64", metavar="W,...", help="EP ranks (default 8,16,32,64)")
    add("-b", "--bs", type=int, default=128, metavar="BS", help="tokens a rank (default 128)")
    shape_options.add_options(parser)
    add("--no-quant", action="store_true", help="bf16 rows in dispatch; default: int8")
    add("--contract", default="v2", metavar="v1|v2", help="default v2")
    add("--cores", type=int, default=0, metavar="N", help="AIV cores of a launch (default: all of the SoC)")
    names = ",".join(ALGORITHMS)
    add("--algorithm", default="", metavar="NAME,...", help=f"of {names} (default: all that can run there)")
    add("--json", action="store_true", help="print JSON only")
    add("--plot", type=Path, metavar="FILE", help="write a picture, SVG: steps by algorithm and EP")
    add("--check", action="store_true", help="the model against published times, held-out ones judged")
    add("--calibrate", action="store_true", help="fit the free parameters to the calibration points")
    add(
        "--write",
        type=Path,
        metavar="FOLDER",
        help="with --calibrate: write soc_costs.json, calibration.json",
    )
    add("--docs", type=Path, metavar="FOLDER", help="write predict.md and its pictures")
    return parser.parse_args(argv)


def _numbers(given: str) -> list[int]:
    try:
        return [int(word) for word in given.split(",")]
    except ValueError:
        raise ArgumentError(f"--ep {given} is no list of whole numbers, like 8,16", argument="ep") from None


def _request(options: argparse.Namespace) -> Request:
    return Request(
        ranks=1,
        **shape_of(options)._asdict(),
        batch=options.bs,
        quant=not options.no_quant,
        contract=options.contract,
        soc=options.soc,
        cores=options.cores,
    )


def run(request: Request, worlds: list[int], algorithms: list[str]) -> list[Prediction]:
    """One prediction an algorithm and world, algorithms inside worlds; none named: all that can run there."""
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


def text(found: list[Prediction]) -> list[str]:
    """The predictions in lines: times, then where each went."""
    one = found[0].request
    rows = "int8 rows in dispatch" if one.quant else "bf16 rows"
    lines = [
        f"{one.soc}, {one.cores} cores, BS {one.batch}, H {one.hidden}, K {one.topk}, E {one.experts}, "
        f"{rows}, contract {one.contract}",
        banner(),
        "",
    ]
    head = ["EP", "algorithm", "dispatch us", "combine us", "link use", "MTE", "V", "S", "SyncAll", "status"]
    body = []
    for each in found:
        body.append(
            [
                each.request.ranks,
                each.algorithm,
                f"{each.dispatch_us:.1f}",
                f"{each.combine_us:.1f}",
                *_use(each),
            ]
        )
    lines += table([head, *body])
    for each in found:
        lines += ["", f"EP {each.request.ranks}, {each.algorithm}: steps on the critical path, us"]
        lines += table([[name, *_steps(op)] for name, op in _ops(each)], "  ")
    return lines


def _ops(found: Prediction) -> list[tuple[str, OpPrediction]]:
    return [("dispatch", found.dispatch), ("combine", found.combine)]


def _use(found: Prediction) -> list[str]:
    """Busiest link, then shares of the critical paths by what S did or waited for."""
    link = max((share for name, share in found.link_use.items() if name != "memory"), default=0.0)
    total = found.dispatch_us + found.combine_us
    sums: dict[str, float] = {}
    for _, op in _ops(found):
        for name, us in op.pipes.items():
            sums[name] = sums.get(name, 0.0) + us / total
    mte = sums.get("MTE2", 0.0) + sums.get("MTE3", 0.0)
    shares = [link, mte, *(sums.get(name, 0.0) for name in ("V", "S", "SyncAll", "status"))]
    return [f"{share:.0%}" for share in shares]


def _steps(op: OpPrediction) -> list[str]:
    return [f"{name} {us:.1f}" for name, us in op.phases.items()]


def as_dict(found: list[Prediction]) -> dict[str, object]:
    """For JSON."""

    def op(one: OpPrediction) -> dict[str, object]:
        return {
            "us": round(one.us, 3),
            "phases_us": {name: round(us, 3) for name, us in one.phases.items()},
            "pipes_us": {name: round(us, 3) for name, us in one.pipes.items()},
            "link_use": {name: round(share, 4) for name, share in one.link_use.items()},
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
                "dispatch": op(each.dispatch),
                "combine": op(each.combine),
            }
            for each in found
        ],
    }


def error_rows(compared: list[Compared]) -> list[list[str]]:
    """A row a published time: where, published, model, error, role, trust."""
    return [
        [
            one.point.id,
            f"{one.point.us:.0f}",
            f"{one.us:.1f}",
            f"{one.error:+.1%}",
            one.point.role,
            one.point.trust,
        ]
        for one in compared
    ]


ERROR_HEAD = ["published time", "us", "model us", "error", "role", "trust"]


def _check(as_json: bool) -> int:
    chosen = calibration.points(calibration.CALIBRATION, calibration.HELD_OUT, "shown")
    compared = calibration.compare(chosen)
    held_out = [one for one in compared if one.point.role == calibration.HELD_OUT]
    limit, worst = calibration.held_out_limit(), calibration.errors_of(held_out)
    if as_json:
        values = [
            {
                "id": one.point.id,
                "us": one.point.us,
                "model_us": round(one.us, 3),
                "error": round(one.error, 4),
            }
            | {"role": one.point.role, "trust": one.point.trust}
            for one in compared
        ]
        print(json.dumps({"limit": limit, "held_out_error": round(worst, 4), "points": values}, indent=2))
    else:
        print("\n".join(table([ERROR_HEAD, *error_rows(compared)], "")))
        verdict = "within" if worst <= limit else "over"
        print(f"held-out times: off by {worst:.1%} at most, {verdict} the limit of {limit:.0%}")
    return 0 if worst <= limit else 1


def _calibrate(folder: Path | None) -> int:
    def progress(line: str) -> None:
        print(line, file=sys.stderr)

    fitted = calibration_fit.calibrate(progress=progress)
    for name, value in fitted.items():
        print(f"{name} = {value:g}")
    if folder is not None:
        calibration_fit.write(fitted, folder, progress)
    return 0
