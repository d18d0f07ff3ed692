"""`ascend-vnpu`: run a command on the virtual NPU."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"ascend-vnpu needs {missing.name}: pip install typer") from None

from .launch import DEFAULT_DEVICES, MAX_DEVICES, launch
from .package import DEFAULT_SOC, SOC_OF_SERIES, SOCS, ArgumentError, LibraryError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_SOC = f"{', '.join(SOCS)}. Default: {DEFAULT_SOC}, or {SOC_OF_SERIES['A2']} if a vllm-ascend for A2 is installed."


@app.command(context_settings={"allow_interspersed_args": False})
def vnpu(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND [ARGUMENT ...]", help="The command to run, after --.")
    ],
    soc: Annotated[str | None, typer.Option(metavar="NAME", help=_SOC)] = None,
    devices: Annotated[
        int, typer.Option(metavar="N", help=f"Number of devices, 1 to {MAX_DEVICES}.")
    ] = DEFAULT_DEVICES,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Do not compare torch_npu's files with its RECORD, or --soc with vllm-ascend."
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print no line about the virtual NPU on stderr.")
    ] = False,
) -> None:
    """Run a command with torch_npu on a virtual NPU: host memory and CPU cores replace devices.

    ascend-vnpu -- python script.py

    ascend-vnpu -- torchrun --nproc-per-node 4 script.py

    Use it to check results; times are not meaningful.

    Exit code: the command's; 2 for wrong options, or if torch_npu does not match torch.
    """
    launch(command, soc, devices, check=not no_verify, quiet=quiet)


def main() -> None:
    """Run `ascend-vnpu`; an error of the launcher is one line on stderr, and exit code 2."""
    try:
        app(prog_name="ascend-vnpu")
    except (ArgumentError, LibraryError) as error:
        print(f"ascend-vnpu: {error}", file=sys.stderr)
        sys.exit(2)
