"""Starts a command in an environment in which torch_npu finds the virtual NPU's libraries, not CANN's."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .. import settings
from ..errors import ArgumentError, LibraryError, need
from ..native import library
from ..native.releases import PAIRS, pair_of
from ..plan.soc import DEFAULT_SOC, SOC_OF_SERIES, SOCS
from ..settings import MAX_WORLD
from . import query

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
MAX_DEVICES = MAX_WORLD

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
    soc: str | None = None, devices: int = DEFAULT_DEVICES, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``base`` (default: this process's environment) changed so that a child runs on the virtual NPU.

    Args:
        soc: what the devices say they are, e.g. Ascend910_9391 (A3) or Ascend910B3 (A2). Default: of the series that
            this environment's vllm-ascend was built for; without one Ascend910_9391.
        devices: how many, 1 to 384.

    Raises:
        ArgumentError: no such SoC, or too many devices.
        LibraryError: the libraries are not built.
    """
    soc = soc or SOC_OF_SERIES.get(query.vllm_ascend_device(), DEFAULT_SOC)
    _need_devices(soc, devices)
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


def _need_devices(soc: str, devices: int) -> None:
    need(soc in SOCS, "soc", "is {!r}; need one of {}", soc, ", ".join(SOCS))
    need(1 <= devices <= MAX_DEVICES, "devices", "is {}; need 1 to {}", devices, MAX_DEVICES)


