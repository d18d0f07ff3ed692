"""Has what vLLM's runners do with an all2all manager, and what a rank process of vllm-ascend does with its own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from ascend_moe.errors import PeerLost
from ascend_moe.interop.deep_ep import Buffer
from ascend_moe.interop.vllm import All2AllManager
from ascend_moe.interop.vllm_ascend import use_fault_tolerance

W, E, H, T = 3, 6, 512, 2
_communicator = SimpleNamespace(all2all_manager=None)


def layer(manager: All2AllManager) -> None:
    """A step of the model: dispatch and combine of the manager's own handle."""
    handle = manager.get_handle({"num_experts": 2 * manager.world, "max_num_tokens": T})
    x = torch.full((T, H), float(manager.rank)).bfloat16()
    ids = torch.tensor([[0, 2 * manager.world - 1]] * T, dtype=torch.int32)
    arrived = handle.dispatcher.dispatch(x, ids)
    out = handle.dispatcher.combine(arrived.expand_x, arrived, torch.full((T, 2), 0.5))
    assert torch.equal(out, x)


def after_step(manager: Any) -> None:
    """What a runner does with a step's outputs."""
    assert manager.support_fault_tolerance
    has_fault = manager.query_fault().to("cpu", non_blocking=True)
    if has_fault.item():
        raise RuntimeError(f"Mask: {manager.query_active_mask().cpu().tolist()}")


def buffer_of(group: Any, rank: int) -> Buffer:
    """As ``DeepEPLLAll2AllManager`` makes it."""
    size = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=T, hidden=H, num_ranks=W, num_experts=E
    )
    return Buffer(
        group=(group, W, rank),
        num_nvl_bytes=1 << 30,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=E // W,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=True,
    )


def moved(buffer: Buffer, rank: int, others: int) -> None:
    """One layer, whose experts return their rows; ``others``: how many of a token's two experts are there."""
    x, ids = torch.full((T, H), float(rank)).bfloat16(), torch.tensor([[0, E - 1]] * T)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, T, E, use_fp8=False)
    out, _, _ = buffer.low_latency_combine(rows, ids, torch.full((T, 2), 0.5), handle)
    assert torch.equal(out, x * others / 2)


def cleaned(buffer: Buffer) -> None:
    """What the manager's ``clean_buffers`` does."""
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()


# ---- in rank processes


def give_a_manager() -> bool:
    """To a communicator as vllm-ascend's; then a step of another manager of the group."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    manager = use_fault_tolerance(_communicator, SimpleNamespace(device_group=group))
    after_step(manager)
    layer(All2AllManager(group, group.rank(), group.size()))
    after_step(manager)
    return manager is _communicator.all2all_manager


def mask_with_a_fault(seconds: float = 20) -> list[int]:
    """The mask, once there is a fault."""
    manager: Any = _communicator.all2all_manager
    deadline = time.monotonic() + seconds
    while not manager.query_fault().item() and time.monotonic() < deadline:
        time.sleep(0.01)
    return list(manager.query_active_mask().cpu().tolist())


_buffers: list[Buffer] = []


def _masks() -> list[int]:
    mask = torch.full((W,), 9, dtype=torch.int32)
    _buffers[0].low_latency_query_mask_buffer(mask)
    return list(mask.tolist())


def make_buffer() -> int:
    import torch.distributed as dist

    _buffers[:] = [buffer_of("0", dist.get_rank())]
    return dist.get_rank()


def moved_here(others: int) -> list[int]:
    """A layer of this process; the mask after it."""
    moved(_buffers[0], _buffers[0].rank, others)
    return _masks()


def lose_one() -> list[int]:
    """A layer in which a rank is lost; the mask after it."""
    try:
        moved_here(2)
    except PeerLost as lost:
        assert "left out from now on" in str(lost)
        return _masks()
    raise AssertionError("no rank was lost")


def clean_here() -> list[int]:
    cleaned(_buffers[0])
    return _masks()
