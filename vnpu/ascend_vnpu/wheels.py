"""Checks that a command's Python has compatible, unmodified wheels of torch and torch_npu."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import query
from .package import ArgumentError


@dataclass(frozen=True)
class Pair:
    """Versions of torch and torch_npu that fit together. ``tested``: ``make test-npu`` has passed with them."""

    torch: str
    torch_npu: str
    tested: bool = True

    def __str__(self) -> str:
        return f"torch {self.torch} with torch_npu {self.torch_npu}"


# The first is what a message proposes if the environment has neither.
PAIRS = (
    Pair("2.13.0", "2.13.0"),
    Pair("2.10.0", "2.10.0.post4"),  # what vllm-ascend 0.23.0 and 0.26.0rc1 pin
    Pair("2.14.0", "2.14.0", tested=False),
)


def pair_of(torch: str | None, torch_npu: str | None) -> Pair | None:
    """Return the pair in `PAIRS` of two versions, or None; local parts after a + are ignored.

    A later post release of a pair's torch_npu counts as that pair.
    """
    installed, number = ((version or "").partition("+")[0] for version in (torch, torch_npu))
    return next((pair for pair in PAIRS if pair.torch == installed and _follows(number, pair.torch_npu)), None)


def _follows(version: str, known: str) -> bool:
    """Return whether a version is the known one or a later post release of it."""
    (release, _, post), (known_release, _, known_post) = (text.partition(".post") for text in (version, known))
    if release != known_release or (post and not post.isdigit()):
        return False
    return int(post or 0) >= int(known_post or 0)


@dataclass(frozen=True)
class Wheel:
    """An installed torch_npu: version, the folder it lies in, its dist-info (``metadata``), the `Pair` it counts as."""

    version: str
    folder: Path
    metadata: Path
    pair: Pair

    @property
    def is_later(self) -> bool:
        """Whether this torch_npu is a later post release than the pair's."""
        return self.version.partition("+")[0] != self.pair.torch_npu


def interpreter_of(command: str) -> str:
    """Return the Python that runs ``command``: itself, or that of its first line (#!), or else python3 of PATH.

    Raises:
        ArgumentError: there is no such command.
    """
    path = shutil.which(command)
    if path is None:
        fix = f"write python {command}" if command.endswith(".py") else "install it, or pass its path"
        raise ArgumentError(f"{command} is no command of PATH: {fix}", argument="command")
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


def ask(interpreter: str, program: str = "", env: Mapping[str, str] | None = None) -> Any:
    """Run a Python program with ``interpreter``, and return the JSON value of its last line of output.

    ``program``: source text; "": the module `query`, which prints `query.installed`. ``env``: None: this process's.

    Raises:
        ArgumentError: the program fails.
    """
    text = program or Path(query.__file__).read_text(encoding="utf-8")
    run = subprocess.run([interpreter, "-c", text], capture_output=True, text=True, check=False, env=env)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise ArgumentError(f"{interpreter} cannot run a test program: {last}; use another Python", argument="command")
    return json.loads(run.stdout.strip().splitlines()[-1])


def torch_npu_of(installed: Mapping[str, Any], interpreter: str) -> Wheel:
    """Return an environment's torch_npu, if it and its torch are one of `PAIRS` or a later post release of one.

    ``installed``: the result of `query.installed`, run by ``interpreter``.

    Raises:
        ArgumentError: they are not; the message describes how to install a pair.
    """
    versions = [(installed[name] or [""])[0] for name in ("torch", "torch_npu")]
    pair = pair_of(*versions)
    if pair is None:
        has = [f"{name} {number or 'none'}" for name, number in zip(("torch", "torch_npu"), versions, strict=True)]
        fix = _how_to_install(interpreter, *versions)
        text = f"the virtual NPU needs {' or '.join(map(str, PAIRS))}, {interpreter} has {', '.join(has)}: {fix}"
        raise ArgumentError(text, argument="command")
    version, folder, metadata = installed["torch_npu"]
    return Wheel(version, Path(folder), Path(metadata), pair)


def _how_to_install(interpreter: str, torch: str, torch_npu: str) -> str:
    """Return how to install the wheels; torch_npu into its own folder, as it breaks ``import torch`` without CANN."""
    wanted = next((pair.torch_npu for pair in PAIRS if pair_of(torch, pair.torch_npu)), "")
    if not wanted:
        fits = next((pair for pair in PAIRS if pair_of(pair.torch, torch_npu)), PAIRS[0])
        return f"use a Python environment with torch=={fits.torch}"
    folder = f"build/npu/torch_npu-{wanted}"
    install = f"{interpreter} -m pip install --no-deps --target {folder} torch_npu=={wanted}"
    return f"{install} && export PYTHONPATH=$PWD/{folder}"


def verify(wheel: Wheel) -> int:
    """Compare size and SHA-256 of every file of a wheel, except console scripts, with its RECORD; return their number.

    Success is cached in ``~/.cache/ascend_moe`` until the size, time or inode of a file changes.

    Raises:
        ArgumentError: a file is missing or differs; the message names the first.
    """
    record = wheel.metadata / "RECORD"
    if not record.is_file():
        raise ArgumentError(f"{record} is missing: install {wheel.metadata.stem} again", argument="verify")
    with open(record, newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == 3 and row[1]]
    # without console scripts, which pip generates
    rows = [row for row in rows if not row[0].startswith("..") and not row[0].startswith("bin/")]
    fingerprint = hashlib.sha256(record.read_bytes())
    for name, _, size in rows:
        try:
            stat = (wheel.folder / name).stat()
        except OSError:
            raise _differs(wheel, name, "is missing") from None
        if size and stat.st_size != int(size):
            raise _differs(wheel, name, f"has {stat.st_size} bytes, its RECORD has {size}")
        fingerprint.update(f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n".encode())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    passed = Path(base) / "ascend_moe" / "vnpu" / f"torch_npu-{fingerprint.hexdigest()[:32]}"
    if not passed.is_file():
        for name, digest, _ in rows:
            _check(wheel, name, digest)
        with contextlib.suppress(OSError):  # a read-only home: it is checked again next time
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.write_text(f"{len(rows)} files as in RECORD\n")
    return len(rows)


def _check(wheel: Wheel, name: str, digest: str) -> None:
    kind, _, wanted = digest.partition("=")
    actual = hashlib.new(kind)
    with open(wheel.folder / name, "rb") as file:
        while block := file.read(1 << 20):
            actual.update(block)
    if base64.urlsafe_b64encode(actual.digest()).rstrip(b"=").decode() != wanted:
        raise _differs(wheel, name, "differs from the hash in its RECORD")


def _differs(wheel: Wheel, name: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"{wheel.folder / name} {why}: this is not the wheel that was published; run "
        f"pip install --upgrade --no-deps --target {wheel.folder} torch_npu=={wheel.version}, or pass --no-verify to "
        "use it as it is",
        argument="verify",
    )
