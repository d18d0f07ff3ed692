"""Ranks of a LocalCluster that raise, return early or come to their end, in real ops."""

from __future__ import annotations

import random
import time
from typing import Any

import failure_cases as cases
import pytest
from failure_cases import Caught, caught

import ascend_moe
from ascend_moe.errors import CommError, CommTimeout, PeerLost
from ascend_moe.reference.cases import Place

pytestmark = pytest.mark.tsan

DEADLINE_S = 0.5
AT_ONCE_S = 0.4


@pytest.fixture(autouse=True, params=["window", "direct"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", request.param)
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "30")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")


@pytest.mark.asan
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("before", ["dispatch", "combine"])
def test_rank_that_raises_is_lost_to_the_others(world: int, before: str) -> None:
    """They raise at once, and run() raises what was at the root of it."""

    def body(rank: int, group_ep: str) -> str:
        place = Place(rank, world, group_ep)
        cases.round_trip(place, 1)
        if before == "dispatch" and rank == 1:
            raise KeyError("my own mistake")
        sent = cases.dispatch(place, 2)
        if rank == 1:
            raise KeyError("my own mistake")
        return cases.check_combine(place, cases.combine(place, sent, 2), 2) or "right"

    with ascend_moe.LocalCluster(world) as cluster:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(KeyError, match="my own mistake") as raised:
                cluster.run(body)
            assert time.monotonic() - began < 5
            found: dict[int, Any] = raised.value.others  # type: ignore[attr-defined]
            assert sorted(found) == [rank for rank in range(world) if rank != 1]
            for error in found.values():
                assert type(error) is PeerLost and error.rank == 1, repr(error)
                assert "its function raised KeyError" in str(error) and "\n" not in str(error)
        # The cluster is fit for the next run.
        assert (
            cluster.run(lambda rank, name: cases.round_trip(Place(rank, world, name), 3)) == ["right"] * world
        )


def test_first_cause_is_named_by_everybody() -> None:
    """A rank that has failed because of another, and left, is not taken for the cause."""
    rng = random.Random(1)
    for trial in range(60):
        victim, pause = rng.randrange(4), rng.random() / 200

        def body(rank: int, group_ep: str, victim: int = victim, pause: float = pause) -> None:
            place = Place(rank, 4, group_ep)
            sent = cases.dispatch(place, 2)
            if rank == victim:
                time.sleep(pause)
                raise ValueError("the cause")
            cases.combine(place, sent, 2)
            cases.dispatch(place, 3)

        with ascend_moe.LocalCluster(4) as cluster:
            with pytest.raises(ValueError, match="the cause") as raised:
                cluster.run(body)
        for rank, error in raised.value.others.items():  # type: ignore[attr-defined]
            assert type(error) is PeerLost and error.rank == victim, f"trial {trial}, rank {rank}: {error!r}"


def test_rank_that_returns_without_calling_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", str(DEADLINE_S))

    def body(rank: int, group_ep: str) -> list[Caught]:
        place = Place(rank, 3, group_ep)
        sent = cases.dispatch(place, 1)
        if rank == 2:
            return []
        return [caught(cases.combine, place, sent, 1) for _ in range(3)]

    with ascend_moe.LocalCluster(3) as cluster:
        results = cluster.run(body)
        for found in results[:2]:
            for number, one in enumerate(found):
                assert type(one.error) is CommTimeout and one.error.rank == 2, repr(one)
                assert "its function has returned" in str(one.error)
                if number == 0:
                    assert 0.8 * DEADLINE_S < one.seconds < DEADLINE_S + 2
                    assert "missing: rank 2 (last seen in dispatch, epoch 1)" in str(one.error)
                else:
                    assert one.seconds < AT_ONCE_S
        # Late, it hears of it at once.
        late = cluster.run(lambda rank, name: caught(cases.dispatch, Place(rank, 3, name), 1))
        for one in late:
            assert type(one.error) is CommTimeout and one.error.rank == 2 and one.seconds < AT_ONCE_S
        cluster.close()
        assert cluster.run(lambda rank, name: cases.round_trip(Place(rank, 3, name), 3)) == ["right"] * 3


def test_failed_rank_does_not_keep_peers_from_naming_it_when_they_are_late() -> None:
    """A rank that comes to the failed communicator only later finds the cause too."""

    def body(rank: int, group_ep: str) -> CommError | None:
        place = Place(rank, 3, group_ep)
        cases.dispatch(place, 1)
        if rank == 0:
            raise ValueError("first")
        time.sleep(0.2 * rank)
        one = caught(cases.dispatch, place, 2)
        assert type(one.error) is PeerLost and one.error.rank == 0 and one.seconds < AT_ONCE_S
        assert one.error.reporter in (1, 2)
        return None

    with ascend_moe.LocalCluster(3) as cluster:
        with pytest.raises(ValueError, match="first") as raised:
            cluster.run(body)
        assert raised.value.others == {}  # type: ignore[attr-defined]


def test_ranks_that_close_after_their_last_op_harm_nobody() -> None:
    """Fast ranks are through and gone while slow ones are still in that op."""
    world = 4

    def body(rank: int, group_ep: str) -> str:
        place = Place(rank, world, group_ep)
        done = cases.round_trip(place, rank_seed[0])
        ascend_moe.close(group_ep)
        return done

    rank_seed = [0]
    with ascend_moe.LocalCluster(world) as cluster:
        for trial in range(100):
            rank_seed[0] = trial % 5
            assert cluster.run(body) == ["right"] * world


@pytest.mark.asan
def test_many_failures_leave_nothing_open() -> None:
    """Windows and descriptors come and go with the communicators."""
    import os

    def open_count() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum(1 for _ in maps)

    def body(rank: int, group_ep: str) -> None:
        place = Place(rank, 3, group_ep)
        cases.dispatch(place, 1)
        if rank == 1:
            raise ValueError("again")
        cases.dispatch(place, 2)

    counts = []
    with ascend_moe.LocalCluster(3) as cluster:
        for _ in range(30):
            with pytest.raises(ValueError, match="again"):
                cluster.run(body)
            counts.append(open_count())
    assert max(fds for fds, _ in counts[10:]) <= max(fds for fds, _ in counts[:10])
    assert max(maps for _, maps in counts[10:]) <= max(maps for _, maps in counts[:10]) + 8
