"""`ascend-moe trace`: a timeline of dispatch and combine, as trace JSON and as a chart."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from ascend_moe._text import OPS, PICKS, TRACED, show, write_whole
from ascend_moe.call import QUANTS
from ascend_moe.cli import options
from ascend_moe.cli.options import bar, started

app = typer.Typer()


@app.command()
def trace(
    ranks: Annotated[int, typer.Option("-r", "--ranks", metavar="W", help="EP ranks.")] = 2,
    batch: Annotated[int, typer.Option("-b", "--batch", metavar="BS", help="Tokens per rank.")] = 32,
    preset: options.Preset = None,
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    quant: options.Quant = "none",
    op: Annotated[str, typer.Option(metavar="|".join(OPS), help="Ops to run.")] = "both",
    comm_alg: Annotated[
        str, typer.Option("--comm-alg", metavar="|".join(TRACED), help="Algorithm of the ops.")
    ] = "auto",
    repeat: Annotated[int, typer.Option("--iterations", "-n", metavar="N", max=100_000, help="Rounds to record.")] = 15,
    pick: Annotated[str, typer.Option(metavar="|".join(PICKS), help="Round to show.")] = "p10",
    seed: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="Seed of inputs and routing.")] = 0,
    soc: Annotated[str, typer.Option(metavar="NAME", help="Predict for this SoC instead of measuring here.")] = "",
    out: Annotated[Path | None, options.output("Write trace JSON for ui.perfetto.dev.")] = None,
    plot: Annotated[Path | None, options.output("Write an SVG chart.")] = None,
    as_json: options.Json = "",
) -> None:
    """Run dispatch and combine and show where the time goes.

    Without --soc the kernels run on this CPU and the timeline is measured. With --soc the timed engine runs
    them and the timeline is predicted by a model of that SoC. Every output states which of the two it is.

    Exit code 0: success. 2: wrong options, or a file that cannot be written.
    """
    from ascend_moe.predict import roundtrip
    from ascend_moe.predict.roundtrip import TraceRequest
    from ascendc_twin.timeline import chrome, picture

    shape = options.shape_of(preset, hidden, topk, experts)
    asked: dict[str, Any] = {"op": op, "algorithm": comm_alg, "repeat": repeat, "pick": pick, "seed": seed}
    request = TraceRequest(ranks=ranks, batch=batch, quant_mode=QUANTS[quant], **shape, **asked)
    how = f"prediction for {soc}" if soc else f"recording {repeat} rounds"
    begin = functools.partial(started, "trace", f"{request.title}; {how}")
    with bar("rounds"):
        timeline = roundtrip.predicted(request, soc, begin) if soc else roundtrip.measured(request, begin)
    show(roundtrip.as_dict(timeline), as_json, lambda: print("\n".join(roundtrip.text(timeline))))
    lines: list[str] = []
    for path, content in ((out, chrome.text), (plot, picture.svg)):
        if path is None:
            continue
        write_whole(path, content(timeline))
        lines.append(f"wrote {path}")
        if content is chrome.text:
            lines.append(f"open it at https://ui.perfetto.dev: Open trace file, {path.resolve()}")
    if lines and as_json != "-":
        print("\n".join(lines))
