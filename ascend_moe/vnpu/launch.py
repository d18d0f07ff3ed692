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
from typing import NoReturn

from .. import settings
from ..errors import ArgumentError, LibraryError, need
from ..native import library
from ..plan.soc import DEFAULT_SOC, SOCS

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
    _need_devices(soc, devices)
    wheel = find_wheels(interpreter_of(command[0]))["torch_npu"]
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

# Each torch_npu is for the torch of the same number. The first is what a message offers.
VERSIONS = ("2.13.0", "2.14.0")

# Run by the command's own interpreter; metadata only, nothing is imported.
_QUERY = """
import importlib.metadata as m, json, sys
def find(name):
    try:
        d = m.distribution(name)
    except m.PackageNotFoundError:
        return None
    return [d.version, str(d.locate_file("")), str(getattr(d, "_path", ""))]
print(json.dumps({name: find(name) for name in ("torch", "torch_npu")}))
"""


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


def find_wheels(interpreter: str) -> dict[str, Wheel]:
    """torch and torch_npu as that interpreter sees them.

    Raises:
        ArgumentError: one is missing or has another version; the message has the way to it.
    """
    run = subprocess.run([interpreter, "-c", _QUERY], capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise ArgumentError(f"{interpreter} does not run: {last}", argument="command")
    versions = json.loads(run.stdout.strip().splitlines()[-1])
    wheels: dict[str, Wheel] = {}
    allowed: tuple[str, ...] = VERSIONS
    for name in ("torch", "torch_npu"):
        entry = versions[name]
        number = "" if entry is None else str(entry[0]).partition("+")[0]
        if number not in allowed:
            has = "none" if entry is None else entry[0]
            text = f"the virtual NPU needs {name} {' or '.join(allowed)}, {interpreter} has {has}: "
            raise ArgumentError(text + _how_to_install(name, interpreter, allowed[0]), argument="command")
        wheels[name] = Wheel(entry[0], Path(entry[1]), Path(entry[2]))
        allowed = (number,)
    return wheels


def _how_to_install(name: str, interpreter: str, version: str) -> str:
    """torch_npu goes into a folder of its own: beside torch, without CANN, no ``import torch`` would work any more."""
    if name == "torch":
        return f"use a Python environment with torch=={version}"
    folder = f"build/npu/torch_npu-{version}"
    install = f"{interpreter} -m pip install --no-deps --target {folder} torch_npu=={version}"
    return f"{install} && export PYTHONPATH=$PWD/{folder}"


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
