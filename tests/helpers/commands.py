"""`ascend-moe` in this process: its exit code, and what it prints where a test asks for that."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
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
