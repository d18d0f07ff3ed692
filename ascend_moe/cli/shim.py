"""`ascend-moe shim`: a command with a shim of torch_npu."""

from __future__ import annotations

from typing import Annotated

import typer

from ascend_moe.shim import launch

app = typer.Typer()


@app.command(context_settings={"allow_interspersed_args": False})
def shim(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND [ARGUMENT ...]", help="Put -- before it.")],
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No line on stderr about what this is.")] = False,
) -> None:
    """Run MoE code written for torch_npu on CPU tensors, with a shim of torch_npu: no wheel, no NPU.

    ascend-moe shim -- python script.py

    ascend-moe shim -- torchrun --nproc-per-node 4 script.py

    Device "npu" means CPU there, process groups "hccl" are gloo, the operators are ascend_moe.npu's. For correctness
    only: times mean nothing. Where the torch_npu wheel is, `ascend-moe vnpu` runs the real one.

    Exits with the command's exit code; with 2 where options are wrong or torch_npu is installed.
    """
    launch(command, quiet=quiet)
