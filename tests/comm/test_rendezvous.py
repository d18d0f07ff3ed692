"""How ranks open windows together: threads over a HashStore."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist
import window_library
from window_library import WindowLibrary, exchange

from ascend_moe import comm
from ascend_moe.comm.board import Board
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.processes import Opening, Peer, Post, create_window
from ascend_moe.errors import CommTimeout, ConfigMismatch, PeerLost


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

    def open(self, timeout: float) -> tuple[Communicator, bytes]:
        """(this rank's end, the digest that all ranks of these windows share)"""
        opening = Opening("g", self.store, self.rank, self.world, 1 << 20, 1 << 20, timeout)
        opening.run()
        return opening.communicator(), opening.digest


def on_threads(world: int, function: Any) -> list[Any]:
    """function(Rank) on a thread a rank over a fresh store; results by rank, the first error raised."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(function, [Rank(rank, world, store) for rank in range(world)]))


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hesitate at random before a word or an answer, so that every other rank can get ahead of it."""
    dice = random.Random(1)

    def hesitate(name: str) -> None:
        method = getattr(Opening, name)

        def later(self: Opening, *args: Any) -> None:
            if dice.random() < 0.2:
                time.sleep(dice.choice([0.002, 0.02]))
            method(self, *args)

        monkeypatch.setattr(Opening, name, later)

    for name in ("_say", "_answer", "_connect"):
        hesitate(name)


@pytest.mark.usefixtures("hesitant")
@pytest.mark.parametrize("world", [2, 3, 5])
def test_generations_never_mix(world: int) -> None:
    """Ranks open and close as fast as they can, or dawdle: the n-th windows of all are the same ones."""

    def rank_body(rank: Rank) -> list[bytes]:
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

    def rank_body(rank: Rank) -> tuple[bytes, list[int]]:
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


# ---- posts


def put(store: Any, rank: int, post: Post) -> None:
    dist.PrefixStore("ascend_moe/windows", store).set(f"rank/{rank}", json.dumps(asdict(post)))


def dead_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_stale_posts_are_not_joined() -> None:
    """Posts of a former run of the job: of a dead process, and of sockets that nobody listens on."""
    store = dist.HashStore()
    mine = Post(1 << 20, 0, 1)
    put(store, 0, replace(mine, pid=dead_process(), started=1))
    put(store, 1, mine)
    with pytest.raises(CommTimeout, match="rank 0 has not called since") as caught:
        Rank(2, 3, store).open(0.5)
    assert caught.value.rank == 0 and caught.value.ranks == [0, 1]


def _breaks(self: Board, rank: int) -> None:
    raise RuntimeError("Broken pipe\nwith a long trace")


@pytest.mark.parametrize(
    ("read", "timeout", "error", "text"),
    [
        (_breaks, 20, PeerLost, r"store .* has failed \(Broken pipe\); rank 0 normally hosts"),
        (lambda board, rank: time.sleep(3), 0.2, CommTimeout, r"store .* not answered for 1\.\d s; rank 0 norm"),
    ],
)
def test_store_that_fails(
    read: Any, timeout: float, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Board, "_read", read)
    opening = Opening("g", dist.HashStore(), 1, 2, 1 << 20, 0, timeout, host=0)
    began = time.monotonic()
    with pytest.raises(error, match=text) as caught:
        opening.run()
    assert caught.value.rank == 0  # type: ignore[attr-defined]
    assert time.monotonic() - began < 2 and "\n" not in str(caught.value)


# ---- windows


@pytest.mark.parametrize(
    ("field", "changes", "ours", "theirs"),
    [
        ("ASCEND_MOE_RANKS_PER_SERVER", {"ranks_per_server": 2, "context": "a2", "data_bytes": 1 << 19}, 0, 2),
        ("ASCEND_MOE_CONTEXT", {"context": "a3"}, "table", "a3"),
        ("ASCEND_MOE_NEAR_STORES", {"near_stores": 1}, 0, 1),
        ("ASCEND_MOE_RDMA_FLAGS", {"rdma_flags": 1}, 0, 1),
        ("HCCL_BUFFSIZE", {"data_bytes": 2 << 20}, 1, 2),
        ("ASCEND_MOE_LENT_MIB", {"lent_bytes": 5 << 20}, 1, 5),
        ("window layout", {"total": 1 << 21}, 0, 1 << 21),
        ("machine", {"machine": "elsewhere", "host": "another-host"}, "", "another-host"),
    ],
)
def test_ranks_with_other_windows_are_told_apart(field: str, changes: dict[str, Any], ours: Any, theirs: Any) -> None:
    def rank_body(rank: Rank) -> tuple[str, int, Any, Any]:
        opening = Opening("g", rank.store, rank.rank, 2, 1 << 20, 1 << 20, 10)
        usual = opening.mine.host if field == "machine" else opening.mine.total
        if rank.rank == 1:
            opening.mine = opening.board.mine = replace(opening.mine, **changes)
        with pytest.raises(ConfigMismatch) as caught:
            opening.run()
        error = caught.value
        return error.field, error.rank, error.ours or usual, error.theirs or usual

    first, second = on_threads(2, rank_body)
    usual = ours or first[2]
    assert (first, second) == ((field, 1, usual, theirs), (field, 0, theirs, usual))


def test_window_smaller_than_its_post_says_is_not_mapped(library: WindowLibrary) -> None:
    """Reading past its end would be a bus error."""
    for size, mapped in ((4096, 0), (1 << 20, 1)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = Peer(Post(1 << 20, 0, 1 << 20), ours, 1 << 20)
        window = create_window(size)
        socket.send_fds(theirs, [b"window"], [window])
        os.close(window)
        ours.setblocking(False)
        peer.read()
        assert peer.answered and len(library.mapped) == mapped
        peer.close()
        for end in (ours, theirs):
            end.close()
