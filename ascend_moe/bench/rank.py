"""One rank of a run; ascend_moe.bench.ranks starts it, with or without mpiexec."""

from __future__ import annotations

import datetime
import os
import select
import shutil
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ascend_moe
from ascend_moe.bench import limits, timing
from ascend_moe.bench.board import Board
from ascend_moe.bench.job import Job, marks_path, write_json
from ascend_moe.bench.methods import Place
from ascend_moe.comm.liveness import open_pidfd, process_gone
from ascend_moe.errors import ArgumentError, AscendMoeError

RANK = "ASCEND_MOE_BENCH_RANK"
PATIENCE_S = 120.0


def main(scratch: str) -> None:
    """Runs the job in the folder ``scratch``; on an error leaves a note there and exits with 1."""
    folder = Path(scratch)
    job = Job.read(folder)
    _die_with(job.bench_pid, folder)
    rank, mpi = _rank_and_mpi(job)
    try:
        _run(job, folder, rank, mpi)
    except BaseException as error:
        note = {
            "at": time.monotonic(),
            "kind": type(error).__name__,
            "text": str(error),
            "expected": isinstance(error, AscendMoeError),
            "trace": traceback.format_exc(),
        }
        write_json(folder / f"error{rank}.json", note)
        # Not by way of atexit: gloo and MPI would wait for ranks that wait for this one.
        os._exit(1)


def _run(job: Job, folder: Path, rank: int, mpi: Any) -> None:
    core = job.cores[rank % len(job.cores)]
    os.sched_setaffinity(0, {core})  # before any library starts threads: they inherit it
    torch.set_num_threads(1)
    board = Board(folder, rank, job.world)
    board.use_cores(len(job.cores))
    board.sign_in()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job.world,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    place = Place(rank, job.world, ascend_moe.comm_name(), mpi)
    if job.limits:
        write_json(folder / f"limits.rank{rank}.json", limits.measure(job.cases, place, board))
    for number, case in enumerate(job.cases):
        found = timing.run_case(case, number, job.methods, job.iterations, place, board)
        write_json(marks_path(folder, number, rank), asdict(found))
        board.step(number + 1, 0)
    board.barrier()
    ascend_moe.close(place.group_ep)
    dist.destroy_process_group()


def _rank_and_mpi(job: Job) -> tuple[int, Any]:
    if not job.mpi:
        return int(os.environ[RANK]), None
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # spares MPI its locks
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != job.world:
        raise ArgumentError(
            f"mpiexec started {world.size} ranks of {job.world} that see each other: "
            "mpiexec and mpi4py are not of one installation",
            argument="methods",
        )
    return world.rank, world


def _die_with(pid: int, folder: Path) -> None:
    """Ends this rank when the process that started the run ends, and leaves nothing behind."""

    descriptor = open_pidfd(pid)

    def watch() -> None:
        if descriptor >= 0:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        while not process_gone(pid):
            time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
