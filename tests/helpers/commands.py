"""`ascend-moe` in this process: its exit code; what it prints goes where pytest captures it."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_moe import cli


def run(name: str, arguments: Sequence[str]) -> int:
    try:
        cli.main([name, *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
