"""DeepEP's low-latency mode: rows, sums, hooks, costs, and fp8 rows with their scales."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from deep_ep_buffers import BF16, FP8, Case, H, each_case, empty_stack, finish, low, low_rows, low_sum, on_all, send
from op_runs import Clusters
from routed_tokens import randn

from ascend_moe.errors import ArgumentError, InvalidExpertId
from ascend_moe.experts import quant
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
            source_indices = case.rows_of(rank * case.local + expert)
            assert count[expert] == len(source_indices) and stats[expert] == 100 + len(source_indices)
            assert torch.equal(rows[expert, : len(source_indices)], low_rows(case, rank, expert))
            assert source[expert, : len(source_indices)].tolist() == [token for _, token, _ in source_indices]
            for each in range(case.world):
                word = int(ranges[expert, each])
                begin, number = word >> 32, word & 0xFFFFFFFF
                assert all(one == each for one, _, _ in source_indices[begin : begin + number])
                assert number == sum(one == each for one, _, _ in source_indices)
        factors = torch.tensor([2.0 ** (rank * case.local + expert) for expert in range(case.local)])
        out = torch.empty(case.tokens(rank), H, dtype=BF16)
        total = finish(case, rank, buffer, sent, x=(rows.float() * factors[:, None, None]).bfloat16(), out=out)
        assert total is out and torch.equal(out, low_sum(case, rank, lambda expert: 2.0**expert))

    on_all(clusters, case, body)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_hook_receives_once(clusters: Clusters, fp8: bool) -> None:
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
        for _ in range(2):
            hook()
            assert torch.equal(count, whole[1]) and torch.equal(stats, count)
        for got, expected in zip(rows if fp8 else [rows], whole[0] if fp8 else [whole[0]], strict=True):
            assert torch.equal(got.float(), expected.float())
        assert torch.equal(handle[1], whole[2][1]) and torch.equal(handle[0], whole[2][0])
        ones = torch.ones(handle[0].shape[0], handle[0].shape[1], H).bfloat16()
        y, _, hook = buffer.low_latency_combine(ones, case.ids(rank), case.weights(rank), handle, return_recv_hook=True)
        assert not y.any()
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
        with pytest.raises(ArgumentError, match="2 results are in use, 1 of them with a hook") as caught:
            low(case, rank, buffer)
        assert "\n" not in str(caught.value)
        held[1][4]()
        with pytest.raises(ArgumentError, match="low_latency_dispatch: 2 results are in use"):
            low(case, rank, buffer)
        assert torch.equal(finish(case, rank, buffer, held[0]), low_sum(case, rank))
        third = low(case, rank, buffer)  # one has been combined
        held.clear()
        low(case, rank, buffer)  # one was dropped
        assert torch.equal(finish(case, rank, buffer, third), low_sum(case, rank))
        for _ in range(4):  # nobody holds these
            low(case, rank, buffer)

    on_all(clusters, case, body)


@pytest.mark.parametrize("buffers", [1, 2])
def test_micro_batches_in_turns_and_normal_mode_between(clusters: Clusters, buffers: int) -> None:
    """Sends of one batch while another's is open, as in two-batch overlap, by one Buffer or two of the group."""
    first, second = Case(kind="-1"), Case(topk=2)

    def body(rank: int, buffer: Buffer) -> None:
        other = buffer if buffers == 1 else Buffer(buffer.group)
        one = low(first, rank, buffer, return_recv_hook=True)
        two = low(second, rank, other, return_recv_hook=True)  # it receives the first one
        one[4]()
        given, out = (first.ids(rank), first.weights(rank), one[2]), torch.empty(first.tokens(rank), H, dtype=BF16)
        y, _, home = buffer.low_latency_combine(one[0], *given, return_recv_hook=True, out=out)
        two[4]()
        normal = send(first, rank, other)  # the combine receives
        assert y is out and torch.equal(y, low_sum(first, rank))
        home()
        buffer.clean_low_latency_buffer(first.most, H, first.experts)
        assert torch.equal(finish(second, rank, other, two), low_sum(second, rank))
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
            (torch.zeros(1, dtype=torch.int64, device="meta"), "is on meta, x on cpu; move it to x's device"),
        ):
            with pytest.raises(ArgumentError, match=f"dispatch_wait_recv_cost_stats {text}"):
                low(case, rank, buffer, dispatch_wait_recv_cost_stats=wrong)
            with pytest.raises(ArgumentError, match=f"combine_wait_recv_cost_stats {text}"):
                finish(case, rank, buffer, sent, combine_wait_recv_cost_stats=wrong)

    on_all(clusters, case, body)


# ---- fp8 rows whose scales are exponents, and rows with one scale


