"""Starts the ranks of a run, watches them, and collects what they measured. Nothing outlives the run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ascend_moe.bench.board import Board
from ascend_moe.bench.job import Job, read_marks
from ascend_moe.bench.rank import RANK
from ascend_moe.bench.rank_failures import failure, stalled
from ascend_moe.bench.timing import CaseMarks

#: Set alike for all methods: memory that was freed is used again instead of being faulted in afresh.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_POLL_S = 0.05
_START_S = 180.0  # until the last rank is there
_STALL_S = 150.0  # without a step of any rank
_GRACE_S = 5.0

Progress = Callable[[int, int], None]


def has_mpi() -> bool:
    """Whether mpi4py and an mpiexec are installed. Whether they fit, the ranks find out."""
    return importlib.util.find_spec("mpi4py") is not None and mpiexec() is not None


def mpiexec() -> str | None:
    """The mpiexec beside this Python, where the wheel mpich puts it; else the one on PATH."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def run(job: Job, progress: Progress) -> tuple[list[list[CaseMarks]], list[dict[str, Any]]]:
    """Runs a job: marks by case and rank, and each rank's limits (empty when not asked for).

    Raises:
        RankFailed: the first rank to fail; all others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="ascend-moe-bench-") as name:
        folder = Path(name)
        job.write(folder)
        board = Board(folder, -1, job.world)
        output = (folder / "output").open("w+b")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            _start(job, folder, output, processes)
            _watch(job, folder, board, processes, progress)
            marks = [[read_marks(folder, c, r) for r in range(job.world)] for c in range(len(job.cases))]
            read = [folder / f"limits.rank{rank}.json" for rank in range(job.world)]
            return marks, [json.loads(path.read_text()) for path in read if path.is_file()]
        finally:
            _end(processes, [board.pid(rank) for rank in range(job.world)])
            board.close()
            output.close()


def _start(job: Job, folder: Path, output: Any, processes: list[subprocess.Popen[bytes]]) -> None:
    here = str(Path(__file__).resolve().parents[2])
    # The ranks run this very package: -m would take another one that lies in the current folder.
    code = f"import sys; sys.path.insert(0, {here!r}); from ascend_moe.bench import rank"
    command = [sys.executable, "-c", f"{code}; rank.main({str(folder)!r})"]
    env = {
        **os.environ,
        **MALLOC,
        **THREADS,
        "HCCL_BUFFSIZE": str(job.window_mib),
        "ASCEND_MOE_LENT_MIB": str(job.lent_mib),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONFAULTHANDLER": "1",
    }
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    if job.mpi:
        start = [str(mpiexec()), "-n", str(job.world), *command]
        processes.append(subprocess.Popen(start, env=env, start_new_session=True, **settings))
        return
    for rank in range(job.world):
        processes.append(subprocess.Popen(command, env={**env, RANK: str(rank)}, **settings))


def _watch(
    job: Job, folder: Path, board: Board, processes: list[subprocess.Popen[bytes]], progress: Progress
) -> None:
    began = moved = time.monotonic()
    before: list[int] = []
    while any(process.poll() is None for process in processes):
        if _failed(folder, processes):
            raise failure(job.mpi, folder, board, processes)
        steps, now = board.steps(), time.monotonic()
        if steps != before:
            before, moved = steps, now
            progress(*board.progress())
        if now - moved > (_STALL_S if all(steps) else _START_S):
            raise stalled(board, steps, now - moved)
        time.sleep(_POLL_S if now - began > 1 else 0.01)
    if _failed(folder, processes):
        raise failure(job.mpi, folder, board, processes)


def _failed(folder: Path, processes: list[subprocess.Popen[bytes]]) -> bool:
    notes = next(folder.glob("error*.json"), None) is not None
    return notes or any(process.poll() not in (None, 0) for process in processes)


def _end(processes: list[subprocess.Popen[bytes]], pids: list[int]) -> None:
    """Ends whatever still runs. mpiexec first gets the chance to end its ranks itself."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
    for pid in pids:  # of mpiexec's ranks, were it killed
        if pid > 0 and _is_rank(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _is_rank(pid: int) -> bool:
    """The id may belong to somebody else by now."""
    with contextlib.suppress(OSError):
        return re.search(rb"ascend_moe\.bench", Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False
