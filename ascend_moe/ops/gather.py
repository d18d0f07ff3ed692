"""Every rank's numbers on every rank, by one small dispatch: it needs the group's windows and nothing else."""

from __future__ import annotations

import torch

from . import npu_moe_distribute_dispatch_v2
from .npu_communicator import check

_WORDS = 8  # a dispatch's row is a multiple of 32 bytes


@torch.no_grad()
def gather_words(words: torch.Tensor, group_ep: str, world: int, rank: int, device: torch.device) -> torch.Tensor:
    """What every rank has passed, by rank.

    Args:
        words: ``(n,)`` int32 on the CPU, the same n on all ranks.
        group_ep, world, rank: the group, its size and this rank's place in it.
        device: where the group's windows are.

    Returns:
        ``(world, n)`` int32 on the CPU: on an NPU the host waits for it.

    Collective, as a dispatch is. Raises as `npu_moe_distribute_dispatch_v2`, on an NPU too before it returns.
    """
    width = -(-words.numel() // _WORDS) * _WORDS
    row = torch.zeros(width, dtype=torch.int32)
    row[: words.numel()] = words
    # A dispatch moves bytes: which numbers they are as fp32 does not matter.
    rows = row.view(torch.float32).expand(world, width).contiguous().to(device)
    ids = torch.arange(world, dtype=torch.int32).unsqueeze(1).to(device)  # a row for each rank's only expert
    arrived = npu_moe_distribute_dispatch_v2(rows, ids, group_ep, world, rank, world).expand_x[:world]
    if arrived.device.type != "cpu":
        check(group_ep)
    return arrived.cpu().view(torch.int32)[:, : words.numel()]
