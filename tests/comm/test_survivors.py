"""Lost ranks are survived by processes and threads: vote, agree, shrink, and layers on what is left."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import survivor_cases as cases
import torch.distributed as dist
import window_library
from rank_processes import CallResult, Ranks, fork_server, nothing_left, values
from window_library import WindowLibrary

import ascend_moe
from ascend_moe import comm
from ascend_moe.comm.place import Place
from ascend_moe.comm.vote import StoreVote, WindowVote
from ascend_moe.errors import ArgumentError, CommTimeout, PeerLost
from ascend_moe.explore.survivors import Votes
from ascend_moe.ops import npu_servers
from ascend_moe.ops.npu_servers import ServerRecord
from ascend_moe.settings import MAX_WORLD

__all__ = ["fork_server", "nothing_left"]  # fixtures


def ended(ranks: Ranks, alive: list[int], seconds: float = 60) -> list[Any]:
    return values([ranks.wait(rank, seconds) for rank in alive])


@pytest.mark.parametrize(
    ("seed", "rank0_hosts"),
    [
        (1, False),
        (2, True),
        *(pytest.param(seed, seed % 5 == 0, marks=pytest.mark.nightly) for seed in range(1000, 1050)),
    ],
)
def test_three_of_four_go_on_for_100_layers(seed: int, rank0_hosts: bool) -> None:
    """One is killed at a drawn moment, also where the store has died with rank 0."""
    draw, layers = random.Random(seed), 100
    victim = 0 if rank0_hosts else draw.randrange(4)
    alive = [rank for rank in range(4) if rank != victim]
    with Ranks(4, rank0_hosts=rank0_hosts, timeout_s=20) as ranks:
        before = [ranks.pid(rank) for rank in alive]
        values(ranks.call(cases.layers_at, "", 1))
        for rank in range(4):
            ranks.start(rank, cases.go_on_here, layers)
        time.sleep(draw.random() * 0.1)
        ranks.kill(victim)
        found = ended(ranks, alive)
        assert [(each.alive, each.error, each.layers) for each in found] == [([alive], "PeerLost", layers)] * 3
        assert [each.place for each in found] == [Place(found[0].place.group_ep, 3, rank) for rank in range(3)]
        assert [ranks.pid(rank) for rank in alive] == before


# ---- within agree and shrink


def test_windows_that_do_not_open_on_one_rank_are_opened_on_none() -> None:
    with Ranks(3, timeout_s=20) as ranks:
        values(ranks.call(cases.layers_at, "", 1))
        for rank in range(3):
            ranks.start(rank, cases.shrink_that_fails, "", rank == 1)
        found = ended(ranks, [0, 1, 2])
        assert "too many open files" in found[1][0]
        assert all(
            text.startswith("PeerLost") and "has failed meanwhile: call agree again" in text for text, *_ in found[::2]
        )
        assert [rest for _, *rest in found] == [[[0, 1, 2], 0]] * 3
        places = [place for _, place in values(ranks.call(cases.agree_and_shrink))]
        assert {place.world for place in places} == {3}
        assert values(ranks.call(cases.layers_at, places[0].group_ep, 2)) == [2, 2, 2]


def test_a_stopped_rank_is_left_out_and_gets_the_reason() -> None:
    with Ranks(3, timeout_s=20) as ranks:
        values(ranks.call(cases.layers_at, "0", 2))
        ranks.stop(1)
        left = values(ranks.call(cases.agree_and_shrink, "", 2.0, ranks=[0, 2]))
        assert [alive for alive, _ in left] == [[0, 2]] * 2
        name = left[0][1].group_ep
        ranks.resume(1)
        late, again = (ranks.call(ascend_moe.agree, "0", ranks=[1])[0] for _ in range(2))
        for outcome in (late, again):
            assert outcome.error == "CommTimeout" and outcome.details["ranks"] == [0, 2], outcome
            assert "without this rank" in outcome.text
        assert values(ranks.call(cases.layers_at, name, 3, ranks=[0, 2])) == [3, 3]


def test_all_may_agree_and_shrink_with_nobody_lost() -> None:
    """Fresh windows after a timeout, twice; what ``close`` and descriptors say of the old ones."""
    with Ranks(3, timeout_s=20) as ranks:
        values(ranks.call(ascend_moe.comm_name))
        name = "0"
        files = None
        for generation in range(1, 4):
            found = values(ranks.call(cases.agree_and_shrink, name))
            assert [alive for alive, _ in found] == [[0, 1, 2]] * 3
            name = found[0][1].group_ep
            assert name == f"0~{generation}"
            assert values(ranks.call(cases.layers_at, name, 2)) == [2] * 3
            count = values(ranks.call(cases.opened_files))
            assert files is None or count == files, "fresh windows leave nothing of the old ones"
            files = count
        assert found[0][1] == Place(name, 3, 0)
        refused(ranks.call(comm.group_of, "group", name, ranks=[0])[0], "group", "has no process group")
        values(ranks.call(ascend_moe.close, name))
        gone = ranks.call(ascend_moe.agree, name)
        assert {outcome.error for outcome in gone} == {"ArgumentError"}


# ---- mistakes


def refused(outcome: CallResult, argument: str, *words: str) -> None:
    assert outcome.error == "ArgumentError" and outcome.details["argument"] == argument, outcome
    assert "\n" not in outcome.text and all(word in outcome.text for word in words), outcome.text


def test_likely_mistakes_are_named() -> None:
    with Ranks(3, timeout_s=2) as ranks:
        refused(ranks.call(ascend_moe.agree, "0", ranks=[0])[0], "group_ep", "no open windows", "before close")
        refused(ranks.call(ascend_moe.agree, "nobody", ranks=[0])[0], "group_ep", "names no live communicator")
        values(ranks.call(ascend_moe.comm_name))
        refused(ranks.call(ascend_moe.agree, "0", -1, ranks=[0])[0], "timeout", "seconds above 0")
        for alive, words in (
            ([0, 0], "ascending"),
            ([2, 0], "ascending"),
            ([0, 3], "0..2"),
            ([], "ascending"),
            (None, "ascend_moe.agree"),
            ([1, 2], "must contain this rank, which is 0"),
        ):
            refused(ranks.call(ascend_moe.shrink, "0", alive, ranks=[0])[0], "alive", words)
        ranks.start(0, ascend_moe.shrink, "0", [0, 1])
        ranks.start(1, ascend_moe.shrink, "0", [0, 1, 2])
        ranks.start(2, ascend_moe.shrink, "0", [0, 1, 2])
        first, second, third = (ranks.wait(rank) for rank in range(3))
        assert first.error == "ConfigMismatch" and first.details["field"] == "alive", first
        assert second.error == "ConfigMismatch" and "ascend_moe.agree" in second.text, second
        assert third.error in ("ConfigMismatch", "PeerLost", "CommTimeout"), third
        assert values(ranks.call(cases.layers_at, "0", 2)) == [2] * 3, "the old group stays as it was"


def test_a_rank_that_was_left_out_stays_out() -> None:
    with Ranks(3, timeout_s=20) as ranks:
        values(ranks.call(ascend_moe.comm_name))
        values(ranks.call(ascend_moe.agree, "0", 1.5, ranks=[0, 1]))
        for outcome in ranks.call(ascend_moe.shrink, "0", [0, 1, 2], ranks=[0, 1]):
            refused(outcome, "alive", "ascend_moe.agree returned [0, 1]")


# ---- ranks that are threads


pytestmark = pytest.mark.tsan


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowLibrary]:
    """Counted windows; every test leaves none, and no rank's thread."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "2")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")
    with window_library.counted(monkeypatch) as installed:
        yield installed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("local_cluster")]


