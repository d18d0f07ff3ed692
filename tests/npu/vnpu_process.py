"""Scripts on the virtual NPU, in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe import vnpu

HERE = Path(__file__).resolve().parent
SECONDS = 280.0  # a machine with more ranks than cores


@dataclass(frozen=True)
class Outcome:
    """Exit codes and texts of the ranks of a run, in rank order."""

    codes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]

    def must_pass(self) -> Outcome:
        for rank, code in enumerate(self.codes):
            text = f"rank {rank} ended with {code}:\n{self.stdout[rank]}\n{self.stderr[rank][-4000:]}"
            assert code == 0, text
        return self

    def last_lines(self) -> list[Any]:
        """What each rank, which must have passed, printed as JSON in the end."""
        return [json.loads(text.splitlines()[-1]) for text in self.must_pass().stdout]


def run(
    script: Path | str, *arguments: str, world: int = 1, env: Mapping[str, str] | None = None, **device: Any
) -> Outcome:
    """Runs a file, or a text as ``python -c``, as ``world`` ranks in the environment of the virtual NPU.

    Each gets RANK, WORLD_SIZE and STORE, a path for the group's store. ``device``: soc and devices.
    """
    words = [str(script)] if isinstance(script, Path) else ["-c", script]
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "STORE": f"{folder}/store"}
            base = {**os.environ, "ASCEND_MOE_TIMEOUT_S": "60", **place}
            own = {**vnpu.environment(base=base, **device), **(env or {})}
            pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen([sys.executable, *words, *arguments], env=own, **pipes))
        try:
            texts = [process.communicate(timeout=SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    codes = tuple(process.returncode for process in processes)
    return Outcome(codes, tuple(out for out, _ in texts), tuple(err for _, err in texts))


def launch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``ascend-moe vnpu WORDS``, as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "ascend_moe", "vnpu", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "ASCEND_MOE_TIMEOUT_S": "60", **env},
    )


def torchrun(world: int, *words: str) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(world)]
    return ["--", sys.executable, "-m", "torch.distributed.run", *options, *words]


def checks_of(script: Path) -> list[str]:
    """The functions that a script of `vnpu_checks`, which needs torch_npu, marks as checks."""
    return re.findall(r"@check\ndef (\w+)", script.read_text())


def traces() -> set[str]:
    """Names that a run could leave on this machine: in /dev/shm. All other memory has no name."""
    return set(os.listdir("/dev/shm"))


def left_behind(before: set[str], seconds: float = 60.0) -> set[str]:
    """New traces that stay. Those of runs beside this one go away when their runs end."""
    new = traces() - before
    end = time.monotonic() + seconds
    while new and time.monotonic() < end:
        time.sleep(0.2)
        new &= traces()
    return new
