"""`ascend-moe run`: an MoE layer over EP ranks on this machine, checked against two references.

`layers` describes a run and runs one rank, `check` verifies the results, `report` prints them, this module starts the
ranks.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

import ascend_moe
from ascend_moe._text import show
from ascend_moe.comm.threads import LocalCluster
from ascend_moe.errors import AscendMoeError
from ascend_moe.native.windows import timeout_s
from ascend_moe.run.check import verify
from ascend_moe.run.layers import Progress, RankRecord, RunSpec, run_rank
from ascend_moe.run.report import RunReport

_PLAIN_WIDTH = 100  # columns if the output is not a terminal


def execute(spec: RunSpec, head: Sequence[str], backend: str = "threads", as_json: str = "") -> int:
    """Run ``spec``, check it and print the report.

    ``head``: sentences to print first. ``backend``: ranks are "threads" or processes. ``as_json``: see `_text.show`.

    Returns:
        0 for PASS, 1 for FAIL or an error of the run.
    """
    start = time.perf_counter()
    if as_json != "-":
        for sentence in head:
            _console().print(sentence, markup=False, highlight=False)
        sys.stdout.flush()
    try:
        with Console(stderr=True).status("start") as status:  # a line on stderr, if that is a terminal

            def progress(stage: str, done: int, total: int) -> None:
                status.update(f"{stage} {done}/{total}" if total else stage)

            records = (run_threads if backend == "threads" else run_processes)(spec, progress)
            checked = verify(spec, records, progress)
    except AscendMoeError as error:
        _print_error(error, head, as_json)
        return 1
    report = RunReport(spec, head, backend, records, checked, time.perf_counter() - start)
    show(report.json(), as_json, lambda: report.show(_console()))
    return 0 if checked.ok else 1


def run_threads(spec: RunSpec, progress: Progress) -> list[RankRecord]:
    """Run all ranks as threads and return their records by rank. Rank 0 reports its progress to ``progress``."""
    before = torch.get_num_threads()
    torch.set_num_threads(_share_of_cores(spec))
    try:
        with LocalCluster(spec.ranks) as cluster:
            return cluster.run(lambda rank, group_ep: run_rank(spec, rank, group_ep, progress if rank == 0 else _quiet))
    finally:
        torch.set_num_threads(before)


def run_processes(spec: RunSpec, progress: Progress) -> list[RankRecord]:
    """Run each rank in a process and return the records by rank; raise the error of the first rank that failed."""
    progress("start of the processes", 0, 0)
    with tempfile.TemporaryDirectory(prefix="ascend-moe-run-") as scratch:
        start: Any = start_processes  # untyped
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # only this process handles Ctrl-C, and ends the ranks
        try:
            ranks = start(_rank_main, args=(spec, scratch), nprocs=spec.ranks, start_method="spawn", join=False)
        finally:
            signal.signal(signal.SIGINT, usual)
        try:
            while not ranks.join():
                pass
        except (KeyboardInterrupt, SystemExit):
            for process in ranks.processes:
                process.kill()
            raise
        except (ProcessExitedException, ProcessRaisedException) as error:  # a rank that raised has written its error
            failures = sorted(Path(scratch).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
            if not failures:
                raise AscendMoeError(str(error), rank=error.error_index) from None
            raise torch.load(failures[0], weights_only=False) from None
        return [torch.load(Path(scratch) / f"{rank}.pt", weights_only=False) for rank in range(spec.ranks)]


def _rank_main(rank: int, spec: RunSpec, scratch: str) -> None:
    os.dup2(2, 1)  # gloo prints to stdout, which is for the report
    torch.set_num_threads(_share_of_cores(spec))
    wait = datetime.timedelta(seconds=timeout_s() + 60)
    store = f"file://{scratch}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=spec.ranks, timeout=wait)
    try:
        group_ep = ascend_moe.comm_name()
        torch.save(run_rank(spec, rank, group_ep, _quiet), f"{scratch}/{rank}.pt")
        dist.barrier()  # the others would report a rank that exits early as lost
    except AscendMoeError as error:
        torch.save(error, f"{scratch}/{rank}.part")
        os.replace(f"{scratch}/{rank}.part", f"{scratch}/{rank}.error")
        sys.exit(1)
    ascend_moe.close(group_ep)
    dist.destroy_process_group()


def _share_of_cores(spec: RunSpec) -> int:
    """Number of torch threads per rank."""
    return max(1, len(os.sched_getaffinity(0)) // spec.ranks)


def _quiet(stage: str, done: int, total: int) -> None:
    """Ignore the progress of a rank."""


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def _print_error(error: AscendMoeError, head: Sequence[str], as_json: str) -> None:
    """Print an error of the run, and the errors of other ranks."""
    text = f"{type(error).__name__}: {error}"

    def show_text() -> None:
        for rank, other in sorted(error.others.items()):
            if str(other) != str(error):
                print(f"rank {rank} raised {type(other).__name__}: {other}", file=sys.stderr)
        _console().print(f"\n{text}\n[bold red]FAIL", soft_wrap=True)

    show({"pass": False, "about": head, "error": text}, as_json, show_text)
