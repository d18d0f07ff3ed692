"""`ascend-moe` in this process: its exit code, and what it prints where a test asks for that; other processes."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ascend_moe import cli


class Said(NamedTuple):
    code: int
    out: str
    err: str


def run(name: str, arguments: Sequence[str]) -> int:
    try:
        cli.main([name, *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def said(name: str, *arguments: str) -> Said:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(name, arguments)
    return Said(code, out.getvalue(), err.getvalue())


def process(command: Sequence[str], cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that ends with 0, without the variables of an outer launcher."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launcher} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
