"""pytest over a part of the suite in a process of its own, against a given library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:xdist", "-p", "no:randomly")


def first_failure(library: Path, suite: Sequence[str], seconds: float, **environment: str) -> str | None:
    """What fails first, or 'hangs' or 'signal N'; None when all pass.

    Raises:
        AssertionError: pytest ended neither with passed nor with failed tests.
    """
    settings = {**os.environ, "ASCEND_MOE_LIBRARY": str(library), **environment}
    try:
        done = subprocess.run(
            [*COMMAND, *suite], cwd=HERE, env=settings, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-3000:]
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return (failed or ["?"])[0].removeprefix("FAILED ")[:160]
