"""How long a Buffer's calls waited for each rank, added where the caller wants it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from deep_ep_buffers import Case, finish, low, low_sum, on_all
from op_runs import Clusters

from ascend_moe.errors import ArgumentError

LATE_S, TRIES = 0.04, 3


@pytest.mark.parametrize(("hook", "matrix"), [(False, False), (True, True)])
def test_the_rank_that_came_late_is_the_one_that_is_waited_for(clusters: Clusters, hook: bool, matrix: bool) -> None:
    """Rank 1 begins last. On a loaded machine another may begin as late, so the longest of some tries counts."""
    case = Case(world=3)
    barrier = threading.Barrier(3)

    def late(rank: int) -> None:
        barrier.wait(20)
        if rank == 1:
            threading.Event().wait(LATE_S)

    def once(rank: int, buffer: Any) -> list[torch.Tensor]:
        """µs that the two calls waited for each rank."""
        costs = torch.full((2, 3, 3) if matrix else (2, 3), 7)
        late(rank)
        given: dict[str, Any] = {"return_recv_hook": hook, "dispatch_wait_recv_cost_stats": costs[0]}
        sent = low(case, rank, buffer, **given)
        if hook:
            assert bool((costs == 7).all())  # it has only sent
        sent[4]()
        late(rank)
        given = {"return_recv_hook": hook, "combine_wait_recv_cost_stats": costs[1]}
        out, _, receive = buffer.low_latency_combine(sent[0], case.ids(rank), case.weights(rank), sent[2], **given)
        receive()
        assert torch.equal(out, low_sum(case, rank))
        if matrix:
            assert bool((costs[:, torch.arange(3) != rank] == 7).all())
        return [(each[rank] if matrix else each) - 7 for each in costs]

    def body(rank: int, buffer: Any) -> None:
        tries = [once(rank, buffer) for _ in range(TRIES)]
        for waited in zip(*tries, strict=True):
            assert all(bool((each >= 0).all()) for each in waited)
            if rank != 1:
                longest = max(int(each[1]) for each in waited)
                assert longest >= LATE_S * 5e5 and min(int(each[rank]) for each in waited) < longest

    on_all(clusters, case, body)


def test_costs_that_do_not_fit(clusters: Clusters) -> None:
    case = Case(world=1)

    def body(rank: int, buffer: Any) -> None:
        sent = low(case, rank, buffer)
        for wrong, text in (
            (torch.zeros(2, dtype=torch.int64), r"is \(2,\); it must be \(1,\) or \(1, 1\)"),
            (torch.zeros(1), "is torch.float32; it must be int64 or int32"),
            (torch.zeros(1, dtype=torch.int64, device="meta"), "is on meta, x on cpu; move it there"),
        ):
            with pytest.raises(ArgumentError, match=f"dispatch_wait_recv_cost_stats {text}"):
                low(case, rank, buffer, dispatch_wait_recv_cost_stats=wrong)
            with pytest.raises(ArgumentError, match=f"combine_wait_recv_cost_stats {text}"):
                finish(case, rank, buffer, sent, combine_wait_recv_cost_stats=wrong)

    on_all(clusters, case, body)
