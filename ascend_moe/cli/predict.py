"""`ascend-moe predict`: times of dispatch and combine on NPUs, from a model; its errors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ascend_moe._text import table
from ascend_moe.cli import options
from ascend_moe.plan import Request
from ascend_moe.plan.soc import DEFAULT_SOC, known_socs
from ascend_moe.timed import ALGORITHMS, calibration, report

app = typer.Typer()


@app.command()
def predict(
    soc: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(known_socs())}.")] = DEFAULT_SOC,
    ep: Annotated[str, typer.Option(metavar="W,...", help="EP ranks.")] = "8,16,32,64",
    bs: Annotated[int, typer.Option("-b", "--bs", metavar="BS", help="Tokens a rank.")] = 128,
    preset: options.Preset = None,
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    no_quant: Annotated[bool, typer.Option("--no-quant", help="bf16 rows in dispatch; default: int8.")] = False,
    contract: options.Contract = "v2",
    cores: options.Cores = 0,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Of {','.join(ALGORITHMS)}; default: all that run there.")
    ] = "",
    as_json: options.Json = False,
    check: Annotated[
        bool, typer.Option("--check", help="The model against published times, held-out ones judged.")
    ] = False,
) -> None:
    """Times of dispatch and combine on NPUs, predicted by a model: nothing here is measured.

    Our kernels run on the timed engine, all ranks and cores in this process.

    Exit code 0. With --check 1: a held-out error is over its limit. 2: wrong options.
    """
    if check:
        raise typer.Exit(_check(as_json))
    request = Request(
        ranks=1,
        **options.shape_of(preset, hidden, topk, experts),
        batch=bs,
        quant=not no_quant,
        contract=contract,
        soc=soc,
        cores=cores,
    )
    names = algorithm.split(",") if algorithm else []
    predictions = report.predictions(request, options.numbers("ep", ep), names)
    found = report.as_dict(predictions)
    print(json.dumps(found, indent=2) if as_json else "\n".join(report.text(predictions)))


def _check(as_json: bool) -> int:
    chosen = calibration.points(calibration.CALIBRATION, calibration.HELD_OUT, "shown")
    compared = calibration.compare(chosen)
    held_out = [each for each in compared if each.point.role == calibration.HELD_OUT]
    limit, worst = calibration.held_out_limit(), calibration.errors_of(held_out)
    if as_json:
        values = []
        for each in compared:
            point, times = each.point, {"model_us": round(each.us, 3), "error": round(each.error, 4)}
            values.append({"id": point.id, "us": point.us, **times, "role": point.role, "trust": point.trust})
        print(json.dumps({"limit": limit, "held_out_error": round(worst, 4), "points": values}, indent=2))
    else:
        print("\n".join(table([report.ERROR_HEAD, *report.error_rows(compared)], "")))
        verdict = "within" if worst <= limit else "over"
        print(f"held-out times: off by {worst:.1%} at most, {verdict} the limit of {limit:.0%}")
    return 0 if worst <= limit else 1
