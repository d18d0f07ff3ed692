"""The `ascend-moe` command: one module of this folder a command, read when it is asked for.

typer and rich come with the extra [cli]. This module imports neither before it knows that they are there.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ascend_moe.cli.commands import COMMANDS

_EXTRA = ("typer", "click", "rich")
_NOBODY_READS = 128 + 13  # SIGPIPE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of ``arguments``, sys.argv's when None; end in SystemExit with its exit code.

    The exit code is 141, as of a program that SIGPIPE ends, where nobody reads the output any more (``| head``).
    """
    try:
        with _until_nobody_reads():
            root = importlib.import_module("ascend_moe.cli.root")
            root.app(args=_with_json(sys.argv[1:] if arguments is None else arguments), prog_name="ascend-moe")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        words = sys.argv[1:] if arguments is None else arguments
        command = next((word for word in words if word in COMMANDS), "")
        sys.exit(
            f"ascend-moe {command}".rstrip() + f" needs {error.name}, which is not installed: "
            "pip install 'ascend_moe[cli]'"
        )


class _Pipe(io.FileIO):
    """A pipe's writing end; the program ends with 141 when it is written to and nobody reads."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is written on the way out
            raise SystemExit(_NOBODY_READS) from None


@contextlib.contextmanager
def _until_nobody_reads() -> Iterator[None]:
    """Meanwhile stdout and stderr are `_Pipe`s where they are pipes.

    The exception is SystemExit: neither typer nor rich then takes a pipe's end for an error of its own.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_piped, before)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = before


def _piped(stream: TextIO) -> TextIO:
    try:
        number = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return stream
    except (OSError, ValueError):  # a program's own object, or closed
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Pipe(number, "w", closefd=False))
    at_once = bool(getattr(stream, "line_buffering", False) or getattr(stream, "write_through", False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=at_once)


def _with_json(words: Sequence[str]) -> list[str]:
    """`--json` without a value means `--json -`."""
    made = list(words)
    for at, word in reversed(list(enumerate(words))):
        following = words[at + 1] if at + 1 < len(words) else "--"
        if word == "--json" and words[0] not in ("vnpu", "shim") and following.startswith("-") and following != "-":
            made.insert(at + 1, "-")
    return made


if __name__ == "__main__":
    main()
