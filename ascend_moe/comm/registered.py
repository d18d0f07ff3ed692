"""Registered (zero-copy) buffers: the tensors of ``window_empty``, in this rank's window, and their lifetime."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Sequence

import torch

from ascend_moe import settings
from ascend_moe.errors import ArgumentError, WindowTooSmall
from ascend_moe.native import library

_MIB = 1 << 20
VARIABLE = settings.REGISTERED_MIB.name
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of expand_x


class RegisteredMemory:
    """The memory for registered (zero-copy) buffers in this rank's window, until the last buffer is freed.

    A tensor keeps a CPU's window mapped, also after the communicator was closed; an NPU's window is HCCL's. Finalizers
    run wherever Python frees a tensor, so they must not take locks of Python.
    """

    def __init__(self, handle: int) -> None:
        """``handle``: from am_comm_registered or am_registered_open; owned from here on."""
        self.handle = handle
        self._unmap: Callable[[], None] = lambda: None

    def take(self, size: int, registered_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return ``size`` bytes, released with the returned object. Raises as `grant`."""
        address, generation = self.grant(size, registered_bytes)
        block = (ctypes.c_char * size).from_address(address)
        end = weakref.finalize(block, self._give, generation, os.getpid())
        end.atexit = False  # at exit a tensor may still be in use
        return block

    def grant(self, size: int, registered_bytes: int) -> tuple[int, int]:
        """Return the address of a free block of ``size`` bytes, and its generation, a number by which it is released.

        Raises WindowTooSmall if there is no room; ``registered_bytes``, the size of all memory, is for its text.
        """
        out = (ctypes.c_uint64 * 4)()
        if library.lib().am_registered_take(self.handle, min(size, 1 << 62), out):
            raise no_room(size, registered_bytes, held=out[2], needed=out[3])
        return out[0], out[1]

    def _give(self, generation: int, owner: int) -> None:
        if os.getpid() != owner:  # a forked child: its parent's blocks are not its own
            return
        if library.lib().am_registered_release(self.handle, generation):
            self._unmap()

    def retire(self, unmap: Callable[[], None]) -> None:
        """Call ``unmap`` as soon as no tensor is alive, possibly now. Destroy the native communicator first."""
        self._unmap = unmap
        if library.lib().am_registered_close(self.handle):
            unmap()


def no_room(size: int, registered_bytes: int, held: int, needed: int) -> WindowTooSmall:
    """Return the error for a new tensor of ``size`` bytes that does not fit in ``registered_bytes`` (0: none reserved).

    ``held``: number of tensors that use space. ``needed``: value of ``registered_bytes`` that would suffice.
    """
    mib = -(-needed // _MIB)
    why = f"{VARIABLE}=0 leaves no room for registered buffers: unset it, or export {VARIABLE}={mib}, on all ranks"
    if registered_bytes:
        tensors = "1 window tensor holds" if held == 1 else f"{held} window tensors hold"
        why = (
            f"{size / _MIB:.1f} MiB do not fit in the {registered_bytes // _MIB} MiB for registered buffers, of which "
            f"{tensors} space: drop tensors that combine has consumed (their space is free one op later), "
            f"or export {VARIABLE}={mib} on all ranks"
        )
    text = f"window_empty: {why} before the group's first op"
    return WindowTooSmall(text, argument="shape", needed_mib=mib, variable=VARIABLE, held=held)


def byte_size(shape: Sequence[int] | int, dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Return the shape as a tuple and the tensor's bytes. Raises ArgumentError for an invalid shape or dtype."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        text = f"window_empty: shape is {sizes}, its sizes must be integers of at least 0"
        raise ArgumentError(text, argument="shape")
    if dtype not in DTYPES.values():
        text = f"window_empty: dtype is {dtype}, it must be one of {', '.join(map(str, DTYPES.values()))}"
        raise ArgumentError(text, argument="dtype")
    return sizes, math.prod(sizes) * dtype.itemsize


def tensor_of(block: ctypes.Array[ctypes.c_char], sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a block of `RegisteredMemory.take`, which is released with the tensor's storage."""
    return torch.frombuffer(block, dtype=dtype).view(sizes)
