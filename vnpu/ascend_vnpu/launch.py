"""Start of commands in an environment in which torch_npu loads the virtual NPU's libraries instead of CANN's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import query
from .package import (
    DEFAULT_SOC,
    SOC_OF_SERIES,
    SOCS,
    ArgumentError,
    LibraryError,
    library,
    need,
    settings,
)
from .wheels import ask, interpreter_of, torch_npu_of, verify

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
    "libatb.so",
    "libnnopbase.so",
    "opp/op_api/lib/libcust_opapi.so",  # where torch_npu looks for it below ASCEND_CUSTOM_OPP_PATH
)
DEFAULT_DEVICES = 8
MAX_DEVICES = 32  # of torch_npu: NPUStream.cpp asserts num_npus <= 32

# CANN's own settings would point torch_npu at other libraries.
_UNSET = ("ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH", "ASCEND_HOME_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")

_CANN_PYTHON = Path(__file__).parent / "cann_python"  # modules that CANN would put on Python's path


def library_folder() -> Path:
    """Return the folder of the virtual NPU's libraries: $ASCEND_MOE_VNPU_LIBRARIES if it is set.

    Otherwise vnpu/ beside libascend_moe.so if it exists, else a folder of the cache, built on first use.

    Raises:
        LibraryError: a library is missing; the message names it and the command that builds it.
    """
    named = settings.VNPU_LIBRARIES.get()
    folder, fix = named or library.vnpu_folder(), f"unset {settings.VNPU_LIBRARIES.name}, or " * bool(named)
    missing = [name for name in LIBRARIES if not (folder / name).is_file()]
    if missing:
        text = f"{folder} lacks {', '.join(missing)} of the virtual NPU: {fix}build with\n  {library.build_command()}"
        raise LibraryError(text, missing=missing)
    return folder


def environment(
    soc: str | None = None, devices: int = DEFAULT_DEVICES, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a copy of ``base`` with which a child process runs on the virtual NPU.

    Args:
        soc: SoC that the devices report, e.g. Ascend910_9391 (A3) or Ascend910B3 (A2). None: one of the series that
            this environment's vllm-ascend was built for; without vllm-ascend Ascend910_9391.
        devices: number of devices, 1 to 32.
        base: environment variables; None: those of this process.

    Raises:
        ArgumentError: there is no such SoC, or the number of devices is out of range.
        LibraryError: a library is missing or cannot be built.
    """
    soc = soc or SOC_OF_SERIES.get(query.vllm_ascend_device(), DEFAULT_SOC)
    _need_devices(soc, devices)
    folder = str(library_folder())
    result = dict(os.environ if base is None else base)
    for name in _UNSET:
        result.pop(name, None)
    result["LD_LIBRARY_PATH"] = _before(folder, result.get("LD_LIBRARY_PATH", ""))
    result["PYTHONPATH"] = _before(str(_CANN_PYTHON), result.get("PYTHONPATH", ""))
    result["ASCEND_CUSTOM_OPP_PATH"] = f"{folder}/opp"
    result[settings.VNPU.name] = folder
    result[settings.VNPU_SOC.name] = soc
    result[settings.VNPU_DEVICES.name] = str(devices)
    return result


def _before(folder: str, path: str) -> str:
    return ":".join([folder, *(entry for entry in path.split(":") if entry and entry != folder)])


def _need_devices(soc: str, devices: int) -> None:
    need(soc in SOCS, "soc", "is {!r}; need one of {}", soc, ", ".join(SOCS))
    need(1 <= devices <= MAX_DEVICES, "devices", "is {}; need 1 to {}, torch_npu's limit", devices, MAX_DEVICES)


def launch(
    command: Sequence[str],
    soc: str | None = None,
    devices: int = DEFAULT_DEVICES,
    check: bool = True,
    quiet: bool = False,
) -> NoReturn:
    """Replace this process by ``command``, with torch_npu's libraries replaced by the virtual NPU's. Does not return.

    Args:
        command: a Python interpreter, or a console script such as torchrun or pytest, and its arguments.
        soc: SoC that the devices report; None: as in `environment`, for the vllm-ascend of the command's Python.
        devices: number of devices, 1 to 32.
        check: first compare torch_npu's files with the RECORD of its wheel, and the SoC's series with vllm-ascend's.
        quiet: print no lines about the virtual NPU on stderr.

    Raises:
        ArgumentError: no such command, SoC or number of devices; torch_npu is missing, modified, or of a version that
            is not supported; vllm-ascend was built for another series.
        LibraryError: a library is missing or cannot be built.
    """
    _need_devices(soc or DEFAULT_SOC, devices)
    interpreter = interpreter_of(command[0])
    installed = ask(interpreter)
    wheel = torch_npu_of(installed, interpreter)
    soc = _soc_for(soc, installed, check)
    if check:
        verify(wheel)
    changed = environment(soc, devices)  # last: it builds what is not there
    if not quiet:
        if wheel.is_later:
            text = f"warning: torch_npu {wheel.version} is later than {wheel.pair.torch_npu} of the pair that is known"
            print(f"ascend-moe vnpu: {text}", file=sys.stderr)
        print(
            f"ascend-moe vnpu: {devices} virtual {soc} on host memory, torch_npu {wheel.version}; "
            "not an NPU, times mean nothing",
            file=sys.stderr,
            flush=True,
        )
    os.execvpe(command[0], list(command), changed)


def _soc_for(soc: str | None, installed: Mapping[str, Any], check: bool) -> str:
    """Return the SoC to report: the requested one, or else one of the series that vllm-ascend was built for."""
    series = installed.get("vllm_ascend_device", "")
    fits = SOC_OF_SERIES.get(series)
    if check and series and (fits is None if soc is None else SOCS[soc].series != series):
        version = (installed.get("vllm_ascend") or ["of unknown version"])[0]
        named = f"{soc} is {SOCS[soc].series}" if soc else "no virtual device is one"
        text = f"vllm-ascend {version} of this environment was built for {series} and starts on no other, {named}: "
        fix = f"pass --soc {fits}, or " if fits else f"pass --soc {DEFAULT_SOC} and "
        raise ArgumentError(f"{text}{fix}--no-verify if the program does not use vllm-ascend", argument="soc")
    return soc or fits or DEFAULT_SOC
