"""Scripts on the virtual NPU, in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ascend_moe import vnpu

HERE = Path(__file__).resolve().parent
SECONDS = 240.0  # a machine with more ranks than cores


@dataclass(frozen=True)
class Outcome:
    """Exit codes and texts of the ranks of a run, in rank order."""

    codes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    seconds: float

    def must_pass(self) -> Outcome:
        for rank, code in enumerate(self.codes):
            text = f"rank {rank} ended with {code}:\n{self.stdout[rank]}\n{self.stderr[rank][-4000:]}"
            assert code == 0, text
        return self


def launcher(*options: str) -> list[str]:
    return [sys.executable, "-m", "ascend_moe", "vnpu", *options, "--", sys.executable]


def run(
    script: Path | str,
    *arguments: str,
    world: int = 1,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    through_launcher: bool = True,
) -> Outcome:
    """Runs a file, or a text as ``python -c``, as ``world`` ranks; each gets RANK and WORLD_SIZE.

    Without the launcher, which imports torch once more, the processes get the environment that it makes.
    """
    words = [str(script)] if isinstance(script, Path) else ["-c", script]
    begin = time.monotonic()
    processes = []
    for rank in range(world):
        own = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), **(env or {})}
        start = launcher(*options) if through_launcher else [sys.executable]
        if not through_launcher:
            own = vnpu.environment(base=own)
        command = [*start, *words, *arguments]
        processes.append(
            subprocess.Popen(command, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        texts = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Outcome(
        tuple(process.returncode for process in processes),
        tuple(out for out, _ in texts),
        tuple(err for _, err in texts),
        time.monotonic() - begin,
    )


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


def report_of(script: Path, target: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``script`` writes as JSON into ``target``, its argument, in a process with torch_npu.

    ``env`` is changed in the environment of the virtual NPU. Fails, and never skips, when the script does.
    """
    done = subprocess.run(
        [sys.executable, str(script), str(target)],
        env={**vnpu.environment(), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if done.returncode:
        pytest.fail(f"{script.name} left with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return found
