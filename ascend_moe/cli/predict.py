"""`ascend-moe predict`: times of dispatch and combine on NPUs, from a model; its errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from ascend_moe._text import show, table, unwritable
from ascend_moe.choices import PREDICTED
from ascend_moe.cli import options
from ascend_moe.cli.options import bad
from ascend_moe.cli.progress import bar, started
from ascend_moe.plan import Request
from ascend_moe.plan.soc import DEFAULT_SOC, SOCS

app = typer.Typer()


@app.command()
def predict(
    soc: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(SOCS)}.")] = DEFAULT_SOC,
    ranks: Annotated[str, typer.Option("-r", "--ranks", metavar="W,...", help="EP ranks.")] = "8,16,32,64",
    batch: Annotated[int, typer.Option("-b", "--batch", metavar="BS", help="Tokens a rank.")] = 128,
    preset: options.Preset = None,
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    quant: options.Quant = "int8",
    contract: options.Contract = "v2",
    cores: options.Cores = None,
    comm_alg: Annotated[
        str, typer.Option("--comm-alg", metavar="NAME,...", help=f"Of {','.join(PREDICTED)}; default: all.")
    ] = "",
    as_json: options.Json = "",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of the times along --ranks, SVG.")
    ] = None,
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
        batch=batch,
        quant=quant == "int8",
        contract=contract,
        soc=soc,
        cores=cores or 0,
    )
    if plot is not None:
        if why := unwritable(plot):
            bad("--plot", why)
        if importlib.util.find_spec("matplotlib") is None:
            bad("--plot", "needs matplotlib: pip install matplotlib")
    names = comm_alg.split(",") if comm_alg else []
    worlds = options.numbers("ranks", ranks)
    with bar("predictions") as advance:
        from ascend_moe.predict import Prediction, report
        from ascend_moe.predict import predict as predicted

        pairs = report.asked(request, worlds, names)
        tell = print if as_json != "-" else _untold
        tell("\n".join(report.head(pairs[0][0])), flush=True)
        found: list[Prediction] = []
        for one, name in pairs:
            advance(f"EP {one.ranks}, {name}", len(found), len(pairs))
            found.append(predicted(one, algorithm=name))
            tell(report.row(found[-1]), flush=True)
    show(
        report.as_dict(found),
        as_json,
        lambda: print("\n".join(line for prediction in found for line in report.steps(prediction))),
    )
    if plot is not None:
        report.draw(found, plot)


def _untold(*texts: str, flush: bool) -> None:
    """Stands for print where JSON is all that is printed."""


def _check(as_json: str) -> int:
    from ascend_moe.predict import calibration, report

    chosen = calibration.points(calibration.CALIBRATION, calibration.HELD_OUT, "shown")
    with bar("published times") as advance:
        started("predict", f"{len(chosen)} published times, each predicted anew")
        compared = calibration.compare(chosen, progress=lambda done: advance("published times", done, len(chosen)))
    held_out = [each for each in compared if each.point.role == calibration.HELD_OUT]
    limit, worst = calibration.held_out_limit(), calibration.errors_of(held_out)
    values = []
    for each in compared:
        point, times = each.point, {"model_us": round(each.us, 3), "error": round(each.error, 4)}
        values.append({"id": point.id, "us": point.us, **times, "role": point.role, "trust": point.trust})
    lines = table([report.ERROR_HEAD, *report.error_rows(compared)], "")
    verdict = "within" if worst <= limit else "over"
    lines.append(f"held-out times: off by {worst:.1%} at most, {verdict} the limit of {limit:.0%}")
    found = {"limit": limit, "held_out_error": round(worst, 4), "points": values}
    show(found, as_json, lambda: print("\n".join(lines)))
    return 0 if worst <= limit else 1
