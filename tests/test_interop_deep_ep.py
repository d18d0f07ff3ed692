"""DeepEP's Buffer against its definitions: layouts, rows, sums, hooks; sgl-kernel-npu's flavour against the V2 ops."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_processes
from op_runs import Clusters
from routed_tokens import randn, routed

import ascend_moe
from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError, InvalidExpertId, RoutingOverflow, WindowTooSmall
from ascend_moe.experts import grouped_mlp
from ascend_moe.interop import deep_ep
from ascend_moe.interop.deep_ep import AscendBuffer, Buffer, Config, EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.place import Place

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
H = 256
KINDS = ["random", "one expert", "an expert without tokens", "-1", "empty rank"]


@dataclass(frozen=True)
class Case:
    """What all ranks have, by a rank's number; every rank can tell what the others hold."""

    world: int = 2
    local: int = 3
    topk: int = 3
    kind: str = "random"
    hidden: int = H

    @property
    def experts(self) -> int:
        return self.world * self.local

    def tokens(self, rank: int) -> int:
        return 0 if self.kind == "empty rank" and rank == 1 % self.world else 5 + 2 * (rank % 4)

    @property
    def most(self) -> int:
        return max(map(self.tokens, range(self.world)))

    def ids(self, rank: int) -> torch.Tensor:
        ids = routed(self.tokens(rank), self.experts, self.topk, self.kind).long()
        shifted = torch.where(ids >= 0, (ids + rank) % self.experts, -1)
        if self.kind == "one expert":
            shifted = torch.full_like(ids, -1)
            shifted[:, 1] = 1
        return ids if self.kind == "an expert without tokens" else shifted

    def x(self, rank: int) -> torch.Tensor:
        return randn(self.tokens(rank), self.hidden, seed=rank).bfloat16()

    def weights(self, rank: int) -> torch.Tensor:
        return randn(self.tokens(rank), self.topk, seed=100 + rank).abs()

    def owner(self, expert: int) -> int:
        return expert // self.local if expert >= 0 else -1

    def hit(self, rank: int, token: int) -> list[int]:
        """Ranks of a token's experts, ascending."""
        return sorted({self.owner(expert) for expert in self.ids(rank)[token].tolist()} - {-1})

    def copies(self, rank: int) -> list[tuple[int, int]]:
        """(source rank, token) of each row that a rank receives in normal mode."""
        sources = [(source, token) for source in range(self.world) for token in range(self.tokens(source))]
        return [(source, token) for source, token in sources if rank in self.hit(source, token)]

    def rows_of(self, expert: int) -> list[tuple[int, int, int]]:
        """(source rank, token, k) of each row of an expert."""
        return [
            (source, token, k)
            for source in range(self.world)
            for token, ids in enumerate(self.ids(source).tolist())
            for k, id in enumerate(ids)
            if id == expert
        ]


CASES = [Case(kind=kind) for kind in KINDS] + [Case(world=world, kind="-1") for world in (1, 4, 8)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.world}")


def on_all(clusters: Clusters, case: Case, body: Callable[[int, Buffer], Any], flavour: str = "deepep") -> list[Any]:
    def run(rank: int, group_ep: str) -> Any:
        return body(rank, Buffer((group_ep, case.world, rank), flavour=flavour))

    return clusters[case.world].run(run)


def send(case: Case, rank: int, buffer: Buffer, **changes: Any) -> tuple[Any, ...]:
    """Normal dispatch of a rank's tokens."""
    ids = case.ids(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, case.experts)
    given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    given |= {"x": case.x(rank), "topk_idx": ids, "topk_weights": case.weights(rank)}
    return buffer.dispatch(**{**given, **changes})  # type: ignore[arg-type]


