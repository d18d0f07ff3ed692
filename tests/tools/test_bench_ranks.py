"""The benchmark's processes: every method right over 2 ranks, and nothing left when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_moe.bench import ranks
from ascend_moe.bench.board import Board
from ascend_moe.bench.cases import Case
from ascend_moe.bench.job import Job
from ascend_moe.bench.methods import METHODS
from ascend_moe.bench.rank import RANK
from ascend_moe.bench.rank_failures import RankFailed
from ascend_moe.bench.results import evaluate, limits
from ascend_moe.errors import CommTimeout

TINY = Case("tiny", world=2, batch=4, hidden=64, topk=2, experts=8)
CASES = [
    TINY,
    Case("tiny", 2, 5, 128, 3, 6, skew="hot", quant="int8"),
    Case("tiny", 2, 1, 64, 2, 4, skew="zipf", dtype="fp32"),
]


def job(cases: list[Case], iterations: int = 2, mpi: bool = False, with_limits: bool = False) -> Job:
    return Job(
        world=cases[0].world,
        cases=cases,
        methods=list(METHODS),
        iterations=iterations,
        mpi=mpi,
        limits=with_limits,
        window_mib=8,
        lent_mib=8,
        bench_pid=os.getpid(),
        cores=sorted(os.sched_getaffinity(0)),
    )


def quiet(case: int, done: int) -> None:
    pass


def rank_pids(parent: int) -> dict[int, int]:
    """rank -> process id of the benchmark's ranks that ``parent`` started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            born_of = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError):
            continue
        environ = dict(word.split("=", 1) for word in words if "=" in word)
        if born_of == parent and RANK in environ:
            found[int(environ[RANK])] = int(folder.name)
    return found


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs put their scratch folders; empty again in the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def check_all(one: Job) -> None:
    marks, machine = ranks.run(one, quiet)
    for case, of_ranks in zip(one.cases, marks, strict=True):
        result = evaluate(case, of_ranks, 0.0, 2)
        mpi = {name for name in METHODS if name.startswith("mpi")}
        optional = {"direct", "direct-zero-copy"} | (set() if one.mpi else mpi)
        assert set(METHODS) - {row.name for row in result.rows} == set(result.missing) <= optional
        for row in result.rows:
            assert row.round_trip.n == one.iterations and row.round_trip.p10 > 0
            assert row.exact or row.name == "gloo-ag-rs" or not row.name.endswith(("tuned", "window"))
    if one.limits:
        found = limits(one.world, machine)
        assert set(found.flags_ns) == {"spin", "spin, then yield", "futex"}
        assert all(rate > 0 for by in found.rates.values() for rate in by.values())
        assert [sorted(by) for by in found.rates.values()] == [[1, 2]] * 4


def test_every_method_agrees_over_gloo(scratch: Path) -> None:
    check_all(job(CASES, with_limits=True))
    assert not list(scratch.iterdir()) and not rank_pids(os.getpid())


needs_mpi = pytest.mark.skipif(not ranks.has_mpi(), reason="no mpi4py, or no mpiexec")


@needs_mpi
def test_every_method_agrees_over_mpi(scratch: Path) -> None:
    check_all(job(CASES, mpi=True))
    assert not list(scratch.iterdir())


def _hurt(number: int, sign: signal.Signals, then: Callable[[], None] = bool) -> Callable[[int, int], None]:
    """As the progress of a run: sends a rank that measures the signal, once, and calls ``then``."""
    sent = []

    def tell(case: int, done: int) -> None:
        if done > 0 and not sent:
            sent.append(sign)
            os.kill(rank_pids(os.getpid())[number], sign)
            then()

    return tell


def test_a_rank_that_is_killed_ends_the_run_and_is_named(scratch: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of the benchmark was killed by SIGKILL") as error:
        ranks.run(job([TINY], iterations=100_000), _hurt(1, signal.SIGKILL))
    assert error.value.rank == 1
    assert not list(scratch.iterdir()) and not rank_pids(os.getpid())


@needs_mpi
def test_a_rank_of_mpiexec_that_is_killed_is_named(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boards: list[Board] = []

    class Seen(Board):
        def __init__(self, folder: Path, rank: int, world: int) -> None:
            super().__init__(folder, rank, world)
            boards.append(self)

    monkeypatch.setattr(ranks, "Board", Seen)
    killed: list[int] = []

    def tell(case: int, done: int) -> None:
        if done > 0 and not killed:
            killed.append(boards[0].pid(1))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(RankFailed, match="rank 1 of the benchmark was killed by SIGKILL"):
        ranks.run(job([TINY], iterations=100_000, mpi=True), tell)
    assert not list(scratch.iterdir()) and not Path(f"/proc/{killed[0]}").exists()


def test_a_rank_that_stands_still_ends_the_run_and_is_named(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorten() -> None:
        monkeypatch.setattr(ranks, "_STALL_S", 0.5)
        monkeypatch.setattr(ranks, "_GRACE_S", 0.5)

    with pytest.raises(RankFailed, match=r"rank 1 of the benchmark did not go on for .* is stopped"):
        ranks.run(job([TINY], iterations=100_000), _hurt(1, signal.SIGSTOP, shorten))
    assert not list(scratch.iterdir()) and not rank_pids(os.getpid())


def test_what_a_rank_raises_is_told(scratch: Path) -> None:
    too_wide = Case("tiny", 2, 4, 64, 2, 7)  # 7 experts on 2 ranks: the ops refuse that
    with pytest.raises(RankFailed, match=r"rank [01]: ArgumentError: .*moe_expert_num"):
        ranks.run(job([too_wide]), quiet)
    assert not list(scratch.iterdir()) and not rank_pids(os.getpid())


def test_ranks_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ascend_moe.bench",
        "--preset",
        "small",
        "--methods",
        "window",
        "-n",
        "99999",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pids = _until(lambda: [*rank_pids(bench.pid).values()], lambda found: len(found) == 2)
        # Past the start of Python, where a rank begins to watch.
        _until(lambda: list(tmp_path.glob("*/rendezvous")), bool)
    finally:
        bench.kill()
        bench.wait()
    _until(lambda: [pid for pid in pids if Path(f"/proc/{pid}/fd").exists()], lambda found: not found)
    _until(lambda: list(tmp_path.iterdir()), lambda found: not found)


def _until(look: Callable[[], list], enough: Callable[[list], bool]) -> list:
    deadline = time.monotonic() + 60
    while not enough(found := look()):
        assert time.monotonic() < deadline, f"still {found}"
        time.sleep(0.02)
    return found


def test_the_barrier_names_who_has_not_come(tmp_path: Path) -> None:
    Board(tmp_path, -1, 3)
    here = [Board(tmp_path, rank, 3) for rank in (0, 2)]
    raised: list[CommTimeout] = []

    def wait(board: Board) -> None:
        try:
            board.barrier(patience_s=0.2)
        except CommTimeout as error:
            raised.append(error)

    threads = [threading.Thread(target=wait, args=(board,)) for board in here]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [error.ranks for error in raised] == [[1], [1]]


def test_the_barrier_lets_nobody_through_early(tmp_path: Path) -> None:
    Board(tmp_path, -1, 2)
    boards = [Board(tmp_path, rank, 2) for rank in range(2)]
    seen: list[int] = []
    inside = [0, 0]

    def go(rank: int) -> None:
        for step in range(50):
            inside[rank] = step
            boards[rank].barrier(10)
            seen.append(inside[1 - rank] - step)  # the other has come as far, and at most one step farther

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 100 and set(seen) <= {0, 1}
