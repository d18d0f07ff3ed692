"""One call for a layer refuses more rows than a rank takes on all ranks, and agrees on limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_op_ranks import K, L, Rank, outcomes, same
from routed_tokens import randn, routed

from ascend_moe.errors import ConfigMismatch, RoutingOverflow
from ascend_moe.layer_ops import calls
from ascend_moe.layer_ops.agreement import Limit, judge


@pytest.mark.parametrize("world", [1, 2, 4])
def test_overflow_on_one_rank_is_raised_on_all(clusters: Any, world: int) -> None:
    """Expert 1, of rank 0, gets every row: one more than the limit raises, the limit itself does not."""
    tokens = [(3 + 2 * rank) % 8 for rank in range(world)]
    arriving = sum(tokens) if world == 1 else sum(tokens) - tokens[0]

    def prepared(rank: int, extra: int = 0) -> Rank:
        mine = Rank(rank, world, tokens[rank] + extra)
        mine.ids = torch.full_like(mine.ids, -1)
        mine.ids[:, 0] = 1 if rank or world == 1 else L * world - 1
        return mine

    for name in ("max_output_size", "max_recv_token_num"):

        def body(rank: int, group: str, name: str = name) -> None:
            mine = prepared(rank)
            for limit in (arriving - 1, arriving):

                def call(limit: int = limit) -> tuple[torch.Tensor, ...]:
                    if name == "max_output_size":
                        return mine.one_call(group, limit=limit)
                    return mine.mega(mine.buffer(group, max_recv_token_num=limit))

                if limit < arriving:
                    with pytest.raises(
                        RoutingOverflow, match=f"{name} is {limit}, but {arriving} rows go to rank 0"
                    ) as raised:
                        call()
                    error = raised.value
                    assert (error.owner, error.rows, error.capacity) == (0, arriving, limit)
                else:
                    same(call(), mine.three_calls(group))

        assert outcomes(clusters[world], body) == [None] * world


@pytest.mark.parametrize("pairs", [False, True], ids=["tokens", "pairs"])
def test_masked_pairs_do_not_count(pairs: bool, clusters: Any) -> None:
    """The limit is that of the rows that are sent; an int8 mask is active where it is not 0."""

    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2)
        mine.ids[:, 0] = 1  # more for rank 0 than for rank 1
        active = randn(*(mine.ids.shape if pairs else (9,)), seed=9 + rank) > 0
        mine.mask = active
        expected = mine.three_calls(group)
        most = 0
        for other in range(2):
            ids = routed(9, 2 * L, K)
            ids[:, 0] = 1
            shape = (9, K) if pairs else (9, 1)
            most += int(((randn(*shape, seed=9 + other) > 0) & (ids < L)).sum())
        mine.mask = torch.where(active, torch.tensor([2, -1, 1])[torch.arange(active.numel()) % 3].view_as(active), 0)
        mine.mask = mine.mask.to(torch.int8)
        same(mine.one_call(group, limit=most), expected)
        same(mine.mega(mine.buffer(group, max_recv_token_num=most)), expected)
        with pytest.raises(RoutingOverflow, match=f"max_output_size is {most - 1}, but {most} rows go to rank 0"):
            mine.one_call(group, limit=most - 1)

    assert outcomes(clusters[2], body) == [None] * 2


@pytest.mark.parametrize("topk", [1, 3, 7])
def test_counts_are_compared_only_where_the_limit_can_be_reached(
    topk: int, clusters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below W * T * min(K, L) rows, of all ranks' batches: an NPU's host waits for it."""
    compared: list[int] = []
    gather_loads = calls.gather_loads

    def counted(*given: Any) -> Any:
        compared.append(given[-1].rows)
        return gather_loads(*given)

    monkeypatch.setattr(calls, "gather_loads", counted)
    most = 2 * 9 * min(topk, L)

    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2)
        mine.ids = routed(9, 2 * L, topk)
        mine.probs = randn(9, topk, seed=rank)
        for limit in (most - 1, most, most + 1):
            same(mine.one_call(group, limit=limit), mine.three_calls(group))

    clusters[2].run(body)
    assert compared == [most - 1] * 2


@pytest.mark.parametrize("mega", [False, True])
def test_ranks_of_unequal_batches_compare_counts_together(mega: bool, clusters: Any) -> None:
    """Where some could overflow by their own batch only; in mega_moe by the buffer's most tokens."""
    tokens, limits = ((1, 16), (70, 7)) if mega else ((1, 9, 9), (50, 10))

    def body(rank: int, group: str) -> Any:
        mine = Rank(rank, len(tokens), tokens[rank])

        def call(limit: int) -> Any:
            return (
                mine.mega(mine.buffer(group, max_recv_token_num=limit)) if mega else mine.one_call(group, limit=limit)
            )

        same(call(limits[0]), mine.three_calls(group))
        return call(limits[1])

    for error in outcomes(clusters[len(tokens)], body):
        assert isinstance(error, RoutingOverflow) and error.capacity == limits[1] < error.rows


def test_equal_batches_need_no_global_bs() -> None:
    """judge says what dispatch takes: 0, or W times the largest batch."""
    limit = Limit("max_output_size", 0)

    def table(*tokens: int) -> torch.Tensor:
        return torch.tensor([[each, 0, K, L, *([1] * len(tokens))] for each in tokens])

    assert judge(table(5, 5, 5), limit, 0) == 0 and judge(table(5, 0, 7), limit, 1) == 21


def test_ranks_with_different_limits(clusters: Any) -> None:
    for limits in ((0, 5, 5), (500, 5, 5), (0, 0, 7)):

        def body(rank: int, group: str, limits: tuple[int, ...] = limits) -> Any:
            return Rank(rank, 3, 4 + rank).one_call(group, limit=limits[rank])

        for rank, error in enumerate(outcomes(clusters[3], body)):
            assert isinstance(error, ConfigMismatch) and error.field == "max_output_size"
            assert error.ours == limits[rank] != error.theirs == limits[error.rank]
