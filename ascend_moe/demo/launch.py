"""One `ascend-moe run`: starts all ranks on this machine, shows how far they are, prints the report.

Ranks are threads of this process, or processes over gloo.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

import ascend_moe
from ascend_moe.comm.communicator import timeout_s
from ascend_moe.comm.threads import LocalCluster
from ascend_moe.demo.check import verify
from ascend_moe.demo.layers import RunSpec
from ascend_moe.demo.rank import Progress, RankRecord, run_rank
from ascend_moe.demo.report import Report, plot
from ascend_moe.errors import AscendMoeError

BACKENDS = ("threads", "processes")
_POLL_S = 0.05
_PLAIN_WIDTH = 100  # columns where the output is no terminal


@dataclass(frozen=True)
class Job:
    """A run and what to do with its results.

    Attributes:
        head: sentences about it, printed first.
        backend: "threads" or "processes".
        plot: image file of the heat map, or None.
        as_json: print JSON and nothing else.
    """

    spec: RunSpec
    head: tuple[str, ...]
    backend: str
    plot: Path | None = None
    as_json: bool = False


def execute(job: Job) -> int:
    """Runs the job and prints the report. Returns 0 for PASS, 1 for FAIL or an error of the run."""
    start = time.perf_counter()
    try:
        with Bar() as bar:
            records = run_ranks(job.spec, job.backend, bar.update)
            verdict = verify(job.spec, records, bar.update)
        report = Report(job.spec, job.head, job.backend, records, verdict, time.perf_counter() - start)
        if job.plot is not None:
            plot(report.counts, job.plot, job.head[0])
    except AscendMoeError as error:
        return _failed(job, error)
    if job.as_json:
        print(json.dumps(report.json(), indent=1))
    else:
        report.show(_console())
        if job.plot is not None:
            print(f"heat map: {job.plot}")
    return 0 if verdict.ok else 1


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def _failed(job: Job, error: AscendMoeError) -> int:
    kind = "" if type(error).__name__ == "RankFailed" else f"{type(error).__name__}: "
    if job.as_json:
        print(json.dumps({"pass": False, "about": job.head, "error": f"{kind}{error}"}, indent=1))
        return 1
    for sentence in job.head:
        print(sentence)
    for rank, other in sorted(error.others.items()):
        if str(other) != str(error):
            print(f"rank {rank} raised {type(other).__name__}: {other}", file=sys.stderr)
    _console().print(f"\n{kind}{error}\n[bold red]FAIL", soft_wrap=True)
    return 1


# ---- the ranks


class RankFailed(AscendMoeError):
    """A rank's process raised or died. ``.rank``, and ``.trace`` when it raised."""


def run_ranks(spec: RunSpec, backend: str, progress: Progress) -> list[RankRecord]:
    """The records of all ranks, by rank. ``progress`` hears of rank 0.

    Raises:
        AscendMoeError: what the first rank to fail raised; for processes as RankFailed.
    """
    return _threads(spec, progress) if backend == "threads" else _processes(spec, progress)


def share_of_cores(ranks: int) -> int:
    """Threads a rank may use in torch."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _threads(spec: RunSpec, progress: Progress) -> list[RankRecord]:
    before = torch.get_num_threads()
    torch.set_num_threads(share_of_cores(spec.ranks))
    try:
        with LocalCluster(spec.ranks) as cluster:
            return cluster.run(
                lambda rank, group_ep: run_rank(spec, rank, group_ep, progress if rank == 0 else _quiet)
            )
    finally:
        torch.set_num_threads(before)


def _processes(spec: RunSpec, progress: Progress) -> list[RankRecord]:
    with tempfile.TemporaryDirectory(prefix="ascend-moe-run-") as scratch:
        reports = get_context("spawn").SimpleQueue()
        start: Any = start_processes  # untyped
        context = start(
            _rank_main, args=(spec, scratch, reports), nprocs=spec.ranks, join=False, start_method="spawn"
        )
        progress("start of the processes", 0, 0)
        try:
            while not context.join(timeout=_POLL_S):
                while not reports.empty():
                    progress(*reports.get())
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _first_failure(Path(scratch), error) from None
        return [torch.load(Path(scratch) / f"{rank}.pt", weights_only=False) for rank in range(spec.ranks)]


def _rank_main(rank: int, spec: RunSpec, scratch: str, reports: Any) -> None:
    os.dup2(2, 1)  # gloo talks on stdout, which belongs to the report
    torch.set_num_threads(share_of_cores(spec.ranks))
    report = (lambda *what: reports.put(what)) if rank == 0 else _quiet
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=spec.ranks,
        timeout=datetime.timedelta(seconds=timeout_s() + 60),
    )
    try:
        group_ep = ascend_moe.comm_name()
        torch.save(run_rank(spec, rank, group_ep, report), f"{scratch}/{rank}.pt")
        dist.barrier()  # a rank that leaves early would be lost to the others
    except Exception as error:
        note = {"at": time.time(), "kind": type(error).__name__, "text": str(error)}
        note["trace"] = traceback.format_exc()
        (Path(scratch) / f"{rank}.json").write_text(json.dumps(note))
        raise
    ascend_moe.close(group_ep)
    dist.destroy_process_group()


def _first_failure(scratch: Path, error: Exception) -> RankFailed:
    """The earliest error that a rank left behind; ``error`` when none did (it was killed)."""
    notes = [(json.loads(path.read_text()), int(path.stem)) for path in scratch.glob("*.json")]
    if not notes:
        rank = getattr(error, "error_index", None)
        return RankFailed(f"rank {rank}: {str(error).strip().splitlines()[-1]}", rank=rank)
    note, rank = min(notes, key=lambda one: one[0]["at"])
    return RankFailed(f"rank {rank}: {note['kind']}: {note['text']}", rank=rank, trace=note["trace"])


def _quiet(stage: str, done: int, total: int) -> None:
    """Progress of ranks that nobody listens to."""


# ---- progress: a bar on stderr, where that is a terminal


class Bar:
    """One line that shows the stage of a run; gone when the run is over."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = RichProgress(
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
