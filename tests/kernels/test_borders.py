"""Checks what the kernels check, one step on either side of the border: accepted there, refused here, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import op_runs
import pytest
import torch
from op_runs import Clusters

from ascend_moe import comm
from ascend_moe.errors import ArgumentError, AscendMoeError, RoutingMismatch, RoutingOverflow
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import padded

pytestmark = [pytest.mark.asan]

each_way = [
    pytest.mark.parametrize("algorithm", ["window", "direct"]),
    pytest.mark.parametrize("contract", [1, 2]),
    pytest.mark.parametrize("cores", [1, 8]),
    pytest.mark.parametrize("world", [2, 8]),  # of 8, and on several cores, vectors check, too
]


SETTINGS = {"ASCEND_MOE_COMM_ALG": "direct", "ASCEND_MOE_AIV_CORES": "1", "ASCEND_MOE_TIMEOUT_S": "5"}


def ways(test: Callable[..., None]) -> Callable[..., None]:
    for mark in each_way:
        test = mark(test)
    return test


def full(world: int, contract: int) -> Case:
    """Every rank sends rank 0 as many rows as it may: BS * min(3, 2), and the rest of K to the next rank."""
    case = Case(world=world, local=2, topk=3, batch=4, contract=contract, ids="distinct", seed=7)
    for given in case.inputs:
        given.expert_ids[:] = torch.tensor([0, 1, 2], dtype=torch.int32)
    return case


def combine_of(cluster: comm.LocalCluster, case: Case, change: Callable[[int, list[torch.Tensor]], None]) -> list[Any]:
    """By rank, what combine makes of dispatch's outputs after ``change``: its result, or the error."""

    def body(rank: int, group_ep: str) -> Any:
        sent = [tensor.clone() for tensor in op_runs.dispatch(case, rank, group_ep)]
        sent[0] = padded(op_runs.expert_rows(case, rank, sent), case, sent[0])
        change(rank, sent)
        try:
            return op_runs.combine(case, rank, group_ep, sent[0], sent)
        except AscendMoeError as error:
            return error

    return cluster.run(body)


def unchanged(rank: int, sent: list[torch.Tensor]) -> None:
    pass


def wanted(case: Case) -> list[torch.Tensor]:
    sent = case.dispatched()
    return case.combined(case.rows_of(sent), sent)


def assert_right(case: Case, results: list[Any]) -> None:
    for rank, (result, want) in enumerate(zip(results, wanted(case), strict=True)):
        assert not isinstance(result, AscendMoeError), result
        op_runs.check_combine(rank, result, want)


def assert_refused(results: list[Any], argument: str, guilty: int) -> None:
    for error in results:
        assert isinstance(error, ArgumentError), error
        assert (error.argument, error.rank) == (argument, guilty), error


# ---- ep_send_counts


@ways
def test_counts_one_step_beyond_their_borders(clusters: Clusters, contract: int, world: int) -> None:
    """As many rows as expand_x has, as a source may send, and counts that stay, are accepted."""
    case = Case(world=world, local=2, topk=2, batch=3, contract=contract, ids="distinct", seed=3)

    def exactly(rank: int, sent: list[torch.Tensor]) -> None:
        sent[0] = sent[0][: int(sent[4][case.experts - 1])].clone()

    def more_than_expand_x(rank: int, sent: list[torch.Tensor]) -> None:
        exactly(rank, sent)
        sent[4][case.experts - 1] += rank == 1

    def more_than_a_source_may_send(rank: int, sent: list[torch.Tensor]) -> None:
        if rank == 0:  # a row of rank 0 becomes one of rank 1
            sent[4][0] -= 1

    def falling(rank: int, sent: list[torch.Tensor]) -> None:
        if rank == 1:  # nobody sends rows to its second expert
            assert set(sent[4][world - 1 : 2 * world].tolist()) == {4 * world}
            sent[4][2 * world - 1] -= 1

    assert_right(case, combine_of(clusters[world], case, exactly))
    assert_refused(combine_of(clusters[world], case, more_than_expand_x), "ep_send_counts", 1)
    case = full(world, contract)
    assert_right(case, combine_of(clusters[world], case, unchanged))
    assert_refused(combine_of(clusters[world], case, more_than_a_source_may_send), "ep_send_counts", 0)
    assert_refused(combine_of(clusters[world], case, falling), "ep_send_counts", 1)


