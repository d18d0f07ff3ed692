"""96 processes in one group: one that is killed, and one that sends too many rows, are named by all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import comm_cases
import failure_cases as cases
import pytest
from rank_processes import CallResult, Ranks, assert_named, fork_server, nothing_left, values

from ascend_moe import settings
from ascend_moe.reference.cases import Case, legal

__all__ = ["fork_server", "nothing_left"]  # fixtures
pytestmark = pytest.mark.nightly
WORLD, VICTIM = 96, 41
FAR_S = 4 * settings.DEFAULT_TIMEOUT_S  # 96 processes take turns on a machine with two cores


class ManyRanks(Ranks):
    """Ranks that are waited for as long as a busy machine needs."""

    def wait(self, rank: int, seconds: float = FAR_S) -> CallResult:
        return super().wait(rank, max(seconds, FAR_S))


@pytest.fixture
def many(algorithm: str) -> Iterator[ManyRanks]:
    """Processes with two cores each, that have run both ops."""
    with ManyRanks(WORLD, timeout_s=FAR_S) as ranks:
        for name, value in (("COMM_ALG", algorithm), ("AIV_CORES", "2")):
            values(ranks.call(comm_cases.set_env, f"ASCEND_MOE_{name}", value))
        assert values(ranks.call(cases.run_round_trip)) == ["right"] * WORLD
        yield ranks


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_an_overflow_then_a_killed_process_are_named_by_all(many: ManyRanks) -> None:
    case = legal(Case(world=WORLD, local=1, topk=2, ids="overflow", cores=2, units=1, seed=8))
    fault = replace(case).fault()  # of another object: tensors that it keeps would travel with it
    assert fault is not None and fault.kind == "RoutingOverflow"
    for outcome in many.call(cases.run_faulty, case):
        assert_named(outcome, "RoutingOverflow", fault.rank)
    assert values(many.call(cases.run_dispatch, 1)) == ["right"] * WORLD  # the group has stayed usable
    many.kill(VICTIM)
    survivors = [rank for rank in range(WORLD) if rank != VICTIM]
    for outcome in many.call(cases.run_combine, ranks=survivors):
        assert_named(outcome, "PeerLost", VICTIM, "has ended")
        assert outcome.seconds < FAR_S / 4  # it is not waited for until the deadline
