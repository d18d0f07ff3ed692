"""`ascend-moe vllm-pairs`: the parts of vLLM's modular kernel, which of them fit, and one pair tried for real."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ascend_moe._text import show, unwritable, write_whole
from ascend_moe.choices import EXPERTS, PREPARE_FINALIZE
from ascend_moe.cli import options
from ascend_moe.cli.options import MAX_SEED
from ascend_moe.errors import ArgumentError, need
from ascend_moe.presets import preset as preset_of
from ascend_moe.settings import MAX_WORLD

if TYPE_CHECKING:
    from ascend_moe.vllm_pairs import Outcome, Trial

app = typer.Typer()
_WIDTH = 100  # columns where the output is no terminal


@app.command()
def vllm_pairs(
    pf_type: Annotated[
        str, typer.Option("--pf-type", metavar="|".join(PREPARE_FINALIZE), help="PrepareAndFinalize.")
    ] = "",
    experts_type: Annotated[
        str, typer.Option("--experts-type", metavar="|".join(EXPERTS), help="Experts to try with it.")
    ] = "",
    ranks: Annotated[int, typer.Option("-r", "--ranks", metavar="W", help="EP ranks.")] = 4,
    batch: Annotated[
        str, typer.Option("-b", "--batch", help="Tokens a rank: 32 gives rank 0 32 and the others fewer; 9,0,7,3 all.")
    ] = "32",
    preset: options.Preset = "tiny",
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    quant: options.Quant = "none",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of weights, tokens and routing.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A torch trace of rank 0's forward, for ui.perfetto.dev.")
    ] = None,
    as_json: options.Json = "",
) -> None:
    """Which PrepareAndFinalize fits which experts; with both types given, that pair is run and checked.

    All ranks run on this CPU, in bf16 or W8A8, and every result is compared with dispatch, experts and combine, bit
    for bit, and with plain torch.

    Exit code 0: printed, or the pair is right. 1: the pair does not fit or computes something else, or the profile
    could not be written. 2: wrong options.
    """
    from ascend_moe.interop.vllm.selection import compatibility
    from ascend_moe.run.layers import batches_of
    from ascend_moe.vllm_pairs import Trial, try_pair

    if not pf_type and not experts_type:
        if profile is not None:
            text = "--profile shows one forward: give --pf-type and --experts-type too"
            raise ArgumentError(text, argument="profile")
        pairs = compatibility()
        show([pair._asdict() | {"fits": not pair.reason} for pair in pairs], as_json, _show_matrix)
        return
    for option, value, other in (("--pf-type", pf_type, experts_type), ("--experts-type", experts_type, pf_type)):
        if not value:
            raise ArgumentError(f"{option} is missing: a pair is tried, and {other} is half of it", argument=option)
    if profile is not None:
        if why := unwritable(profile):  # refused before anything runs
            raise ArgumentError(why, argument="profile")
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler prints when it starts and stops
    need(1 <= ranks <= MAX_WORLD, "ranks", "is {}; need 1..{}", ranks, MAX_WORLD)
    shape = options.shape_of(preset, hidden, topk, experts)
    width = preset_of(preset or "tiny").config().moe_intermediate_size
    layer = (shape["hidden"], width, shape["experts"], shape["topk"])
    trial = Trial(pf_type, experts_type, batches_of(batch, ranks), *layer, quant == "int8", seed)
    outcome = try_pair(trial, profile is not None)
    values = asdict(trial) | {name: value for name, value in asdict(outcome).items() if name != "trace"}
    show(values | {"ok": outcome.ok}, as_json, lambda: print("\n".join(_text(trial, outcome))))
    if outcome.ok and profile is not None:
        _write(profile, outcome.trace, as_json != "-")
    raise typer.Exit(0 if outcome.ok else 1)


def _write(path: Path, trace: str, tell: bool) -> None:
    try:
        write_whole(path, trace)
    except OSError as problem:
        print(f"ascend-moe vllm-pairs: {path}: {problem.strerror}", file=sys.stderr)
        raise typer.Exit(1) from None
    if tell:
        print(f"wrote {path}: open it at https://ui.perfetto.dev")


def _show_matrix() -> None:
    from ascend_moe.interop.vllm.selection import compatibility

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    made = Table("PrepareAndFinalize", *(f"{kind} experts" for kind in EXPERTS))
    cells: dict[str, list[Any]] = {kind: [] for kind in PREPARE_FINALIZE}
    for pair in compatibility():
        cells[pair.prepare_finalize].append(pair.reason or "fits")
    for kind, row in cells.items():
        made.add_row(kind, *row)
    console.print(made)
    print("Try one: ascend-moe vllm-pairs --pf-type mc2 --experts-type standard")


def _text(trial: Trial, outcome: Outcome) -> list[str]:
    pair = f"{trial.prepare_finalize} with {trial.experts} experts"
    if not outcome.fits:
        return [f"{pair} do not fit: {outcome.reason}"]
    assert outcome.difference is not None and outcome.tolerance is not None
    kind = "W8A8" if trial.quantized else "bf16"
    near = "ok  " if outcome.difference <= outcome.tolerance else "FAIL"
    return [
        f"{pair}, {kind}: {len(trial.batches)} ranks, tokens {', '.join(map(str, trial.batches))}, H {trial.hidden}, "
        f"F {trial.width}, E {trial.num_experts}, K {trial.topk}",
        f"{'ok  ' if outcome.equal else 'FAIL'}  = dispatch, experts and combine, bit for bit",
        f"{near}  = plain torch in fp32: relative difference {outcome.difference:.4f}, at most {outcome.tolerance}",
        "PASS" if outcome.ok else "FAIL",
    ]
