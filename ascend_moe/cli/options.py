"""What several commands share: options of a layer's shape and of a whole configuration, and the progress shown."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ascend_moe import plan as planning
from ascend_moe._text import unwritable
from ascend_moe.call import ALGORITHMS, DTYPES, QUANTS, CallOptions
from ascend_moe.errors import need, need_one_of
from ascend_moe.moe_config import PRESETS, preset
from ascend_moe.plan import Request
from ascendc_twin.soc import DEFAULT_SOC, SOCS

DEFAULT_PRESET = "deepseek-v3"
MAX_SEED = 2**62  # ranks and rounds are added to it, and torch's generators take 64 bits


def shape_of(
    name: str | None,
    hidden: int | None = None,
    topk: int | None = None,
    experts: int | None = None,
    *,
    special: bool = False,
) -> dict[str, Any]:
    """Return H, K and E by name; those that are None are the numbers of preset ``name``, None: ``DEFAULT_PRESET``.

    Args:
        special: the command supports zero, copy and const experts; False: a preset with them is a BadParameter.
    """
    layer = preset(name or DEFAULT_PRESET).published
    if layer.special.total and not special:
        rule = f"{name} has {layer.special.total} zero, copy or const experts, which this command does not support"
        bad("--preset", f"{rule}: give another preset, or --hidden, --topk and --experts")
    usual = {"hidden": layer.row_size, "topk": layer.top_k, "experts": layer.num_experts}
    given = {"hidden": hidden, "topk": topk, "experts": experts}
    return usual | {key: value for key, value in given.items() if value is not None}


def _not_zero(param: typer.CallbackParam, value: int | None) -> int | None:
    need(value != 0, str(param.name), "is 0; need 1 or more, or leave the option out")  # 0 is the modules' default
    return value


def _writable(value: str | Path | None) -> str | Path | None:
    """Return the value of an option that names an output file; a file that cannot be written is a BadParameter."""
    if value not in (None, "", "-") and (why := unwritable(Path(value))):
        raise typer.BadParameter(why)
    return value


def _drawable(value: Path | None) -> str | Path | None:
    if value is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib")
    return _writable(value)


def output(help: str, matplotlib: bool = False) -> Any:
    """Return typer's description of an option with the name of an output file, which ``matplotlib`` may draw."""
    return typer.Option(metavar="FILE", help=help, callback=_drawable if matplotlib else _writable)


def bad(option: str, message: str) -> NoReturn:
    """Raise typer.BadParameter, which the command reports with exit code 2, for an ``option`` as typed: "--batch"."""
    raise typer.BadParameter(message, param_hint=f"'{option}'")


def _one_of(option: str, names: Iterable[str]) -> Callable[[str], str]:
    """Return typer's callback of an option whose value is one of ``names``."""

    def checked(value: str) -> str:
        need_one_of(option, value, names)
        return value

    return checked


_USUAL = shape_of(None)

Preset = Annotated[
    str | None,
    typer.Option("-p", "--preset", metavar="NAME", help=f"Take H, K and E from a model: {', '.join(PRESETS)}."),
]
Hidden = Annotated[
    int | None, typer.Option(metavar="H", help=f"Hidden size, elements of a row; default {_USUAL['hidden']}.")
]
TopK = Annotated[
    int | None, typer.Option("-k", "--topk", metavar="K", help=f"Experts per token; default {_USUAL['topk']}.")
]
Experts = Annotated[
    int | None,
    typer.Option("-e", "--experts", metavar="E", help=f"Experts in all ranks together; default {_USUAL['experts']}."),
]
Quant = Annotated[
    str,
    typer.Option(metavar="none|int8", help="Format in which dispatch sends rows.", callback=_one_of("quant", QUANTS)),
]
Contract = Annotated[str, typer.Option(metavar="|".join(planning.CONTRACTS), help="Version of the operators.")]
Cores = Annotated[
    int | None, typer.Option(metavar="N", help="AIV cores per rank; default: all of the SoC.", callback=_not_zero)
]
CommAlg = Annotated[
    str,
    typer.Option(
        "--comm-alg",
        metavar="|".join(ALGORITHMS),
        help="Algorithm of the ops.",
        show_default="auto",
        callback=_one_of("comm_alg", ("", *ALGORITHMS)),
    ),
]
Json = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write all numbers as JSON to FILE; -: to stdout, instead of text.",
        callback=_writable,
    ),
]