def empty_stack(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like[:0]


# ---- layouts


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


@pytest.mark.parametrize("world", [1, 3, 17])
def test_gather(world: int) -> None:
    def run(rank: int, group_ep: str) -> None:
        table = Place(group_ep, world, rank).gather(torch.arange(5, dtype=torch.int32) - rank)
        assert table.tolist() == [[number - each for number in range(5)] for each in range(world)]

    with LocalCluster(world) as cluster:
        cluster.run(run)


# ---- normal mode


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

    on_all(clusters, case, body)


def check_handle(case: Case, rank: int, handle: Any, copies: list[tuple[int, int]]) -> None:
    prefix, channels, received, source, in_rank, head = handle
    for to in range(case.world):
        sources = [source for source, _ in case.copies(to)]
        assert prefix[:, to].tolist() == [sum(one <= each for one in sources) for each in range(case.world)]
        assert channels[to].item() == sum(one == rank for one in sources) and received[to].item() == 0
    assert source.tolist() == [token for _, token in copies]
    sent = [0] * case.world
    for token in range(case.tokens(rank)):
        for to in range(case.world):
            hit = to in case.hit(rank, token)
            assert bool(in_rank[token, to]) == hit and head[token, to].item() == (sent[to] if hit else -1)
            sent[to] += hit


@each_case
def test_combine_adds_rows_and_weights(clusters: Clusters, case: Case) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        x, _, weights, _, handle, _ = send(case, rank, buffer)
        total, summed, _ = buffer.combine(x, handle, topk_weights=weights)
        hits = torch.tensor([len(case.hit(rank, token)) for token in range(case.tokens(rank))])
        assert torch.equal(total, (case.x(rank).float() * hits[:, None]).bfloat16())
        assert torch.equal(summed, torch.where(case.ids(rank) >= 0, case.weights(rank), 0))
        assert buffer.combine(x, handle)[1] is None

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


@each_case
def test_a_cached_dispatch_equals_the_first(clusters: Clusters, case: Case) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        x, _, _, _, handle, _ = send(case, rank, buffer)
        other = send(case, rank, buffer, x=case.x(rank) * 3)[0]
        again, *rest = buffer.dispatch(case.x(rank), handle=handle)
        assert torch.equal(again, x) and rest[:4] == [None] * 4
        assert torch.equal(buffer.dispatch(case.x(rank) * 3, handle)[0], other)
        # What backward passes do: gradients of rows come home, those of sums go out again.
        assert torch.equal(buffer.combine(again, handle)[0], buffer.combine(x, handle)[0])

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
        hits = torch.tensor([len(case.hit(rank, token)) for token in range(case.tokens(rank))])
        assert torch.equal(buffer.combine(x, handle)[0], (case.x(rank).float() * hits[:, None]).to(dtype))
        again = buffer.dispatch(case.x(rank).to(dtype), handle)[0]
        assert torch.equal(again, x)

    on_all(clusters, case, body)


def test_alignment_rounds_counts_up(clusters: Clusters) -> None:
    case = Case(kind="an expert without tokens")

    def body(rank: int, buffer: Buffer) -> None:
        exact, aligned = send(case, rank, buffer)[3], send(case, rank, buffer, expert_alignment=8)[3]
        assert aligned == [-(-number // 8) * 8 for number in exact]
        assert rank or 0 in aligned

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
        if case.tokens(rank):  # it raises before anything is sent
            with pytest.raises(ArgumentError, match=rf"num_worst_tokens is 1; .* at least {2 * case.tokens(rank)}$"):
                send(case, rank, buffer, num_worst_tokens=1)

    on_all(clusters, case, body)
    on_all(clusters, case, too_small)


def test_a_worst_number_of_rows_is_for_capture(clusters: Clusters) -> None:
    """Nothing is read on the host."""
    case = Case(world=1)

    def body(rank: int, buffer: Buffer) -> None:
        with pytest.MonkeyPatch.context() as patch:

            def read(*_: Any) -> None:
                raise AssertionError("a value is read on the host")

            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, read)
            x, _, weights, _, handle, _ = send(case, rank, buffer, num_worst_tokens=case.most)
            buffer.combine(x, handle, weights)
            buffer.dispatch(case.x(rank), handle)

    on_all(clusters, case, body)


def test_a_dispatch_without_ids(clusters: Clusters) -> None:
    case = Case(world=4)

    def body(rank: int, buffer: Buffer) -> None:
        x, ids, weights, numbers, _, _ = send(case, rank, buffer, topk_idx=None, topk_weights=None)
        expected = send(case, rank, buffer)
        assert ids is None and weights is None and torch.equal(x, expected[0]) and numbers == expected[3]

    on_all(clusters, case, body)


def test_two_handles_may_be_open_at_once(clusters: Clusters) -> None:
    case, other = Case(kind="-1"), Case(local=2, topk=2)

    def body(rank: int, buffer: Buffer) -> None:
        first, second = send(case, rank, buffer), send(other, rank, buffer)
        alone = buffer.combine(first[0], first[4])[0], buffer.combine(second[0], second[4])[0]
        assert torch.equal(buffer.combine(second[0], second[4])[0], alone[1])
        assert torch.equal(buffer.combine(first[0], first[4])[0], alone[0])

    on_all(clusters, case, body)


# ---- low latency


def low(case: Case, rank: int, buffer: Any, **changes: Any) -> Any:
    """Low-latency dispatch of a rank's tokens, bf16 where nothing else is asked for."""
    given = {"use_fp8": False, **changes}
    return buffer.low_latency_dispatch(case.x(rank), case.ids(rank), case.most + 1, case.experts, **given)


def low_rows(case: Case, rank: int, expert: int) -> torch.Tensor:
    """The rows of a local expert."""
    rows = [case.x(source)[token] for source, token, _ in case.rows_of(rank * case.local + expert)]
    return empty_stack(rows, torch.empty(0, case.hidden, dtype=BF16))


def low_sum(case: Case, rank: int, factor: Callable[[int], float] = lambda _: 1.0) -> torch.Tensor:
    """What combine gives when every expert has multiplied its rows by a factor that bf16 holds."""
    total = torch.zeros(case.tokens(rank), case.hidden)
    for k in range(case.topk):
        for token, expert in enumerate(case.ids(rank)[:, k].tolist()):
            if expert >= 0:
                row = (case.x(rank)[token].float() * factor(expert)).bfloat16().float()
                total[token] += row * case.weights(rank)[token, k]
    return total.bfloat16()


def finish(case: Case, rank: int, buffer: Any, sent: Any, **changes: Any) -> torch.Tensor:
    given = {"x": sent[0], **changes}
    return buffer.low_latency_combine(given.pop("x"), case.ids(rank), case.weights(rank), sent[2], **given)[0]  # type: ignore[no-any-return]


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


def reference_cast(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Group by group."""
    codes, scales = torch.empty(x.shape, dtype=FP8), torch.empty(x.shape[0], x.shape[1] // 128)
    for row in range(x.shape[0]):
        for group in range(x.shape[1] // 128):
            part = x[row, group * 128 : group * 128 + 128].float()
            top = max(part.abs().max(), torch.tensor(1e-4))
            scale, factor = top / 448.0, torch.tensor(448.0) / top
            if round_scale:
                scale = torch.tensor(2.0) ** torch.tensor(float(scale)).double().log2().ceil().float()
                factor = 1 / scale
            codes[row, group * 128 : group * 128 + 128] = (part * factor).to(FP8)
            scales[row, group] = scale
    return codes, scales


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("kind", ["-1", "empty rank"])
def test_low_latency_fp8_rows_equal_a_reference_cast(clusters: Clusters, kind: str, round_scale: bool) -> None:
    case = Case(kind=kind)

    def body(rank: int, buffer: Buffer) -> None:
        sent = low(case, rank, buffer, use_fp8=True, round_scale=round_scale)
        (codes, scales), count, *_ = sent
        assert codes.dtype == FP8 and scales.shape == (*codes.shape[:2], H // 128) and scales.stride(1) == 1
        for expert in range(case.local):
            expected, factors = reference_cast(low_rows(case, rank, expert), round_scale)
            n = int(count[expert])
            assert torch.equal(codes[expert, :n].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(scales[expert, :n], factors)
        back = codes.float().view(*codes.shape[:2], -1, 128) * scales.unsqueeze(3)
        total = finish(case, rank, buffer, sent, x=back.view(codes.shape).bfloat16())
        torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.1, atol=0.3)

    on_all(clusters, case, body)


def test_zeros_and_powers_of_two_as_fp8() -> None:
    from ascend_moe.interop.deep_ep.rows import cast_fp8

    x = torch.zeros(2, 128, dtype=BF16)
    x[1, 0] = 448.0
    for round_scale in (False, True):
        codes, scales = cast_fp8(x, round_scale)
        expected, factors = reference_cast(x, round_scale)
        assert torch.equal(codes.float(), expected.float()) and torch.equal(scales, factors)
        assert codes[1, 0].float() == 448.0 and scales[1, 0] == 1.0


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


def test_with_a_hook_nobody_is_waited_for(clusters: Clusters) -> None:
    case = Case()
    dispatched, combined = threading.Event(), threading.Event()

    def body(rank: int, buffer: Buffer) -> None:
        for event in (dispatched, combined):
            if rank == 1:
                assert event.wait(15)
            if event is dispatched:
                sent = low(case, rank, buffer, return_recv_hook=True)
            else:
                given = case.ids(rank), case.weights(rank), sent[2]
                y, _, home = buffer.low_latency_combine(sent[0], *given, return_recv_hook=True)
            event.set()  # rank 0 has sent before rank 1 begins
            (sent[4] if event is dispatched else home)()
        assert torch.equal(y, low_sum(case, rank))

    on_all(clusters, case, body)


def test_a_hook_that_is_never_called_raises_at_the_third_dispatch(clusters: Clusters) -> None:
    case = Case()

    def body(rank: int, buffer: Buffer) -> None:
        expected = low(case, rank, buffer)
        finish(case, rank, buffer, expected)
        sent = [low(case, rank, buffer, return_recv_hook=True) for _ in range(2)]
        for _ in range(2):
            with pytest.raises(ArgumentError, match="2 results are alive already, 1 of them with a hook") as caught:
                low(case, rank, buffer)
            assert "\n" not in str(caught.value)
        for each in sent:
            each[4]()
            assert torch.equal(each[0], expected[0]) and torch.equal(each[1], expected[1])
            assert torch.equal(finish(case, rank, buffer, each), low_sum(case, rank))
        finish(case, rank, buffer, low(case, rank, buffer))

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
        held = [low(case, rank, buffer) for _ in range(2)]
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
        given = first.ids(rank), first.weights(rank), one[2]
        y, _, home = buffer.low_latency_combine(one[0], *given, return_recv_hook=True)
        two[4]()
        normal = send(first, rank, buffer)  # the combine receives
        assert torch.equal(y, low_sum(first, rank))
        home()
        buffer.clean_low_latency_buffer(first.most, H, first.experts)
        assert torch.equal(finish(second, rank, buffer, two), low_sum(second, rank))
        assert normal[0].shape[0] == len(first.copies(rank))

    on_all(clusters, first, body)


def test_zero_copy(clusters: Clusters) -> None:
    case = Case(kind="-1")

    def body(rank: int, buffer: Buffer) -> None:
        sent = low(case, rank, buffer)
        with pytest.raises(ArgumentError, match="zero_copy needs get_next_low_latency_combine_buffer"):
            finish(case, rank, buffer, sent, zero_copy=True)
        rows = buffer.get_next_low_latency_combine_buffer(sent[2])
        assert rows.shape == sent[0].shape and rows.dtype == BF16
        rows.copy_(sent[0])
        total = finish(case, rank, buffer, sent, x=torch.empty_like(rows), zero_copy=True)
        assert torch.equal(total, low_sum(case, rank))

    on_all(clusters, case, body)


# ---- what is refused, and the small things


def test_what_is_not_there_is_refused_by_name() -> None:
    case = Case(world=1)

    def run(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, 1, 0))
        sent = low(case, rank, buffer)
        costs = torch.zeros(1, 1, dtype=torch.int64)
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("use_ue8m0 is True", lambda: low(case, 0, buffer, use_ue8m0=True, round_scale=True)),
            ("dispatch_wait_recv_cost_stats", lambda: low(case, 0, buffer, dispatch_wait_recv_cost_stats=costs)),
            ("use_logfmt is True", lambda: finish(case, 0, buffer, sent, use_logfmt=True)),
            ("combine_wait_recv_cost_stats", lambda: finish(case, 0, buffer, sent, combine_wait_recv_cost_stats=costs)),
            ("low_latency_update_mask_buffer", lambda: buffer.low_latency_update_mask_buffer(0, True)),
            ("low_latency_query_mask_buffer", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1).int())),
            ("low_latency_clean_mask_buffer", buffer.low_latency_clean_mask_buffer),
            ("get_local_buffer_tensor", lambda: buffer.get_local_buffer_tensor(BF16)),
            ("num_tokens_per_rank is missing", lambda: buffer.dispatch(case.x(0))),
            ("handle is a tuple", lambda: buffer.dispatch(case.x(0), handle=tuple(sent[2]))),
            ("topk_idx is given with a handle", lambda: send(case, 0, buffer, handle=send(case, 0, buffer)[4])),
            ("num_max_dispatch_tokens_per_rank is 3", lambda: low_with(case, buffer, 3)),
            ("num_experts is 7", lambda: Buffer((group_ep, 2, 0)).get_dispatch_layout(case.ids(0), 7)),
            ("comm is given", lambda: Buffer((group_ep, 1, 0), comm=object())),
            ("flavour is 'other'", lambda: Buffer((group_ep, 1, 0), flavour="other")),
            ("explicitly_destroy is False", buffer.destroy),
            ("event is None", lambda: send(case, 0, buffer)[5].current_stream_wait()),
        ]
        for text, call in refused:
            with pytest.raises(ArgumentError, match=text) as caught:
                call()
            assert "\n" not in str(caught.value)
        Buffer((group_ep, 1, 0), explicitly_destroy=True).destroy()

    with LocalCluster(1) as cluster:
        cluster.run(run)


def low_with(case: Case, buffer: Buffer, most: int) -> Any:
    return buffer.low_latency_dispatch(case.x(0), case.ids(0), most, case.experts)


@pytest.mark.parametrize("wrong", [6, -2])
def test_an_id_that_is_none_is_told_on_every_rank(clusters: Clusters, wrong: int) -> None:
    case = Case()

    def body(rank: int, buffer: Buffer) -> None:
        ids = case.ids(rank)
        if rank == 1:
            ids[3, 2] = wrong
        with pytest.raises(
            InvalidExpertId, match=f"rank 1, token 3, k 2 has expert id {wrong}; need -1 or 0..5"
        ) as told:
            send(case, rank, buffer, topk_idx=ids)
        assert (told.value.rank, told.value.expert_id) == (1, wrong)  # type: ignore[attr-defined]

    on_all(clusters, case, body)


def test_the_same_expert_more_than_once_is_an_overflow(clusters: Clusters) -> None:
    def body(rank: int, buffer: Buffer) -> None:
        ids = torch.zeros(4, 3, dtype=torch.int64)
        x = torch.ones(4, H, dtype=BF16)
        if rank == 0:
            with pytest.raises(RoutingOverflow, match="has 24 rows, the result has 8"):
                buffer.low_latency_dispatch(x, ids, 4, 6, use_fp8=False)
        else:
            buffer.low_latency_dispatch(x, ids, 4, 6, use_fp8=False)

    on_all(clusters, Case(), body)


def test_across_servers_hierarchy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    case = Case(world=4)

    def run(rank: int, group_ep: str) -> None:
        for flavour in ("deepep", "ascend"):
            buffer = Buffer((group_ep, 4, rank), flavour=flavour)
            per_rank, servers, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.ids(rank), case.experts)
            hits = [{to // 2 for to in case.hit(rank, token)} for token in range(case.tokens(rank))]
            assert servers is not None and servers.tolist() == [sum(server in hit for hit in hits) for server in (0, 1)]
            with pytest.raises(ArgumentError, match="hierarchy"):
                buffer.dispatch(case.x(rank), None, per_rank, servers, in_rank, per_expert, case.ids(rank))
            with pytest.raises(ArgumentError, match="hierarchy"):
                low(case, rank, buffer)

    with LocalCluster(4) as cluster:
        cluster.run(run)


def test_servers_of_unequal_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")

    def run(rank: int, group_ep: str) -> None:
        buffer, ids = Buffer((group_ep, 3, rank)), torch.zeros(1, 2, dtype=torch.int64)
        with pytest.raises(
            ArgumentError, match="group has 3 ranks, 2 a server; a Buffer needs as many on every server"
        ):
            buffer.get_dispatch_layout(ids, 6)

    with LocalCluster(3) as cluster:
        cluster.run(run)


def test_internode_calls_take_deepeps_positions(clusters: Clusters) -> None:
    case = Case()

    def body(rank: int, buffer: Buffer) -> None:
        ids, weights = case.ids(rank), case.weights(rank)
        per_rank, servers, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, case.experts, None, True)
        config, given = Buffer.get_dispatch_config(2), (None, per_rank, servers, in_rank, per_expert, ids, weights)
        rows, _, _, numbers, handle, event = buffer.internode_dispatch(case.x(rank), *given, 4, config, event, True)
        wanted, *_ = send(case, rank, buffer)
        assert torch.equal(rows, wanted) and all(number % 4 == 0 for number in numbers) and event.event is not None
        home, summed, _ = buffer.internode_combine(rows, handle, None, case.x(rank), config, event)
        assert torch.equal(home, buffer.combine(rows, handle, bias=case.x(rank))[0]) and summed is None

    on_all(clusters, case, body)


def test_events() -> None:
    seen: list[int] = []
    event = Buffer.capture()
    event.register_hook_after_wait(lambda: seen.append(1))
    with pytest.raises(ArgumentError, match="second hook"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    with event(release_handle=True) as same:
        assert same is event and event.event is not None
    assert seen == [1] and event.event is None
    with EventOverlap():
        pass
    EventHandle().current_stream_wait()


@pytest.mark.parametrize("algorithm", ["", "window", "direct"])
def test_a_window_as_large_as_the_hint_is_enough(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    case = Case(local=2, topk=4, hidden=8192)
    hint = Buffer.get_low_latency_rdma_size_hint(64, case.hidden, case.world, case.experts)
    mib = hint >> 20

    def enough(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, 2, rank))
        sent = buffer.low_latency_dispatch(case.x(rank), case.ids(rank), 64, case.experts, use_fp8=False)
        assert torch.equal(finish(case, rank, buffer, sent), low_sum(case, rank))

    def too_small(rank: int, group_ep: str) -> None:
        with pytest.raises(WindowTooSmall, match=f"HCCL_BUFFSIZE={mib}"):
            enough(rank, group_ep)

    for size, run in ((mib, enough), (mib - 1, too_small)):
        monkeypatch.setenv("HCCL_BUFFSIZE", str(size))
        with LocalCluster(2) as cluster:
            cluster.run(run)


@pytest.mark.parametrize("algorithm", ["", "window", "direct"])
def test_normal_mode_needs_no_more_than_the_hint(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ids and weights beside the rows, and with two biases, where rows are fp32."""
    tokens, hidden, experts, topk = 4096, 64, 64, 32
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    mib = Config().get_nvl_buffer_size_hint(2 * hidden, 2) >> 20
    monkeypatch.setenv("HCCL_BUFFSIZE", str(mib))

    def run(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, 2, rank))
        x, ids = torch.ones(tokens, hidden, dtype=BF16), torch.arange(topk).repeat(tokens, 1) * 2
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        given = (None, per_rank, None, in_rank, per_expert, ids, torch.ones(ids.shape))
        rows, _, _, _, handle, _ = buffer.dispatch(x, *given)
        assert torch.equal(buffer.combine(rows, handle, bias=(x, x))[0], x * 4)

    with LocalCluster(2) as cluster:
        cluster.run(run)


def test_hints_are_what_the_windows_need() -> None:
    from ascend_moe import plan

    small, large = (Buffer.get_low_latency_rdma_size_hint(tokens, 7168, 4, 16) for tokens in (8, 128))
    topk = min(16, plan.limits()["topk"])
    asked = (plan.Request(4, 16, topk, 7168, 128, equal_batches=False, comm_alg=each) for each in ("window", "direct"))
    needs = [plan.window_need(each) for each in asked]
    assert small < large == max(min(need[op] for need in needs) for op in ("dispatch_mib", "combine_mib")) << 20
    with pytest.raises(ArgumentError):
        Buffer.get_low_latency_rdma_size_hint(-1, 512, 4, 16)
    config = Buffer.get_dispatch_config(8)
    assert config == Buffer.get_combine_config(8) == Config(Buffer.num_sms)
    assert config.get_nvl_buffer_size_hint(1024, 8) > 0 == config.get_rdma_buffer_size_hint(1024, 8)
    before = Buffer.num_sms
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(2).num_sms == AscendBuffer.num_sms == 24 and Buffer.is_sm90_compiled()
    Buffer.set_num_sms(before)
    with pytest.raises(ArgumentError, match="must be even"):
        Buffer.set_num_sms(3)


# ---- sgl-kernel-npu


def v2(case: Case, rank: int, place: Place, **changes: Any) -> Any:
    return ascend_moe.npu_moe_distribute_dispatch_v2(
        case.x(rank), case.ids(rank).int(), **place.of_op(case.experts, case.most), **changes
    )


@each_case
@pytest.mark.parametrize("quant", ["bf16", "int8"])
def test_ascend_normal_mode(clusters: Clusters, case: Case, quant: str) -> None:
    def body(rank: int, buffer: Any) -> None:
        assert isinstance(buffer, AscendBuffer) and buffer.flavour == "ascend"
        got, ids, weights, numbers, handle, _ = send(case, rank, buffer, quant_mode=quant)
        expected = v2(case, rank, buffer._place, quant_mode=2 if quant == "int8" else 0)
        n = int(expected.ep_recv_counts[-1])
        rows = got[0] if quant == "int8" else got
        assert torch.equal(rows, expected.expand_x[:n]) and numbers == expected.expert_token_nums.tolist()
        if quant == "int8":
            assert torch.equal(got[1], expected.dynamic_scales[:n])
            rows = (got[0] * got[1][:, None]).bfloat16()
        triples = [triple for expert in range(case.local) for triple in case.rows_of(rank * case.local + expert)]
        assert len(handle) == 8 and handle[3].view(-1, 3).tolist() == [list(triple) for triple in triples]
        assert handle[4].dtype == torch.int32
        assert torch.equal(handle[5][:-1], expected.ep_recv_counts) and handle[5][-1] == case.most
        for row, (source, token, k) in enumerate(triples):
            local = int(case.ids(source)[token, k]) - rank * case.local
            assert ids[row].tolist() == [local if each == k else -1 for each in range(case.topk)]
            assert weights[row, k] == case.weights(source)[token, k] and int(weights[row].count_nonzero()) <= 1
        total, home, _ = buffer.combine(rows, handle, topk_weights=weights)
        assert home is handle[7]
        if quant == "bf16":
            assert torch.equal(total, low_sum(case, rank))
        torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.05, atol=0.1)
        with pytest.raises(ArgumentError, match="handle of an earlier dispatch"):
            buffer.dispatch(case.x(rank), handle)

    on_all(clusters, case, body, "ascend")


@each_case
@pytest.mark.parametrize(("strategy", "entries"), [("default", 7), ("ops", 10)])
def test_ascend_low_latency(clusters: Clusters, case: Case, strategy: str, entries: int) -> None:
    def run(rank: int, group_ep: str) -> None:
        buffer = AscendBuffer((group_ep, case.world, rank), low_latency_strategy=strategy)
        for quant in (None, "int8"):
            got, count, handle, _, hook = low(case, rank, buffer, quant_mode=quant, topk_weights=case.weights(rank))
            place = buffer._place
            expected = ascend_moe.npu_moe_distribute_dispatch_v2(
                case.x(rank),
                case.ids(rank).int(),
                quant_mode=2 if quant else 0,
                **place.of_op(case.experts, case.most + 1),
            )
            n = int(expected.ep_recv_counts[-1])
            rows = got[0] if quant else got
            assert rows.shape == ((case.most + 1) * case.world * min(case.topk, case.local), H)
            assert torch.equal(rows[:n], expected.expand_x[:n]) and count.dtype == torch.int64
            assert torch.equal(count, expected.expert_token_nums) and len(handle) == entries
            assert torch.equal(handle[1], expected.ep_recv_counts) and handle[2:5] == (case.most + 1, H, case.experts)
            hook()
            values = (got[0] * got[1][:, None]).bfloat16() if quant else got
            total = finish(case, rank, buffer, (values, count, handle))
            torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.05, atol=0.1)
            assert quant or torch.equal(total, low_sum(case, rank))

    clusters[case.world].run(run)


