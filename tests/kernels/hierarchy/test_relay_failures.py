"""comm_alg "hierarchy" between servers when ranks differ, are wrong or do not come: every rank names the culprit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import op_runs
import pytest

from ascend_moe import LocalCluster
from ascend_moe.errors import AscendMoeError, CommTimeout, ConfigMismatch, RoutingMismatch
from ascend_moe.reference.cases import Case, legal

CASE = legal(Case(world=4, local=2, topk=3, share=2, batches="global_bs", cores=2, seed=5))
DEADLINE = 0.5


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", "a2")
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", str(DEADLINE))
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", str(CASE.cores))


def raised(call: Any, *args: Any) -> Exception:
    try:
        call(*args)
    except AscendMoeError as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("op", "absent"),
    [
        ("dispatch", 0),
        ("combine", 3),
        pytest.param("dispatch", 3, marks=pytest.mark.nightly),
        pytest.param("combine", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_does_not_come_is_named_by_all(op: str, absent: int) -> None:
    """Its server waits for it, its lane waits for its records, and whoever relays tells the others."""

    def body(rank: int, group_ep: str) -> tuple[Exception, Exception, float] | None:
        sent = op_runs.dispatch(CASE, rank, group_ep)
        rows = op_runs.expert_rows(CASE, rank, sent)
        if rank == absent:
            time.sleep(DEADLINE + 1)
            return None
        begun = time.monotonic()
        if op == "dispatch":
            first = raised(op_runs.dispatch, CASE, rank, group_ep)
        else:
            first = raised(op_runs.combine, CASE, rank, group_ep, rows, sent)
        waited = time.monotonic() - begun
        return first, raised(op_runs.dispatch, CASE, rank, group_ep), waited

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        for rank, found in enumerate(cluster.run(body)):
            if rank == absent:
                continue
            first, again, waited = found
            assert isinstance(first, CommTimeout) and first.details["rank"] == absent, (rank, first)
            assert isinstance(again, CommTimeout) and again.details["rank"] == absent, (rank, again)
            assert waited < DEADLINE + 2


@pytest.mark.parametrize("other", [0, 3])
def test_another_configuration_is_named_by_all(other: int) -> None:
    """It stops rows on both levels, and no message; the group works on."""

    def body(rank: int, group_ep: str) -> tuple[Exception, Exception, op_runs.RankRun | AscendMoeError]:
        wide = replace(CASE, units=4) if rank == other else CASE
        first = raised(op_runs.dispatch, wide, rank, group_ep)
        more = replace(CASE, topk=2) if rank == other else CASE
        return first, raised(op_runs.dispatch, more, rank, group_ep), op_runs.run_rank(CASE, rank, group_ep)

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        found = cluster.run(body)
    for first, second, _ in found:
        assert isinstance(first, ConfigMismatch) and first.details["field"] == "H"
        assert isinstance(second, ConfigMismatch) and second.details["field"] == "K"
    op_runs.check(CASE, [good for _, _, good in found])


def test_other_ids_in_combine_are_this_ranks_error_alone() -> None:
    """A server returns sums of dispatch's tokens: the rank whose ids have changed says so, the others get theirs."""
    odd = 1

    def body(rank: int, group_ep: str) -> op_runs.RankRun | AscendMoeError:
        sent = op_runs.dispatch(CASE, rank, group_ep)
        rows = op_runs.expert_rows(CASE, rank, sent)
        changed = {"expert_ids": CASE.inputs[rank].expert_ids * 0 - 1} if rank == odd else {}
        try:
            result = op_runs.validate_run.combine(
                op_runs.DevicePlace(group_ep, CASE.world, rank), CASE, rows, sent, **changed
            )
        except AscendMoeError as error:
            return error
        return op_runs.RankRun(sent, rows, result, [])

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        found = cluster.run(body)
        assert isinstance(found[odd], RoutingMismatch) and found[odd].details["rank"] == odd
        want = CASE.combined([op_runs.expert_rows(CASE, r, (d.expand_x, d.dynamic_scales, 0, 0, d.ep_recv_counts))
                              for r, d in enumerate(CASE.dispatched())], CASE.dispatched())  # fmt: skip
        for rank, outcome in enumerate(found):
            if rank != odd:
                op_runs.check_combine(rank, outcome.result, want[rank])
        op_runs.check(CASE, cluster.run(lambda rank, group_ep: op_runs.run_rank(CASE, rank, group_ep)))
