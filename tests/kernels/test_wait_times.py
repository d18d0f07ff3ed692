"""performance_info: what an op has waited for each source is added to what is there, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failure_cases import case_of, check_combine, check_dispatch

import ascend_moe
from ascend_moe.errors import CommTimeout
from ascend_moe.validate import run as validate_run
from ascend_moe.validate.run import DevicePlace

WORLD, LATE, SLEPT_S = 3, 0, 0.2  # messages after the late one are seen again until that comes
BEFORE = torch.tensor([5, (1 << 32) - 1, 1 << 40])  # the second carries into its upper half
ALGORITHMS = ["window", "direct"]


SETTINGS = {"HCCL_BUFFSIZE": "2"}


def on_ranks(work: Callable[[DevicePlace], Any], world: int = WORLD) -> list[Any]:
    with ascend_moe.LocalCluster(world) as cluster:
        return cluster.run(lambda rank, group_ep: work(DevicePlace(group_ep, world, rank)))


def others_wait(place: DevicePlace, gate: threading.Barrier) -> None:
    """Lets the late rank call a while after the others are in their op."""
    gate.wait(20)
    if place.rank == LATE:
        end = ascend_moe.comm.lookup(place.group_ep, place.world, place.rank)
        while not all("in an op" in end.describe_peer(rank) for rank in range(place.world) if rank != LATE):
            time.sleep(0.001)
        time.sleep(SLEPT_S)


def check_times(place: DevicePlace, times: torch.Tensor) -> None:
    waited = (times - BEFORE[: place.world]).tolist()
    assert all(0 <= micros < 60e6 for micros in waited), waited
    if place.rank != LATE:
        assert waited[LATE] >= SLEPT_S * 0.5e6, f"rank {place.rank} waited {waited} us"
        assert all(micros < waited[LATE] for rank, micros in enumerate(waited) if rank != LATE), waited


@pytest.mark.parametrize("cores", [1, 2, 8])
@pytest.mark.parametrize("way", [*ALGORITHMS, "RDMA", "RDMA with flags"])
def test_the_late_rank_has_the_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both ops, beside outputs that are the reference's bit for bit."""
    algorithm = way if way in ALGORITHMS else "window"
    if way != algorithm:
        monkeypatch.setenv("HCCL_BUFFSIZE", "4")
        monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "1")
        monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", str(int("flags" in way)))
    gates = [threading.Barrier(WORLD) for _ in range(2)]

    def work(place: DevicePlace) -> None:
        case = case_of(WORLD, 1, 2)
        options = {"comm_alg": algorithm}
        validate_run.dispatch(place, case, **options)  # opens the windows
        times = [BEFORE.clone(), BEFORE.clone()]
        others_wait(place, gates[0])
        sent = validate_run.dispatch(place, case, performance_info=times[0], **options)
        check_dispatch(place, sent, 1, 2)
        others_wait(place, gates[1])
        result = validate_run.combine(place, case, sent[0], sent, performance_info=times[1], **options)
        check_combine(place, result, 1)
        for each in times:
            check_times(place, each)

    on_ranks(work)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_never_comes_counts_until_the_end(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "0.3")
    over = threading.Event()

    def work(place: DevicePlace) -> None:
        case = case_of(2, 1, 2)
        validate_run.dispatch(place, case, comm_alg=algorithm)
        if place.rank == 1:
            over.wait(20)
            return
        times = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(CommTimeout):
            validate_run.dispatch(place, case, comm_alg=algorithm, performance_info=times)
        over.set()
        assert 0.29e6 <= times[1] < 20e6 and times[0] < times[1], times

    on_ranks(work, 2)
