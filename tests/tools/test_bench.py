"""The benchmark: numbers, tables and rules from made-up marks; every method over 2 ranks; ranks that die."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ascend_moe import bench
from ascend_moe.bench import RankFailed, bounds, cases, rank, report
from ascend_moe.bench.cases import Case, matrix
from ascend_moe.bench.methods import LIMIT, METHODS, arrived, native_call, pointers
from ascend_moe.bench.rank import CaseMarks, Job
from ascend_moe.bench.results import SCHEMA, CaseResult, Run, evaluate
from ascend_moe.plan import plan

TINY = Case("tiny", world=2, batch=4, hidden=64, topk=2, experts=8)

# method -> µs of dispatch and combine on every iteration
TIMES_US = {
    "limit-memcpy": 10,
    "limit-nontemporal": 15,
    "limit-ub": 20,
    "bare-push": 16,
    "bare-nontemporal": 20,
    "bare-pull": 24,
    "direct-zero-copy": 14,
    "direct": 20,
    "window": 50,
    "mpi-a2a-tuned": 100,
    "gloo-a2a-tuned": 200,
    "gloo-a2a": 400,
}
SLOW_DIRECT = TIMES_US | {"direct": 52, "mpi-a2a-tuned": 200, "gloo-a2a-tuned": 400}
ABOUT = dict.fromkeys(("date", "kernel", "python", "torch", "mpi", "sources", "engine"), "")
ABOUT |= {"cpu": "a CPU", "cores": 2, "caches": "", "load_before": 0.1, "settings": {"OMP_NUM_THREADS": "1"}}


def marks(case: Case, times_us: dict[str, int], jitter: float = 0.0) -> list[CaseMarks]:
    """Returns what every rank would have noted of 8 iterations, every other one (1 + jitter) times as long.

    Rank r begins 1 µs after rank r - 1; all end when the last one does.
    """
    ranks = []
    for number in range(case.world):
        noted = CaseMarks(missing={"gloo-ag-rs": "not there"}, exact=list(times_us))
        for name, us in times_us.items():
            noted.marks[name], noted.warm[name] = [], []
            for at in range(0, 80_000_000, 10_000_000):
                ns = int(us * (1 + jitter * (at // 10_000_000 % 2)) * 1000)
                half, late = at + 5_000_000, number * 1000
                noted.marks[name].append((at + late, at + ns, half + late, half + ns))
                # The limit and one exchange, then the fastest, gain twice of what the others do.
                warm = ns // (4 if METHODS[name].kind == LIMIT or name == "bare-pull" else 2)
                noted.warm[name].append((at + late, at + warm, half + late, half + warm))
            noted.first[name] = (0, 3 * us * 1000, 5_000_000, 5_000_000 + 3 * us * 1000)
        ranks.append(noted)
    return ranks


def result(case: Case, times_us: dict[str, int] | None = None, jitter: float = 0.0, cores: int = 2) -> CaseResult:
    of_ranks = marks(case, times_us or TIMES_US, jitter)
    of_ranks[0].latency_ns = (30.0, 200.0)
    return evaluate(case, of_ranks, 0.5, cores)


def bench_run(sweep: str = "") -> Run:
    return Run(dict(ABOUT), [result(case) for case in matrix(("deepseek-v2-lite",), [2], [8, 32], sweep=sweep)])


# ---- cases and data ----


@pytest.mark.parametrize(("skew", "low", "high"), [("uniform", 0.15, 0.6), ("zipf", 0.6, 1.0), ("hot", 1.0, 1.0)])
def test_routing_is_legal_new_and_skewed(skew: str, low: float, high: float) -> None:
    case = replace(TINY, batch=64, skew=skew, topk=3)
    one, again, other = (cases.inputs(case, 1, entry) for entry in (0, 0, 1))
    assert torch.equal(one.x, again.x) and torch.equal(one.expert_ids, again.expert_ids)
    assert not torch.equal(one.expert_ids, other.expert_ids)
    ids = one.expert_ids.sort(1).values
    assert bool((ids[:, 1:] > ids[:, :-1]).all()) and int(ids.min()) >= 0 and int(ids.max()) < case.experts
    assert low <= float((one.expert_ids == 0).float().mean() * case.topk) <= high  # of the tokens


# ---- correctness ----


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_the_windows_are_large_enough_for_each_algorithm(algorithm: str) -> None:
    """For the most tokens that a sweep has, too: by window 512 tokens need 1 MiB more than by direct."""
    longest = matrix(["deepseek-v3"], [2], [8], sweep="tokens")[-1]
    for case in (longest, replace(longest, quant_mode=2), replace(longest, dtype="fp32"), TINY):
        found = plan(replace(case.request, comm_alg=algorithm, window_mib=bench.window_mib(case)))
        assert found.ok and found.fit is not None, case
        assert set(found.fit.algorithms.values()) == {algorithm}, case


def test_wrong_rows_and_sums_are_found() -> None:
    want = rank.expected(TINY, 0, 0)
    sent = want.dispatched
    came = arrived(sent.expand_x.clone(), None, sent.expert_token_nums.clone(), None)
    assert rank.dispatch_fault(came, want) == ""
    came.expand_x[[0, 1]] = came.expand_x[[1, 0]]
    assert "row 0" in rank.dispatch_fault(came, want)
    came.expert_token_nums[0] += 1
    assert "rows per expert" in rank.dispatch_fault(came, want)
    assert rank.combine_fault(want.sums, want) == ("", True)
    neighbour = (want.sums.view(torch.int16) + 1).view(torch.bfloat16)
    assert rank.combine_fault(neighbour, want) == ("", False), "rounding and no more"
    for wrong in (want.sums * 1.05, torch.full_like(want.sums, float("nan")), want.sums.roll(1, 0)):
        text, exact = rank.combine_fault(wrong, want)
        assert "differs at token" in text and not exact
    assert "is (4, 64)" in rank.combine_fault(want.sums.float(), want)[0]


# ---- results, JSON, tables, pictures ----


def test_evaluation_of_known_marks() -> None:
    """Times go from the first begin to the last end; ratios are those of the same iteration."""
    case = matrix(["deepseek-v2-lite"], [2], [32])[0]
    one = result(case)
    row, best = one.row("window"), one.best_peer()
    assert one.best == {"bare": "bare-push", "limit": "limit-memcpy"} and row is not None
    limit, bare = row.to["limit"], row.to["bare"]
    assert (row.round_trip.p50, limit.cold.p50, limit.p10, row.first_us) == (100.0, 5.0, 5.0, 300.0)
    assert (row.warm.p50, limit.warm.p50, row.warm.n) == (50.0, 10.0, 8)
    assert (bare.cold.p50, bare.p10, bare.warm.p50) == (3.125, 3.125, 25 / 6)
    assert row.faster["mpi-a2a-tuned"].p50 == 2.0
    assert row.gb_per_s == pytest.approx(2 * 32 * 6 * 2048 * 2 / 100e-6 / 1e9)
    assert best is not None and best.name == "mpi-a2a-tuned"
    assert not one.oversubscribed and result(case, cores=1).oversubscribed
    assert report.headline(result(case, cores=1)).endswith("(2 ranks on 1 cores)")
    # Every other iteration three times as long: the run is noisy, its ratios are as before.
    wild = result(case, jitter=2.0)
    row = wild.row("window")
    assert row is not None and (row.round_trip.p10, row.round_trip.p50, row.round_trip.p90) == (100, 200, 300)
    cold = row.to["limit"].cold
    assert (cold.p10, cold.p50, cold.p90) == (5.0, 5.0, 5.0)
    assert "direct 1.25 x (1.25..1.25) the bare exchange (warm 1.67 x), 2.00 x the limit" in report.headline(
        result(case)
    )
    assert "5.0 x faster than mpi-a2a-tuned" in report.headline(result(case))
    slow = report.headline(result(case, TIMES_US | {"window": 200}))
    assert "window 12.5 x (12.5..12.5) the bare exchange (warm 16.67 x), 20.00 x the limit, 2.0 x slower than" in slow
    assert [bounds.ratio_of(bounds.Bound("window", "limit", 9, warm=warm), wild) for warm in (False, True)] == [5, 10]
    assert wild.too_noisy and "no ratios, " in report.headline(wild)
    assert "2.00 x" in report.headline(wild, force=True) and "(noisy)" in report.headline(wild, force=True)


def test_report_and_json_have_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(json.dumps(bench_run().as_dict(), allow_nan=False))
    assert values["schema"] == SCHEMA and set(values) == {"schema", "about", "cases"}
    direct = next(row for row in values["cases"][0]["rows"] if row["name"] == "direct")
    assert set(direct["round_trip"]) == {"p10", "p50", "p90", "n"}
    assert direct["faster"]["mpi-a2a-tuned"]["p50"] == 5.0 and len(direct["samples"]["dispatch"]) == 8
    report.show(bench_run(), Console(width=200), force=False)
    shown = capsys.readouterr().out
    for word in (*TIMES_US, "a CPU", "gloo-ag-rs omitted: not there", "÷ bare", "after two calls", "30 before"):
        assert word in shown
    hindered = replace(bench_run().cases[0], hindrance=1.75)
    assert any("1.75 x as long while all ranks work" in line for line in report.notes(hindered))
    assert not any("as long while all ranks work" in line for line in report.notes(bench_run().cases[0]))
    assert not any("busy" in line for line in report.about_lines(ABOUT))
    assert any("busy" in line for line in report.about_lines({**ABOUT, "load_before": 1.5}))


# ---- what make bench-check holds ----


def judged(times_us: dict[str, int], jitter: float = 0.0) -> dict[str, bool | None]:
    few, one, *_, many = (bounds.judge(result(case, times_us, jitter)) for case in bounds.cases())
    assert not any("warm" in outcome.bound.text for outcome in few), "8 tokens: cold only"
    assert {outcome.bound.against for outcome in many} == {"gloo-a2a-tuned"} and all(outcome.ok for outcome in many)
    return {outcome.bound.text: outcome.ok for outcome in one}


def test_the_check_passes_what_is_fast_enough_and_only_that() -> None:
    assert set(judged(TIMES_US).values()) == {True}
    assert judged(SLOW_DIRECT)["direct: at most 2.5 x the bare exchange"] is False
    close = judged(TIMES_US | {"gloo-a2a-tuned": 120})
    assert close["window: at least 2.5 x faster than gloo-a2a-tuned"] is False
    # Noise hides no slow op, and makes none of a fast one: the p10 are compared.
    assert set(judged(TIMES_US, jitter=2.0).values()) == {True}
    assert judged(SLOW_DIRECT, jitter=2.0)["direct: at most 2.5 x the bare exchange"] is False
    without = {name: us for name, us in TIMES_US.items() if name != "mpi-a2a-tuned"}
    assert [ok for ok in judged(without).values() if ok is not True] == [None], "it needs no MPI"


# ---- the machine's limits: copies by three methods, the weighted sum bit for bit ----


@pytest.mark.parametrize("method", [0, 1, 2])
def test_rows_are_copied(method: int) -> None:
    order = torch.tensor([3, 3, 0, 4, 1, 2, 0])
    for row_bytes in (64, 14336, 200, 400_000):
        source = torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8)
        target = torch.zeros(len(order) + 1, row_bytes, dtype=torch.uint8)
        native_call("am_bench_copy_rows", target, pointers(source, order), len(order), row_bytes, method)()
        assert torch.equal(target[:-1], source[order]) and not target[-1].any()


CASES = [
    TINY,
    Case("tiny", 2, 5, 128, 3, 6, skew="hot", quant_mode=2),
    Case("tiny", 2, 1, 64, 2, 4, skew="zipf", dtype="fp32"),
]


def job(cases: list[Case], iterations: int = 2, mpi: bool = False) -> Job:
    return Job(cases, list(METHODS), iterations, mpi, os.getpid(), sorted(os.sched_getaffinity(0)))


def ranks_in(scratch: Path) -> list[int]:
    """Python processes whose command names a folder in this one."""
    pids = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # a process that has ended
            words = command.read_text(errors="replace").split("\0")
            if words[0] == sys.executable and words[1] == "-c" and f"{scratch}/" in words[2]:
                pids.append(int(command.parent.name))
    return pids


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs put their scratch folders: empty again in the end, and no rank is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir()) and not ranks_in(tmp_path)


needs_mpi = pytest.param(True, marks=pytest.mark.skipif(not bench.has_mpi(), reason="no mpi4py, or no mpiexec"))


@pytest.mark.nightly
@pytest.mark.parametrize("mpi", [False, needs_mpi])
def test_every_method_agrees(scratch: Path, mpi: bool) -> None:
    work = job(CASES, mpi=mpi)
    for case, of_ranks in zip(work.cases, bench.run_ranks(work), strict=True):
        result = evaluate(case, of_ranks, 0.0, 2)
        absent = {name for name in METHODS if METHODS[name].needs_mpi and not mpi}
        assert set(METHODS) - {row.name for row in result.rows} == set(result.missing) == absent
        for row in result.rows:
            assert row.round_trip.n == work.iterations and row.round_trip.p10 > 0
            assert row.exact or row.name == "gloo-ag-rs" or not row.name.endswith(("tuned", "window"))


@pytest.mark.nightly
@pytest.mark.parametrize("mpi", [False, needs_mpi])
def test_a_rank_that_is_killed_ends_the_run(scratch: Path, mpi: bool) -> None:
    def kill() -> int:
        until(lambda: scratch.glob("*/rendezvous"), bool)
        victim = until(lambda: ranks_in(scratch), lambda found: len(found) == 2)[1]
        os.kill(victim, signal.SIGKILL)
        return victim

    with ThreadPoolExecutor(1) as pool, pytest.raises(RankFailed) as error:
        killer = pool.submit(kill)
        bench.run_ranks(job([TINY], iterations=100_000, mpi=mpi))
    # Its peer tells, or the launcher, whichever sees it first.
    text = f"{error.value} {error.value.details.get('trace')}"
    assert re.search(rf"rank \d|{killer.result()}|KILLED BY SIGNAL: 9", text), text


@pytest.mark.nightly
def test_ranks_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    options = ["--preset", "deepseek-v2-lite", "--methods", "window", "-n", "99999"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    words = [sys.executable, "-m", "ascend_moe", "bench", *options]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path)}, **silent) as command:
        try:  # past the start of Python, where a rank begins to watch
            until(lambda: tmp_path.glob("*/rendezvous"), bool)
            pids = until(lambda: ranks_in(tmp_path), lambda found: len(found) == 2)
        finally:
            command.kill()
    until(lambda: [pid for pid in pids if Path(f"/proc/{pid}/fd").exists()], lambda found: not found)
    until(lambda: tmp_path.glob("ascend-moe-bench-*"), lambda found: not found)


def until(look: Callable[[], Iterable[Any]], enough: Callable[[list[Any]], bool]) -> list[Any]:
    deadline = time.monotonic() + 120
    while not enough(found := list(look())):
        assert time.monotonic() < deadline, f"still {found}"
        time.sleep(0.02)
    return found
