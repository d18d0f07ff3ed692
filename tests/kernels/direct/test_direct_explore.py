"""comm_alg="direct" on the checked engine: no finding in any schedule, and its deliberate bugs are found."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from error_codes import CORRUPT, PEER_LOST, TIMEOUT
from mutant_builds import MutantBuilds
from mutant_cases import MUTANTS, MutantCase, by_name
from mutant_search import DTYPE, LIMIT, SEEDS, search
from pytest_runs import first_failure

from ascend_moe import explore
from ascend_moe.explore import Faults, Options, Program, World

COLLECTIVE = range(1, 7)
DIRECT = [case for case in MUTANTS if case.where == "direct"]
KILLED_AT = range(0, 900, 30)


def drawn(first: int, count: int, algorithm: str) -> list[Program]:
    return [replace(explore.draw(first + n), algorithm=algorithm) for n in range(count)]


@pytest.mark.parametrize("algorithm", ["direct", "mixed"])
def test_random_cases_and_schedules_have_no_finding(algorithm: str) -> None:
    result = explore.campaign(drawn(80_000, 150, algorithm), schedules=1500, seed=1, a_case=10)
    assert result.finding is None, result.finding.line()
    assert result.schedules == 1500 and 2 * result.distinct >= result.schedules
    assert len(result.polls) == 3  # status runs, abort blocks, the fail block


@pytest.mark.parametrize("policy", ["late", "random", "lazy", "pct"])
@pytest.mark.parametrize("stores", ["fifo", "unordered"])
def test_every_policy_and_order_of_stores(policy: str, stores: str) -> None:
    case = Program(world=2, cores=3, local=2, sequence="DDCC", quant="int8", seed=3, algorithm="direct")
    result = explore.explore(case, 30, 7, Options(policy=policy, store_order=stores))
    assert result.finding is None, result.finding.line()


def test_all_schedules_with_a_switch() -> None:
    result = explore.exhaustive(explore.parse("w2,c1,k1,b1,u1,DC,direct"), preemptions=1)
    assert result.finding is None, result.finding.line()
    assert result.schedules > 100


def killed(case: Program, library: Path | None = None) -> tuple[int, int]:
    """Ops of the others that named the killed rank, and that were right; AssertionError for any other end."""
    loaded = None if library is None else explore.checked_library(library)
    lost = finished = 0
    with World(case.world, library=loaded) as world:
        program = world.load(case, accepted=1 | 1 << PEER_LOST | 1 << TIMEOUT)
        for step in KILLED_AT:
            faults = Faults(kill_rank=case.world - 1, kill_step=step)
            run = world.run(step, 1, Options(hang_is_finding=False, faults=faults))
            assert not run.failed, run.message
            for call, (code, text) in zip(program.calls, world.errors(), strict=True):
                if call.rank == case.world - 1:
                    continue
                assert code in (0, PEER_LOST), (step, code, text)
                lost += code == PEER_LOST
                finished += code == 0
    return lost, finished


@pytest.mark.parametrize("algorithm", ["direct", "mixed"])
def test_a_killed_rank_is_missed_by_name(algorithm: str) -> None:
    lost, finished = killed(Program(world=3, cores=2, sequence="DCDC", seed=4, algorithm=algorithm))
    assert lost > 10 and finished > 5


def test_a_stalled_rank_only_delays() -> None:
    case = Program(world=3, cores=2, seed=6, algorithm="direct")
    with World(case.world) as world:
        world.load(case)
        for step in range(0, 600, 50):
            run = world.run(step, 1, Options(faults=Faults(stall_rank=1, stall_step=step)))
            assert not run.failed, run.message


def test_a_turned_bit_of_a_status_block_is_never_accepted() -> None:
    case = Program(world=2, cores=2, local=3, sequence="DC", seed=9, batch=2, algorithm="direct")
    accepted = 1 << CORRUPT | 1 << TIMEOUT | 1 << PEER_LOST | sum(1 << code for code in COLLECTIVE)
    raised = 0
    with World(case.world) as world:
        world.load(case, accepted=accepted | 1)
        for block in range(1, 9):
            for word in range(8):
                turned = 1 << (block * 5 + word) % 32
                faults = Faults(corrupt_block=block, corrupt_word=word, corrupt_xor=turned)
                run = world.run(block, 1, Options(hang_is_finding=False, faults=faults, vary_epoch=False))
                assert not run.failed, (block, word, run.message)
                raised += any(code > 0 for code, _ in world.errors())
    assert raised > 40


# ---- its bugs


@pytest.mark.mutants
@pytest.mark.parametrize("case", DIRECT, ids=lambda case: case.name)
def test_a_mutant_of_direct_is_found(builds: MutantBuilds, case: MutantCase) -> None:
    library = builds.mutant(case.number, "checked", (DTYPE,))
    found = [search(library, seed, where="direct") for seed in SEEDS]
    needed = [one.schedules for one in found]
    print(f"{case.number} {case.name:28} median {statistics.median(needed):g}, worst {max(needed)} schedules")
    assert all(one.kind in case.finds for one in found), found
    assert statistics.median(needed) <= LIMIT


@pytest.mark.mutants
@pytest.mark.parametrize("seed", SEEDS)
def test_the_clean_kernels_pass_the_same_search(builds: MutantBuilds, seed: int) -> None:
    found = search(builds.clean("checked"), seed, LIMIT, where="direct")
    assert found.kind is None and found.schedules == LIMIT, found.line


@pytest.mark.mutants
def test_cores_that_do_not_hear_of_core_0_hang(builds: MutantBuilds) -> None:
    library = builds.mutant(by_name("fail_block_ignored").number, "checked", (DTYPE,))
    with pytest.raises(AssertionError, match="hang"):
        killed(Program(world=3, cores=3, sequence="DCDC", dtype=DTYPE, algorithm="direct"), library)


@pytest.mark.mutants
def test_rows_looked_for_in_the_half_are_missed(builds: MutantBuilds) -> None:
    library = builds.mutant(by_name("lent_as_published").number, "fast")
    assert first_failure(library, ["test_zero_copy.py"], 300) is not None
