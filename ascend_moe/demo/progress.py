"""A progress bar on stderr, where that is a terminal; nothing elsewhere."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Bar:
    """One line that shows the stage of a run; gone when the run is over."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._lock = threading.Lock()
        self._task = self._progress.add_task("start", total=None)

    def update(self, stage: str, done: int, total: int) -> None:
        """Shows the stage; ``total`` 0 when its length is unknown. Called from any thread."""
        with self._lock:
            self._progress.update(self._task, description=stage, completed=done, total=total or None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
