"""Window tensors by the compiled kernels: ``window_empty`` again, of a communicator that lent before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _lib, compiled, local_cluster
from .communicator import Communicator
from .lent import LentMemory


@functools.cache
def _op() -> Callable[..., torch.Tensor | None] | None:
    if not compiled.active():
        return None
    compiled.register_lend()
    op: Any = torch.ops.ascend_moe_python.lend.default
    return op  # type: ignore[no-any-return]


def lend(
    shape: Sequence[int] | int, dtype: torch.dtype, group_ep: str, ep_world_size: int, ep_rank_id: int
) -> torch.Tensor | None:
    """What ``window_empty`` returns, when the same group has lent before; None: Python has to look."""
    op = _op()
    if op is None or torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return None  # modes that trace ops need one that they know
    if isinstance(shape, int) or not all(type(size) is int for size in shape):
        return None
    try:
        return op(shape, dtype, group_ep, ep_world_size, ep_rank_id)
    except (RuntimeError, TypeError):  # no dtype, no name: Python says so
        return None


def generation() -> int:
    """To be given to ``remember``; read before the communicator is looked up."""
    return compiled.generation() if compiled.active() else 0


def remember(generation: int, group_ep: str, communicator: Communicator, area: LentMemory) -> None:
    """``lend`` answers from now on, on this thread, for as long as the name means this communicator."""
    if communicator.gate is None:
        return
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
