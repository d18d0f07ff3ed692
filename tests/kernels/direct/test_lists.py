"""Lists of pairs are made by some cores while others publish rows, or by all cores."""

from __future__ import annotations

from dataclasses import replace

import op_runs
import pytest
from op_runs import Clusters

from ascend_moe import plan
from ascend_moe.ops import calls
from ascend_moe.plan import Request
from ascend_moe.predict import predict
from ascend_moe.reference.cases import Case

SETTINGS = {"ASCEND_MOE_COMM_ALG": "direct"}


def list_cores(case: Case) -> int:
    """How many cores of a rank make lists."""
    request = Request(
        ranks=case.world, experts=case.experts, topk=case.topk, hidden=64, batch=max(1, case.batch), cores=case.cores
    )
    made = plan.describe("dispatch", request, "direct")
    return plan.tiling_of(calls.Plan("dispatch", made))["list_cores"]


@pytest.mark.parametrize(("batch", "lists"), [(8, 2), (1023, 1), (1024, 1), (1025, 0)])
def test_pairs_that_do_not_fit_are_listed_by_all_cores(clusters: Clusters, batch: int, lists: int) -> None:
    case = Case(world=2, local=8, topk=8, units=1, batch=batch, contract=1, cores=8)
    assert [list_cores(replace(case, cores=cores)) for cores in (1, 7, 8)] == [0, 0, lists]
    op_runs.check(case, op_runs.run(clusters[2], case))


def test_the_roles_are_kept() -> None:
    """Cores below the split make no lists, those above publish no rows."""
    request = Request(ranks=4, experts=64, topk=8, hidden=7168, batch=96, quant_mode=2, cores=24)
    by_step: dict[str, set[int]] = {}
    for event in predict(request, algorithm="direct", events=1_000_000).dispatch.events:
        if event.pipe != "S":
            by_step.setdefault(event.phase, set()).add(event.core)
    assert by_step["PublishRows"] == set(range(18))
    assert by_step["PublishLists"] == set(range(18, 24))