class Dies(BaseException):
    """What a rank of a test raises in order to be lost."""


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(100, 300))]
)
def test_ranks_die_at_drawn_calls(seed: int) -> None:
    """One or two of 3 to 5 ranks die before a drawn call; in one of three, a step of agree later."""
    draw = random.Random(seed)
    world = draw.randrange(3, 6)
    doomed = {rank: draw.randrange(6) for rank in draw.sample(range(world), draw.choice((1, 1, 2)))}
    within = draw.random() < 0.33
    alive = [rank for rank in range(world) if rank not in doomed]

    def work(rank: int, group_ep: str) -> Any:
        place = Place(group_ep, world, rank)
        if rank not in doomed:
            return cases.go_on(place, 4)
        cases.layers(place, doomed[rank])
        if within:
            end = ascend_moe.comm.lookup(group_ep, world, rank)
            left = [draw.randrange(1, 6)]

            class Mortal(WindowVote):
                def _swap(self, *words: int) -> int:
                    left[0] -= 1
                    if not left[0]:
                        raise Dies
                    return super()._swap(*words)

            end.vote.__class__ = Mortal
            ascend_moe.agree(group_ep)
        raise Dies

    with ascend_moe.LocalCluster(world) as cluster:
        with pytest.raises(Dies) as lost:
            cluster.run(work)
        found = cases.results_of(lost.value, alive)
        assert len({str(each.alive) for each in found.values()}) == 1
        assert [found[rank].place.rank for rank in alive] == list(range(len(alive)))
        assert {found[rank].place.world for rank in alive} == {len(alive)}
        assert {each.layers for each in found.values()} == {4}
        cluster.run(lambda rank, group_ep: cases.layers(Place(group_ep, world, rank), 1))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 60))])
