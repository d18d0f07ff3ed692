"""How ranks open windows together: threads over a HashStore."""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import window_library
from window_library import WindowLibrary, exchange

from ascend_moe import comm
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.peers import Record, create_window
from ascend_moe.comm.records import Records
from ascend_moe.comm.rendezvous import Opening
from ascend_moe.errors import CommTimeout, ConfigMismatch, PeerLost
from ascend_moe.native.liveness import pid_namespace


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowLibrary]:
    """Counted windows; every test leaves none, and no descriptor either."""
    before = len(os.listdir("/proc/self/fd"))
    with window_library.counted(monkeypatch) as installed:
        yield installed
    assert len(os.listdir("/proc/self/fd")) == before


class Rank:
    """One rank of a group over a HashStore; ``open`` makes one attempt."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.rank, self.world, self.store = rank, world, store

    def opening(self, timeout: float) -> Opening:
        records = functools.partial(Records, self.store, None, "windows", self.rank)
        return Opening("g", self.rank, self.world, 1 << 20, 1 << 20, timeout, records)

    def open(self, timeout: float) -> tuple[Communicator, str]:
        """(this rank's end, the digest that all ranks of these windows share)"""
        opening = self.opening(timeout)
        opening.run()
        return opening.communicator(), opening.digest


def on_threads(world: int, function: Any) -> list[Any]:
    """function(Rank) on a thread a rank over a fresh store; results by rank, the first error raised."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(function, [Rank(rank, world, store) for rank in range(world)]))


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hesitate at random before they write a word or map a window, so that every other one can get ahead."""
    dice = random.Random(1)

    def hesitate(name: str) -> None:
        method = getattr(Opening, name)

        def later(self: Opening, *args: Any) -> None:
            if dice.random() < 0.2:
                time.sleep(dice.choice([0.002, 0.02]))
            method(self, *args)

        monkeypatch.setattr(Opening, name, later)

    for name in ("_write", "_take"):
        hesitate(name)


@pytest.mark.usefixtures("hesitant")
@pytest.mark.parametrize("world", [2, 3, 5])
def test_generations_never_mix(world: int) -> None:
    """Ranks open and close as fast as they can, or dawdle: the n-th windows of all are the same ones."""

    def rank_body(rank: Rank) -> list[str]:
        dice = random.Random(world * 100 + rank.rank)
        digests = []
        for _ in range(12):
            end, digest = rank.open(20)
            digests.append(digest)
            end.close()
            time.sleep(dice.choice([0, 0, 0.001, 0.01]))
        return digests

    digests = on_threads(world, rank_body)
    assert all(other == digests[0] for other in digests) and len(set(digests[0])) == 12


@pytest.mark.usefixtures("hesitant")
@pytest.mark.parametrize("seed", range(4))
def test_attempts_given_up_at_any_moment_do_no_harm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gives up a few times at moments of its own; then all meet, and the windows are common."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "10")
    ends: dict[int, Communicator] = {}  # no group knows these
    monkeypatch.setattr(comm, "lookup", lambda _group, _world, rank: ends[rank])

    def rank_body(rank: Rank) -> tuple[str, list[int]]:
        dice = random.Random(seed * 10 + rank.rank)
        hasty = dice.randrange(6)
        while True:
            hasty -= 1
            try:
                end, digest = rank.open(dice.uniform(0, 0.03) if hasty >= 0 else 10)
            except CommTimeout:
                assert hasty >= 0, "all were there for this attempt"
                continue
            ends[rank.rank] = end
            try:
                return digest, exchange(end, rank.rank + 7)
            except PeerLost:  # a peer gave up in the same instant in which we completed
                continue
            finally:
                end.close()

    results = on_threads(3, rank_body)
    assert len({digest for digest, _ in results}) == 1
    assert all(values == [7, 8, 9] for _, values in results)


# ---- records


def put(store: Any, rank: int, record: Record) -> None:
    dist.PrefixStore("ascend_moe/windows", store).set(f"rank/{rank}", json.dumps(asdict(record)))


def dead_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_stale_records_are_not_joined() -> None:
    """Records of a former run of the job: of a dead process, and of descriptors that are closed."""
    store = dist.HashStore()
    mine = Record(1 << 20, 0, 1)
    put(store, 0, replace(mine, pid=dead_process(), started=1))
    put(store, 1, mine)
    with pytest.raises(CommTimeout, match="rank 0 has not called since") as caught:
        Rank(2, 3, store).open(0.5)
    assert caught.value.rank == 0 and caught.value.ranks == [0, 1]


# ---- windows


@pytest.mark.parametrize(
    ("field", "changes", "ours", "theirs"),
    [
        ("ASCEND_MOE_RANKS_PER_SERVER", {"ranks_per_server": 2, "context": "a2", "data_bytes": 1 << 19}, 0, 2),
        ("ASCEND_MOE_CONTEXT", {"context": "a3"}, "table", "a3"),
        ("ASCEND_MOE_INTRA_NODE_STORES", {"intra_node_stores": 1}, 0, 1),
        ("ASCEND_MOE_RDMA_FLAGS", {"rdma_flags": 1}, 0, 1),
        ("HCCL_BUFFSIZE", {"data_bytes": 2 << 20}, 1, 2),
        ("ASCEND_MOE_REGISTERED_MIB", {"registered_bytes": 5 << 20}, 1, 5),
        ("window layout", {"total": 1 << 21}, 0, 1 << 21),
        ("machine", {"machine": "elsewhere", "host": "another-host"}, "", "another-host"),
        ("PID namespace", {"pid_space": "pid:[1]"}, pid_namespace(), "pid:[1]"),
    ],
)
def test_ranks_with_different_windows_are_refused(field: str, changes: dict[str, Any], ours: Any, theirs: Any) -> None:
    def rank_body(rank: Rank) -> tuple[str, int, Any, Any]:
        opening = rank.opening(10)
        usual = opening.mine.host if field == "machine" else opening.mine.total
        if rank.rank == 1:
            opening.mine = replace(opening.mine, **changes)
        with pytest.raises(ConfigMismatch) as caught:
            opening.run()
        error = caught.value
        assert "\n" not in str(error) and (field != "PID namespace" or "docker run --pid=host" in str(error))
        return error.field, error.rank, error.ours or usual, error.theirs or usual

    first, second = on_threads(2, rank_body)
    usual = ours or first[2]
    assert (first, second) == ((field, 1, usual, theirs), (field, 0, theirs, usual))


def test_only_the_window_of_the_record_is_mapped(library: WindowLibrary, tmp_path: Path) -> None:
    """Reading past the end of a smaller one would be a bus error; a descriptor may belong to another file since."""
    opening = Rank(0, 1, dist.HashStore()).opening(1)
    opening._start()
    record = opening.mine
    other = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    small = create_window(4096)
    assert len(library.mapped) == 1
    for changes in ({"total": 2 * record.total}, {"token": "another"}, {"fd": other}, {"fd": small}, {"fd": 1 << 20}):
        assert opening._map(0, replace(record, **changes)) is None, changes
    assert opening._map(0, replace(record, pid=dead_process())) is None
    assert len(library.mapped) == 1
    peer = opening._map(0, record)
    assert peer is not None and peer.word == "open" and len(library.mapped) == 2
    peer.close()
    opening._give_up(ValueError())
    for fd in (opening._window, other, small):
        os.close(fd)
