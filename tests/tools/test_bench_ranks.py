"""The benchmark's processes: every method right over 2 ranks, and nothing left when a rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascend_moe.bench import run
from ascend_moe.bench.cases import Case
from ascend_moe.bench.methods import METHODS
from ascend_moe.bench.rank import Job
from ascend_moe.bench.results import evaluate
from ascend_moe.bench.run import RankFailed
from ascend_moe.bench.timing import Barrier
from ascend_moe.errors import CommTimeout

TINY = Case("tiny", world=2, batch=4, hidden=64, topk=2, experts=8)
CASES = [
    TINY,
    Case("tiny", 2, 5, 128, 3, 6, skew="hot", quant="int8"),
    Case("tiny", 2, 1, 64, 2, 4, skew="zipf", dtype="fp32"),
]


def job(cases: list[Case], iterations: int = 2, mpi: bool = False) -> Job:
    return Job(cases, list(METHODS), iterations, mpi, os.getpid(), sorted(os.sched_getaffinity(0)))


def rank_pids(scratch: Path) -> dict[int, int]:
    """rank -> process id of the benchmark's ranks whose scratch folder lies in ``scratch``."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        environ = dict(word.split("=", 1) for word in words if "=" in word)
        number = environ.get("RANK", environ.get("PMI_RANK"))
        if number is not None and len(command) > 2 and f"rank.main('{scratch}/" in command[2]:
            pids[int(number)] = int(folder.name)
    return pids


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs put their scratch folders: empty again in the end, and no rank is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir()) and not rank_pids(tmp_path)


needs_mpi = pytest.param(True, marks=pytest.mark.skipif(not run.has_mpi(), reason="no mpi4py, or no mpiexec"))


@pytest.mark.parametrize("mpi", [False, needs_mpi])
def test_every_method_agrees(scratch: Path, mpi: bool) -> None:
    work = job(CASES, mpi=mpi)
    for case, of_ranks in zip(work.cases, run.run_ranks(work), strict=True):
        result = evaluate(case, of_ranks, 0.0, 2)
        absent = {name for name in METHODS if METHODS[name].needs_mpi and not mpi}
        assert set(METHODS) - {row.name for row in result.rows} == set(result.missing) == absent
        for row in result.rows:
            assert row.round_trip.n == work.iterations and row.round_trip.p10 > 0
            assert row.exact or row.name == "gloo-ag-rs" or not row.name.endswith(("tuned", "window"))


@pytest.mark.nightly
@pytest.mark.parametrize("mpi", [False, needs_mpi])
def test_a_rank_that_is_killed_ends_the_run(scratch: Path, mpi: bool) -> None:
    killed: list[int] = []

    def kill() -> None:
        pids = _until(lambda: rank_pids(scratch), lambda found: len(found) == 2)
        _until(lambda: list(scratch.glob("*/rendezvous")), bool)
        killed.append(pids[1])
        os.kill(pids[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankFailed) as error:
        run.run_ranks(job([TINY], iterations=100_000, mpi=mpi))
    killer.join()
    # Its peer tells, or the launcher, whichever sees it first.
    told = f"{error.value} {error.value.details.get('trace')}"
    assert "rank 1" in told or str(killed[0]) in told or "KILLED BY SIGNAL: 9" in told


def test_what_a_rank_raises_is_told(scratch: Path) -> None:
    too_wide = Case("tiny", 2, 4, 64, 2, 7)  # 7 experts on 2 ranks: the ops refuse that
    with pytest.raises(RankFailed, match=r"rank [01]: ArgumentError: .*moe_expert_num") as error:
        run.run_ranks(job([too_wide]))
    assert error.value.rank in (0, 1) and not error.value.details["trace"]


@pytest.mark.nightly
def test_ranks_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    options = ["--preset", "small", "--methods", "window", "-n", "99999"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "ascend_moe", "bench", *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        pids = _until(lambda: rank_pids(tmp_path), lambda found: len(found) == 2)
        # Past the start of Python, where a rank begins to watch.
        _until(lambda: list(tmp_path.glob("*/rendezvous")), bool)
    finally:
        bench.kill()
        bench.wait()
    _until(
        lambda: [pid for pid in pids.values() if Path(f"/proc/{pid}/fd").exists()], lambda found: not found
    )
    _until(lambda: list(tmp_path.glob("ascend-moe-bench-*")), lambda found: not found)


def _until(look: Callable[[], list], enough: Callable[[list], bool]) -> list:
    deadline = time.monotonic() + 60
    while not enough(found := look()):
        assert time.monotonic() < deadline, f"still {found}"
        time.sleep(0.02)
    return found


def test_the_barrier_names_who_has_not_come(tmp_path: Path) -> None:
    def wait(number: int) -> list[int]:
        with pytest.raises(CommTimeout) as raised:
            Barrier(tmp_path / "barrier", number, 3, 2).wait(patience_s=0.2)
        ranks: list[int] = raised.value.ranks
        return ranks

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wait, (0, 2))) == [[1], [1]]
