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
    sound = Case(world=3, local=2, topk=3, batch=5, contract=contract, seed=50, cores=4)
    broken = Case(world=3, local=2, topk=3, batch=5, contract=contract, seed=50, cores=4)
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
            live = (
                one.x_active_mask
                if one.x_active_mask.dim() == 2
                else one.x_active_mask[:, None].expand(-1, 4)
            )
            one.expert_ids[~live] = 12345
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


def right_result(clusters: Clusters, case: Case, rank: int) -> torch.Tensor:
    one = op_runs.run(clusters[2], case)[rank]
    assert isinstance(one, op_runs.RankRun)
    return one.result


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("change", ["fewer", "others", "more"])
def test_routing_mismatch(clusters: Clusters, contract: int, change: str) -> None:
    """Other ids in combine than in dispatch: raised where it is seen, with the expert and both numbers."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        ids = case.inputs[1].expert_ids.clone()
        ids[2] = torch.tensor({"fewer": [-1, -1, -1], "others": [0, 0, 0], "more": [0, 3, 5]}[change])
        inputs = [case.inputs[0], replace(case.inputs[1], expert_ids=ids)]
        return replace(case, given=tuple(inputs)) if rank == 1 else case

    unrouted = 2 if change == "more" else None
    case, (other, error) = spoiled(clusters, contract, spoil, unrouted)
    assert type(error).__name__ == "RoutingMismatch" and error.rank == 1
    before = Counter(case.inputs[1].expert_ids.reshape(-1).tolist())
    after = Counter(spoil(case, 1, []).inputs[1].expert_ids.reshape(-1).tolist())
    assert error.ours == after[error.expert] != before[error.expert]
    assert error.theirs == before[error.expert] and "expand_idx" not in str(error)
    assert ref.same_bits(other, right_result(clusters, case, 0))


def test_mask_for_one_op_only(clusters: Clusters) -> None:
    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        masked = replace(case.inputs[0], x_active_mask=torch.arange(6) < 5)
        return replace(case, given=(masked, case.inputs[1])) if rank == 0 else case

    _, (error, other) = spoiled(clusters, 1, spoil)
    assert type(error).__name__ == "RoutingMismatch" and error.rank == 0
    assert isinstance(other, torch.Tensor)


def test_expand_idx_out_of_its_expert(clusters: Clusters) -> None:
    for value in (-1, 6, 1000, 2**31 - 1):

        def spoil(case: Case, rank: int, sent: list[torch.Tensor], value: int = value) -> Case:
            if rank == 1:
                sent[2][7] = value
            return case

        case, (other, error) = spoiled(clusters, 1, spoil)
        assert type(error).__name__ == "RoutingMismatch" and error.rank == 1
        assert error.expert == int(case.inputs[1].expert_ids.reshape(-1)[7]) and error.theirs == value
        assert ref.same_bits(other, right_result(clusters, case, 0))


@pytest.mark.parametrize("word, value", [(0, 2), (0, -1), (1, 6), (1, -1), (2, 3), (2, -1)])
def test_triple_out_of_range(clusters: Clusters, word: int, value: int) -> None:
    """Would store outside of a window or of its slot: refused on every rank."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        if rank == 1:
            sent[2][3 * 4 + word] = value
        return case

    _, errors = spoiled(clusters, 2, spoil)
    for error in errors:
        assert isinstance(error, ArgumentError), repr(error)
        assert (error.argument, error.rank) == ("assist_info_for_combine", 1)


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("at, value", [(0, -1), (3, 0), (3, None), (5, 10**6), (5, 2**31 - 1)])
def test_ep_send_counts_that_are_none(clusters: Clusters, at: int, value: int | None, contract: int) -> None:
    """Negative, falling (None: by one) or more than expand_x's rows: refused on every rank."""

    def spoil(case: Case, rank: int, sent: list[torch.Tensor]) -> Case:
        if rank == 0:
            sent[4][at] = sent[4][at - 1] - 1 if value is None else value
        return case

    _, errors = spoiled(clusters, contract, spoil)
    for error in errors:
        assert isinstance(error, ArgumentError), repr(error)
        assert (error.argument, error.rank) == ("ep_send_counts", 0)