def launch(
    command: Sequence[str],
    soc: str | None = None,
    devices: int = DEFAULT_DEVICES,
    check: bool = True,
    quiet: bool = False,
) -> NoReturn:
    """Becomes ``command``, with torch_npu's libraries replaced by the virtual NPU's. Does not return.

    Args:
        command: a Python, a Python script, or a console script such as torchrun or pytest, and its arguments.
        soc: what the devices say they are; default as in `environment`, of the command's Python.
        devices: how many there are.
        check: compare torch_npu's files with the RECORD of its wheel first, and ``soc`` with vllm-ascend's.
        quiet: no line about it on stderr.

    Raises:
        ArgumentError: no such command, SoC or number; torch_npu is missing, modified, another version.
        LibraryError: the libraries are not built.
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
        print(
            f"ascend-moe vnpu: {devices} virtual {soc} on host memory, torch_npu {wheel.version}; "
            "not an NPU, times mean nothing",
            file=sys.stderr,
            flush=True,
        )
    os.execvpe(command[0], list(command), changed)


# ---- whether the command's Python has torch and torch_npu as published, in the right versions


@dataclass(frozen=True)
class Wheel:
    """An installed distribution: its version, the folder it lies in, its dist-info folder."""

    version: str
    folder: Path
    metadata: Path


def interpreter_of(command: str) -> str:
    """The Python of this command: itself, or the Python that its first line names; else python3 of PATH.

    Raises:
        ArgumentError: there is no such command.
    """
    path = shutil.which(command)
    if path is None:
        hint = f": write python {command}" if command.endswith(".py") else ""
        raise ArgumentError(f"{command} is no command of PATH{hint}", argument="command")
    if Path(path).name.startswith("python"):
        return path
    with open(path, "rb") as file:
        first = file.readline(512)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if words and Path(words[0]).name.startswith("python"):
        return shutil.which(words[0]) or words[0]
    return shutil.which("python3") or "python3"


def ask(interpreter: str) -> dict[str, Any]:
    """Returns what that interpreter has, see `query.installed`.

    Raises:
        ArgumentError: it does not run.
    """
    text = Path(query.__file__).read_text(encoding="utf-8")
    run = subprocess.run([interpreter, "-c", text], capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise ArgumentError(f"{interpreter} does not run: {last}", argument="command")
    installed: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return installed


def torch_npu_of(installed: Mapping[str, Any], interpreter: str) -> Wheel:
    """The torch_npu of an environment in which it and torch are one of the pairs.

    Raises:
        ArgumentError: they are not; the message has the way to a pair.
    """
    versions = [(installed[name] or [""])[0] for name in ("torch", "torch_npu")]
    if pair_of(*versions) is None:
        has = [f"{name} {number or 'none'}" for name, number in zip(("torch", "torch_npu"), versions, strict=True)]
        fix = _how_to_install(interpreter, *versions)
        text = f"the virtual NPU needs {' or '.join(map(str, PAIRS))}, {interpreter} has {', '.join(has)}: {fix}"
        raise ArgumentError(text, argument="command")
    version, folder, metadata = installed["torch_npu"]
    return Wheel(version, Path(folder), Path(metadata))


def _how_to_install(interpreter: str, torch: str, torch_npu: str) -> str:
    """torch_npu goes into a folder of its own: beside torch, without CANN, no ``import torch`` would work any more."""
    wanted = next((pair.torch_npu for pair in PAIRS if pair_of(torch, pair.torch_npu)), "")
    if not wanted:
        fits = next((pair for pair in PAIRS if pair_of(pair.torch, torch_npu)), PAIRS[0])
        return f"use a Python environment with torch=={fits.torch}"
    folder = f"build/npu/torch_npu-{wanted}"
    install = f"{interpreter} -m pip install --no-deps --target {folder} torch_npu=={wanted}"
    return f"{install} && export PYTHONPATH=$PWD/{folder}"


def _soc_for(soc: str | None, installed: Mapping[str, Any], check: bool) -> str:
    """The SoC to show: the one asked for, else of the series that vllm-ascend was built for."""
    series = installed.get("vllm_ascend_device", "")
    fits = SOC_OF_SERIES.get(series)
    if check and series and (fits is None if soc is None else SOCS[soc].series != series):
        version = (installed.get("vllm_ascend") or ["of unknown version"])[0]
        named = f"{soc} is {SOCS[soc].series}" if soc else "no virtual device is one"
        text = f"vllm-ascend {version} of this environment was built for {series} and starts on no other, {named}: "
        fix = f"--soc {fits}, or " if fits else f"--soc {DEFAULT_SOC} and "
        raise ArgumentError(f"{text}{fix}--no-verify for a program that does without it", argument="soc")
    return soc or fits or DEFAULT_SOC


def verify(wheel: Wheel) -> int:
    """Compares every file of a wheel with its RECORD: size and SHA-256. Returns how many files.

    A verdict is kept in ``~/.cache/ascend_moe`` until a size or time of a file changes.

    Raises:
        ArgumentError: a file is missing or differs; the message names the first.
    """
    record = wheel.metadata / "RECORD"
    if not record.is_file():
        raise ArgumentError(f"{record} is missing: install {wheel.metadata.stem} again", argument="verify")
    with open(record, newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == 3 and row[1]]
    # Console scripts are written by pip, elsewhere with --target; the wheel's own files are what counts.
    rows = [row for row in rows if not row[0].startswith("..") and not row[0].startswith("bin/")]
    stamps = hashlib.sha256(record.read_bytes())
    for name, _, size in rows:
        try:
            stat = (wheel.folder / name).stat()
        except OSError:
            raise _differs(wheel, name, "is missing") from None
        if size and stat.st_size != int(size):
            raise _differs(wheel, name, f"has {stat.st_size} bytes, its RECORD says {size}")
        stamps.update(f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n".encode())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    verdict = Path(base) / "ascend_moe" / "vnpu" / f"torch_npu-{stamps.hexdigest()[:32]}"
    if not verdict.is_file():
        for name, digest, _ in rows:
            _check(wheel, name, digest)
        with contextlib.suppress(OSError):  # a read-only home: it is checked again next time
            verdict.parent.mkdir(parents=True, exist_ok=True)
            verdict.write_text(f"{len(rows)} files as in RECORD\n")
    return len(rows)


def _check(wheel: Wheel, name: str, digest: str) -> None:
    kind, _, wanted = digest.partition("=")
    actual = hashlib.new(kind)
    with open(wheel.folder / name, "rb") as file:
        while block := file.read(1 << 20):
            actual.update(block)
    if base64.urlsafe_b64encode(actual.digest()).rstrip(b"=").decode() != wanted:
        raise _differs(wheel, name, "does not hash to what its RECORD says")


def _differs(wheel: Wheel, name: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"{wheel.folder / name} {why}: this is not the wheel that was published; "
        f"pip install --upgrade --no-deps --target {wheel.folder} torch_npu=={wheel.version}, or --no-verify to run it "
        "as it is",
        argument="verify",
    )
