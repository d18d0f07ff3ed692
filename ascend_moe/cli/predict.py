"""`ascend-moe predict`: times of dispatch and combine on NPUs, predicted by a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ascend_moe._text import PREDICTED, show
from ascend_moe.call import QUANTS
from ascend_moe.cli import options
from ascend_moe.cli.options import bar
from ascend_moe.plan import Request
from ascendc_twin.soc import DEFAULT_SOC, SOCS

app = typer.Typer()


@app.command()
def predict(
    soc: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(SOCS)}.")] = DEFAULT_SOC,
    ranks: Annotated[str, typer.Option("-r", "--ranks", metavar="W,...", help="EP ranks.")] = "8,16,32,64",
    batch: Annotated[int, typer.Option("-b", "--batch", metavar="BS", help="Tokens per rank.")] = 128,
    preset: options.Preset = None,
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    quant: options.Quant = "int8",
    contract: options.Contract = "v2",
    cores: options.Cores = None,
    comm_alg: Annotated[
        str, typer.Option("--comm-alg", metavar="NAME,...", help=f"One or more of {','.join(PREDICTED)}; default: all.")
    ] = "",
    as_json: options.Json = "",
    plot: Annotated[Path | None, options.output("Write an SVG chart of the times over --ranks.", True)] = None,
) -> None:
    """Predict times of dispatch and combine on NPUs with a model. Nothing is measured.

    The kernels run on the timed engine, with all ranks and cores in this process. The output states the assumptions.

    Exit code 0: success. 2: wrong options.
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
    names = comm_alg.split(",") if comm_alg else []
    worlds = options.numbers("--ranks", ranks)
    with bar("predictions") as advance:
        from ascend_moe.predict import Prediction, report
        from ascend_moe.predict import predict as predicted

        pairs = report.asked(request, worlds, names)
        shown = as_json != "-"  # JSON goes to stdout alone
        if shown:
            print("\n".join(report.head(pairs[0][0])), flush=True)
        found: list[Prediction] = []
        for one, name in pairs:
            advance(f"EP {one.ranks}, {name}", len(found), len(pairs))
            found.append(predicted(one, algorithm=name))
            if shown:
                print(report.row(found[-1]), flush=True)
    lines = [line for prediction in found for line in report.steps(prediction)]
    show(report.as_dict(found), as_json, lambda: print("\n".join(lines)))
    if plot is not None:
        report.draw(found, plot)
