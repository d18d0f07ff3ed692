"""DeepEP's mask of ranks: low-latency calls go on without ranks that were lost, or that the caller leaves out.

`Rank` is DeepEP's own test of low latency with --shrink-test: its calls, keyword for keyword, while three of eight
ranks fail. Two things are different: a call that loses a rank raises `PeerLost` and the step is repeated, where DeepEP
gives incomplete results; and `clean_low_latency_buffer` meets no other rank, so that the next dispatch sees who has
failed.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deep_ep_buffers import Case, finish, low, low_sum, shrinkable
from survivor_cases import results_of

from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError, PeerLost
from ascend_moe.interop.deep_ep import Buffer
from ascend_moe.interop.deep_ep.utils import calc_diff, per_token_cast_back

CASE = Case(world=4, local=2, kind="-1")


def step(buffer: Buffer, rank: int, masked: Sequence[int] = ()) -> None:
    """A dispatch and a combine whose experts return their rows; layouts have the whole group's numbers."""
    sent = low(CASE, rank, buffer)
    rows, count, handle, *_ = sent
    width = (CASE.most + 1) * CASE.world
    assert rows.shape == (CASE.local, width, CASE.hidden) and handle[1].shape == (CASE.local, CASE.world)
    assert torch.equal((handle[1] & 0xFFFFFFFF).sum(1), count.long())
    expected = low_sum(CASE, rank, lambda expert: float(CASE.owner(expert) not in masked))
    assert torch.equal(finish(CASE, rank, buffer, sent), expected)