def request_of(
    *,
    preset: Preset = None,
    ranks: Annotated[int | None, typer.Option("-r", "--ranks", metavar="W", help="EP ranks; default 16.")] = None,
    batch: Annotated[
        int | None,
        typer.Option("-b", "--batch", metavar="BS", help="Tokens per rank, equal on all ranks; default 128."),
    ] = None,
    global_bs: Annotated[
        int | None,
        typer.Option(
            "--global-bs", metavar="N", help="Ranks times the largest batch; batches of ranks may then differ."
        ),
    ] = None,
    hidden: Hidden = None,
    topk: TopK = None,
    experts: Experts = None,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="Element type of x.")] = "bf16",
    quant: Quant = "none",
    smooth: Annotated[bool, typer.Option("--smooth", help="Dispatch takes smooth scales; implies int8.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Dispatch takes expert_scales too.")] = False,
    contract: Contract = "v2",
    soc: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(SOCS)}.")] = DEFAULT_SOC,
    cores: Cores = None,
    window: Annotated[
        int | None, typer.Option(metavar="MIB", help="Current HCCL_BUFFSIZE, for comparison.", callback=_not_zero)
    ] = None,
    comm_alg: Annotated[str, typer.Option("--comm-alg", metavar="NAME", help=f"One of {', '.join(ALGORITHMS)}.")] = "",
    ranks_per_server: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-server", metavar="N", help="Default: all NPUs of a server with this SoC.", callback=_not_zero
        ),
    ] = None,
    rdma_flags: Annotated[
        bool, typer.Option("--rdma-flags", help="As with ASCEND_MOE_RDMA_FLAGS=1: flagged blocks between servers.")
    ] = False,
    super_pods: Annotated[
        int, typer.Option("--super-pods", metavar="N", help="A3 super-pods that the ranks span.")
    ] = 1,
    **options: Any,
) -> Request:
    """Return the `Request` to plan from options of a command; ``options``: `CallOptions` fields, None: the preset's."""
    ranks = 16 if ranks is None else ranks
    if batch is not None and global_bs is not None:
        bad("--global-bs", "sets the batch too: remove --batch")
    if global_bs is not None and (global_bs < 1 or global_bs % max(1, ranks)):
        bad("--global-bs", f"{global_bs} must be a multiple of the {ranks} ranks")
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
        window_mib=window or 0,
        ranks_per_server=ranks_per_server or 0,
        comm_alg=comm_alg,
        weights=weights,
        rdma_flags=rdma_flags,
        super_pods=super_pods,
    )


def _parameters() -> dict[str, inspect.Parameter]:
    """Parameters of `request_of`, and one for each field of `CallOptions` with a help text."""
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
    """Decorator: add the options of `request_of` to a command, whose first argument receives them as a dict."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command({name: given.pop(name) for name in _PARAMETERS}, **given)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = inspect.Signature([*_PARAMETERS.values(), *keyword_only])  # type: ignore[attr-defined]
    run.__annotations__ = {value.name: value.annotation for value in (*_PARAMETERS.values(), *own)}
    return run


def numbers(option: str, text: str) -> list[int]:
    """Return the integers, separated by commas, in the ``text`` of an ``option`` as typed, or raise BadParameter."""
    if not all(word.strip().isdecimal() for word in text.split(",")):
        bad(option, f"{text!r} is no list of integers from 0 on, like 8,16")
    return [int(word) for word in text.split(",")]


# ---- progress: a bar on a terminal, lines where stderr is a pipe or a file

#: advance(text, done, total), total 0 when unknown
Advance = Callable[[str, int, int], None]


@contextmanager
def bar(text: str) -> Iterator[Advance]:
    """Context manager: show a progress bar on stderr, if that is a terminal; yield the function that advances it."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda now, done, total: progress.update(task, description=now, completed=done, total=total or None)


@contextmanager
def steps(command: str, text: str) -> Iterator[Callable[[str], object]]:
    """Context manager: yield a function that shows a step in a bar, or on its own line if stderr is no terminal."""
    with bar(text) as advance:

        def begin(step: str) -> None:
            advance(step, 0, 0)
            started(command, step)

        yield begin


def started(command: str, text: str) -> None:
    """Print to stderr what ``command`` begins to do, unless stderr is a terminal, which shows a bar instead."""
    if not sys.stderr.isatty():
        print(f"ascend-moe {command}: {text}", file=sys.stderr, flush=True)
