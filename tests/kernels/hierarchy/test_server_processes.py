"""comm_alg "hierarchy" between real processes on two simulated servers, and when one of them is killed."""

from __future__ import annotations

import random
import time

import comm_cases
import op_runs
import pytest
from failure_cases import here
from rank_processes import Ranks, assert_named, fork_server, nothing_left, values

from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, legal

__all__ = ["fork_server", "nothing_left"]  # fixtures
SOON_S = 15.0  # half of the deadline
CASE = legal(
    Case(world=4, local=2, topk=3, share=2, batches="unequal", cores=2, quant_mode=2, comm_quant_mode=2, seed=21)
)
_sums = CASE.combined(CASE.rows_of(CASE.dispatched()), CASE.dispatched())


def layers(count: int) -> str:
    """Runs so many round trips, up to the first error."""
    place = here()
    for _ in range(count):
        outcome = op_runs.run_rank(CASE, place.rank, place.group_ep)
        if isinstance(outcome, AscendMoeError):
            raise outcome
        assert outcome.algorithms == ("hierarchy", "hierarchy")
        op_runs.check_combine(place.rank, outcome.result, _sums[place.rank])
    return "right"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))])
def test_a_rank_killed_at_any_time_is_named_by_all(seed: int) -> None:
    """Others are in the same op then, in its first level or its second."""
    drawn = random.Random(seed)
    victim = drawn.randrange(4)
    with Ranks(4, timeout_s=30.0) as ranks:
        for name, value in (("ASCEND_MOE_RANKS_PER_SERVER", "2"), ("ASCEND_MOE_AIV_CORES", "2")):
            values(ranks.call(comm_cases.set_env, name, value))
        assert values(ranks.call(layers, 2)) == ["right"] * 4
        for rank in range(4):
            ranks.start(rank, layers, 100000)
        time.sleep(drawn.uniform(0.2, 0.5))
        ranks.kill(victim)
        killed = time.monotonic()
        for rank in range(4):
            if rank != victim:
                assert_named(ranks.wait(rank), "PeerLost", victim)
        assert time.monotonic() - killed < SOON_S