def oracle(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents as bytes, by numpy in float64 and ml_dtypes' two types."""
    groups = x.float().numpy().astype(np.float64).reshape(len(x), x.shape[1] // 128, 128)
    top = np.maximum(np.abs(groups).max(2), np.float32(1e-4)).astype(np.float32)
    least = (top / np.float32(448)).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(least))  # the power of two that is no smaller
    codes = (groups / scale[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8).reshape(x.shape), scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


def drawn(n: int, hidden: int, seed: int) -> torch.Tensor:
    """Groups of very different sizes, among them zeros, powers of two, and bf16's largest and smallest."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, hidden // 128, 128)) * 2.0 ** generator.integers(-60, 60, (n, hidden // 128, 1))
    kinds = generator.integers(0, 8, (n, hidden // 128))
    x[kinds == 0] = 0
    x[kinds == 1] = 448 * 2.0 ** generator.integers(-20, 20)
    x[kinds == 2, 5] = 3.38e38
    x[kinds == 3] *= 1e-38
    return torch.from_numpy(x.reshape(n, hidden).astype(np.float32)).bfloat16()


@pytest.mark.parametrize("seed", range(6))
def test_codes_and_exponents_equal_ml_dtypes(seed: int) -> None:
    x = drawn(17, 512, seed)
    codes, scales = quant.cast_fp8(x, round_scale=True)
    expected, exponents = oracle(x)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected)
    assert np.array_equal(quant.ue8m0(scales).numpy(), exponents)
    groups = x.float().numpy().reshape(17, 4, 128)
    top = np.maximum(np.abs(groups).max(2), np.float32(1e-4))
    codes, scales = quant.cast_fp8(x, round_scale=False)
    factor = np.float32(448) * (np.float32(1) / top)  # torch's 448.0 / top
    expected = (groups * factor[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected.reshape(17, 512))
    assert np.array_equal(scales.numpy(), top / np.float32(448))


def test_exponents_of_every_power_of_two() -> None:
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    expected = powers.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert np.array_equal(quant.ue8m0(powers).numpy(), expected)
    assert quant.ue8m0(torch.tensor([float("inf")])).item() == 255  # e8m0's NaN, DeepEP's infinity


def bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """Four for each int32: ``(.., H / 128)``."""
    return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("kind", ["-1", "empty rank", "one expert"])
@pytest.mark.parametrize(
    ("rounded", "packed", "hook"), [(False, False, False), (True, False, True), (True, True, False), (True, True, True)]
)
def test_low_latency_rows_are_cast_and_scales_packed(
    clusters: Clusters, kind: str, rounded: bool, packed: bool, hook: bool
) -> None:
    case = Case(kind=kind, hidden=1024)

    def body(rank: int, buffer: Any) -> None:
        sent = low(case, rank, buffer, use_fp8=True, round_scale=rounded, use_ue8m0=packed, return_recv_hook=hook)
        sent[4]()
        (codes, scales), count, *_ = sent
        assert codes.dtype == FP8 and scales.dtype == (torch.int32 if packed else torch.float32)
        assert scales.shape == (*codes.shape[:2], 1024 // (512 if packed else 128)) and scales.stride(1) == 1
        # As DeepEP decodes it: the bytes are the exponents of float32.
        factors = (bytes_of(scales).int() << 23).view(torch.float32) if packed else scales
        for expert in range(case.local):
            expected, exact = quant.cast_fp8(low_rows(case, rank, expert), round_scale=rounded)
            n = int(count[expert])
            assert torch.equal(codes[expert, :n].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(factors[expert, :n], exact)
        back = (codes.float().view(*codes.shape[:2], -1, 128) * factors.unsqueeze(3)).view(codes.shape).bfloat16()
        total = finish(case, rank, buffer, sent, x=back)
        torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.1, atol=0.3)

    on_all(clusters, case, body)


def rows_oracle(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    value = x.float().numpy()
    top = np.abs(value).max(1)
    factor = np.where(top == 0, np.float32(1), np.float32(448) / np.where(top == 0, np.float32(1), top))
    codes = (value * factor[:, None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), (np.float32(1) / factor).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_one_scale_equal_ml_dtypes(seed: int) -> None:
    x = randn(9, 256, seed=seed).bfloat16() * 10.0 ** (seed * 5 - 5)
    x[2] = 0
    codes, scales = quant.cast_fp8_rows(x)
    expected, factors = rows_oracle(x)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected) and np.array_equal(scales[:, 0].numpy(), factors)


@pytest.mark.parametrize("kind", ["-1", "empty rank"])
def test_pertoken_fp8_of_flavour_ascend(clusters: Clusters, kind: str) -> None:
    case, mode = Case(kind=kind), "pertoken_fp8_e4m3"

    def body(rank: int, buffer: Any) -> None:
        mine = [low_rows(case, rank, expert) for expert in range(case.local)]
        codes, scales = rows_oracle(empty_stack([row for each in mine for row in each], low_rows(case, rank, 0)))
        for sent in (send(case, rank, buffer, quant_mode=mode), low(case, rank, buffer, quant_mode=mode)):
            (got, factors), n = sent[0], len(codes)
            assert got.dtype == FP8 and factors.dtype == torch.float32 and factors.shape == got.shape[:1]
            assert np.array_equal(got[:n].view(torch.uint8).numpy(), codes)
            assert np.array_equal(factors[:n].numpy(), scales)
            back = torch.where(torch.arange(len(got))[:, None] < n, got.float() * factors[:, None], 0).bfloat16()
            if len(sent) == 6:
                total = buffer.combine(back, sent[4])[0]
            else:
                total = finish(case, rank, buffer, sent, x=back)
            torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.1, atol=0.3)

    on_all(clusters, case, body, "ascend")
