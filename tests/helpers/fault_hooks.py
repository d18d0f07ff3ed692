"""Has what vLLM's runners do with an all2all manager, and what a rank process of vllm-ascend does with its own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

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
