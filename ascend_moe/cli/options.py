"""Options that several commands have: the shape of a layer, and a whole configuration."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ascend_moe import plan as planning
from ascend_moe import settings
from ascend_moe._text import unwritable
from ascend_moe.call import ALGORITHMS, DTYPES, QUANTS, CallOptions
from ascend_moe.errors import ArgumentError
from ascend_moe.moe_config import PRESETS, preset
from ascend_moe.plan import Request
from ascend_moe.plan.soc import DEFAULT_SOC, SOCS

DEFAULT_PRESET = "deepseek-v3"
MAX_SEED = 2**62  # numbers of ranks and rounds are added to it, and torch's generators take 64 bits


def shape_of(
    name: str | None,
    hidden: int | None = None,
    topk: int | None = None,
    experts: int | None = None,
    *,
    special: bool = False,
) -> dict[str, Any]:
    """H, K and E of the options; the rest is the preset's, or ``DEFAULT_PRESET``'s.

    special: the command knows experts to which no row travels; else a preset that has them is refused.
    """
    layer = preset(name or DEFAULT_PRESET).published
    if layer.special.total and not special:
        rule = (
            f"{name} has {layer.special.total} experts to which no row travels, which this command does not know: give "
        )
        bad("--preset", rule + "another, or --hidden, --topk and --experts")
    usual = {"hidden": layer.row_size, "topk": layer.top_k, "experts": layer.num_experts}
    given = {"hidden": hidden, "topk": topk, "experts": experts}
    return usual | {key: value for key, value in given.items() if value is not None}


def _quant(value: str) -> str:
    if value not in QUANTS:
        bad("--quant", f"{value!r} is none of {', '.join(QUANTS)}")
    return value


def _cores(value: int | None) -> int | None:
    if value == 0:
        raise ArgumentError("cores is 0; need 1..64, or leave --cores out for all of the SoC", argument="cores")
    return value


def _json(value: str) -> str:
    if value not in ("", "-") and (why := unwritable(Path(value))):
        bad("--json", why)
    return value


def bad(option: str, message: str) -> NoReturn:
    """A wrong option, in typer's form."""
    raise typer.BadParameter(message, param_hint=f"'{option}'")


def _comm_alg(value: str) -> str:
    if value not in ("", *ALGORITHMS):
        bad("--comm-alg", f"{value!r} is none of {', '.join(ALGORITHMS)}")
    return value


@contextmanager
def comm_alg_of_ops(name: str) -> Iterator[None]:
    """Meanwhile ops that name no algorithm, here and in processes started from here, run this one; "": as before."""
    variable = settings.COMM_ALG.name
    before = os.environ.get(variable)
    if name:
        os.environ[variable] = name
    try:
        yield
    finally:
        if name:
            os.environ.pop(variable)
        if name and before is not None:
            os.environ[variable] = before


_USUAL = shape_of(None)

Preset = Annotated[
    str | None, typer.Option("-p", "--preset", metavar="NAME", help=f"H, K and E of a model: {', '.join(PRESETS)}.")
]
Hidden = Annotated[int | None, typer.Option(metavar="H", help=f"Elements of a row; default {_USUAL['hidden']}.")]
TopK = Annotated[
    int | None, typer.Option("-k", "--topk", metavar="K", help=f"Experts a token; default {_USUAL['topk']}.")
]
Experts = Annotated[
    int | None, typer.Option("-e", "--experts", metavar="E", help=f"Experts of all ranks; default {_USUAL['experts']}.")
]
Quant = Annotated[str, typer.Option("--quant", metavar="none|int8", help="Rows as they travel.", callback=_quant)]
Contract = Annotated[str, typer.Option(metavar="|".join(planning.CONTRACTS))]
Cores = Annotated[
    int | None, typer.Option(metavar="N", help="AIV cores of a launch; default: all of the SoC.", callback=_cores)
]
CommAlg = Annotated[
    str,
    typer.Option(
        "--comm-alg", metavar="|".join(ALGORITHMS), help="What the ops run.", show_default="auto", callback=_comm_alg
    ),
]
Json = Annotated[
    str, typer.Option("--json", metavar="FILE|-", help="Every number as JSON; -: printed alone.", callback=_json)
]