@pytest.mark.parametrize("quant_mode", [0, 1])
def test_ascend_fused_deep_moe(clusters: Clusters, quant_mode: int) -> None:
    case, inner = Case(kind="-1"), 64
    gate_up, down = randn(case.local, H, 2 * inner, seed=1).bfloat16(), randn(case.local, inner, H, seed=2).bfloat16()
    scales: Any = (None, None)
    if quant_mode:
        scales = (gate_up.float().abs().amax(1) / 127, down.float().abs().amax(1) / 127)
        gate_up = (gate_up / scales[0][:, None]).round().to(torch.int8)
        down = (down / scales[1][:, None]).round().to(torch.int8)

    def body(rank: int, buffer: Any) -> None:
        given = (gate_up, scales[0], down, scales[1], case.most, case.experts)
        bits = [scale.view(torch.int32).long() if quant_mode else None for scale in scales if quant_mode] or [None] * 2
        ids, weights = case.ids(rank), case.weights(rank)
        y, counts = buffer.fused_deep_moe(case.x(rank), ids, weights, *given, quant_mode=quant_mode)
        again, nums = buffer.fused_deep_moe(
            case.x(rank),
            ids,
            weights,
            gate_up,
            bits[0],
            list(down),
            bits[1],
            1000,
            case.experts,
            quant_mode,
            fuse_mode=2,
        )
        place = buffer._place.of_op(case.experts, case.most)
        sent = v2(case, rank, buffer._place, quant_mode=2 * quant_mode)
        more = {"dynamic_scales": sent.dynamic_scales, "w_gate_up_scale": scales[0], "w_down_scale": scales[1]}
        more = {**more, "output_dtype": BF16} if quant_mode else {}
        rows = grouped_mlp(sent.expand_x, gate_up, down, sent.expert_token_nums, **more)
        triples = sent.assist_info_for_combine
        expected = ascend_moe.npu_moe_distribute_combine_v2(
            rows, ids.int(), triples, sent.ep_recv_counts, weights, **place
        )
        assert torch.equal(y, expected) and torch.equal(again, expected)
        assert torch.equal(counts, sent.ep_recv_counts) and nums.dtype == torch.int32
        assert torch.equal(nums.long(), sent.expert_token_nums)

    on_all(clusters, case, body, "ascend")


