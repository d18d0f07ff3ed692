"""Whether a command's Python is fit for the virtual NPU: torch and torch_npu as published, right versions."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError

TORCH = "2.13.0"
TORCH_NPU = "2.13.0"

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
        raise ArgumentError(f"{command} is no command of PATH", argument="command")
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
        ArgumentError: one is missing or has another version; the message has the pip command.
    """
    run = subprocess.run([interpreter, "-c", _QUERY], capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise ArgumentError(f"{interpreter} does not run: {last}", argument="command")
    versions = json.loads(run.stdout.strip().splitlines()[-1])
    wheels = {}
    for name, wanted in (("torch", TORCH), ("torch_npu", TORCH_NPU)):
        entry = versions[name]
        if entry is None or str(entry[0]).partition("+")[0] != wanted:
            has = "none" if entry is None else entry[0]
            raise ArgumentError(
                f"the virtual NPU needs {name} {wanted}, {interpreter} has {has}: "
                f"{interpreter} -m pip install torch=={TORCH} torch_npu=={TORCH_NPU}",
                argument="command",
            )
        wheels[name] = Wheel(entry[0], Path(entry[1]), Path(entry[2]))
    return wheels


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
        f"pip install --force-reinstall --no-deps torch_npu=={TORCH_NPU}, or --no-verify to run it as it is",
        argument="verify",
    )
