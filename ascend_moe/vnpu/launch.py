"""Starting a command on the virtual NPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..plan.soc import DEFAULT_SOC
from .libraries import DEFAULT_DEVICES, environment
from .versions import find_wheels, interpreter_of, verify


def launch(
    command: Sequence[str],
    soc: str = DEFAULT_SOC,
    devices: int = DEFAULT_DEVICES,
    check: bool = True,
    quiet: bool = False,
) -> NoReturn:
    """Becomes ``command``, with torch_npu's libraries replaced by the virtual NPU's. Does not return.

    Args:
        command: a Python, a Python script, or a console script such as torchrun or pytest, and its arguments.
        soc: what the devices say they are.
        devices: how many there are.
        check: compare torch_npu's files with the RECORD of its wheel first.
        quiet: no line about it on stderr.

    Raises:
        ArgumentError: no such command, SoC or number; torch_npu is missing, modified, another version.
        LibraryError: the libraries are not built.
    """
    changed = environment(soc, devices)
    wheel = find_wheels(interpreter_of(command[0]))["torch_npu"]
    if check:
        verify(wheel)
    if not quiet:
        print(
            f"ascend-moe vnpu: {devices} virtual {soc} on host memory, torch_npu {wheel.version}; "
            "not an NPU, times mean nothing",
            file=sys.stderr,
            flush=True,
        )
    os.execvpe(command[0], list(command), changed)
