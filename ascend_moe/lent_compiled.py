"""Window tensors by the compiled kernels: ``window_empty`` again, of a communicator that lent before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import _lib, compiled, local_cluster
from .communicator import Communicator
from .lent import LentMemory

_op: Callable[..., torch.Tensor | None] | None = None  # once it is registered


def lend(
    shape: Sequence[int] | int, dtype: torch.dtype, group_ep: str, ep_world_size: int, ep_rank_id: int
) -> torch.Tensor | None:
    """What ``window_empty`` returns, when the same group has lent before; None: Python has to look."""
    # Few steps: between large ops each runs from cold caches. A builtin: torch.compile leaves it alone.
    if _op is None or torch._C._len_torch_dispatch_stack():  # modes want ops that they know
        return None
    if type(shape) is not tuple and not isinstance(shape, (list, torch.Size)):
        return None
    for size in shape:
        if type(size) is not int:
            return None
    try:
        return _op(shape, dtype, group_ep, ep_world_size, ep_rank_id)
    except (RuntimeError, TypeError):  # no dtype, no name: Python says so
        return None


def generation() -> int:
    """To be given to ``remember``; read before the communicator is looked up."""
    return compiled.generation() if compiled.active() else 0


def remember(generation: int, group_ep: str, communicator: Communicator, area: LentMemory) -> None:
    """``lend`` answers from now on, on this thread, for as long as the name means this communicator."""
    global _op
    if communicator.gate is None:
        return
    if _op is None:
        compiled.register_lend()
        _op = torch.ops.ascend_moe_python.lend.default._op
    compiled.remember_lender(
        generation,
        group_ep,
        communicator.world,
        communicator.rank,
        None if local_cluster.find(group_ep) is not None else group_ep,
        communicator.gate,
        area.handle,
        _lib.lib().am_lent_take,
        _lib.lib().am_lent_release,
        area.unused,
    )
