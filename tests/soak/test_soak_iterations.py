"""Many iterations on the same windows, another batch each time: right to the last, and nothing grows."""

from __future__ import annotations

import pytest
import soak_rows
import soak_streams as streams
from soak_rows import Tally
from test_failures import OpRanks, fork_server, values

from ascend_moe import LocalCluster
from ascend_moe.reference.cases import Place

__all__ = ["fork_server"]  # a fixture

MIB = 1 << 20
WORLD = 4
WARM = 300  # iterations before anything is measured


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "1")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "120")


def assert_constant(before: dict[str, int], after: dict[str, int]) -> None:
    grown = after["rss"] - before["rss"]
    assert grown < MIB, f"{grown} bytes more than before"
    assert after["fds"] == before["fds"], f"{after['fds']} descriptors, there were {before['fds']}"


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
@soak_rows.row("back to back", quick=500, full=100_000)
def test_ranks_as_processes(numbers: range, tally: Tally) -> None:
    with OpRanks(WORLD, timeout_s=120) as ranks:
        for rank in range(WORLD):
            ranks.start(rank, streams.record_and_repeat, [WARM, len(numbers)])
        for before, after in values([ranks.wait(rank, 3000) for rank in range(WORLD)]):
            assert_constant(before, after)
    tally.count("ranks as processes", cases=len(numbers))