def masks(buffer: Buffer) -> list[int]:
    status = torch.full((CASE.world,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def test_ranks_that_the_caller_leaves_out() -> None:
    left_out = threading.Barrier(CASE.world)

    def leave_out(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, CASE.world, rank), low_latency_mode=True, enable_shrink=True)
        step(buffer, rank)
        if rank not in (1, 3):
            go_on_alone(buffer, rank)
        left_out.wait()
        buffer.low_latency_clean_mask_buffer()  # on all ranks: they are back
        assert masks(buffer) == [0] * CASE.world
        step(buffer, rank)
        left_out.wait()

    def go_on_alone(buffer: Buffer, rank: int) -> None:
        for undo in (lambda: buffer.low_latency_update_mask_buffer(2 - rank), buffer.low_latency_clean_mask_buffer):
            buffer.low_latency_update_mask_buffer(2 - rank, True)
            assert sum(masks(buffer)) == 1
            undo()
            assert masks(buffer) == [0] * CASE.world
        for masked in (1, 3):
            buffer.low_latency_update_mask_buffer(masked, True)
        step(buffer, rank, [1, 3])
        with pytest.raises(ArgumentError, match=f"is {rank}, this rank: pass another"):
            buffer.low_latency_update_mask_buffer(rank, True)

    def without(rank: int, group_ep: str) -> None:
        with pytest.raises(ArgumentError, match="enable_shrink=True"):
            Buffer((group_ep, CASE.world, rank)).low_latency_update_mask_buffer(1, True)

    with LocalCluster(CASE.world, window_mib=4) as cluster:
        for each in (without, leave_out):
            cluster.run(each)


W, E, K, T, H = 8, 24, 4, 6, 512
L, COUNT = E // W, (1 << 32) - 1
FAILS_IN = {"dispatch": 1, "combine": 3, "clean": 5}  # a rank each, before its first such call
FORMATS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


class Fails(Exception):
    """What a rank raises that fails."""


def formats() -> Iterator[tuple[bool, bool, bool, bool]]:
    """return_recv_hook, use_fp8, round_scale, use_ue8m0."""
    for hook, format in itertools.product((False, True), FORMATS):
        yield hook, *format


@dataclass
class Rank:
    """One rank of the test: its tokens, and who has failed by now."""

    rank: int
    group: str
    x: torch.Tensor = field(init=False)
    failed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buffer = shrinkable(self.group, W, self.rank, T, H, E)
        self.mask = torch.zeros((W,), dtype=torch.int)
        self.ids = [ids_of(rank) for rank in range(W)]
        self.weights = torch.randn((T, K), generator=torch.Generator().manual_seed(self.rank)).abs()
        self.x = torch.full((T, H), float(self.rank - 4)).bfloat16()
        self.x[:, -128:] = torch.arange(T).bfloat16().view(-1, 1)

    def fails(self, call: str) -> None:
        """A rank of the test fails before this call; all know which."""
        self.failed.add(FAILS_IN[call])
        if self.rank == FAILS_IN[call]:
            raise Fails

    def masked(self) -> None:
        """The mask has who has failed."""
        self.buffer.low_latency_query_mask_buffer(self.mask)
        assert set(self.mask.nonzero().squeeze(-1).tolist()) == self.failed

    def dispatched(self, hook: bool, fp8: bool, round_scale: bool, ue8m0: bool) -> tuple[Any, torch.Tensor, Any]:
        stats = torch.zeros((L,), dtype=torch.int)
        rows, count, handle, event, receive = self.buffer.low_latency_dispatch(
            self.x,
            self.ids[self.rank],
            T,
            E,
            use_fp8=fp8,
            round_scale=round_scale,
            use_ue8m0=ue8m0,
            cumulative_local_expert_recv_stats=stats,
            async_finish=not hook,
            return_recv_hook=hook,
        )
        receive() if hook else event.current_stream_wait()
        assert torch.equal(stats, count)
        return rows, count, handle

    def combined(self, rows: torch.Tensor, handle: Any, hook: bool, zero_copy: bool) -> torch.Tensor:
        if zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        out = torch.empty((T, H), dtype=torch.bfloat16)
        total, event, receive = self.buffer.low_latency_combine(
            rows,
            self.ids[self.rank],
            self.weights,
            handle,
            use_logfmt=False,
            async_finish=not hook,
            zero_copy=zero_copy,
            return_recv_hook=hook,
            out=out,
        )
        receive() if hook else event.current_stream_wait()
        assert total is out
        return total

    def check_rows(self, rows: torch.Tensor, count: torch.Tensor, handle: Any, exact: bool) -> None:
        for local in range(L):
            expert, number = self.rank * L + local, int(count[local])
            ranges = handle[1][local]
            sent = [0 if rank in self.failed else int((self.ids[rank] == expert).sum()) for rank in range(W)]
            assert (ranges & COUNT).tolist() == sent and number == sum(sent)
            for rank, (begin, length) in enumerate(zip((ranges >> 32).tolist(), sent, strict=True)):
                assert not exact or (rows[local, begin : begin + length, :-128] == rank - 4).all()
            tokens = handle[0][local, :number] % T
            assert not exact or (rows[local, :number, -128:] == tokens.view(-1, 1)).all()

    def check_sum(self, total: torch.Tensor, most: float) -> None:
        ids = self.ids[self.rank]
        there = (ids >= 0) & ~torch.isin(ids // L, torch.tensor(sorted(self.failed)))
        want = self.x * self.weights.masked_fill(~there, 0).sum(dim=1).view(-1, 1)
        assert not total.isnan().any() and calc_diff(want, total) < most

    def step(self, zero_copy: bool, hook: bool, fp8: bool, round_scale: bool, ue8m0: bool) -> None:
        """Once through the loop. Raises PeerLost: a rank has failed meanwhile."""
        self.fails("dispatch")
        rows, count, handle = self.dispatched(hook, fp8, round_scale, ue8m0)
        self.masked()
        if fp8:
            rows = per_token_cast_back(rows[0].view(-1, H), rows[1].contiguous().view(W * T * L, -1)).view(L, W * T, H)
        self.check_rows(rows, count, handle, exact=not round_scale)
        self.fails("combine")
        total = self.combined(rows, handle, hook, zero_copy)
        self.masked()
        self.check_sum(total, 9e-4 if fp8 else 1e-5)

    def run(self) -> int:
        """All of the test; how often a step was repeated."""
        repeated = 0
        for (hook, *format), zero_copy in itertools.product(formats(), (False, True)):
            while True:
                try:
                    self.step(zero_copy, hook, *format)
                    break
                except PeerLost as lost:
                    assert lost.rank in self.failed and "are masked from now on: repeat the step" in str(lost)
                    repeated += 1
            if self.rank == FAILS_IN["clean"]:
                raise Fails
            self.buffer.clean_low_latency_buffer(T, H, E)
            self.masked()
            self.failed.add(FAILS_IN["clean"])
        return repeated


def ids_of(rank: int) -> torch.Tensor:
    """Of a rank's tokens; some are -1."""
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(rank * T + t))[:K] for t in range(T)])
    draw = random.Random(rank)
    for _ in range(4):
        ids[draw.randrange(T), draw.randrange(K)] = -1
    return ids


def test_deepeps_shrink_test() -> None:
    done = threading.Barrier(W - len(FAILS_IN))

    def work(rank: int, group_ep: str) -> int:
        made = Rank(rank, group_ep)
        repeated = made.run()
        with pytest.raises(ArgumentError, match="which is masked: low_latency_clean_mask_buffer"):
            made.buffer.low_latency_update_mask_buffer(FAILS_IN["clean"], False)
        with pytest.raises(ArgumentError, match="have ended: restart the job"):
            made.buffer.low_latency_clean_mask_buffer()
        done.wait()
        return repeated

    with LocalCluster(W, window_mib=4) as cluster, pytest.raises(Fails) as lost:
        cluster.run(work)
    left = [rank for rank in range(W) if rank not in FAILS_IN.values()]
    assert results_of(lost.value, left) == dict.fromkeys(left, 3), "each loss costs one step"
