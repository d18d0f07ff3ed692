"""`ascend-moe run`: an MoE layer over EP ranks of this machine, by `ascend_moe.run`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ascend_moe import settings
from ascend_moe._text import BACKENDS, DEFAULT_TEXT
from ascend_moe.call import DTYPES, QUANTS
from ascend_moe.cli import options
from ascend_moe.cli.options import DEFAULT_PRESET, MAX_SEED, bad
from ascend_moe.errors import ArgumentError, need, need_one_of
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
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Use a layer of this Hugging Face checkpoint instead of a preset."
        ),
    ] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Decoder layer of --checkpoint, from 0.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-r", min=1, max=MAX_WORLD, help="EP ranks.")] = 4,
    backend: Annotated[
        str, typer.Option(metavar="|".join(BACKENDS), help="Run each rank in a thread, or in a process (gloo).")
    ] = BACKENDS[0],
    batch: Annotated[
        str,
        typer.Option(
            "--batch", "-b", help="Tokens per rank. 64: rank 0 has 64, the others fewer. 64,0,7,9: of each rank."
        ),
    ] = "64",
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Element type of rows and weights.")] = "bf16",
    quant: options.Quant = "none",
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    comm_alg: options.CommAlg = "",
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help=f"Text whose bytes are the tokens; default {DEFAULT_TEXT}."),
    ] = None,
    iterations: Annotated[int, typer.Option("--iterations", "-n", min=1, max=1000, help="Timed passes.")] = 5,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the embedding and the random weights.")] = 0,
    as_json: options.Json = "",
) -> None:
    """Run an MoE layer over EP ranks of this machine on real text, and check every result.

    Exit code 0: PASS. 1: FAIL, or an error of the run. 2: wrong options.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise typer.BadParameter("ascend-moe run starts its ranks itself: run it without torchrun")
    need_one_of("backend", backend, BACKENDS)
    need_one_of("dtype", dtype, DTYPES)
    import torch

    from ascend_moe.native import binding
    from ascend_moe.run import execute
    from ascend_moe.run.layers import RunSpec, batches_of
    from ascend_moe.run.report import about

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
    library.lib()  # reports a missing library before anything starts
    binding.library()
    head = about(spec, source, backend, width, text.name if text else DEFAULT_TEXT, note)
    with settings.COMM_ALG.within(comm_alg):
        raise typer.Exit(execute(spec, head, backend, as_json))


def _has_codes(checkpoint: Path | None, layer: int) -> bool:
    """Return whether a checkpoint's experts stay int8 or int4; the run reports errors in its files."""
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
    """The configuration, a text about it, and the published width of the experts if they are narrower."""
    if checkpoint is None:
        if number is not None:
            bad("--layer", "needs --checkpoint, whose layers it selects")
        found = preset(name or DEFAULT_PRESET)
        width = found.published.moe_intermediate_size
        hidden, topk, experts = options.shape_of(name, *shape, special=True).values()
        _need_groups(found.published, name or DEFAULT_PRESET, topk, experts)
        config = replace(found.config(), hidden_size=hidden, top_k=topk, num_experts=experts)
        narrowed = width if config.moe_intermediate_size < width else None
        changed = _other(found.published, config)
        return config, f"{name or DEFAULT_PRESET}: {found.about}{changed}, random weights", narrowed
    if name is not None:
        bad("--preset", "conflicts with --checkpoint: remove one of the two")
    for option, value in zip(("--hidden", "--topk", "--experts"), shape, strict=True):
        if value is not None:
            bad(option, "conflicts with --checkpoint: remove one of the two")
    if number is None:
        bad("--layer", "is required with --checkpoint: the number of a decoder layer, from 0")
    from ascend_moe.checkpoint.config import moe_config, read_json

    return moe_config(read_json(checkpoint)), f"{checkpoint}: decoder layer {number}", None


def _need_groups(layer: MoEConfig, name: str, topk: int, experts: int) -> None:
    """Raise ArgumentError unless the preset's groups of experts fit, in which a token chooses."""
    groups = layer.n_group
    fits = groups == 1 or (experts % groups == 0 and experts >= 2 * groups)
    rule = "is {0}; --preset {1} has {2} groups of experts: pass a multiple of {2}, at least {3}, or --preset tiny"
    need(fits, "experts", rule, experts, name, groups, 2 * groups)
    most = experts // groups * layer.topk_group + layer.special.total
    rule = "is {}; a token of --preset {} chooses among {} of {} experts: pass a --topk up to that, or more --experts"
    need(topk <= most or experts < 1, "topk", rule, topk, name, most, experts + layer.special.total)


def _other(published: MoEConfig, config: MoEConfig) -> str:
    names = {"hidden_size": "H", "top_k": "K", "num_experts": "E"}
    changed = [short for name, short in names.items() if getattr(published, name) != getattr(config, name)]
    return f" with {', '.join(changed)} changed" if changed else ""


def _text(path: Path | None, tokens: int) -> tuple[bytes, str]:
    """The first ``tokens`` bytes of the text, repeated if it is shorter, and a note about that."""
    from ascend_moe.run.layers import default_text

    if path is None:
        text = default_text()
    else:
        with path.open("rb") as file:
            text = file.read(tokens + 1)
    if not text:
        bad("--text", f"{path} is empty: pass a file with text")
    repeats = -(-tokens // len(text))
    note = f"the text has {len(text)} bytes and is repeated {repeats} times" if repeats > 1 else ""
    return (text * repeats)[:tokens], note
