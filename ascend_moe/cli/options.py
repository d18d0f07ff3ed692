"""Options that several commands have: the shape of a layer, and a whole configuration."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from ascend_moe import plan as planning
from ascend_moe.checkpoint.presets import PRESETS, preset
from ascend_moe.errors import ArgumentError
from ascend_moe.plan import Request
from ascend_moe.plan.soc import SOCS

DEFAULT_PRESET = "deepseek-v3"


class Shape(NamedTuple):
    """H, K and E of a layer."""

    hidden: int
    topk: int
    experts: int


def _shape(name: str) -> Shape:
    layer = preset(name).published
    return Shape(layer.hidden_size, layer.top_k, layer.num_experts)


_USUAL = _shape(DEFAULT_PRESET)

Preset = Annotated[
    str | None,
    typer.Option("-p", "--preset", metavar="NAME", help=f"H, K and E of a model: {', '.join(PRESETS)}."),
]
Hidden = Annotated[int | None, typer.Option(metavar="H", help=f"Elements of a row; default {_USUAL.hidden}.")]
TopK = Annotated[
    int | None, typer.Option("-k", "--topk", metavar="K", help=f"Experts a token; default {_USUAL.topk}.")
]
Experts = Annotated[
    int | None,
    typer.Option("-e", "--experts", metavar="E", help=f"Experts of all ranks; default {_USUAL.experts}."),
]
Ranks = Annotated[int | None, typer.Option("-r", "--ranks", metavar="W", help="EP ranks; default 16.")]
Batch = Annotated[
    int | None,
    typer.Option("-b", "--batch", metavar="BS", help="Tokens a rank, the same on all; default 128."),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-bs", metavar="N", help="Ranks times the largest batch; batches may then differ."),
]
Dtype = Annotated[str, typer.Option(metavar="|".join(planning.DTYPES), help="Of x.")]
Quant = Annotated[bool, typer.Option("--quant", help="int8 rows, quant_mode 2.")]
Smooth = Annotated[bool, typer.Option("--smooth", help="With smooth scales; implies --quant.")]
Contract = Annotated[str, typer.Option(metavar="|".join(planning.CONTRACTS))]
Soc = Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(SOCS)}.")]
Cores = Annotated[
    int, typer.Option(metavar="N", help="AIV cores of a launch; 0: all of the SoC.", show_default=False)
]
Window = Annotated[
    int, typer.Option(metavar="MIB", help="HCCL_BUFFSIZE as it is, to compare with.", show_default=False)
]
CommAlg = Annotated[str, typer.Option("--comm-alg", metavar="NAME", help="window, direct or auto.")]
RanksPerServer = Annotated[
    int,
    typer.Option("--ranks-per-server", metavar="N", help="0: a full server of the SoC.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def shape_of(name: str | None, hidden: int | None, topk: int | None, experts: int | None) -> Shape:
    """What the options say; the rest is the preset's, or ``DEFAULT_PRESET``'s.

    Raises:
        ArgumentError: no such preset.
    """
    usual = _shape(name or DEFAULT_PRESET)
    given = (hidden, topk, experts)
    return Shape(*(usual[i] if number is None else number for i, number in enumerate(given)))


def request_of(
    *,
    preset: str | None,
    ranks: int | None,
    batch: int | None,
    global_bs: int | None,
    hidden: int | None,
    topk: int | None,
    experts: int | None,
    window: int,
    exported: int,
    quant: bool,
    smooth: bool,
    **rest: Any,
) -> Request:
    """The configuration that the options describe. ``exported``: HCCL_BUFFSIZE where --window says none.

    Raises:
        ArgumentError: no such preset, or --batch and --global-bs both.
    """
    ranks = 16 if ranks is None else ranks
    if batch is not None and global_bs is not None:
        raise ArgumentError("--global-bs is ranks * batch: leave --batch out", argument="global_bs")
    batch = 128 if batch is None else batch
    if global_bs is not None:
        if global_bs < 1 or global_bs % max(1, ranks):
            text = f"--global-bs {global_bs} must be a multiple of the {ranks} ranks"
            raise ArgumentError(text, argument="global_bs")
        batch = global_bs // ranks
    return Request(
        ranks=ranks,
        **shape_of(preset, hidden, topk, experts)._asdict(),
        batch=batch,
        equal_batches=global_bs is None,
        quant=quant or smooth,
        smooth=smooth,
        window_mib=window or exported,
        **rest,
    )


def bad(option: str, message: str) -> NoReturn:
    """A wrong option, in typer's form."""
    raise typer.BadParameter(message, param_hint=f"'{option}'")
