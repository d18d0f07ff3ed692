"""Lost ranks are survived in a LocalCluster: its other ranks agree, shrink and go on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import survivor_cases as cases
import window_library
from window_library import WindowLibrary

import ascend_moe
from ascend_moe.comm.place import Place
from ascend_moe.comm.vote import WindowVote
from ascend_moe.errors import ArgumentError, CommTimeout, PeerLost
from ascend_moe.settings import MAX_WORLD

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
        with pytest.raises(PeerLost, match="rank 1 has not called shrink: its function has returned") as lost:
            ascend_moe.shrink(group_ep, [0, 1], 5)
        assert lost.value.rank == 1
        assert ascend_moe.agree(group_ep) == [0]
        place = ascend_moe.shrink(group_ep, [0])
        return cases.layers(place, 2)

    with ascend_moe.LocalCluster(3) as cluster:
        assert cluster.run(work) == [2, None, [0, 1]]


def test_calls_from_outside_are_refused() -> None:
    with ascend_moe.LocalCluster(2) as cluster:
        with pytest.raises(ArgumentError, match="call it in the thread of a rank"):
            ascend_moe.agree(cluster.name)
        with pytest.raises(ArgumentError, match="names no live communicator"):
            ascend_moe.shrink("elsewhere", [0])
