"""The `ascend-moe` command. A command is a module of this folder, imported when it runs.

This module imports neither typer nor rich, which come with the extra [cli], so that it can report their absence.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ascend_moe._text import reason

_EXTRA = ("typer", "click", "rich")
_SIGINT_CODE, _SIGPIPE_CODE = 128 + 2, 128 + 13
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # they end the command as Ctrl-C does, with its ranks and files


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in ``arguments`` (None: sys.argv[1:]) and raise SystemExit with its exit code.

    The exit code is 141, as after SIGPIPE, if the reader of the output closes it (``| head``); 2 if a file that the
    arguments name cannot be read or written, or the output written; 130 after Ctrl-C; with sys.argv
    143 or 129 after SIGTERM or SIGHUP; 1 without extra [cli].
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = " ".join(["ascend-moe", *[word for word in words if not word.startswith("-")][:1]])
    for number in _ENDING if arguments is None else ():
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with _exit_when_write_fails():
            root = importlib.import_module("ascend_moe.cli.root")
            root.app(args=_with_json(words), prog_name="ascend-moe")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f"{command} needs {error.name}, which is not installed: pip install 'ascend_moe[cli]'")
    except OSError as error:
        if not _is_named(error.filename, words):
            raise
        print(f"{command}: {reason(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # during imports
        print(f"{command}: interrupted", file=sys.stderr)
        sys.exit(_SIGINT_CODE)
    except SystemExit as ended:
        if ended.code in (_SIGINT_CODE, *(128 + number for number in _ENDING)) and threading.active_count() > 1:
            os._exit(int(ended.code))  # Python would abort if a rank's thread calls it from C++ now
        raise


def _is_named(file: Any, words: Sequence[str]) -> bool:
    """Return whether the arguments name the file of an error, or a folder that contains it."""
    if not isinstance(file, str):
        return False
    path, named = Path(file).absolute(), (Path(word.rpartition("=")[2]).absolute() for word in words if word)
    return not {path, *path.parents}.isdisjoint(named)


class _Output(io.FileIO):
    """The output. A failed write ends the program: with code 141 if the reader has closed a pipe, else with 2."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for writes during exit
            if isinstance(error, BrokenPipeError):
                raise SystemExit(_SIGPIPE_CODE) from None
            print(f"ascend-moe: the output cannot be written: {error.strerror}", file=sys.stderr)
            raise SystemExit(2) from None


@contextlib.contextmanager
def _exit_when_write_fails() -> Iterator[None]:
    """Replace stdout and stderr by `_Output`s unless they are terminals.

    An `_Output` raises SystemExit, which neither typer nor rich handles as an error.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_checked, before)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = before


def _checked(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed when Python started
        return open(os.devnull, "w")
    try:
        number = stream.fileno()
        if stream.isatty():
            return stream
    except (OSError, ValueError):  # an object without a file, or a closed one
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Output(number, "w", closefd=False))
    at_once = bool(getattr(stream, "line_buffering", False) or getattr(stream, "write_through", False))
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=at_once)


def _with_json(words: Sequence[str]) -> list[str]:
    """Replace `--json` without a value by `--json -`."""
    made = list(words)
    for at, word in reversed(list(enumerate(words))):
        following = words[at + 1] if at + 1 < len(words) else "--"
        if word == "--json" and words[0] not in ("vnpu", "shim") and following.startswith("-") and following != "-":
            made.insert(at + 1, "-")
    return made
