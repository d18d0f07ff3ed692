"""`ascend-moe predict`: times of dispatch and combine on NPUs, from a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from ascend_moe._text import PREDICTED, show, unwritable
from ascend_moe.call import QUANTS
from ascend_moe.cli import options
from ascend_moe.cli.options import bad
from ascend_moe.cli.progress import bar
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
) -> None:
    """Times of dispatch and combine on NPUs, predicted by a model: nothing here is measured.

    Our kernels run on the timed engine, all ranks and cores in this process. The output states the assumptions.

    Exit code 0. 2: wrong options.
    """
    request = Request(
        ranks=1,
        **options.shape_of(preset, hidden, topk, experts),
        batch=batch,
        quant_mode=QUANTS[quant],
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
