"""`ascend-moe shim`: run a command with a shim of torch_npu."""

from __future__ import annotations

from typing import Annotated

import typer

from ascend_moe.shim import launch

app = typer.Typer()


@app.command(context_settings={"allow_interspersed_args": False})
def shim(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND [ARGUMENT ...]", help="The command to run, after --.")
    ],
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no line about the shim on stderr.")] = False,
) -> None:
    """Run MoE code written for torch_npu on CPU tensors, with a shim of torch_npu instead of its wheel.

    ascend-moe shim -- python script.py

    ascend-moe shim -- torchrun --nproc-per-node 4 script.py

    Device "npu" is the CPU, process groups "hccl" are gloo, and the operators are those of ascend_moe.npu. Use it to
    check results; times are not meaningful. If the torch_npu wheel is installed, use `ascend-moe vnpu`.

    Exit code: the command's; 2 for wrong options, or if torch_npu is installed.
    """
    launch(command, quiet=quiet)
