"""Errors that the kernels find: bad ids, overflow, tensors of combine that are not dispatch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import op_runs
import pytest
import torch
from op_runs import Clusters

import ascend_moe.reference as ref
from ascend_moe.errors import ArgumentError, AscendMoeError, InvalidExpertId
from ascend_moe.reference.cases import Case, legal

pytestmark = [pytest.mark.asan, pytest.mark.tsan]


# ---- errors that every rank raises


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("bad", [-2, -(2**31), 6, 2**31 - 1])
def test_invalid_expert_id(clusters: Clusters, bad: int, guilty: int, contract: int) -> None:
    """Named by rank, token, k and id on every rank; nobody is stuck, the next call works."""
    sound, broken = (
        Case(world=3, local=2, topk=3, batch=5, contract=contract, seed=50, cores=4) for _ in range(2)
    )
    broken.inputs[guilty].expert_ids[3, 1] = bad
    broken.inputs[2].expert_ids[4, 2] = bad  # later, or on a later rank
    runs = op_runs.run(clusters[3], broken)
    for error in runs:
        assert isinstance(error, InvalidExpertId) and isinstance(error, ValueError)
        assert error.details == {"rank": guilty, "token": 3, "k": 1, "expert_id": bad}
        assert str(error).startswith(f"dispatch: rank {guilty}, token 3, k 1 has expert id {bad}")
    op_runs.check(sound, op_runs.run(clusters[3], sound))


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


def spoiled(
    clusters: Clusters,
    contract: int,
    spoil: Callable[[Case, int, list[torch.Tensor]], Case],
    unrouted: int | None = None,
) -> tuple[Case, list[Any]]:
    """A sound dispatch, then a combine that ``spoil`` may change; results or errors by rank.

    ``unrouted`` is a token of rank 1 that dispatch does not route.
    """
    case = Case(world=2, local=3, topk=3, batch=6, contract=contract, ids="distinct", seed=70)

    if unrouted is not None:
        case.inputs[1].expert_ids[unrouted] = -1

    def fn(rank: int, group_ep: str) -> Any:
        sent = list(op_runs.dispatch(case, rank, group_ep))
        rows = op_runs.expert_rows(case, rank, sent)
        try:
            return op_runs.combine(spoil(case, rank, sent), rank, group_ep, rows, sent)
        except AscendMoeError as error:
            return error

    with op_runs.cores(4):
        results = clusters[2].run(fn)
    # The communicator stays usable.
    op_runs.check(case, op_runs.run(clusters[2], case))
    return case, results


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("change", ["fewer", "others", "more", "mask"])
def test_routing_mismatch(clusters: Clusters, contract: int, change: str) -> None:
    """Other ids or another mask in combine than in dispatch: named with the expert and both numbers."""
    new = {"fewer": [-1, -1, -1], "others": [0, 0, 0], "more": [0, 3, 5]}
    kept = torch.arange(6) != 2

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        if change == "mask":
            spoilt = replace(case.inputs[1], x_active_mask=kept)
        else:
            ids = case.inputs[1].expert_ids.clone()
            ids[2] = torch.tensor(new[change])
            spoilt = replace(case.inputs[1], expert_ids=ids)
        return replace(case, given=(case.inputs[0], spoilt)) if rank == 1 else case

    case, errors = spoiled(clusters, contract, spoil, 2 if change == "more" else None)
    other, error = errors  # rank 1 raises, rank 0 has its right result
    assert type(error).__name__ == "RoutingMismatch" and error.rank == 1
    right = op_runs.run(clusters[2], case)[0]
    assert isinstance(right, op_runs.RankRun) and ref.same_bits(other, right.result)
    before = Counter(case.inputs[1].expert_ids.reshape(-1).tolist())
    spoilt = spoil(case, 1, []).inputs[1].expert_ids
    after = Counter((spoilt[kept] if change == "mask" else spoilt).reshape(-1).tolist())
    assert error.ours == after[error.expert] != before[error.expert]
    assert error.theirs == before[error.expert] and "expand_idx" not in str(error)


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("at, value", [(0, -1), (3, 0), (3, None), (5, 10**6), (5, 2**31 - 1)])
def test_counts_that_would_store_elsewhere(
    clusters: Clusters, contract: int, at: int, value: int | None
) -> None:
    """Counts that fall (None: by one) or exceed expand_x: every rank refuses."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        if rank == 1:
            sent[4][at] = sent[4][at - 1] - 1 if value is None else value
        return case

    for error in spoiled(clusters, contract, spoil)[1]:
        assert isinstance(error, ArgumentError), repr(error)
        assert (error.argument, error.rank) == ("ep_send_counts", 1)
