"""`ascend-moe run`: a MoE layer over EP ranks of this machine; ascend_moe.run does the work."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ascend_moe._text import BACKENDS, DEFAULT_TEXT
from ascend_moe.call import DTYPES, QUANTS
from ascend_moe.cli import options
from ascend_moe.cli.options import DEFAULT_PRESET, MAX_SEED, bad
from ascend_moe.errors import ArgumentError
from ascend_moe.moe_config import PRESETS, MoEConfig, preset
from ascend_moe.native import library
from ascend_moe.settings import MAX_WORLD

app = typer.Typer()


@app.command()
def run(
    preset_name: Annotated[
        str | None,
        typer.Option("--preset", "-p", metavar="NAME", help=f"{', '.join(PRESETS)}; default {DEFAULT_PRESET}."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Hugging Face checkpoint instead of a preset.")
    ] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Its decoder layer, from 0.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, max=MAX_WORLD, help="EP ranks.")] = 4,
    backend: Annotated[
        str, typer.Option(metavar="|".join(BACKENDS), help="One thread a rank, or one process a rank (gloo).")
    ] = BACKENDS[0],
    batch: Annotated[
        str,
        typer.Option(
            "--batch", "-b", help="Tokens a rank: 64: rank 0 has 64, the others fewer; 64,0,7,9 says them all."
        ),
    ] = "64",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Of rows and weights.")] = "bf16",
    quant: options.Quant = "none",
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    comm_alg: options.CommAlg = "",
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help=f"The tokens, a byte each; default {DEFAULT_TEXT}.")
    ] = None,
    iterations: Annotated[int, typer.Option("--iterations", "-n", min=1, max=1000, help="Timed passes.")] = 5,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of embedding and random weights.")] = 0,
    as_json: options.Json = "",
) -> None:
    """Run a MoE layer over EP ranks of this machine on real text, and check every result.

    Exit code 0: PASS. 1: FAIL, or an error of the run. 2: wrong options.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise typer.BadParameter("ascend-moe starts its ranks itself: leave out torchrun")
    for option, value, names in (("--backend", backend, BACKENDS), ("--dtype", dtype, DTYPES)):
        if value not in names:
            bad(option, f"{value!r} is none of {', '.join(names)}")
    import torch

    from ascend_moe.native import binding
    from ascend_moe.run import execute
    from ascend_moe.run.layers import RunSpec, batches_of
    from ascend_moe.run.report import about

    try:
        config, source, width = _layer(preset_name, checkpoint, layer, (hidden, topk, experts))
        batches = batches_of(batch, ranks)
        wanted, note = _text(text, sum(batches))
        spec = RunSpec(
            config=config,
            batches=batches,
            dtype=getattr(torch, DTYPES[dtype]),
            quant_mode=QUANTS["int8" if _has_codes(checkpoint, layer or 0) else quant],
            text=wanted,
            seed=seed,
            iterations=iterations,
            checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
            layer=layer or 0,
        )
    except ArgumentError as error:
        hint = {"directory": "checkpoint"}.get(error.argument, error.argument)
        raise typer.BadParameter(str(error), param_hint=f"'--{hint}'") from None
    library.lib()  # what is missing is said in one line, before anything starts
    binding.library()
    head = about(spec, source, backend, width, text.name if text else DEFAULT_TEXT, note)
    with options.comm_alg_of_ops(comm_alg):
        raise typer.Exit(execute(spec, head, backend, as_json))


def _has_codes(checkpoint: Path | None, layer: int) -> bool:
    """Whether a checkpoint's experts stay int8 or int4. What is wrong with its files the run says."""
    if checkpoint is None:
        return False
    from ascend_moe.checkpoint import kept_bits

    try:
        return kept_bits(checkpoint, layer) > 0
    except ArgumentError:
        return False


def _layer(
    name: str | None, checkpoint: Path | None, number: int | None, shape: tuple[int | None, int | None, int | None]
) -> tuple[MoEConfig, str, int | None]:
    """The numbers, what they are, and the published width of the experts where they are narrower."""
    if checkpoint is None:
        if number is not None:
            bad("--layer", "it counts the layers of a checkpoint: give --checkpoint too")
        found = preset(name or DEFAULT_PRESET)
        width = found.published.moe_intermediate_size
        hidden, topk, experts = options.shape_of(name, *shape, special=True).values()
        config = replace(found.config(), hidden_size=hidden, top_k=topk, num_experts=experts)
        narrowed = width if config.moe_intermediate_size < width else None
        return (
            config,
            f"{name or DEFAULT_PRESET}: {found.about}{_other(found.published, config)}, random weights",
            narrowed,
        )
    if name is not None:
        bad("--preset", "the numbers come from --checkpoint: leave one of them out")
    for option, value in zip(("--hidden", "--topk", "--experts"), shape, strict=True):
        if value is not None:
            bad(option, "the numbers come from --checkpoint: leave one of them out")
    if number is None:
        bad("--layer", "say which decoder layer of the checkpoint, from 0")
    from ascend_moe.checkpoint.config import moe_config, read_json

    return moe_config(read_json(checkpoint)), f"{checkpoint}: decoder layer {number}", None


def _other(published: MoEConfig, config: MoEConfig) -> str:
    names = {"hidden_size": "H", "top_k": "K", "num_experts": "E"}
    changed = [short for name, short in names.items() if getattr(published, name) != getattr(config, name)]
    return f" with another {', '.join(changed)}" if changed else ""


def _text(path: Path | None, tokens: int) -> tuple[bytes, str]:
    """``tokens`` bytes of the text, repeated where it is shorter, and the sentence that says so."""
    from ascend_moe.run.layers import default_text

    text = default_text() if path is None else path.read_bytes()
    if not text:
        bad("--text", f"{path} is empty")
    repeats = -(-tokens // len(text))
    note = f"the text has {len(text)} bytes and is read {repeats} times" if repeats > 1 else ""
    return (text * repeats)[:tokens], note
