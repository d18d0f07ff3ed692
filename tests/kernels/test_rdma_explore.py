"""The transport to other servers on the checked engine: a copy agent moves whenever the schedule says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mutant_cases
import pytest
from error_codes import PEER_LOST
from mutant_builds import BuildError, MutantBuilds
from mutant_cases import MutantCase
from mutant_search import DTYPE, LIMIT, SEEDS, search

from ascend_moe import explore
from ascend_moe.explore import Faults, Options, Program, World

MUTANTS = [case for case in mutant_cases.MUTANTS if case.where == "servers"]


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


# ---- controls


@pytest.fixture(scope="module")
def builds() -> MutantBuilds:
    try:
        made = MutantBuilds()
        made.clean("checked")
    except BuildError as error:
        if "are needed" in str(error):
            pytest.skip(str(error))
        raise
    return made


@pytest.mark.parametrize("case", MUTANTS, ids=lambda case: case.name)
def test_a_mutant_of_the_transport_is_found(builds: MutantBuilds, case: MutantCase) -> None:
    library = builds.mutant(case.number, "checked", (DTYPE,))
    found = search(library, SEEDS[0], where="servers")
    assert found.kind in case.finds and found.schedules <= LIMIT, found


def test_the_clean_kernels_pass_the_same_search(builds: MutantBuilds) -> None:
    found = search(builds.clean("checked"), SEEDS[0], LIMIT, where="servers")
    assert found.kind is None and found.schedules == LIMIT, found.line


@pytest.mark.parametrize("case", MUTANTS, ids=lambda case: case.name)
def test_one_server_has_none_of_these(builds: MutantBuilds, case: MutantCase) -> None:
    """Stores take none of the transport's ways: what breaks it changes nothing within a server."""
    found = search(builds.mutant(case.number, "checked", (DTYPE,)), SEEDS[0], 100)
    assert found.kind is None, found.line
