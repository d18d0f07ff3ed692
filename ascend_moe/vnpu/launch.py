"""Starts a command in an environment in which torch_npu finds the virtual NPU's libraries, not CANN's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from .. import settings
from ..errors import LibraryError, need
from ..native import library
from ..plan.soc import DEFAULT_SOC, SOCS
from .versions import find_wheels, interpreter_of, verify

LIBRARY = "libascendcl.so"
# Every library that torch_npu loads by name; without one of them it fails in ways that do not name it.
LIBRARIES = (
    LIBRARY,
    "libacl_op_compiler.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libopapi.so",
    "opp/op_api/lib/libcust_opapi.so",  # where torch_npu looks for it below ASCEND_CUSTOM_OPP_PATH
)
DEFAULT_DEVICES = 8
MAX_DEVICES = 64

# CANN's own settings would point torch_npu at other libraries.
_UNSET = ("ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH", "ASCEND_HOME_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def library_folder() -> Path:
    """Where the virtual NPU's libraries are: $ASCEND_MOE_VNPU_LIBRARIES, or vnpu/ beside libascend_moe.so,
    or in the cache, built on first use.

    Raises:
        LibraryError: a library is missing; the message names it and the command that builds it.
    """
    folder = settings.VNPU_LIBRARIES.get() or library.vnpu_folder()
    missing = [name for name in LIBRARIES if not (folder / name).is_file()]
    if missing:
        build = library.build_command()
        raise LibraryError(
            f"{folder} lacks {', '.join(missing)} of the virtual NPU: build with\n  {build}", missing=missing
        )
    return folder


def environment(
    soc: str = DEFAULT_SOC, devices: int = DEFAULT_DEVICES, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``base`` (default: this process's environment) changed so that a child runs on the virtual NPU.

    Args:
        soc: what the devices say they are, e.g. Ascend910_9391 (A3) or Ascend910B3 (A2).
        devices: how many, 1 to 64.

    Raises:
        ArgumentError: no such SoC, or too many devices.
        LibraryError: the libraries are not built.
    """
    need(soc in SOCS, "soc", f"is {soc!r}; need one of {', '.join(SOCS)}")
    need(1 <= devices <= MAX_DEVICES, "devices", f"is {devices}; need 1 to {MAX_DEVICES}")
    folder = str(library_folder())
    result = dict(os.environ if base is None else base)
    for name in _UNSET:
        result.pop(name, None)
    others = [entry for entry in result.get("LD_LIBRARY_PATH", "").split(":") if entry and entry != folder]
    result["LD_LIBRARY_PATH"] = ":".join([folder, *others])
    result["ASCEND_CUSTOM_OPP_PATH"] = f"{folder}/opp"
    result[settings.VNPU.name] = folder
    result[settings.VNPU_SOC.name] = soc
    result[settings.VNPU_DEVICES.name] = str(devices)
    return result


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
