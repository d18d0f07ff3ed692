"""comm_alg="direct" on the checked engine: no finding in any schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from error_codes import CORRUPT, PEER_LOST, TIMEOUT
from killed_ranks import killed

from ascend_moe import explore
from ascend_moe.explore import Faults, Options, Program, World

COLLECTIVE = range(1, 7)


def drawn(first: int, count: int, algorithm: str) -> list[Program]:
    return [replace(explore.draw(first + n), algorithm=algorithm) for n in range(count)]


@pytest.mark.parametrize("algorithm", [pytest.param("direct", marks=pytest.mark.nightly), "mixed"])
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
