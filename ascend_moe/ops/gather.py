"""Every rank's numbers on every rank, by one small dispatch: it needs the group's windows and nothing else."""

from __future__ import annotations

import torch

from . import npu_moe_distribute_dispatch_v2
from .npu_communicator import check

_WORDS = 8  # a dispatch's row is a multiple of 32 bytes


@torch.no_grad()
def gather_rows(words: torch.Tensor, group_ep: str, world: int, rank: int) -> torch.Tensor:
    """What every rank has passed, by rank; nothing is read on the host.

    Args:
        words: ``(n,)`` int32 on the device of the group's windows, the same n on all ranks.
        group_ep, world, rank: the group, its size and this rank's place in it.

    Returns:
        ``(world, n)`` int32, there.

    Collective, as a dispatch is. Raises as `npu_moe_distribute_dispatch_v2`.
    """
    row = torch.nn.functional.pad(words, (0, -words.numel() % _WORDS))
    # A dispatch moves bytes: which numbers they are as fp32 does not matter.
    rows = row.view(torch.float32).expand(world, -1).contiguous()
    # A row for each rank's only expert.
    ids = torch.arange(world, dtype=torch.int32, device=words.device).unsqueeze(1)
    arrived = npu_moe_distribute_dispatch_v2(rows, ids, group_ep, world, rank, world).expand_x[:world]
    return arrived.view(torch.int32)[:, : words.numel()]


@torch.no_grad()
def gather_words(words: torch.Tensor, group_ep: str, world: int, rank: int, device: torch.device) -> torch.Tensor:
    """The same of numbers on the CPU.

    Args:
        words: ``(n,)`` int32 on the CPU, the same n on all ranks.
        group_ep, world, rank: the group, its size and this rank's place in it.
        device: where the group's windows are.

    Returns:
        ``(world, n)`` int32 on the CPU: on an NPU the host waits for it.

    Collective, as a dispatch is. Raises as `npu_moe_distribute_dispatch_v2`, on an NPU too before it returns.
    """
    arrived = gather_rows(words.to(device), group_ep, world, rank)
    if arrived.device.type != "cpu":
        check(group_ep)
    return arrived.cpu()
