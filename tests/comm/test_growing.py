"""Processes that were started anew are taken back at a step that all agree on."""

from __future__ import annotations

import pytest
import survivor_cases as cases
from rank_processes import Ranks, fork_server, nothing_left, values

import ascend_moe

__all__ = ["fork_server", "nothing_left"]  # fixtures


def lose(ranks: Ranks, victims: list[int]) -> str:
    """Kills ranks of an open group; the name with which the others go on."""
    values(ranks.call(cases.layers_at, "", 2))
    for rank in victims:
        ranks.kill(rank)
    alive = [rank for rank in range(ranks.world) if rank not in victims]
    (name,) = {str(place.group_ep) for _, place in values(ranks.call(cases.agree_and_shrink, ranks=alive))}
    return name


@pytest.mark.parametrize("victim", [0, 2])
def test_the_killed_one_comes_back(victim: int) -> None:
    """As the rank that it was, with the others' step; layers are those of 3 ranks again."""
    alive = [rank for rank in range(3) if rank != victim]
    with Ranks(3, timeout_s=20) as ranks, Ranks(1, timeout_s=20) as anew:
        name = lose(ranks, [victim])
        assert values(ranks.call(cases.nobody_back, name, 7, ranks=alive)) == [True, True]
        anew.start(0, cases.come_back, "0", victim)
        for rank in alive:
            ranks.start(rank, cases.steps_with_return, name, 8, 10**4)
        found = values([ranks.wait(rank, 40) for rank in alive])
        found.insert(victim, values([anew.wait(0, 40)])[0])
        assert len({grown.step for grown, _ in found}) == 1
        for rank, (grown, count) in enumerate(found):
            assert (grown.place.rank, grown.place.world, grown.origins, count) == (rank, 3, [0, 1, 2], 5)


def test_two_come_back_one_after_the_other() -> None:
    with Ranks(4, timeout_s=20) as ranks, Ranks(2, timeout_s=20) as anew:
        name = lose(ranks, [0, 3])
        groups = [(ranks, 1), (ranks, 2)]
        for number, origin in enumerate((3, 0)):
            anew.start(number, cases.come_back, "0", origin)
            for where, rank in groups:
                where.start(rank, cases.steps_with_return, name, 0, 10**4)
            found = values([where.wait(rank, 40) for where, rank in groups]) + values([anew.wait(number, 40)])
            (name,) = {grown.place.group_ep for grown, _ in found}
            groups.append((anew, number))
        assert sorted(grown.place.rank for grown, _ in found) == [0, 1, 2, 3]


def test_who_dies_while_coming_back_harms_nobody() -> None:
    with Ranks(3, timeout_s=5) as ranks, Ranks(2, timeout_s=20) as anew:
        name = lose(ranks, [1])
        anew.start(0, cases.die_while_coming_back, "0", 1)
        for rank in (0, 2):
            ranks.start(rank, cases.steps_with_return, name, 0, 10**4)
        anew.processes[0].join(20)
        anew.start(1, cases.come_back, "0", 1)
        found = values([ranks.wait(rank, 60) for rank in (0, 2)]) + values([anew.wait(1, 60)])
        assert {grown.place.world for grown, _ in found} == {3}


def test_likely_mistakes_are_named() -> None:
    with Ranks(3, timeout_s=2) as ranks, Ranks(1, timeout_s=2) as anew:
        name = lose(ranks, [2])
        ranks.start(0, ascend_moe.grow, name, 5)
        ranks.start(1, ascend_moe.grow, name, 6)
        assert ranks.wait(0).value is None
        differs = ranks.wait(1)
        assert differs.error == "ConfigMismatch" and differs.details["field"] == "step", differs
        alone = anew.call(cases.come_back, "0", 2, 0.3)[0]
        assert alone.error == "CommTimeout" and "nobody has let this process back" in alone.text, alone
        anew.start(0, cases.come_back, "0", 1, 5)
        while anew.pipes[0].poll(0.2) is False:
            assert values(ranks.call(cases.nobody_back, name, 9, ranks=[0, 1])) == [True, True]
        refused = anew.wait(0)
        assert refused.error == "ArgumentError" and "rank 1 is not missing" in refused.text, refused
        whole = ranks.call(ascend_moe.grow, name, "soon", ranks=[0])[0]
        assert whole.error == "ArgumentError" and whole.details["argument"] == "step", whole
