"""`ascendc-twin`: build kernels for the emulator and list the contents of a library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import ArgumentError, LibraryError, TwinBuildError

if TYPE_CHECKING:
    from .kernels import Kernels

app = typer.Typer(no_args_is_help=True, help="Build, run and check your own AscendC kernels on the CPU.")


@app.command("build")
def build_command(
    sources: Annotated[list[Path], typer.Argument(help="Kernel sources.", exists=True, dir_okay=False)],
    defines: Annotated[
        list[str] | None, typer.Option("-D", metavar="NAME[=VALUE]", help="Define a macro, e.g. -D DTYPE_X=half.")
    ] = None,
    includes: Annotated[
        list[Path] | None, typer.Option("-I", metavar="DIR", help="Add a folder of headers.", file_okay=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Library to write; default: the first source's name with .so, in this folder."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="fast|checked|both", help="Engines to build for.")] = "both",
    debug: Annotated[bool, typer.Option("--debug", help="Compile for gdb, with -O0 -g.")] = False,
) -> None:
    """Compile kernels into a library for `ascendc_twin.load`.

    Exit code 0: built. 1: a source does not compile; the compiler's messages are printed. 2: wrong options.
    """
    from .kernels import build, load

    target = output or Path(sources[0].stem + ".so")
    try:
        given: dict[str, Any] = {"defines": defines or (), "includes": includes or (), "engine": engine, "debug": debug}
        path = build(sources, output=target, **given)
        kernels = load(path)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    except TwinBuildError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(str(path))
    _show(kernels, "  ")


@app.command("list")
def list_command(
    library: Annotated[Path, typer.Argument(help="A library of `build`.", exists=True, dir_okay=False)],
) -> None:
    """Show the kernels of a library, their parameters, and the tiling keys of templates."""
    from .kernels import load

    try:
        kernels = load(library)
    except (ArgumentError, LibraryError, TwinBuildError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    _show(kernels)


def _show(kernels: Kernels, indent: str = "") -> None:
    """Print each kernel with its parameters; below a template its tiling keys."""
    for name in kernels.names:
        typer.echo(f"{indent}{name}({', '.join(kernels.parameters(name))})")
        for key, arguments in kernels.tiling_keys(name).items():
            typer.echo(f"{indent}  {key}: {', '.join(f'{one}={value}' for one, value in arguments.items())}")
