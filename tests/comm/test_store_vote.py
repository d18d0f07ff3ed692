"""Votes in a store, by which ranks on NPUs agree who is left: in drawn steps, on threads, and without the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ascend_moe.comm.vote import StoreVote
from ascend_moe.errors import CommTimeout, PeerLost
from ascend_moe.explore.survivors import Votes
from ascend_moe.ops import npu_servers
from ascend_moe.ops.npu_servers import ServerRecord


class Stepped(StoreVote):
    """Each question to the store is a step of its rank."""

    def __init__(self, votes: Votes, rank: Any, store: Any) -> None:
        super().__init__(
            "explore", rank.rank, len(votes.bases), lambda other: votes.seen_dead(rank.rank, other), store, None, "key"
        )
        self._clock, self._rank_here = rank, rank

    def _asked(self, ask: Callable[[], Any]) -> Any:
        self._rank_here.step()
        return ask()

    def _decide(self, ranks: Sequence[int], fine: bool, seconds: float) -> list[int]:
        decision = super()._decide(ranks, fine, seconds)
        self._rank_here.decisions.append(decision)
        return decision


def test_ranks_agree_in_any_order_of_steps() -> None:
    for seed in range(60):
        store, world = dist.HashStore(), 2 + seed % 4
        assert not Votes(world, seed // 4 % world, seed, lambda v, rank, s=store: Stepped(v, rank, s)).play().wrong


def votes(world: int, gone: Callable[[int], bool] = lambda rank: False, store: Any = None) -> list[StoreVote]:
    store = store or dist.HashStore()
    return [StoreVote("group", rank, world, gone, store, 0, "key") for rank in range(world)]


def test_who_votes_is_a_member_and_who_comes_late_is_refused() -> None:
    made = votes(4, lambda rank: rank == 2)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda rank: made[rank].agree(0.5), (0, 1))) == [[0, 1]] * 2  # 3 has not come
        with pytest.raises(CommTimeout, match="has continued as ranks 0, 1 without this rank") as late:
            made[3].agree(5)
        assert late.value.ranks == [0, 1]
        assert list(pool.map(lambda rank: made[rank].all_fine([0, 1], rank == 0, 5), (0, 1))) == [False] * 2
        assert list(pool.map(lambda rank: made[rank].all_fine([0, 1], True, 5), (0, 1))) == [True] * 2
        assert {vote.round for vote in made[:2]} == {3}


def test_a_store_that_fails_or_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (vote,) = votes(1)
    silent = threading.Event()
    monkeypatch.setattr("ascend_moe.comm.vote._RESPONSE_S", 0.1)

    def fails(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer\nmore")

    vote._store = type("Store", (), {"set": staticmethod(fails)})()
    with pytest.raises(
        PeerLost, match=r"agree of group 'group': the store .* has failed \(Connection reset by peer\); rank 0"
    ):
        vote.agree(5)
    vote._store = type("Store", (), {"set": staticmethod(lambda *_: silent.wait(20))})()
    with pytest.raises(CommTimeout, match=r"has not responded for 0\.1 s; rank 0 normally hosts it"):
        vote.agree(5)
    silent.set()


def test_processes_that_have_ended_are_seen_on_this_machine_alone() -> None:
    here = ServerRecord()
    dead = ServerRecord(pid=here.pid, born=here.born + 1)  # of another process that had this number
    far = ServerRecord(boot="another", pid=dead.pid, born=dead.born)
    inside = ServerRecord(pids="another", pid=dead.pid, born=dead.born)
    posts = [here, dead, far, inside, ServerRecord()]
    assert here.pid == os.getpid()
    assert [npu_servers._ended(posts, 0, rank) for rank in range(5)] == [False, True, False, False, False]