def test_ascend_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(world=1)

    def run(rank: int, group_ep: str) -> None:
        buffer: Any = AscendBuffer((group_ep, 1, 0))
        sent = send(case, 0, buffer)
        ones = torch.ones(1, dtype=torch.int32)
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("quant_mode is 'mx_fp8_e4m3'", lambda: send(case, 0, buffer, quant_mode="mx_fp8_e4m3")),
            ("quant_mode is 'mx_fp4_e2m1'", lambda: low(case, 0, buffer, quant_mode="mx_fp4_e2m1")),
            ("use_ue8m0 is True", lambda: low(case, 0, buffer, use_ue8m0=True)),
            ("num_worst_tokens is 8", lambda: send(case, 0, buffer, num_worst_tokens=8)),
            ("dispatch_wait_recv_cost_stats", lambda: send(case, 0, buffer, dispatch_wait_recv_cost_stats=ones)),
            ("combine_send_cost_stats", lambda: buffer.combine(sent[0], sent[4], combine_send_cost_stats=ones)),
            ("bias is given", lambda: buffer.combine(sent[0], sent[4], bias=sent[0])),
            ("handle is no tuple of 8", lambda: buffer.combine(sent[0], sent[4][:7])),
            ("get_next_low_latency_combine_buffer", lambda: buffer.get_next_low_latency_combine_buffer(sent[4])),
            ("internode_dispatch", lambda: buffer.runtime.internode_dispatch(case.x(0))),
            ("internode_combine", lambda: buffer.runtime.internode_combine(case.x(0))),
            ("begin_profile", lambda: buffer.runtime.begin_profile(1, 1, "")),
            (
                "needs a process group",
                lambda: send(case, 0, AscendBuffer((group_ep, 1, 0), normal_strategy="alltoall")),
            ),
            ("low_latency_strategy is 'x'", lambda: AscendBuffer((group_ep, 1, 0), low_latency_strategy="x")),
        ]
        for text, call in refused:
            with pytest.raises(ArgumentError, match=text):
                call()
        monkeypatch.setenv("DEEP_USE_MODE", "ops")
        assert AscendBuffer((group_ep, 1, 0)).low_latency_strategy == "ops"
        monkeypatch.setenv("DEEP_USE_MODE", "other")
        with pytest.raises(ArgumentError, match="DEEP_USE_MODE is 'other'"):
            AscendBuffer((group_ep, 1, 0))
        monkeypatch.delenv("DEEP_USE_MODE")
        monkeypatch.setenv("DEEP_NORMAL_MODE_USE_INT8_QUANT", "1")
        assert send(case, 0, buffer)[0][0].dtype == torch.int8
        monkeypatch.setenv("MOE_EXPERT_TOKEN_NUMS_TYPE", "0")
        assert send(case, 0, buffer)[3] == torch.tensor(sent[3]).cumsum(0).tolist()
        monkeypatch.setenv("MOE_SHARED_EXPERT_RANK_NUM", "1")
        with pytest.raises(ArgumentError, match="MOE_SHARED_EXPERT_RANK_NUM is 1"):
            AscendBuffer((group_ep, 1, 0))
        monkeypatch.delenv("MOE_SHARED_EXPERT_RANK_NUM")
        monkeypatch.setenv("DEEPEP_NORMAL_LONG_SEQ_ROUND", "4")
        with pytest.raises(ArgumentError, match="DEEPEP_NORMAL_LONG_SEQ_ROUND is 4"):
            AscendBuffer((group_ep, 1, 0))

    with LocalCluster(1) as cluster:
        cluster.run(run)


