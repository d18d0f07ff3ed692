"""One `ascend-moe run` from its parsed options to the exit code."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ascend_moe.demo import heatmap
from ascend_moe.demo.check import verify
from ascend_moe.demo.launch import run_ranks
from ascend_moe.demo.layers import RunSpec
from ascend_moe.demo.progress import Bar
from ascend_moe.demo.report import Report
from ascend_moe.errors import AscendMoeError

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
            heatmap.plot(report.counts, job.plot, job.head[0])
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
