"""`ascendc-twin`: build kernels for the emulator, list the contents of a library, run a kernel and predict its time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"ascendc-twin needs {missing.name}: pip install typer") from None

from .errors import ArgumentError, LibraryError, TwinBuildError, TwinFault
from .soc import DEFAULT_SOC, SOCS

if TYPE_CHECKING:
    from .kernels import Kernels

_EVENTS = 1_000_000  # of a timeline
_NUMBERS = {"i8": "int8", "u8": "uint8", "bf16": "uint16", "f16": "float16", "f32": "float32"}
_NUMBERS |= {f"{kind}{bits}": f"{name}{bits}" for kind, name in (("i", "int"), ("u", "uint")) for bits in (16, 32, 64)}
_Defines = Annotated[
    list[str] | None, typer.Option("-D", metavar="NAME[=VALUE]", help="Define a macro, e.g. -D DTYPE_X=half.")
]
_Includes = Annotated[
    list[Path] | None, typer.Option("-I", metavar="DIR", help="Add a folder of headers.", file_okay=False)
]

app = typer.Typer(no_args_is_help=True, help="Build, run and check your own AscendC kernels on the CPU.")


@app.command("build")
def build_command(
    sources: Annotated[list[Path], typer.Argument(help="Kernel sources.", exists=True, dir_okay=False)],
    defines: _Defines = None,
    includes: _Includes = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Library to write; default: the first source's name with .so, in this folder."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="fast|checked|timed|both", help="Engines to build for.")] = "both",
    debug: Annotated[bool, typer.Option("--debug", help="Compile for gdb, with -O0 -g.")] = False,
) -> None:
    """Compile kernels into a library for `ascendc_twin.load`.

    Exit code 0: built. 1: a source does not compile; the compiler's messages are printed. 2: wrong options.
    """
    from .kernels import build, load

    target = output or Path(sources[0].stem + ".so")
    with _reported():
        given: dict[str, Any] = {"defines": defines or (), "includes": includes or (), "engine": engine, "debug": debug}
        path = build(sources, output=target, **given)
        kernels = load(path)
    typer.echo(str(path))
    _show(kernels, "  ")


@app.command("run")
def run_command(
    source: Annotated[Path, typer.Argument(help="A kernel source, or a library of `build`.", dir_okay=False)],
    name: Annotated[str | None, typer.Argument(help="The kernel; default: the first.")] = None,
    defines: _Defines = None,
    includes: _Includes = None,
    args: Annotated[
        list[str] | None,
        typer.Option(
            "-a",
            "--arg",
            metavar="TYPE:COUNT|FILE.npy|NUMBER|null",
            help="The next argument: zeros of a type (f32, f16, bf16, i8, u8, i16, ...), an array, an integer, null.",
        ),
    ] = None,
    tiling: Annotated[
        str | None, typer.Option(metavar="TYPE:N,N,...|FILE", help="The tiling; {rank} stands for the rank's number.")
    ] = None,
    block_dim: Annotated[int, typer.Option(help="AIV cores of a rank.")] = 1,
    tiling_key: Annotated[int, typer.Option(help="What TILING_KEY_IS compares.")] = 0,
    workspace: Annotated[int | None, typer.Option(help="Bytes of a workspace before the tiling.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks with windows; 0: one rank without.")] = 0,
    window_mib: Annotated[int, typer.Option(help="MiB of each rank's windowsIn and windowsOut.")] = 200,
    layout: Annotated[str, typer.Option(metavar="a3|a2", help="Layout of the communication context.")] = "a3",
    timed: Annotated[bool, typer.Option("--time", help="Predict its time on an NPU, by a model.")] = False,
    soc: Annotated[str, typer.Option(help=f"With --time: {', '.join(SOCS)}.")] = DEFAULT_SOC,
    timeline: Annotated[
        Path | None, typer.Option(help="With --time: write name.json for ui.perfetto.dev, or name.svg.")
    ] = None,
) -> None:
    """Run a kernel once; with --time predict its time.

    Exit code 0: it ran. 1: it does not compile, or the emulator found a fault in it. 2: wrong options.
    """
    from .kernels import Windows, load

    with _reported():
        kernels = load(source, defines=defines or (), includes=includes or (), engine="timed" if timed else "fast")
        every = [[_value(text) for text in args or ()] for _ in range(max(1, ranks))]
        tilings = [_tiling(tiling, rank) for rank in range(max(1, ranks))]
        windows = Windows(ranks, data_bytes=window_mib << 20, layout=layout) if ranks else None
        found = kernels.launch(
            name or kernels.names[0],
            every if ranks else every[0],
            tilings if ranks else tilings[0],
            block_dim,
            tiling_key,
            windows,
            workspace_bytes=workspace,
            soc=soc,
            events=_EVENTS if timed else 0,
        )
        if found.time is None:
            typer.echo("ran")
            return
        typer.echo(str(found.time))
        typer.echo("busy, us, mean of the cores: " + ", ".join(f"{p} {us:.2f}" for p, us in found.time.busy().items()))
        for link, share in found.time.link_use.items():
            typer.echo(f"{link}: {share:.1%} of its bandwidth")
        if timeline is not None:
            found.time.save(timeline, f"{name or kernels.names[0]}, {soc}")


def _value(text: str) -> Any:
    import numpy as np

    kind, _, count = text.partition(":")
    if text == "null":
        return None
    if text.endswith(".npy") and os.path.isfile(text):
        return np.load(text)
    if kind in _NUMBERS and count.isdigit():
        return np.zeros(int(count), _NUMBERS[kind])
    try:
        return int(text)
    except ValueError:
        rule = f"TYPE:COUNT with a TYPE of {', '.join(_NUMBERS)}, an existing file name.npy, an integer, or null"
        raise ArgumentError(f"--arg {text} is none of: {rule}", argument="arg") from None


def _tiling(text: str | None, rank: int) -> Any:
    import numpy as np

    if text is None:
        return None
    if os.path.isfile(text):  # Path.is_file raises for a text that is too long for a name
        return Path(text).read_bytes()
    kind, _, numbers = text.replace("{rank}", str(rank)).partition(":")
    try:
        return np.array([float(n) if kind.startswith("f") else int(n) for n in numbers.split(",")], _NUMBERS[kind])
    except (KeyError, ValueError, OverflowError):
        rule = f"an existing file, or TYPE:N,N,... with a TYPE of {', '.join(_NUMBERS)} and N that fit"
        raise ArgumentError(f"--tiling {text} is none of: {rule}", argument="tiling") from None


@app.command("list")
def list_command(
    library: Annotated[Path, typer.Argument(help="A library of `build`.", exists=True, dir_okay=False)],
) -> None:
    """Show the kernels of a library, their parameters, and the tiling keys of templates."""
    from .kernels import load

    with _reported():
        _show(load(library))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """End with code 2 for wrong options, and with 1 for what else goes wrong."""
    try:
        yield
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    except (LibraryError, TwinBuildError, TwinFault) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _show(kernels: Kernels, indent: str = "") -> None:
    """Print each kernel with its parameters; below a template its tiling keys."""
    for name in kernels.names:
        typer.echo(f"{indent}{name}({', '.join(kernels.parameters(name))})")
        for key, arguments in kernels.tiling_keys(name).items():
            typer.echo(f"{indent}  {key}: {', '.join(f'{one}={value}' for one, value in arguments.items())}")
