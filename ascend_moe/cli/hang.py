"""`ascend-moe hang`: which rank the others wait for."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ascend_moe._text import show
from ascend_moe.cli import options
from ascend_moe.errors import need_one_of
from ascend_moe.native import hang as states
from ascend_moe.native import hang_cann

app = typer.Typer()
_STEADY_S = 0.2  # a wait that is there this long after it was seen is shown
_LAYOUTS = ("ascend_moe", *hang_cann.LAYOUTS)


@app.command()
def hang(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Copies of the state areas of all ranks, in rank order, for NPUs; without: this machine."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Whose state areas are in the files: ascend_moe, or CANN's on an A3: cann-v1, cann-v2.")
    ] = "ascend_moe",
    experts: Annotated[int, typer.Option("-e", "--experts", help="MoE experts of all ranks, for cann-v1.")] = 0,
    as_json: options.Json = "",
) -> None:
    """Show which rank the others wait for: op, algorithm, epoch and phase of every rank, and who waits for whom.

    Reads the windows of all processes of this user on this machine, on CPUs and the virtual NPU; writes nothing. The
    ranks must share the machine and the PID namespace. Threads of a LocalCluster are not visible from outside: set
    ASCEND_MOE_WATCHDOG_S. On an NPU pass copies of the state areas: windowsExp on an A3, the last MiB of windowsIn on
    an A2 of one server. CANN's operators on an A2 are not supported: their messages are in the data window.

    Exit code 0: no rank is behind. 1: one is. 2: wrong options.
    """
    need_one_of("layout", layout, _LAYOUTS)
    if layout != "ascend_moe":
        groups = [hang_cann.of_files(files or [], layout, experts)]
    elif files:
        groups = [states.of_files(files)]
    else:
        before = states.live()
        time.sleep(_STEADY_S)
        groups = states.steady(before, states.live())
    found = states.behind(groups)
    values = {"groups": [asdict(group) for group in groups], "behind": [asdict(each) for each in found]}
    show(values, as_json, lambda: print(states.text(groups, found)))
    raise typer.Exit(1 if found else 0)
