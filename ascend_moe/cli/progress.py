"""Progress of a command: a bar on a terminal, lines where stderr is a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

#: advance(text, done, total), total 0 when unknown
Advance = Callable[[str, int, int], None]


@contextmanager
def bar(text: str) -> Iterator[Advance]:
    """Show a bar on stderr, if that is a terminal, until the block ends."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(text, total=None)
        yield lambda now, done, total: progress.update(task, description=now, completed=done, total=total or None)


@contextmanager
def steps(command: str, text: str) -> Iterator[Callable[[str], object]]:
    """Show each step when it begins: in a bar, or on a line of its own if stderr is no terminal."""
    with bar(text) as advance:

        def begin(step: str) -> None:
            advance(step, 0, 0)
            started(command, step)

        yield begin


def started(command: str, text: str) -> None:
    """Print what the command is doing to stderr, if that is no terminal and so shows no bar."""
    if not sys.stderr.isatty():
        print(f"ascend-moe {command}: {text}", file=sys.stderr, flush=True)
