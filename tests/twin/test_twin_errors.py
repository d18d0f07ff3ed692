"""Errors that the kernels find: bad ids, overflow, tensors of combine that are not dispatch's."""

from __future__ import annotations

from typing import Any

import op_runs
import pytest
import torch
from op_runs import Clusters

import ascend_moe.reference as ref
from ascend_moe.errors import ArgumentError
from ascend_moe.reference.cases import Case, legal

pytestmark = [pytest.mark.asan, pytest.mark.tsan]


def test_masked_ids_are_not_looked_at(clusters: Clusters) -> None:
    """Any number at a masked pair; expand_idx is 0 there."""
    for mask in ("token", "pair", "prefix"):
        spec = Case(world=2, local=3, topk=4, batch=8, mask=mask, seed=60)
        case = legal(spec)
        for one in case.inputs:
            assert one.x_active_mask is not None
            one.x_active_mask[0] = False
            active = one.x_active_mask.reshape(8, -1).expand(-1, 4)
            one.expert_ids[~active] = 12345
        runs = op_runs.run(clusters[2], case)
        op_runs.check(case, runs)
        for one in runs:
            assert not one.dispatched[2][:4].any()  # type: ignore[union-attr]
            assert not one.result[0].any()  # type: ignore[union-attr]


def test_overflow_beyond_the_capacity_by_one(clusters: Clusters) -> None:
    """maxBS * min(K, L) rows from one source to one owner pass, one more does not."""
    ids = torch.tensor([[0, 1, 2], [0, 1, 3], [2, 3, 1], [0, 1, 2]], dtype=torch.int32)
    inputs = [
        ref.RankInput(torch.randn(4, 16), ids.clone(), expert_scales=torch.rand(4, 3)) for _ in range(2)
    ]
    case = Case.of(inputs, 4, global_bs=8)
    op_runs.check(case, op_runs.run(clusters[2], case))
    inputs[1].expert_ids[:] = torch.tensor([0, 1, 0])  # 12 rows; the capacity is 4 * 2
    fault = ref.check(inputs, 4, 8)
    assert fault is not None and (fault.rank, fault.owner, fault.rows, fault.capacity) == (1, 0, 12, 8)
    op_runs.check_fault(fault, op_runs.run(clusters[2], case))
    inputs[1].expert_ids[0] = torch.tensor([2, 3, 2])
    inputs[1].expert_ids[1, 0] = 3
    assert ref.check(inputs, 4, 8) is None  # 8 rows
    op_runs.check(case, op_runs.run(clusters[2], case))
    inputs[1].expert_ids[1, 0] = 0
    assert ref.check(inputs, 4, 8) is not None  # 9 rows
    op_runs.check(case, op_runs.run(clusters[2], case))


# ---- tensors of combine that are not dispatch's


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("at, value", [(0, -1), (3, 0), (3, None), (5, 10**6), (5, 2**31 - 1)])
def test_counts_that_would_store_elsewhere(
    clusters: Clusters, contract: int, at: int, value: int | None
) -> None:
    """Counts that fall (None: by one) or exceed expand_x: every rank refuses."""

    case = Case(world=2, local=3, topk=3, batch=6, contract=contract, ids="distinct", seed=70)

    def fn(rank: int, group_ep: str) -> Any:
        sent = list(op_runs.dispatch(case, rank, group_ep))
        rows = op_runs.expert_rows(case, rank, sent)
        if rank == 1:
            sent[4][at] = sent[4][at - 1] - 1 if value is None else value
        with pytest.raises(ArgumentError) as caught:
            op_runs.combine(case, rank, group_ep, rows, sent)
        return caught.value

    with op_runs.cores(4):
        found = clusters[2].run(fn)
    assert [(error.argument, error.rank) for error in found] == [("ep_send_counts", 1)] * 2
    op_runs.check(case, op_runs.run(clusters[2], case))  # the communicator stays usable
