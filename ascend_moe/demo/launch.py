"""One `ascend-moe run`: runs all ranks as threads, shows how far they are, prints the report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from ascend_moe.comm.threads import LocalCluster
from ascend_moe.demo.check import verify
from ascend_moe.demo.layers import RunSpec
from ascend_moe.demo.rank import Progress, RankRecord, run_rank
from ascend_moe.demo.report import Report
from ascend_moe.errors import AscendMoeError

_PLAIN_WIDTH = 100  # columns where the output is no terminal


def execute(spec: RunSpec, head: Sequence[str], as_json: bool = False) -> int:
    """Runs it and prints the report, or JSON and nothing else. ``head``: sentences about it, printed first.

    Returns 0 for PASS, 1 for FAIL or an error of the run.
    """
    start = time.perf_counter()
    try:
        with _bar() as progress:
            records = run_ranks(spec, progress)
            verdict = verify(spec, records, progress)
    except AscendMoeError as error:
        _tell(error, head, as_json)
        return 1
    report = Report(spec, head, records, verdict, time.perf_counter() - start)
    if as_json:
        print(json.dumps(report.json(), indent=1))
    else:
        report.show(_console())
    return 0 if verdict.ok else 1


def run_ranks(spec: RunSpec, progress: Progress) -> list[RankRecord]:
    """The records of all ranks, by rank. ``progress`` hears of rank 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // spec.ranks))
    try:
        with LocalCluster(spec.ranks) as cluster:
            return cluster.run(
                lambda rank, group_ep: run_rank(spec, rank, group_ep, progress if rank == 0 else _quiet)
            )
    finally:
        torch.set_num_threads(before)


def _quiet(stage: str, done: int, total: int) -> None:
    """Progress of ranks that nobody listens to."""


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def _tell(error: AscendMoeError, head: Sequence[str], as_json: bool) -> None:
    """An error of the run, with what other ranks raised."""
    text = f"{type(error).__name__}: {error}"
    if as_json:
        print(json.dumps({"pass": False, "about": head, "error": text}, indent=1))
        return
    print("\n".join(head))
    for rank, other in sorted(error.others.items()):
        if str(other) != str(error):
            print(f"rank {rank} raised {type(other).__name__}: {other}", file=sys.stderr)
    _console().print(f"\n{text}\n[bold red]FAIL", soft_wrap=True)


@contextmanager
def _bar() -> Iterator[Progress]:
    """One line on stderr that shows the stage of a run, where that is a terminal; gone afterwards."""
    console, text = Console(stderr=True), TextColumn("{task.description:<28}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("start", total=None)

        def update(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total or None)

        yield update
