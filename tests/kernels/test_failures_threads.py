"""Ranks of a LocalCluster that raise, return early or come to their end, in real ops."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import failure_cases as cases
import pytest
from failure_cases import Caught, caught
from failure_windows import set_epoch

import ascend_moe
from ascend_moe.errors import AscendMoeError, CommTimeout, PeerLost
from ascend_moe.validate.run import DevicePlace

pytestmark = pytest.mark.tsan

DEADLINE_S = 0.5
AT_ONCE_S = 15.0  # half of the deadline of what waits for nobody


@pytest.fixture(autouse=True, params=["window", "direct"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", request.param)
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "30")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")


def run(cluster: ascend_moe.LocalCluster, body: Callable[[DevicePlace], Any]) -> list[Any]:
    world = cluster.world_size
    return cluster.run(lambda rank, name: body(DevicePlace(name, world, rank)))


def others_of(cluster: ascend_moe.LocalCluster, body: Callable[[DevicePlace], Any]) -> dict[int, AscendMoeError]:
    """The errors of the other ranks, by rank, where one rank raises a KeyError of its own."""
    with pytest.raises(KeyError, match="my own mistake") as raised:
        run(cluster, body)
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    above = [at for at, line in enumerate(lines) if "RankRaised: rank " in line]
    assert len(above) == 1 and lines[-1].split(":")[0].endswith(type(raised.value).__name__)
    assert cluster._windows is None, "failed windows are closed"
    found: dict[int, AscendMoeError] = raised.value.others  # type: ignore[attr-defined]
    return found


def assert_works(cluster: ascend_moe.LocalCluster) -> None:
    assert run(cluster, lambda place: cases.round_trip(place, 3)) == ["right"] * cluster.world_size


@pytest.mark.asan
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("before", ["dispatch", "combine"])
def test_rank_that_raises_is_lost_to_the_others(world: int, before: str) -> None:
    """They raise at once, and run() raises what was at the root of it."""

    def body(place: DevicePlace) -> None:
        cases.round_trip(place, 1)
        if before == "dispatch" and place.rank == 1:
            raise KeyError("my own mistake")
        sent = cases.dispatch(place, 2)
        if place.rank == 1:
            raise KeyError("my own mistake")
        cases.combine(place, sent, 2)

    files = []
    with ascend_moe.LocalCluster(world) as cluster:
        for _ in range(8):
            began = time.monotonic()
            found = others_of(cluster, body)
            assert time.monotonic() - began < AT_ONCE_S
            assert sorted(found) == [rank for rank in range(world) if rank != 1]
            for error in found.values():
                assert type(error) is PeerLost and error.rank == 1, repr(error)
                assert "its function raised KeyError" in str(error) and "\n" not in str(error)
            files.append(len(os.listdir("/proc/self/fd")))
        assert max(files[4:]) <= max(files[:4]), "descriptors leak"
        assert_works(cluster)


@pytest.mark.parametrize("missed", [2, 3])
def test_words_from_before_the_wrap_are_not_corrupt(missed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not call in the first epochs after the wrap is missing: its last message is old, not corrupt."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", str(DEADLINE_S))

    def body(place: DevicePlace) -> Caught | None:
        for _ in range(missed):  # the last two before the wrap, and those before the missed one
            cases.dispatch(place, 1)
        return caught(cases.dispatch, place, 1) if place.rank == 0 else None

    with ascend_moe.LocalCluster(2) as cluster:
        for rank in range(2):
            set_epoch(cluster, rank, 0xFFFFFFFD)
        first = run(cluster, body)[0]
        assert type(first.error) is CommTimeout and first.error.rank == 1, repr(first)
        assert f"last seen in dispatch, epoch {missed - 1 if missed > 2 else 0xFFFFFFFF}" in str(first.error)
