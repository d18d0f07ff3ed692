"""DeepEP's mask of ranks: low-latency calls go on without a rank that was lost, or that the caller leaves out."""

from __future__ import annotations

import threading

import pytest
import torch

from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError
from ascend_moe.interop.deep_ep import Buffer

W, L, H, K, T = 4, 2, 128, 3, 3
E = W * L


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (T, H), generator=rng).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=rng)[:K] for _ in range(T)])
    ids[0, 0] = -1
    return x, ids, torch.full((T, K), 0.5)


def step(buffer: Buffer, rank: int, hook: bool) -> torch.Tensor:
    """A dispatch and a combine whose experts return their rows; layouts have the whole group's numbers."""
    x, ids, weights = inputs(rank)
    rows, count, handle, _, receive = buffer.low_latency_dispatch(x, ids, T, E, use_fp8=False, return_recv_hook=hook)
    receive()
    assert rows.shape == (L, T * W, H) and handle[1].shape == (L, W)
    assert torch.equal((handle[1] & 0xFFFFFFFF).sum(1), count.long())
    out, _, receive = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=hook)
    receive()
    return out


def expected(rank: int, masked: list[int]) -> torch.Tensor:
    x, ids, _ = inputs(rank)
    terms = (ids >= 0) & ~torch.isin(ids // L, torch.tensor(masked))
    return (x.float() * terms.sum(1, keepdim=True) * 0.5).bfloat16()


def masks(buffer: Buffer) -> list[int]:
    status = torch.full((W,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def test_ranks_that_the_caller_leaves_out() -> None:
    left_out = threading.Barrier(W)

    def leave_out(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, W, rank), low_latency_mode=True, enable_shrink=True)
        assert torch.equal(step(buffer, rank, False), expected(rank, []))
        if rank not in (1, 3):
            go_on_alone(buffer, rank)
        left_out.wait()
        buffer.low_latency_clean_mask_buffer()  # on all ranks: they are back
        assert masks(buffer) == [0] * W
        assert torch.equal(step(buffer, rank, False), expected(rank, []))
        left_out.wait()

    def go_on_alone(buffer: Buffer, rank: int) -> None:
        buffer.low_latency_update_mask_buffer(2 - rank, True)  # and takes it back
        assert sum(masks(buffer)) == 1
        buffer.low_latency_clean_mask_buffer()
        assert masks(buffer) == [0] * W
        for masked in (1, 3):
            buffer.low_latency_update_mask_buffer(masked, True)
        assert torch.equal(step(buffer, rank, False), expected(rank, [1, 3]))
        with pytest.raises(
            ArgumentError, match="is 0, this rank: pass another" if rank == 0 else "is 2, this rank: pass another"
        ):
            buffer.low_latency_update_mask_buffer(rank, True)

    def without(rank: int, group_ep: str) -> None:
        with pytest.raises(ArgumentError, match="enable_shrink=True"):
            Buffer((group_ep, W, rank)).low_latency_update_mask_buffer(1, True)

    with LocalCluster(W, window_mib=4) as cluster:
        for each in (without, leave_out):
            cluster.run(each)
