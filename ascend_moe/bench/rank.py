"""One rank of a run; ascend_moe.bench.run starts it under torchrun or mpiexec."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ascend_moe
from ascend_moe.bench import timing
from ascend_moe.bench.cases import Case
from ascend_moe.bench.methods import Place
from ascend_moe.comm.liveness import process_gone
from ascend_moe.errors import ArgumentError, AscendMoeError

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Job:
    """What the ranks are told, in the file ``job`` of the scratch folder.

    ``mpi``: mpiexec starts the ranks, not torchrun. ``pid``: the ranks end when this process ends. ``tell``:
    rank 0 writes its progress on stderr.
    """

    cases: list[Case]
    methods: list[str]
    iterations: int
    mpi: bool
    pid: int
    cores: list[int]
    tell: bool = False

    @property
    def world(self) -> int:
        return self.cases[0].world


def main(scratch: str) -> None:
    """Runs the job in the folder ``scratch``; the first rank to fail leaves ``error.json`` there."""
    folder = Path(scratch)
    job: Job = pickle.loads((folder / "job").read_bytes())
    threading.Thread(target=_end_with, args=(job.pid, folder), daemon=True).start()
    rank = -1
    try:
        rank, mpi = _rank_and_mpi(job)
        _run(job, folder, rank, mpi)
    except BaseException as error:
        trace = "" if isinstance(error, AscendMoeError) else traceback.format_exc()
        note = {"rank": rank, "text": f"rank {rank}: {type(error).__name__}: {error}", "trace": trace}
        with contextlib.suppress(FileExistsError), (folder / "error.json").open("x") as file:
            json.dump(note, file)
        # Not by way of atexit: gloo and MPI would wait for ranks that wait for this one.
        os._exit(1)


def _run(job: Job, folder: Path, rank: int, mpi: Any) -> None:
    core = job.cores[rank % len(job.cores)]
    os.sched_setaffinity(0, {core})  # before any library starts threads: they inherit it
    torch.set_num_threads(1)
    barrier = timing.Barrier(folder / "barrier", rank, job.world, len(job.cores))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job.world,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    place = Place(rank, job.world, ascend_moe.comm_name(), mpi=mpi)
    results = []
    for case in job.cases:

        def tell(done: int, name: str = case.name) -> None:
            if job.tell and rank == 0:
                print(f"\r\x1b[K{name}: {done}/{job.iterations}", end="", file=sys.stderr, flush=True)

        marks = timing.run_case(case, job.methods, job.iterations, place, barrier, tell)
        of_ranks: list[Any] = [None] * job.world
        dist.gather_object(marks, of_ranks if rank == 0 else None)
        results.append(of_ranks)
    if rank == 0:
        (folder / "marks").write_bytes(pickle.dumps(results))
    barrier.wait()
    ascend_moe.close(place.group_ep)
    dist.destroy_process_group()


def _rank_and_mpi(job: Job) -> tuple[int, Any]:
    if not job.mpi:
        return int(os.environ["RANK"]), None
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


def _end_with(pid: int, folder: Path) -> None:
    """Ends this rank when the process that started the run has ended, and leaves nothing behind."""
    while not process_gone(pid):
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