# ---- install


@pytest.fixture
def uninstalled() -> Any:
    yield
    deep_ep.uninstall()


def test_install_and_uninstall(uninstalled: None) -> None:
    assert "deep_ep" not in sys.modules and "deep_ep_cpp" not in sys.modules
    deep_ep.uninstall()  # nothing to undo
    deep_ep.install()
    import deep_ep as installed  # type: ignore[import-not-found]
    import deep_ep_cpp  # type: ignore[import-not-found]
    from deep_ep.buffer import Buffer as InPackage  # type: ignore[import-not-found]
    from deep_ep.utils import EventOverlap as InUtils  # type: ignore[import-not-found]

    assert installed.Buffer is Buffer is InPackage and installed.utils.EventOverlap is EventOverlap is InUtils
    for name in ("deep_ep", "deep_ep_cpp", "deep_ep.utils"):  # how callers ask whether it is there
        assert importlib.util.find_spec(name) is not None
    assert installed.Config is deep_ep_cpp.Config is Config and installed.topk_idx_t is torch.int64
    assert deep_ep_cpp.EventHandle is installed.EventHandle is EventHandle
    assert deep_ep_cpp.get_low_latency_rdma_size_hint(8, 512, 4, 16) == Buffer.get_low_latency_rdma_size_hint(
        8, 512, 4, 16
    )
    runtime = deep_ep_cpp.Buffer(0, 1, 0, 0, False, "nobody")
    assert all(callable(getattr(runtime, name)) for name in ("intranode_dispatch", "low_latency_combine"))
    deep_ep.install("ascend")
    import deep_ep as ascend

    assert ascend.Buffer is AscendBuffer and ascend.NormalStrategy.ALLTOALL == "alltoall"
    deep_ep.install(package=False)
    assert "deep_ep" not in sys.modules and "deep_ep_cpp" in sys.modules
    other = sys.modules["deep_ep"] = type(sys)("deep_ep")
    deep_ep.install()
    deep_ep.uninstall()
    assert sys.modules.pop("deep_ep") is other and "deep_ep_cpp" not in sys.modules
    with pytest.raises(ArgumentError, match="flavour is 'x'"):
        deep_ep.install("x")


