"""What a rank process does for the tests of hierarchy: layer after layer, compared with the reference."""

from __future__ import annotations

import op_runs
from failure_cases import here

from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, legal

CASE = legal(Case(world=4, local=2, topk=3, share=2, batches="unequal", cores=2, quant="int8", coded=True, seed=21))
_sums = CASE.combined(
    [CASE.expert_rows(r, d.expand_x, d.dynamic_scales, d.ep_recv_counts) for r, d in enumerate(CASE.dispatched())],
    CASE.dispatched(),
)


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
