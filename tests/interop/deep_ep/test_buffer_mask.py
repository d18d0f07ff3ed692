"""DeepEP's mask of ranks: low-latency calls go on without ranks that were lost, or that the caller leaves out.

`Rank` is DeepEP's own test of low latency with --shrink-test: its calls, keyword for keyword, while three of eight
ranks fail. Two things are different: a call that loses a rank raises `PeerLost` and the step is repeated, where DeepEP
gives incomplete results; and `clean_low_latency_buffer` meets no other rank, so that the next dispatch sees who has
failed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
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
    left_out, started = threading.Barrier(CASE.world, timeout=100), threading.Event()

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
        waits = torch.zeros(CASE.world, dtype=torch.int64)
        started.wait(20) if rank == 2 else started.set()
        time.sleep(0.2 * (rank == 2))  # rank 0 waits for it
        low(CASE, rank, buffer, dispatch_wait_recv_cost_stats=waits)
        assert waits[[1, 3]].tolist() == [0, 0] and (rank == 2 or waits[2] > 0)
        with pytest.raises(ArgumentError, match=f"is {rank}, this rank: pass another"):
            buffer.low_latency_update_mask_buffer(rank, True)

    def without(rank: int, group_ep: str) -> None:
        with pytest.raises(ArgumentError, match="enable_shrink=True"):
            Buffer((group_ep, CASE.world, rank)).low_latency_update_mask_buffer(1, True)

    with LocalCluster(CASE.world, window_mib=4) as cluster:
        for each in (without, leave_out):
            cluster.run(each)


SHRINK = Case(world=8, topk=4, kind="-1", hidden=512)
FAILS_IN = {"dispatch": 1, "combine": 3, "clean": 5}  # a rank each, before its first such call
FORMATS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


class Fails(Exception):
    """What a rank raises that fails."""


@dataclass
class Rank:
    """One rank of DeepEP's test, and who has failed by now."""

    rank: int
    group: str
    failed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buffer = shrinkable(self.group, SHRINK.world, self.rank, SHRINK.most, SHRINK.hidden, SHRINK.experts)

    def fails(self, call: str) -> None:
        """A rank of the test fails before this call; all know which."""
        self.failed.add(FAILS_IN[call])
        if self.rank == FAILS_IN[call]:
            raise Fails

    def masked(self) -> None:
        """The mask has who has failed."""
        mask = torch.zeros((SHRINK.world,), dtype=torch.int)
        self.buffer.low_latency_query_mask_buffer(mask)
        assert set(mask.nonzero().squeeze(-1).tolist()) == self.failed

    def step(self, zero_copy: bool, hook: bool, fp8: bool, round_scale: bool, ue8m0: bool) -> None:
        """Once through the loop. Raises PeerLost: a rank has failed meanwhile."""
        self.fails("dispatch")
        ids, stats = SHRINK.ids(self.rank), torch.zeros((SHRINK.local,), dtype=torch.int)
        received, count, handle, event, receive = self.buffer.low_latency_dispatch(
            SHRINK.x(self.rank), ids, SHRINK.most, SHRINK.experts, use_fp8=fp8, round_scale=round_scale,
            use_ue8m0=ue8m0, cumulative_local_expert_recv_stats=stats, async_finish=not hook, return_recv_hook=hook,
        )  # fmt: skip
        receive() if hook else event.current_stream_wait()
        assert torch.equal(stats, count)
        self.masked()
        rows: Any = received
        if fp8:
            flat = rows[0].view(-1, SHRINK.hidden), rows[1].contiguous().view(rows[0][..., 0].numel(), -1)
            rows = per_token_cast_back(*flat).view(rows[0].shape)
        for local in range(SHRINK.local):
            sources = [source for source, *_ in SHRINK.rows_of(self.rank * SHRINK.local + local)]
            sent = [0 if rank in self.failed else sources.count(rank) for rank in range(SHRINK.world)]
            assert (handle[1][local] & 0xFFFFFFFF).tolist() == sent and int(count[local]) == sum(sent)
        self.fails("combine")
        if zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        out = torch.empty((SHRINK.tokens(self.rank), SHRINK.hidden), dtype=torch.bfloat16)
        total, event, receive = self.buffer.low_latency_combine(
            rows, ids, SHRINK.weights(self.rank), handle, use_logfmt=False, async_finish=not hook, zero_copy=zero_copy,
            return_recv_hook=hook, out=out,
        )  # fmt: skip
        receive() if hook else event.current_stream_wait()
        self.masked()
        expected = low_sum(SHRINK, self.rank, lambda expert: float(SHRINK.owner(expert) not in self.failed))
        assert total is out and calc_diff(expected, out) < (9e-4 if fp8 else 1e-5)

    def run(self) -> int:
        """All of the test; how often a step was repeated."""
        repeated = 0
        for hook, given, zero_copy in itertools.product((False, True), FORMATS, (False, True)):
            while True:
                try:
                    self.step(zero_copy, hook, *given)
                    break
                except PeerLost as lost:
                    assert lost.rank in self.failed and "are masked from now on: repeat the step" in str(lost)
                    repeated += 1
            if self.rank == FAILS_IN["clean"]:
                raise Fails
            self.buffer.clean_low_latency_buffer(SHRINK.most, SHRINK.hidden, SHRINK.experts)
            self.masked()
            self.failed.add(FAILS_IN["clean"])
        return repeated


def test_deepeps_shrink_test() -> None:
    done = threading.Barrier(SHRINK.world - len(FAILS_IN))

    def work(rank: int, group_ep: str) -> int:
        made = Rank(rank, group_ep)
        repeated = made.run()
        with pytest.raises(ArgumentError, match="which is masked: low_latency_clean_mask_buffer"):
            made.buffer.low_latency_update_mask_buffer(FAILS_IN["clean"], False)
        with pytest.raises(ArgumentError, match="have ended: restart the job"):
            made.buffer.low_latency_clean_mask_buffer()
        done.wait()
        return repeated

    with LocalCluster(SHRINK.world, window_mib=4) as cluster, pytest.raises(Fails) as lost:
        cluster.run(work)
    left = [rank for rank in range(SHRINK.world) if rank not in FAILS_IN.values()]
    assert results_of(lost.value, left) == dict.fromkeys(left, 3), "each loss costs one step"