# ---- process groups


def on_a_process_group(rank: int) -> None:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    case = Case(world=group.size(), kind="-1")
    buffer = Buffer(group)
    x, _, weights, _, handle, _ = send(case, rank, buffer)
    hits = torch.tensor([len(case.hit(rank, token)) for token in range(case.tokens(rank))])
    assert torch.equal(buffer.combine(x, handle, weights)[0], (case.x(rank).float() * hits[:, None]).bfloat16())
    assert torch.equal(finish(case, rank, buffer, low(case, rank, buffer)), low_sum(case, rank))
    for strategy in ("default", "alltoall"):
        ascend: Any = Buffer(group, flavour="ascend", normal_strategy=strategy, low_latency_strategy=strategy)
        rows, _, _, numbers, sent, _ = send(case, rank, ascend)
        assert numbers == [len(case.rows_of(rank * case.local + expert)) for expert in range(case.local)]
        assert torch.equal(ascend.combine(rows, sent)[0], low_sum(case, rank))
        assert torch.equal(finish(case, rank, ascend, low(case, rank, ascend)), low_sum(case, rank))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_a_process_group(tmp_path: Path, world: int) -> None:
    run_processes(world, on_a_process_group, tmp_path)


def test_a_process_group_of_one(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        on_a_process_group(0)
    finally:
        dist.destroy_process_group()