def test_many_ranks_agree(seed: int) -> None:
    """Drawn ranks of a large group end round after round, most of them beside where a word of 32 ranks ends."""
    draw = random.Random(seed)
    world = draw.choice((33, 64, 65, 97, 130))
    edges = [rank for rank in range(world) if rank % 32 in (0, 1, 31)]
    doomed = [set(draw.sample(edges, draw.randrange(4)) + draw.sample(range(world), draw.randrange(3))) for _ in "123"]
    left = [sorted(set(range(world)).difference(*doomed[: number + 1])) for number in range(3)]

    def work(rank: int, group_ep: str) -> list[list[int]]:
        ascend_moe.comm.lookup(group_ep, world, rank)
        found: list[list[int]] = []
        while len(found) < 3 and rank in left[len(found)]:
            found.append(ascend_moe.agree(group_ep))
        return found

    with ascend_moe.LocalCluster(world) as cluster:
        for rank, found in enumerate(cluster.run(work)):
            assert found == [ranks for ranks in left if rank in ranks], (seed, rank)


def test_every_round_of_the_largest_group_has_its_list(library: WindowLibrary) -> None:
    """All 32 lists of 384 ranks lie beside each other in a page: none reaches into another."""
    draw, total = random.Random(1), library.am_window_total_bytes(2 << 20, 0)
    pages = [library.am_window_alloc(total) for _ in "ab"]
    try:
        vote = WindowVote("group", 200, [pages[0]] + [pages[1]] * (MAX_WORLD - 1), lambda rank: False)
        lists = {number: sorted(draw.sample(range(MAX_WORLD), draw.randrange(1, 385))) for number in range(1, 33)}
        for number, ranks in lists.items():
            vote._propose(number, ranks)
        assert {number: vote._decision(number) for number in lists} == lists
    finally:
        for page in pages:
            library.am_window_unmap(page, total)


def test_shrinking_twice_and_what_is_left_after_run(library: WindowLibrary) -> None:
    def work(rank: int, group_ep: str) -> list[int]:
        place, sizes = Place(group_ep, 4, rank), []
        for victim in (3, 1):
            cases.layers(place, 2)
            if place.rank == victim:
                raise Dies
            with pytest.raises(PeerLost):
                cases.layers(place, 2)
            alive = ascend_moe.agree(place.group_ep)
            if place.rank == 0:
                with pytest.raises(CommTimeout, match="has not called shrink"):  # the others agree again
                    ascend_moe.shrink(place.group_ep, alive, 0.2)
            place = ascend_moe.shrink(place.group_ep, ascend_moe.agree(place.group_ep))
            assert place.group_ep in ascend_moe.comm.threads.names()
            sizes.append(place.world)
        cases.layers(place, 3)
        return sizes

    with ascend_moe.LocalCluster(4) as cluster:
        with pytest.raises(Dies) as lost:
            cluster.run(work)
        assert cases.results_of(lost.value, [0, 2]) == {0: [3, 2], 2: [3, 2]}
        assert library.mapped == {}, "the windows of all groups are gone with their ranks"
        assert ascend_moe.comm.threads.names() == [cluster.name]


def test_who_does_not_come_is_named() -> None:
    opened, agreed = threading.Barrier(3), threading.Barrier(3)

    def work(rank: int, group_ep: str) -> Any:
        cases.layers(Place(group_ep, 3, rank), 1)
        opened.wait()
        if rank == 2:
            agreed.wait()
            with pytest.raises(CommTimeout, match="without this rank") as late:
                ascend_moe.agree(group_ep)
            return late.value.ranks
        assert ascend_moe.agree(group_ep, 0.5) == [0, 1]
        agreed.wait()
        if rank == 1:
            return None
        with pytest.raises(PeerLost, match="rank 1 has not called shrink in time: its function has returned") as lost:
            ascend_moe.shrink(group_ep, [0, 1], 5)
        assert lost.value.rank == 1
        assert ascend_moe.agree(group_ep) == [0]
        place = ascend_moe.shrink(group_ep, [0])
        return cases.layers(place, 2)

    with ascend_moe.LocalCluster(3) as cluster:
        assert cluster.run(work) == [2, None, [0, 1]]


def test_a_call_from_outside_is_refused() -> None:
    with ascend_moe.LocalCluster(2) as cluster, pytest.raises(ArgumentError, match="call it in the thread of a rank"):
        ascend_moe.agree(cluster.name)


# ---- votes in a store


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


def test_a_store_that_fails_or_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    vote = StoreVote("group", 0, 1, lambda rank: False, dist.HashStore(), 0, "key")
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
    far = ServerRecord(machine="another", pid=dead.pid, born=dead.born)
    inside = ServerRecord(pid_space="another", pid=dead.pid, born=dead.born)
    posts = [here, dead, far, inside, ServerRecord()]
    assert here.pid == os.getpid()
    assert [npu_servers._ended(posts, 0, rank) for rank in range(5)] == [False, True, False, False, False]
