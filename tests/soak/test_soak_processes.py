"""Ranks killed, stopped or slowed at any moment of a stream of ops, as real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator

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

__all__ = ["fork_server", "nothing_left"]  # fixtures of every test here

FAR_S = 30.0  # a deadline that no case waits for
HEARD_S = 5.0  # of a killed rank; a fraction of that where processors are free
STOP_DEADLINE_S = 3.0
MARGIN_S = 0.7  # around the deadline, where both outcomes are right
DEFAULT_S = 60.0  # the deadline of programs that set none
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


# ---- slow


@pytest.fixture
def free_ranks() -> Iterator[OpRanks]:
    with OpRanks(3, timeout_s=DEFAULT_S) as ranks:
        prepared(ranks)
        yield ranks


def slowed(ranks: OpRanks, seed: int) -> tuple[str, float]:
    """One rank takes a hundred times as long as the others, or more."""
    rng = random.Random(seed)
    victim, kind = rng.randrange(ranks.world), seed % 3
    watch = Stopwatch()
    if kind == 0:
        pause = rng.uniform(0.02, 0.05)  # an op takes a fraction of a millisecond
        found = ranks.call(streams.stream, 10, seed, "", pause, victim)
        name = "sleeps before every op"
    elif kind == 1:
        for rank in range(ranks.world):
            ranks.start(rank, streams.stream, 20, seed)
        duty_cycle(ranks, victim, rng.uniform(0.01, 0.03))
        found = [ranks.wait(rank, DEFAULT_S) for rank in range(ranks.world)]
        name = "runs 1 % of the time"
    else:
        found = crowded(ranks, seed, victim)
        name = "crowded out by other processes"
    assert values(found)
    return name, watch.seconds


def duty_cycle(ranks: OpRanks, victim: int, stop_s: float) -> None:
    """Lets the rank run for a hundredth of the time, until it has answered or for a second."""
    watch = Stopwatch()
    while watch.seconds < 1.0 and not ranks.pipes[victim].poll(0):
        os.kill(ranks.pid(victim), signal.SIGSTOP)
        time.sleep(stop_s)
        os.kill(ranks.pid(victim), signal.SIGCONT)
        time.sleep(stop_s / 100)


def crowded(ranks: OpRanks, seed: int, victim: int) -> list[Outcome]:
    """The rank, with 64 AIV cores, shares one processor with programs that never rest."""
    everywhere = os.sched_getaffinity(0)
    one = {min(everywhere)}
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(8)]
    try:
        for pid in (ranks.pid(victim), *(program.pid for program in busy)):
            os.sched_setaffinity(pid, one)
        values(ranks.call(comm_cases.set_env, "ASCEND_MOE_AIV_CORES", "64", ranks=[victim]))
        return ranks.call(streams.stream, 5, seed)
    finally:
        for program in busy:
            program.kill()
            program.wait()
        os.sched_setaffinity(ranks.pid(victim), everywhere)
        ranks.call(comm_cases.set_env, "ASCEND_MOE_AIV_CORES", "8", ranks=[victim])


@soak_rows.row("slow", quick=5, full=100, chunk=25)
def test_slow_rank(free_ranks: OpRanks, numbers: range, tally: Tally) -> None:
    """The results are right, and nobody runs into the default deadline."""
    tally.each(numbers, lambda seed: slowed(free_ranks, seed))
