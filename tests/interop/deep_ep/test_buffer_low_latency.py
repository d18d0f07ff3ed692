"""DeepEP's low-latency mode against its definitions: rows, sums, hooks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from deep_ep_buffers import BF16, Case, H, each_case, finish, low, low_rows, low_sum, on_all, send
from op_runs import Clusters

from ascend_moe.errors import ArgumentError, InvalidExpertId
from ascend_moe.interop.deep_ep import Buffer


@each_case
def test_low_latency_rows_and_sums(clusters: Clusters, case: Case) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        stats = torch.full((case.local,), 100, dtype=torch.int32)
        sent = low(case, rank, buffer, cumulative_local_expert_recv_stats=stats, async_finish=True)
        rows, count, (source, ranges, most, hidden, experts), event, hook = sent
        event.current_stream_wait()
        width = case.world * (case.most + 1)
        assert rows.shape == (case.local, width, H) and source.shape == (case.local, width)
        assert (most, hidden, experts) == (case.most + 1, H, case.experts) and hook() is None
        assert count.dtype == torch.int32 and ranges.dtype == torch.int64 and ranges.shape == (case.local, case.world)
        for expert in range(case.local):
            triples = case.rows_of(rank * case.local + expert)
            assert count[expert] == len(triples) and stats[expert] == 100 + len(triples)
            assert torch.equal(rows[expert, : len(triples)], low_rows(case, rank, expert))
            assert source[expert, : len(triples)].tolist() == [token for _, token, _ in triples]
            for each in range(case.world):
                word = int(ranges[expert, each])
                begin, number = word >> 32, word & 0xFFFFFFFF
                assert all(one == each for one, _, _ in triples[begin : begin + number])
                assert number == sum(one == each for one, _, _ in triples)
        factors = torch.tensor([2.0 ** (rank * case.local + expert) for expert in range(case.local)])
        out = torch.empty(case.tokens(rank), H, dtype=BF16)
        total = finish(case, rank, buffer, sent, x=(rows.float() * factors[:, None, None]).bfloat16(), out=out)
        assert total is out and torch.equal(out, low_sum(case, rank, lambda expert: 2.0**expert))

    on_all(clusters, case, body)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_hook_after_a_matmul_and_twice(clusters: Clusters, fp8: bool) -> None:
    case = Case(kind="-1")

    def body(rank: int, buffer: Buffer) -> None:
        whole = low(case, rank, buffer, use_fp8=fp8)
        total = finish(case, rank, buffer, whole, x=torch.ones(whole[0][0].shape if fp8 else whole[0].shape).bfloat16())
        stats = torch.zeros(case.local, dtype=torch.int32)
        rows, count, handle, _, hook = low(
            case, rank, buffer, use_fp8=fp8, return_recv_hook=True, cumulative_local_expert_recv_stats=stats
        )
        assert not count.any() and not stats.any()  # it has only sent
        with pytest.raises(ArgumentError, match="hook was not called"):
            buffer.low_latency_combine(whole[0], case.ids(rank), case.weights(rank), handle)
        assert torch.equal(torch.ones(3, 4) @ torch.ones(4, 5), torch.full((3, 5), 4.0))
        for _ in range(2):
            hook()
            assert torch.equal(count, whole[1]) and torch.equal(stats, count)
        for got, expected in zip(rows if fp8 else [rows], whole[0] if fp8 else [whole[0]], strict=True):
            assert torch.equal(got.float(), expected.float())
        assert torch.equal(handle[1], whole[2][1]) and torch.equal(handle[0], whole[2][0])
        ones = torch.ones(handle[0].shape[0], handle[0].shape[1], H).bfloat16()
        y, _, hook = buffer.low_latency_combine(ones, case.ids(rank), case.weights(rank), handle, return_recv_hook=True)
        assert not y.any()
        assert torch.equal(torch.ones(3, 4) @ torch.ones(4, 5), torch.full((3, 5), 4.0))
        for _ in range(2):
            hook()
            assert torch.equal(y, total)

    on_all(clusters, case, body)


def test_a_failure_of_the_hook_is_raised_again_and_is_over(clusters: Clusters) -> None:
    case = Case()

    def body(rank: int, buffer: Buffer) -> None:
        for _ in range(3):
            ids = torch.full_like(case.ids(rank), case.experts) if rank == 0 else case.ids(rank)
            given: Any = (case.x(rank), ids, case.most, case.experts)
            if rank == 0:  # it knows at once, the others hear of it when they receive
                with pytest.raises(InvalidExpertId):
                    buffer.low_latency_dispatch(*given, return_recv_hook=True)
                continue
            hook = buffer.low_latency_dispatch(*given, return_recv_hook=True)[4]
            for _ in range(2):
                with pytest.raises(InvalidExpertId):
                    hook()
        assert torch.equal(finish(case, rank, buffer, low(case, rank, buffer)), low_sum(case, rank))

    on_all(clusters, case, body)


def test_two_results_may_be_alive(clusters: Clusters) -> None:
    case = Case(kind="empty rank")

    def body(rank: int, buffer: Buffer) -> None:
        held = [low(case, rank, buffer, return_recv_hook=True) for _ in range(2)]
        with pytest.raises(ArgumentError, match="2 results are alive already, 1 of them with a hook") as caught:
            low(case, rank, buffer)
        assert "\n" not in str(caught.value)
        held[1][4]()
        with pytest.raises(ArgumentError, match="low_latency_dispatch: 2 results are alive"):
            low(case, rank, buffer)
        assert torch.equal(finish(case, rank, buffer, held[0]), low_sum(case, rank))
        third = low(case, rank, buffer)  # one has been combined
        held.clear()
        low(case, rank, buffer)  # one was dropped
        assert torch.equal(finish(case, rank, buffer, third), low_sum(case, rank))
        for _ in range(4):  # nobody holds these
            low(case, rank, buffer)

    on_all(clusters, case, body)


def test_micro_batches_in_turns_and_normal_mode_between(clusters: Clusters) -> None:
    """Sends of one batch while another's is open, as in two-batch overlap."""
    first, second = Case(kind="-1"), Case(topk=2)

    def body(rank: int, buffer: Buffer) -> None:
        one = low(first, rank, buffer, return_recv_hook=True)
        two = low(second, rank, buffer, return_recv_hook=True)  # it receives the first one
        one[4]()
        given, out = (first.ids(rank), first.weights(rank), one[2]), torch.empty(first.tokens(rank), H, dtype=BF16)
        y, _, home = buffer.low_latency_combine(one[0], *given, return_recv_hook=True, out=out)
        two[4]()
        normal = send(first, rank, buffer)  # the combine receives
        assert y is out and torch.equal(y, low_sum(first, rank))
        home()
        buffer.clean_low_latency_buffer(first.most, H, first.experts)
        assert torch.equal(finish(second, rank, buffer, two), low_sum(second, rank))
        assert normal[0].shape[0] == len(first.copies(rank))

    on_all(clusters, first, body)


def test_zero_copy(clusters: Clusters) -> None:
    case = Case(kind="-1")

    def body(rank: int, buffer: Buffer) -> None:
        sent = low(case, rank, buffer)
        for _ in range(2):  # rows serve one combine: the second does not send those of the first
            with pytest.raises(ArgumentError, match="zero_copy needs get_next_low_latency_combine_buffer"):
                finish(case, rank, buffer, sent, zero_copy=True)
            rows = buffer.get_next_low_latency_combine_buffer(sent[2])
            assert rows.shape == sent[0].shape and rows.dtype == BF16
            rows.copy_(sent[0])
            total = finish(case, rank, buffer, sent, x=torch.empty_like(rows), zero_copy=True)
            assert torch.equal(total, low_sum(case, rank))

    on_all(clusters, case, body)


# ---- costs


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
