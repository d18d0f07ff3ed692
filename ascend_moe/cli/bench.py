"""`ascend-moe bench`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ascend_moe._text import SKEWS, SWEEPS, show
from ascend_moe.call import DTYPES
from ascend_moe.cli import options
from ascend_moe.cli.options import bad, bar, numbers, started
from ascend_moe.moe_config import PRESETS

if TYPE_CHECKING:
    from ascend_moe.bench.cases import Case
    from ascend_moe.bench.results import Run

ITERATIONS, QUICK_ITERATIONS = 60, 12

app = typer.Typer()


@app.command()
def bench(
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "-p", metavar="NAME", help=f"Model: {', '.join(PRESETS)}; may be repeated."),
    ] = None,
    batch: Annotated[str, typer.Option("-b", "--batch", metavar="N,N", help="Tokens per rank.")] = "8,32",
    ranks: Annotated[str, typer.Option("--ranks", "-r", metavar="N,N", help="EP ranks.")] = "2",
    skew: Annotated[
        str, typer.Option(metavar="|".join(SKEWS), help="Distribution of the tokens over the experts.")
    ] = "uniform",
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    quant: options.Quant = "none",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Element type of the rows.")] = "bf16",
    methods: Annotated[
        str, typer.Option("--methods", help="auto, ours, peer, or names from the table; limit and bare always run.")
    ] = "auto",
    comm_alg: options.CommAlg = "",
    sweep: Annotated[
        str, typer.Option(metavar="|".join(SWEEPS), help="Vary BS 1..512, ranks 1..8, or H 1024..8192.")
    ] = "",
    iterations: Annotated[
        int, typer.Option("-n", "--iterations", min=1, max=100000, help="Timed round trips per case.")
    ] = ITERATIONS,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_ITERATIONS} iterations.")] = False,
    as_json: options.Json = "",
    plot: Annotated[Path | None, options.output("Write an SVG chart; with --sweep also FILE_SWEEP.", True)] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Only check the bounds of docs/performance.md, in up to three runs; exit code 1 if one is exceeded.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Print ratios even if the run was noisy.")] = False,
) -> None:
    """Time dispatch and combine against torch.distributed, MPI and the machine's limit.

    Exit code 0: success. 1: a wrong result, a rank that failed, or with --check an exceeded bound. 2: wrong options.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise typer.BadParameter("ascend-moe bench starts its ranks itself: run it without torchrun")
    from ascend_moe.bench import bounds, report
    from ascend_moe.bench import methods as every_method
    from ascend_moe.bench.cases import matrix

    if check:
        passed = bounds.check(lambda cases: measure(cases, list(every_method.METHODS), bounds.ITERATIONS), print)
        raise typer.Exit(0 if passed else 1)
    shape, chosen = (hidden, topk, experts), {"sweep": sweep, "skew": skew, "quant": quant, "dtype": dtype}
    worlds, batches = numbers("--ranks", ranks), numbers("--batch", batch)
    cases = matrix(preset or ["deepseek-v3"], worlds, batches, shape=shape, **chosen)
    if comm_alg == "hierarchy":
        why = "hierarchy works between servers; the ranks of bench share one, where it runs window: use window"
        bad("--comm-alg", why)
    names = every_method.chosen(methods, comm_alg)
    result = measure(cases, names, QUICK_ITERATIONS if quick else iterations)
    # A pipe has no width; rich would cut tables at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160)
    show(result.as_dict(), as_json, lambda: report.show(result, console, force))
    if plot is not None:
        from ascend_moe.bench import plots

        plots.draw(result, plot, sweep)


def measure(cases: Sequence[Case], names: Sequence[str], iterations: int) -> Run:
    """Run the benchmark with progress on stderr; if a rank fails, print its error and exit with code 1."""
    from ascend_moe.bench import RankFailed, run

    note = functools.partial(started, "bench")
    try:
        with bar("iterations") as advance:
            note(f"cases: {len(cases)}, iterations: {iterations}, methods: {', '.join(names)}")
            return run(cases, names, iterations, advance=advance if sys.stderr.isatty() else None, note=note)
    except RankFailed as error:
        print(error.details.get("trace") or "", file=sys.stderr)
        print(f"ascend-moe bench: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
