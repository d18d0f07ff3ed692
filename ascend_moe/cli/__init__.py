"""The `ascend-moe` command. A command is a module of this folder, imported when it runs.

This module imports neither typer nor rich, which come with the extra [cli], so that it can report their absence.
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

_EXTRA = ("typer", "click", "rich")
_SIGPIPE_CODE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in ``arguments`` (None: sys.argv[1:]) and raise SystemExit with its exit code.

    The exit code is 141, as after SIGPIPE, if the reader of the output closes it (``| head``); 1 without extra [cli].
    """
    try:
        with _exit_when_pipe_closes():
            root = importlib.import_module("ascend_moe.cli.root")
            root.app(args=_with_json(sys.argv[1:] if arguments is None else arguments), prog_name="ascend-moe")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        words = sys.argv[1:] if arguments is None else arguments
        command = next((word for word in words if not word.startswith("-")), "")
        sys.exit(
            f"ascend-moe {command}".rstrip() + f" needs {error.name}, which is not installed: "
            "pip install 'ascend_moe[cli]'"
        )


class _Pipe(io.FileIO):
    """Writing end of a pipe. A write after the reader has closed it ends the program with code 141."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for writes during exit
            raise SystemExit(_SIGPIPE_CODE) from None


@contextlib.contextmanager
def _exit_when_pipe_closes() -> Iterator[None]:
    """Replace stdout and stderr by `_Pipe`s where they are pipes.

    A `_Pipe` raises SystemExit, which neither typer nor rich handles as an error.
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
    except (OSError, ValueError):  # an object without a file, or a closed one
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Pipe(number, "w", closefd=False))
    at_once = bool(getattr(stream, "line_buffering", False) or getattr(stream, "write_through", False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=at_once)


def _with_json(words: Sequence[str]) -> list[str]:
    """Replace `--json` without a value by `--json -`."""
    made = list(words)
    for at, word in reversed(list(enumerate(words))):
        following = words[at + 1] if at + 1 < len(words) else "--"
        if word == "--json" and words[0] not in ("vnpu", "shim") and following.startswith("-") and following != "-":
            made.insert(at + 1, "-")
    return made


if __name__ == "__main__":
    main()