def request_of(
    *,
    preset: Preset = None,
    ranks: Annotated[int | None, typer.Option("-r", "--ranks", metavar="W", help="EP ranks; default 16.")] = None,
    batch: Annotated[
        int | None, typer.Option("-b", "--batch", metavar="BS", help="Tokens a rank, the same on all; default 128.")
    ] = None,
    global_bs: Annotated[
        int | None,
        typer.Option("--global-bs", metavar="N", help="Ranks times the largest batch; batches may then differ."),
    ] = None,
    hidden: Hidden = None,
    topk: TopK = None,
    experts: Experts = None,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Of x.")] = "bf16",
    quant: Quant = "none",
    smooth: Annotated[bool, typer.Option("--smooth", help="With smooth scales; implies int8.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Dispatch takes expert_scales too.")] = False,
    contract: Contract = "v2",
    soc: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(SOCS)}.")] = DEFAULT_SOC,
    cores: Cores = None,
    window: Annotated[
        int, typer.Option(metavar="MIB", help="HCCL_BUFFSIZE as it is, to compare with.", show_default=False)
    ] = 0,
    comm_alg: Annotated[str, typer.Option("--comm-alg", metavar="NAME", help=f"{', '.join(ALGORITHMS)}.")] = "",
    ranks_per_server: Annotated[
        int, typer.Option("--ranks-per-server", metavar="N", help="0: a full server of the SoC.", show_default=False)
    ] = 0,
    rdma_flags: Annotated[
        bool, typer.Option("--rdma-flags", help="ASCEND_MOE_RDMA_FLAGS is 1: flagged blocks between servers.")
    ] = False,
    super_pods: Annotated[int, typer.Option("--super-pods", metavar="N", help="Super-pods of A3 they are on.")] = 1,
    **options: Any,
) -> Request:
    """The configuration that the options describe; ``options`` are fields of `CallOptions`, None: the preset's."""
    ranks = 16 if ranks is None else ranks
    if batch is not None and global_bs is not None:
        raise ArgumentError("--global-bs is ranks * batch: leave --batch out", argument="global_bs")
    if global_bs is not None and (global_bs < 1 or global_bs % max(1, ranks)):
        text = f"--global-bs {global_bs} must be a multiple of the {ranks} ranks"
        raise ArgumentError(text, argument="global_bs")
    usual = PRESETS[preset].published.special.given if preset in PRESETS else {}
    return Request(
        ranks=ranks,
        **shape_of(preset, hidden, topk, experts, special=True),
        **usual | {name: value for name, value in options.items() if value is not None},
        batch=global_bs // ranks if global_bs else 128 if batch is None else batch,
        equal_batches=global_bs is None,
        dtype=dtype,
        quant_mode=QUANTS["int8" if smooth else quant],
        smooth=smooth,
        contract=contract,
        soc=soc,
        cores=cores or 0,
        window_mib=window,
        ranks_per_server=ranks_per_server,
        comm_alg=comm_alg,
        weights=weights,
        rdma_flags=rdma_flags,
        super_pods=super_pods,
    )


def _parameters() -> dict[str, inspect.Parameter]:
    """Those of ``request_of``, with an option for each field of `CallOptions` that has a help text."""
    found = [*inspect.signature(request_of, eval_str=True).parameters.values()][:-1]
    for option in fields(CallOptions):
        if "help" in option.metadata:
            values = "|".join(map(str, option.metadata.get("choices", "N")))
            name, kind = f"--{option.name.replace('_', '-')}", type(option.default) | None
            own = Annotated[kind, typer.Option(name, metavar=values, help=option.metadata["help"])]  # type: ignore[valid-type]
            found.append(inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=own))
    return {parameter.name: parameter for parameter in found}


_PARAMETERS = _parameters()
USUAL_CONFIGURATION = {name: each.default for name, each in _PARAMETERS.items()}


def with_configuration(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of ``request_of`` before its own; it gets them as its first argument."""
    shared = _PARAMETERS
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command({name: given.pop(name) for name in shared}, **given)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = inspect.Signature([*shared.values(), *keyword_only])  # type: ignore[attr-defined]
    run.__annotations__ = {value.name: value.annotation for value in (*shared.values(), *own)}
    return run


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between them."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ArgumentError(f"--{option} {text} is no list of whole numbers, like 8,16", argument=option)
    return [int(word) for word in words]
