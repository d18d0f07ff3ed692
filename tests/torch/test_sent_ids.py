"""The ids of dispatch and combine are compared: permuted ones would give sums of other rows, and nothing else would."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_moe import begin_combine, begin_dispatch, ops
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError, RoutingMismatch
from ascend_moe.ops import registration, sent_ids

WORLD, EXPERTS, TOKENS, TOPK, HIDDEN = 2, 4, 6, 2, 32
Trip = Callable[[int, str, Tensor, Any, Tensor, Any], Tensor]


def drawn(seed: object) -> tuple[Tensor, Tensor]:
    """Ids of a rank, and others by which every expert has as many rows: two pairs have changed places."""
    draw = random.Random(str(seed))
    ids = torch.tensor([draw.sample(range(EXPERTS), TOPK) for _ in range(TOKENS)], dtype=torch.int32)
    while True:
        other = ids.clone()
        first, second = ((draw.randrange(TOKENS), draw.randrange(TOPK)) for _ in range(2))
        other[first], other[second] = ids[second], ids[first]
        if not torch.equal(ids, other):
            return ids, other


def both(seed: object) -> tuple[list[Tensor], list[Tensor]]:
    """`drawn` of all ranks."""
    drawn_of = [drawn((seed, rank)) for rank in range(WORLD)]
    return [ids for ids, _ in drawn_of], [other for _, other in drawn_of]


def rows_of(rank: int) -> Tensor:
    return torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN) + 1000 * rank


def by(dispatch: Any, combine: Any) -> Trip:
    def trip(rank: int, group: str, ids: Tensor, mask: Any, other: Tensor, other_mask: Any) -> Tensor:
        at = (group, WORLD, rank, EXPERTS)
        sent = dispatch(rows_of(rank), ids, *at, x_active_mask=mask)
        weights = torch.ones(TOKENS, TOPK)
        made: Tensor = combine(sent[0], other, sent[2], sent[4], weights, *at, x_active_mask=other_mask)
        return made

    return trip


v1 = by(torch.ops.ascend_moe.npu_moe_distribute_dispatch, torch.ops.ascend_moe.npu_moe_distribute_combine)
v2 = by(ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_combine_v2)


def in_two(rank: int, group: str, ids: Tensor, mask: Any, other: Tensor, other_mask: Any) -> Tensor:
    at = {"group_ep": group, "ep_world_size": WORLD, "ep_rank_id": rank, "moe_expert_num": EXPERTS}
    sent = begin_dispatch(x=rows_of(rank), expert_ids=ids, x_active_mask=mask, **at).finish()
    given = {"assist_info_for_combine": sent[2], "ep_send_counts": sent[4], "expert_scales": torch.ones(TOKENS, TOPK)}
    opened = begin_combine(expand_x=sent[0], expert_ids=other, x_active_mask=other_mask, **given, **at)
    return opened.finish()


TRIPS = [v1, v2, in_two]


def outcomes(clusters: Any, trip: Trip, *given: Any) -> list[Any]:
    def run(rank: int, group: str) -> Any:
        try:
            return trip(rank, group, *(value[rank] if isinstance(value, list) else value for value in given))
        except ArgumentError as error:
            return error

    return clusters[WORLD].run(run)


@pytest.mark.parametrize("trip", TRIPS, ids=["v1", "v2", "in two"])
def test_ids_that_changed_places_are_refused(trip: Trip, clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if trip is v2:
        ids, other = both(str(TRIPS.index(trip)))
        missed = outcomes(clusters, trip, ids, None, other, None)
        right = outcomes(clusters, trip, ids, None, ids, None)
        assert not any(torch.equal(*each) for each in zip(missed, right, strict=True)), "combine alone does not see it"
    monkeypatch.setenv("ASCEND_MOE_CHECK_ROUTING", "1")
    for number in range(6):
        ids, other = both((str(TRIPS.index(trip)), number))
        for rank, error in enumerate(outcomes(clusters, trip, ids, None, other, None)):
            assert isinstance(error, ArgumentError) and error.argument == "expert_ids"
            token, k = (ids[rank] != other[rank]).nonzero()[0].tolist()
            text = f"of token {token}, k {k} is {other[rank][token, k]}, which dispatch had as {ids[rank][token, k]}"
            assert text in str(error)
        clones = [each.clone() for each in ids]
        got = outcomes(clusters, trip, ids, None, clones, None)
        assert all(torch.equal(y, 2 * rows_of(rank)) for rank, y in enumerate(got))


@pytest.mark.parametrize("trip", TRIPS, ids=["v1", "v2", "in two"])
def test_only_pairs_that_are_routed_count(trip: Trip, clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CHECK_ROUTING", "1")
    ids, _ = drawn(str(TRIPS.index(trip)))
    mask = torch.tensor([True] * (TOKENS - 1) + [False])
    other = ids.clone()
    other[-1] = 99  # of a token that is not active
    wide = mask[:, None].expand(TOKENS, TOPK).contiguous()
    for one, two in ((mask, mask), (mask, wide), (wide, mask)):
        got = outcomes(clusters, trip, ids, one, other, two)
        assert all(torch.equal(y[:-1], 2 * rows_of(rank)[:-1]) for rank, y in enumerate(got)), got
    for one, two in ((mask, None), (None, mask), (mask, mask.flip(0))):
        errors = outcomes(clusters, trip, ids, one, ids, two)
        assert all(isinstance(error, ArgumentError) and "-1: not routed" in str(error) for error in errors)
    odd = outcomes(clusters, trip, ids, None, ids, mask[:2])  # the op's own rule
    assert all(isinstance(error, ArgumentError) and "x_active_mask has shape" in str(error) for error in odd)


def test_ids_changed_in_place_under_a_dispatcher(clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, group: str) -> str:
        ids, other = drawn(rank)
        dispatcher = MC2Dispatcher(group, WORLD, rank, EXPERTS)
        sent = dispatcher.dispatch(rows_of(rank), ids)
        kept = ids.clone()
        ids.copy_(other)
        with pytest.raises(ArgumentError) as caught:
            dispatcher.combine(sent.expand_x, sent, torch.ones(TOKENS, TOPK))
        ids.copy_(kept)
        assert torch.equal(dispatcher.combine(sent.expand_x, sent, torch.ones(TOKENS, TOPK)), 2 * rows_of(rank))
        return str(caught.value)

    monkeypatch.setenv("ASCEND_MOE_CHECK_ROUTING", "1")
    assert all("which dispatch had as" in text for text in clusters[WORLD].run(run))


def test_gradients_pass(clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, group: str) -> Tensor:
        ids, _ = drawn(rank)
        dispatcher = MC2Dispatcher(group, WORLD, rank, EXPERTS)
        x = rows_of(rank).requires_grad_()
        first = dispatcher.dispatch(x, ids)
        second = dispatcher.dispatch(x * 2, ids.flip(0).contiguous())  # two pairs are open
        y = dispatcher.combine(second.expand_x * 1, second, torch.ones(TOKENS, TOPK))
        y = y + dispatcher.combine(first.expand_x * 1, first, torch.ones(TOKENS, TOPK))
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    monkeypatch.setenv("ASCEND_MOE_CHECK_ROUTING", "1")
    assert all(torch.equal(grad, torch.full_like(grad, 6)) for grad in clusters[WORLD].run(run))


def test_nothing_stays_when_the_results_are_gone(clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CHECK_ROUTING", "1")
    ids, other = drawn(1)
    outcomes(clusters, v2, ids, None, ids, None)
    gc.collect()
    for _ in range(20):
        outcomes(clusters, v2, ids, None, ids, None)
    assert len(registration._sent_ids.stored) <= 2 * WORLD
    # A copy of assist_info_for_combine is nobody's.
    known, index = sent_ids.SentIdStore(), torch.zeros(3)
    known.add(index, ids)
    assert known.checked("expert_ids", index.clone(), other) is other
    with pytest.raises(ArgumentError, match="expert_ids of token"):
        known.checked("expert_ids", index[:1], other)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_compiled_pair_is_compared(backend: str, clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CHECK_ROUTING", "1")

    def run(rank: int, group: str) -> None:
        def step(x: Tensor, ids: Tensor, other: Tensor, weights: Tensor) -> Tensor:
            at = (group, 1, 0, EXPERTS)
            sent = torch.ops.ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *at)
            return torch.ops.ascend_moe.npu_moe_distribute_combine_v2(  # type: ignore[no-any-return]
                sent[0], other, sent[2], sent[4], weights, *at
            )

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        ids, other = drawn(backend)
        weights = torch.ones(TOKENS, TOPK)
        assert torch.equal(compiled(rows_of(0), ids, ids.clone(), weights), 2 * rows_of(0))
        with pytest.raises(ArgumentError, match="which dispatch had as"):
            compiled(rows_of(0), ids, other, weights)

    clusters[1].run(run)


def test_on_an_npu_other_ids_become_those_of_nobody(clusters: Any) -> None:
    """The way without a host read, here on CPU tensors; the kernels then raise."""

    def run(rank: int, group: str) -> None:
        ids, other = drawn(rank)
        assert torch.equal(sent_ids._or_nobody(ids, ids.clone(), ids), ids)
        nobody = sent_ids._or_nobody(other, other, ids)
        assert (nobody == -1).all() and nobody.dtype == ids.dtype
        with pytest.raises(RoutingMismatch):
            v2(rank, group, ids, None, nobody, None)

    clusters[WORLD].run(run)