# ---- expand_idx, expert_ids


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("cores", [1, 3])
def test_a_pair_of_any_expert_that_combine_leaves_out(clusters: Clusters, contract: int) -> None:
    """Counts are compared 32 and 64 at a time: of the experts on both sides, the first and the last."""
    borders = [0, 31, 32, 63, 64, 127]
    case = Case(world=2, local=64, topk=6, batch=3, contract=contract, ids="distinct", seed=5)
    given = replace(case)
    for version in (case, given):
        version.inputs[1].expert_ids[:] = torch.tensor(borders, dtype=torch.int32)

    def body(rank: int, group_ep: str) -> AscendMoeError | None:
        sent = op_runs.dispatch(case, rank, group_ep)
        try:
            op_runs.combine(given, rank, group_ep, sent[0], sent)
        except AscendMoeError as error:
            return error
        return None

    assert clusters[2].run(body) == [None, None]
    for k, expert in enumerate(borders):
        given.inputs[1].expert_ids[1] = torch.tensor(borders, dtype=torch.int32)
        given.inputs[1].expert_ids[1, k] = -1
        other, error = clusters[2].run(body)
        assert other is None and isinstance(error, RoutingMismatch), error
        assert (error.rank, error.expert, error.ours, error.theirs) == (1, expert, 2, 3), error


@ways
def test_a_token_with_more_pairs_than_its_owner_has_experts(clusters: Clusters, contract: int, world: int) -> None:
    """A token of rank 1 has another pair for rank 0, which has no room: in dispatch, and in combine alone."""
    case, given = full(world, contract), full(world, contract)
    given.inputs[1].expert_ids[2] = torch.tensor([0, 1, 0], dtype=torch.int32)

    def body(rank: int, group_ep: str) -> list[AscendMoeError]:
        with pytest.raises(AscendMoeError) as first:
            op_runs.dispatch(given, rank, group_ep)
        sent = op_runs.dispatch(case, rank, group_ep)
        with pytest.raises(AscendMoeError) as second:
            op_runs.combine(given, rank, group_ep, sent[0], sent)
        return [first.value, second.value]

    for errors in clusters[world].run(body):
        for error in errors:
            assert isinstance(error, RoutingOverflow), error
            assert (error.rank, error.owner, error.rows, error.capacity) == (1, 0, 9, 8), error
    assert_right(case, combine_of(clusters[world], case, unchanged))


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("cores", [1, 8])  # of 8, some make the lists of direct, each of some experts
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2)])
def test_of_two_owners_without_room_the_first_is_named(
    clusters: Clusters, contract: int, cores: int, first: int, second: int
) -> None:
    case = Case(world=4, local=1, topk=4, batch=4, contract=contract, cores=cores, ids="none", batches="equal")
    case.inputs[3].expert_ids[:] = torch.tensor([second, first] * 2, dtype=torch.int32)
    for error in op_runs.run(clusters[4], case):
        assert isinstance(error, RoutingOverflow), error
        assert (error.rank, error.owner, error.rows, error.capacity) == (3, first, 8, 4), error


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("cores", [1, 8])
def test_a_wrong_source_index_of_a_rank_whose_rows_are_counted_exactly(clusters: Clusters) -> None:
    """A token with more pairs than its owner has experts makes all cores count; the owner still has room."""
    case = replace(full(2, 2))
    case.inputs[1].expert_ids[:] = torch.tensor([0, 1, 2], dtype=torch.int32)
    case.inputs[1].expert_ids[2] = torch.tensor([3, 2, 3], dtype=torch.int32)

    def other(rank: int, sent: list[torch.Tensor]) -> None:
        if rank == 1:
            sent[2][2] = 3  # k of its first row

    assert_right(case, combine_of(clusters[2], case, unchanged))
    assert_refused(combine_of(clusters[2], case, other), "assist_info_for_combine", 1)
