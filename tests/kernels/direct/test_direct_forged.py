"""A run of direct combine with a wrong count, or a wrong first row, in it: named, and followed nowhere.

Core 0 checks the hashes while the other cores already read rows by what the runs say.
"""

from __future__ import annotations

import threading

import failure_cases as cases
import pytest
from failure_cases import LOCAL, caught
from failure_windows import COUNTS_PER_BLOCK, HEADER_BLOCKS, WORDS, State, of_epoch, set_epoch

import ascend_moe
from ascend_moe.errors import AscendMoeError, CorruptStatus
from ascend_moe.reference.cases import Place

pytestmark = [pytest.mark.asan, pytest.mark.tsan]

SOURCE, READER = 1, 0
EPOCH, SEED = 100, 3
COUNTS = 2 * LOCAL  # rows of each local expert, then where they begin


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "5")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")


def word_of(count: int) -> int:
    block, at = divmod(count, COUNTS_PER_BLOCK)
    return (HEADER_BLOCKS + block) * WORDS + 4 + at


def forge(cluster: ascend_moe.LocalCluster, count: int, bit: int) -> None:
    """The run of two ops ago, with a later epoch, is what the source is about to send."""
    state = State.of(cluster, READER)
    assert state.epoch == EPOCH - 1
    slot = state.run(EPOCH, SOURCE, COUNTS)
    made = of_epoch(list(slot), EPOCH)
    made[word_of(count)] ^= 1 << bit
    for i, word in enumerate(made):
        slot[i] = word


def outcome(contract: int, count: int, bit: int) -> AscendMoeError | None:
    """What combine on the reader ends with when a bit of its peer's run is another."""
    barrier, reader_done = threading.Barrier(2, timeout=20), threading.Event()

    def body(rank: int, name: str) -> AscendMoeError | None:
        place = Place(rank, 2, name)
        set_epoch(cluster, rank, EPOCH - 4)
        barrier.wait()
        cases.combine(place, cases.dispatch(place, SEED, contract), SEED, contract)
        sent = cases.dispatch(place, SEED, contract)
        barrier.wait()
        if rank == READER:
            forge(cluster, count, bit)
        barrier.wait()
        if rank == SOURCE:
            reader_done.wait(5)
        found = caught(cases.combine, place, sent, SEED, contract)
        reader_done.set()
        return found.error

    with ascend_moe.LocalCluster(2) as cluster:
        return cluster.run(body)[READER]


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("contract", [1, 2])
def test_a_wrong_word_of_a_run_is_named(contract: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", str(cores))
    for count in range(COUNTS):
        for bit in (0, 2, 20, 31):
            error = outcome(contract, count, bit)
            assert isinstance(error, CorruptStatus), f"count {count}, bit {bit}: {error!r}"
            assert f"rank {SOURCE}" in str(error), str(error)
