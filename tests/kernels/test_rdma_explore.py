"""The transport to other servers on the checked engine: a copy agent moves whenever the schedule says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from error_codes import PEER_LOST

from ascend_moe import explore
from ascend_moe.explore import Faults, Options, Program, World


def cases(first: int, count: int) -> list[Program]:
    """Drawn cases of every mode, over servers of one and of two ranks."""
    return [replace(explore.draw(first + n), servers=1 + n % 2, algorithm="window") for n in range(count)]


def test_schedules_find_nothing() -> None:
    result = explore.campaign(cases(70_000, 50), schedules=1000, seed=3, a_case=20)
    assert result.finding is None, result.finding
    assert result.schedules == 1000 and result.distinct > 900


@pytest.mark.parametrize("policy", ["late", "lazy", "pct"])
def test_policies_find_nothing(policy: str) -> None:
    options = Options(policy=policy)
    result = explore.campaign(cases(71_000, 20), schedules=200, seed=5, options=options, a_case=10)
    assert result.finding is None, result.finding


def test_a_case_says_how_many_ranks_share_a_server() -> None:
    case = Program(world=4, servers=2)
    assert ",r2," in str(case) and explore.parse(str(case)) == case
    assert explore.parse(str(Program())) == Program() and ",r" not in str(Program()).replace(",unequal", "")


@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_rank_is_missed_by_name(servers: int) -> None:
    """Wherever it stops, its posted items half on their way too: the others end, right or naming it."""
    case = Program(world=3, cores=2, sequence="DCDC", seed=4, servers=servers)
    seen: Counter[int] = Counter()
    with World(case.world) as world:
        world.load(case, accepted=1 | 1 << PEER_LOST)
        for step in range(0, 1500, 50):
            faults = Faults(kill_rank=2, kill_step=step)
            run = world.run(step, 1, Options(hang_is_finding=False, faults=faults))
            assert not run.failed, run.message
            assert world.program is not None
            for call, (code, text) in zip(world.program.calls, world.errors(), strict=True):
                if call.rank != 2:
                    seen[code] += 1
                    assert code == 0 or "rank 2 is lost" in text, (code, text)
    assert seen[PEER_LOST] > 12 and seen[0] > 12 and set(seen) == {0, PEER_LOST}


def test_a_stalled_rank_only_delays() -> None:
    case = Program(world=3, cores=2, seed=6, servers=1)
    with World(case.world) as world:
        world.load(case)
        for step in range(0, 600, 50):
            run = world.run(step, 1, Options(faults=Faults(stall_rank=1, stall_step=step)))
            assert not run.failed, run.message
