"""Ranks killed or stopped at any moment of a stream of ops, and many iterations that leave nothing."""

from __future__ import annotations

import random
import time

import comm_cases
import pytest
import soak_rows
import soak_streams as streams
from rank_processes import Outcome
from soak_rows import Stopwatch, Tally
from test_failures import (
    SOON_S,
    OpRanks,
    assert_fresh_windows_work,
    assert_named,
    assert_stuck,
    fork_server,
    nothing_left,
    values,
)

from ascend_moe import LocalCluster
from ascend_moe.reference.cases import Place

__all__ = ["fork_server", "nothing_left"]  # fixtures of every test here

FAR_S = 30.0  # a deadline that no case waits for
HEARD_S = 5.0  # of a killed rank; a fraction of that where processors are free
STOP_DEADLINE_S = 3.0
MARGIN_S = 0.7  # around the deadline, where both outcomes are right
MIB = 1 << 20
WORLD = 4
WARM = 300  # iterations before anything is measured
OPENING = ("post", "hello", "map", "ready")


def started(ranks: OpRanks, seed: int) -> None:
    for rank in range(ranks.world):
        ranks.start(rank, streams.stream, 100_000, seed)


def prepared(ranks: OpRanks) -> list[list[str]]:
    """What each process has open before its windows; they are open afterwards, and have been used."""
    values(ranks.call(streams.prepare, ranks.world))
    files: list[list[str]] = values(ranks.call(comm_cases.open_files))
    values(ranks.call(streams.stream, 2))
    return files


def where(outcome: Outcome) -> str:
    """The op that the error met."""
    if outcome.details.get("phase") == "open":
        return "while windows were opened"
    return "in dispatch" if "dispatch" in outcome.text.split(":")[0] else "in combine"


# ---- killed


def killed(seed: int) -> tuple[str, float]:
    rng = random.Random(seed)
    world = rng.choice([2, 3, 3, 4])
    victim = rng.randrange(world)
    survivors = [rank for rank in range(world) if rank != victim]
    with OpRanks(world, timeout_s=FAR_S) as ranks:
        if rng.random() < 0.15:
            values(ranks.call(streams.prepare, world))
            files = values(ranks.call(comm_cases.open_files, ranks=survivors))
            values(ranks.call(comm_cases.kill_at, rng.choice(OPENING), ranks=[victim]))
            started(ranks, seed)
            ranks.processes[victim].join(3)
            if ranks.processes[victim].is_alive():  # the windows were open too soon for that point
                ranks.kill(victim)
            watch = Stopwatch()
        else:
            files = prepared(ranks)
            files.pop(victim)
            started(ranks, seed)
            time.sleep(0.01 + rng.random() / 20)
            ranks.kill(victim)
            watch = Stopwatch()
        found = [ranks.wait(rank) for rank in survivors]
        seconds = watch.seconds
        for outcome in found:
            assert_named(outcome, "PeerLost", victim)
        assert seconds < HEARD_S, f"the last survivor heard of it after {seconds:.1f} s"
        if where(found[0]) != "while windows were opened":
            assert_stuck(ranks, "PeerLost", victim, survivors)
        assert_fresh_windows_work(ranks, survivors, files)
        return where(found[0]), seconds


@pytest.mark.nightly
@soak_rows.row("kill", quick=8, full=300, chunk=25)
def test_killed_at_any_moment(numbers: range, tally: Tally) -> None:
    """Every survivor raises PeerLost with the rank, and fresh windows work; nothing is left behind."""
    tally.each(numbers, killed)


# ---- stopped


def stopped(seed: int) -> tuple[str, float]:
    rng = random.Random(seed)
    world = rng.choice([2, 3])
    victim = rng.randrange(world)
    # As many short as long ones.
    stop_s = rng.uniform(0.1, STOP_DEADLINE_S) if seed % 2 == 0 else rng.uniform(STOP_DEADLINE_S, 10.0)
    others = [rank for rank in range(world) if rank != victim]
    with OpRanks(world, timeout_s=STOP_DEADLINE_S) as ranks:
        prepared(ranks)
        for rank in range(world):
            ranks.start(rank, streams.stream, 400, seed)
        time.sleep(0.01 + rng.random() / 20)
        ranks.stop(victim)
        watch = Stopwatch()
        late = [outcome for outcome in _until(ranks, others, stop_s, watch) if outcome is not None]
        seconds = watch.seconds
        time.sleep(max(0.0, stop_s - watch.seconds))
        ranks.resume(victim)
        waited = set(others) if not late else set()
        found = late + [ranks.wait(rank) for rank in sorted(waited | {victim})]
        if stop_s < STOP_DEADLINE_S - MARGIN_S or all(not one.error for one in found):
            assert stop_s < STOP_DEADLINE_S + MARGIN_S, "nobody has missed it"
            values(found)
            return "shorter than the deadline, right", 0.0
        for outcome in found:
            assert_named(outcome, "CommTimeout", victim)
        assert seconds < STOP_DEADLINE_S + SOON_S, f"the last one heard of it after {seconds:.1f} s"
        values(ranks.call(comm_cases.close))
        values(ranks.call(streams.stream, 20, seed))
        return "longer, named, fresh windows right", seconds


def _until(ranks: OpRanks, there: list[int], stop_s: float, watch: Stopwatch) -> list[Outcome | None]:
    """What the others have done when the stop is over: nothing, or all of them have raised."""
    if stop_s < STOP_DEADLINE_S - MARGIN_S:
        return []
    first = ranks.pipes[there[0]].poll(max(0.0, stop_s - watch.seconds))
    if not first:
        assert stop_s < STOP_DEADLINE_S + MARGIN_S, "nobody has missed it"
        return []
    return [ranks.wait(rank, SOON_S) for rank in there]


@pytest.mark.nightly
@soak_rows.row("stop", quick=2, full=100, chunk=10)
def test_stopped_at_any_moment(numbers: range, tally: Tally) -> None:
    """For less than the deadline: the results are right. For longer: it is named, and a fresh start works."""
    tally.each(numbers, stopped)


# ---- back to back


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "1")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "120")


def assert_constant(before: dict[str, int], after: dict[str, int]) -> None:
    grown = after["rss"] - before["rss"]
    assert grown < MIB, f"{grown} bytes more than before"
    assert after["fds"] == before["fds"], f"{after['fds']} descriptors, there were {before['fds']}"


@pytest.mark.usefixtures("one_core")
@soak_rows.row("back to back", quick=1000, full=1_000_000)
def test_ranks_as_threads(numbers: range, tally: Tally) -> None:
    streams.prepare(WORLD)
    with LocalCluster(WORLD) as cluster:
        recorded = cluster.run(lambda rank, name: streams.Recorded(Place(rank, WORLD, name)))
        cluster.run(lambda rank, name: recorded[rank].repeat(0, WARM))
        before = streams.resources()
        cluster.run(lambda rank, name: recorded[rank].repeat(WARM, len(numbers)))
        assert_constant(before, streams.resources())
    tally.count("ranks as threads", cases=len(numbers))


@pytest.mark.nightly
@pytest.mark.usefixtures("one_core")
@soak_rows.row("back to back", quick=500, full=100_000)
def test_ranks_as_processes(numbers: range, tally: Tally) -> None:
    with OpRanks(WORLD, timeout_s=120) as ranks:
        for rank in range(WORLD):
            ranks.start(rank, streams.record_and_repeat, [WARM, len(numbers)])
        for before, after in values([ranks.wait(rank, 3000) for rank in range(WORLD)]):
            assert_constant(before, after)
    tally.count("ranks as processes", cases=len(numbers))
