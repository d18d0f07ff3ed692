"""Window tensors by the compiled kernels: ``window_empty`` again, of a communicator that lent before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..native import library
from ..ops import compiled
from . import threads
from .communicator import Communicator
from .lent import LentMemory


def lend(
    shape: Sequence[int] | int, dtype: torch.dtype, group_ep: str, ep_world_size: int, ep_rank_id: int
) -> torch.Tensor | None:
    """What ``window_empty`` returns, when the same group has lent before; None: Python has to look."""
    module = compiled.calls()
    if module is None:
        return None
    made: torch.Tensor | None = module.lend(shape, dtype, group_ep, ep_world_size, ep_rank_id)
    return made


def generation() -> int:
    """To be given to ``remember``; read before the communicator is looked up."""
    return compiled.generation() if compiled.calls() is not None else 0


def remember(generation: int, group_ep: str, communicator: Communicator, area: LentMemory) -> None:
    """``lend`` answers from now on, on this thread, for as long as the name means this communicator."""
    if communicator.gate is None or compiled.calls() is None:
        return
    compiled.remember_lender(
        generation,
        group_ep,
        communicator.world,
        communicator.rank,
        None if threads.find(group_ep) is not None else group_ep,
        communicator.gate,
        area.handle,
        library.lib().am_lent_take,
        library.lib().am_lent_release,
        area.unused,
    )
