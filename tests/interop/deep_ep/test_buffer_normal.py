"""DeepEP's normal mode against its definitions: rows, sums, handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_ep_buffers import FP8, Case, H, each_case, empty_stack, on_all, send
from host_reads import no_host_reads
from op_runs import Clusters
from routed_tokens import randn

from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError
from ascend_moe.interop.deep_ep import Buffer


@each_case
def test_dispatch_sends_a_row_for_each_token_and_rank(clusters: Clusters, case: Case) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        x, ids, weights, numbers, handle, event = send(case, rank, buffer)
        copies = case.copies(rank)
        assert torch.equal(x, empty_stack([case.x(source)[token] for source, token in copies], x))
        first = rank * case.local
        expected = [case.ids(source)[token] - first for source, token in copies]
        own = [(row >= 0) & (row < case.local) for row in expected]
        assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and event.event is None
        expected = [torch.where(here, row, -1) for row, here in zip(expected, own, strict=True)]
        assert torch.equal(ids, empty_stack(expected, ids))
        each = [
            torch.where(here, case.weights(source)[token], 0) for (source, token), here in zip(copies, own, strict=True)
        ]
        assert torch.equal(weights, empty_stack(each, weights))
        assert numbers == [len(case.rows_of(first + expert)) for expert in range(case.local)]
        check_handle(case, rank, handle, copies)
        plain = send(case, rank, buffer, topk_idx=None, topk_weights=None)
        assert plain[1] is plain[2] is None and torch.equal(plain[0], x) and plain[3] == numbers

    on_all(clusters, case, body)


def check_handle(case: Case, rank: int, handle: Any, copies: list[tuple[int, int]]) -> None:
    prefix, channels, received, source, in_rank, head = handle
    for to in range(case.world):
        sources = [source for source, _ in case.copies(to)]
        assert prefix[:, to].tolist() == [sum(sender <= each for sender in sources) for each in range(case.world)]
        assert channels[to].item() == sum(sender == rank for sender in sources) and received[to].item() == 0
    assert source.tolist() == [token for _, token in copies]
    sent = [0] * case.world
    for token in range(case.tokens(rank)):
        for to in range(case.world):
            hit = to in case.hit(rank, token)
            assert bool(in_rank[token, to]) == hit and head[token, to].item() == (sent[to] if hit else -1)
            sent[to] += hit


@each_case
def test_combine_adds_rows_and_weights_and_a_cached_dispatch_equals_the_first(clusters: Clusters, case: Case) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        x, _, weights, _, handle, _ = send(case, rank, buffer)
        total, summed, _ = buffer.combine(x, handle, topk_weights=weights)
        assert torch.equal(total, case.sent_rows(rank).bfloat16())
        assert torch.equal(summed, torch.where(case.ids(rank) >= 0, case.weights(rank), 0))
        other = send(case, rank, buffer, x=case.x(rank) * 3)[0]
        again, *rest = buffer.dispatch(case.x(rank), handle=handle)
        assert torch.equal(again, x) and rest[:4] == [None] * 4
        assert torch.equal(buffer.dispatch(case.x(rank) * 3, handle)[0], other)
        home, none, _ = buffer.combine(again, handle)  # as in a backward pass
        assert torch.equal(home, total) and none is None

    on_all(clusters, case, body)


def test_combine_adds_up_to_two_biases(clusters: Clusters) -> None:
    case = Case(world=4)

    def body(rank: int, buffer: Buffer) -> None:
        x, _, _, _, handle, _ = send(case, rank, buffer)
        rows, shape = (x.float() * (rank + 1)).bfloat16(), (case.tokens(rank), H)
        biases = [randn(*shape, seed=7 + rank).bfloat16(), randn(*shape, seed=8 + rank).bfloat16()]
        plain = torch.zeros(shape)
        for to in range(case.world):
            hit = torch.tensor([to in case.hit(rank, token) for token in range(case.tokens(rank))])
            plain += torch.where(hit[:, None], (case.x(rank).float() * (to + 1)).bfloat16().float(), 0)
        assert torch.equal(buffer.combine(rows, handle)[0], plain.bfloat16())
        assert torch.equal(buffer.combine(rows, handle, bias=biases[0])[0], (plain + biases[0]).bfloat16())
        assert torch.equal(buffer.combine(rows.float(), handle)[0], plain)
        both = buffer.combine(rows, handle, bias=(biases[0], biases[1]))[0]
        assert torch.equal(both, (plain + biases[0] + biases[1]).bfloat16())
        wide = buffer.combine(rows.float(), handle, bias=(biases[0].float(), biases[1].float()))[0]
        assert torch.equal(wide, plain + biases[0] + biases[1])

    on_all(clusters, case, body)


@pytest.mark.parametrize("kind", ["random", "empty rank"])
def test_rows_of_fp8_travel_with_their_scales(clusters: Clusters, kind: str) -> None:
    case = Case(kind=kind)

    def body(rank: int, buffer: Buffer) -> None:
        codes = [case.x(source).to(FP8) for source in range(2)]
        scales = [randn(case.tokens(source), H // 128, seed=source) for source in range(2)]
        (x, scale), _, _, _, handle, _ = send(case, rank, buffer, x=(codes[rank], scales[rank]))
        again, _ = buffer.dispatch((codes[rank], scales[rank]), handle)[0]
        raw = [codes[source].view(torch.uint8)[token] for source, token in case.copies(rank)]
        assert x.dtype == FP8 and scale.dtype == torch.float32
        assert torch.equal(x.view(torch.uint8), empty_stack(raw, x.view(torch.uint8)))
        assert torch.equal(again.view(torch.uint8), x.view(torch.uint8))
        assert torch.equal(scale, empty_stack([scales[source][token] for source, token in case.copies(rank)], scale))

    on_all(clusters, case, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_other_types(clusters: Clusters, dtype: torch.dtype) -> None:
    case = Case()

    def body(rank: int, buffer: Buffer) -> None:
        x, _, _, _, handle, _ = send(case, rank, buffer, x=case.x(rank).to(dtype))
        assert torch.equal(x, empty_stack([case.x(source)[token].to(dtype) for source, token in case.copies(rank)], x))
        assert torch.equal(buffer.combine(x, handle)[0], case.sent_rows(rank).to(dtype))
        again = buffer.dispatch(case.x(rank).to(dtype), handle)[0]
        assert torch.equal(again, x)

    on_all(clusters, case, body)


@pytest.mark.parametrize("extra", [0, 3])
def test_a_worst_number_of_rows(clusters: Clusters, extra: int) -> None:
    case = Case(kind="empty rank")
    worst = case.world * case.most + extra

    def body(rank: int, buffer: Buffer) -> None:
        x, ids, weights, _, handle, _ = send(case, rank, buffer)
        rows, all_ids, all_weights, numbers, worst_handle, _ = send(case, rank, buffer, num_worst_tokens=worst)
        n = x.shape[0]
        assert numbers == [] and len(rows) == len(all_ids) == len(all_weights) == len(worst_handle[3]) == worst
        assert torch.equal(rows[:n], x) and torch.equal(all_ids[:n], ids) and torch.equal(all_weights[:n], weights)
        assert bool((all_ids[n:] == -1).all()) and not all_weights[n:].any() and bool((worst_handle[3][n:] == -1).all())
        total, summed, _ = buffer.combine(rows, worst_handle, all_weights)
        expected = buffer.combine(x, handle, weights)
        assert torch.equal(total, expected[0]) and torch.equal(summed, expected[1])

    def too_small(rank: int, buffer: Buffer) -> None:
        if (few := 2 * case.tokens(rank) - 1) > 0:  # it raises before anything is sent
            with pytest.raises(ArgumentError, match=rf"num_worst_tokens is {few}; .* at least {few + 1}$"):
                send(case, rank, buffer, num_worst_tokens=few)

    on_all(clusters, case, body)
    on_all(clusters, case, too_small)


def test_a_worst_number_of_rows_is_for_capture(clusters: Clusters) -> None:
    """Nothing is read on the host."""
    case = Case(world=1)

    def body(rank: int, buffer: Buffer) -> None:
        with no_host_reads():
            x, _, weights, _, handle, _ = send(case, rank, buffer, num_worst_tokens=case.most)
            buffer.combine(x, handle, weights)
            buffer.dispatch(case.x(rank), handle)

    on_all(clusters, case, body)


# ---- how many tokens go where


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", ["random", "-1", "empty rank"])
def test_layouts_are_their_definitions(clusters: Clusters, world: int, kind: str) -> None:
    case = Case(world=world, kind=kind)

    def body(rank: int, buffer: Buffer) -> None:
        ids = case.ids(rank)
        per_rank, servers, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, case.experts)
        hits = [case.hit(rank, token) for token in range(case.tokens(rank))]
        assert servers is None and event.event is None
        assert per_rank.tolist() == [sum(each in hit for hit in hits) for each in range(world)]
        assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(case.experts)]
        assert in_rank.tolist() == [[each in hit for each in range(world)] for hit in hits]
        assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool

    on_all(clusters, case, body)


# ---- between servers: a row goes once to a server, and a server's sum comes back rounded


def sum_of(case: Case, rank: int, rows: torch.Tensor, share: int) -> torch.Tensor:
    """Two roundings: of each server's sum of equal rows, and of the servers' sums."""
    total = torch.zeros(rows.shape)
    for server in range(case.world // share):
        hits = [sum(to // share == server for to in case.hit(rank, token)) for token in range(len(rows))]
        total += (rows.float() * torch.tensor(hits).view(-1, 1)).to(rows.dtype).float()
    return total.to(rows.dtype)


@pytest.mark.parametrize("kind", ["random", "-1", "one expert", "empty rank"])
@pytest.mark.parametrize("world, share", [(4, 2), (8, 2), (8, 4)], ids=["2 servers", "4 servers", "2 servers of 4"])
def test_rows_sums_and_handles(monkeypatch: pytest.MonkeyPatch, world: int, share: int, kind: str) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    case = Case(world=world, kind=kind)

    def run(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, world, rank))
        x, _, weights, _, handle, _ = send(case, rank, buffer)
        copies = case.copies(rank)
        assert torch.equal(x, empty_stack([case.x(source)[token] for source, token in copies], x))
        assert handle[3].tolist() == [token for _, token in copies]
        total, summed, _ = buffer.combine(x, handle, topk_weights=weights)
        assert torch.equal(total, sum_of(case, rank, case.x(rank), share))
        used = torch.where(case.ids(rank) >= 0, case.weights(rank), 0.0)
        assert torch.equal(summed, used)  # each weight comes from one rank: no rounding
        bias = torch.full_like(case.x(rank), 0.5)
        assert buffer.combine(x, handle, bias=(bias, bias))[0].shape == bias.shape
        assert torch.equal(buffer.dispatch(-case.x(rank), handle)[0], -x)

    with LocalCluster(world, window_mib=16) as cluster:
        cluster.run(run)
