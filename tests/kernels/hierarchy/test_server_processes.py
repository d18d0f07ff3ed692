"""comm_alg "hierarchy" between real processes on two simulated servers, and when one of them is killed."""

from __future__ import annotations

import random
import time

import comm_cases
import level_ranks
import pytest
from rank_processes import Ranks, assert_named, fork_server, nothing_left, values

__all__ = ["fork_server", "nothing_left"]  # fixtures
SOON_S = 15.0  # half of the deadline


def opened(ranks: Ranks) -> None:
    for name, value in (("ASCEND_MOE_RANKS_PER_SERVER", "2"), ("ASCEND_MOE_AIV_CORES", "2")):
        values(ranks.call(comm_cases.set_env, name, value))
    assert values(ranks.call(level_ranks.layers, 2)) == ["right"] * 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))])
def test_a_rank_killed_at_any_time_is_named_by_all(seed: int) -> None:
    """Others are in the same op then, in its first level or its second."""
    drawn = random.Random(seed)
    victim = drawn.randrange(4)
    with Ranks(4, timeout_s=30.0) as ranks:
        opened(ranks)
        for rank in range(4):
            ranks.start(rank, level_ranks.layers, 100000)
        time.sleep(drawn.uniform(0.2, 0.5))
        ranks.kill(victim)
        killed = time.monotonic()
        for rank in range(4):
            if rank != victim:
                assert_named(ranks.wait(rank), "PeerLost", victim)
        assert time.monotonic() - killed < SOON_S


def test_a_rank_that_never_comes_dies_and_is_named() -> None:
    """The others wait for it in the first level, or for whoever relays its rows in the second."""
    with Ranks(4, timeout_s=30.0) as ranks:
        opened(ranks)
        for rank in (0, 1, 3):
            ranks.start(rank, level_ranks.layers, 1)
        time.sleep(0.3)
        ranks.kill(2)
        for rank in (0, 1, 3):
            assert_named(ranks.wait(rank), "PeerLost", 2)


def halted_between_the_levels(ranks: Ranks, op: str) -> tuple[int, int]:
    """Starts ``op`` on four ranks, one of which halts before it passes rows on; returns it and the rank that waits."""
    victim, waits = {"dispatch": (2, 3), "combine": (3, 1)}[op]
    call = {"dispatch": level_ranks.dispatch, "combine": level_ranks.combine}[op]
    opened(ranks)
    if op == "combine":
        assert values(ranks.call(level_ranks.dispatch)) == ["right"] * 4
    values(ranks.call(level_ranks.halt_before_passing_on, op, ranks=[victim]))
    for rank in range(4):
        ranks.start(rank, call)
    return victim, waits


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_killed_between_the_levels_is_named_by_all(op: str) -> None:
    """It has had what it forwards, and stands at a store before it passes that on.

    Who waits for that store says so, of its second level; the others have all of this op, and hear of it in the next.
    """
    with Ranks(4, timeout_s=30.0) as ranks:
        victim, waits = halted_between_the_levels(ranks, op)
        others = [rank for rank in range(4) if rank not in (victim, waits)]
        assert values([ranks.wait(rank) for rank in others]) == ["right"] * 2
        ranks.kill(victim)
        killed = time.monotonic()
        outcome = ranks.wait(waits)
        assert_named(outcome, "PeerLost", victim, "level 2", "what others forward to it")
        found = {name: outcome.details[name] for name in ("reporter", "phase", "level")}
        assert found == {"reporter": waits, "phase": op, "level": 2}
        for rank in others:
            assert_named(ranks.call(level_ranks.layers, 1, ranks=[rank])[0], "PeerLost", victim)
        assert time.monotonic() - killed < SOON_S


@pytest.mark.parametrize("op", ["dispatch", pytest.param("combine", marks=pytest.mark.nightly)])
def test_a_rank_that_stands_still_between_the_levels_is_named_by_all(op: str) -> None:
    """It lives, so only the end of the second wait tells; and who waits names it, not whose rows it forwards.

    The others go on at once. One of them misses, in its next op, the rank that waits, and is the first whose time is
    over: asked whom it misses itself, that rank answers.
    """
    with Ranks(4, timeout_s=2.0) as ranks:
        victim, waits = halted_between_the_levels(ranks, op)
        others = [rank for rank in range(4) if rank not in (victim, waits)]
        assert values([ranks.wait(rank) for rank in others]) == ["right"] * 2
        patient = [rank for rank in others if rank // 2 == victim // 2 or rank % 2 == victim % 2]  # misses the victim
        values(ranks.call(comm_cases.set_env, "ASCEND_MOE_TIMEOUT_S", "5.0", ranks=patient))
        for rank in others:
            ranks.start(rank, level_ranks.layers, 1)
        for rank in (*others, waits):
            outcome = ranks.wait(rank)
            assert_named(outcome, "CommTimeout", victim, "level 2")
            assert (outcome.details["reporter"], outcome.details["level"]) == (waits, 2)
