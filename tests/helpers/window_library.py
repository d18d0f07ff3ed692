"""The native library as the tests of communicators see it, and a small op over its windows.

A proxy in its place keeps count of what is mapped and created.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import ascend_moe
from ascend_moe.comm.communicator import Communicator
from ascend_moe.native import library as _lib


class WindowLibrary:
    """Proxy that keeps accounts."""

    def __init__(self) -> None:
        self.inner: Any = _lib.lib()
        self.mapped: dict[int, int] = {}  # base -> bytes
        self.comms: dict[int, list[int]] = {}  # handle -> bases of its windows
        self.fail_map_at = -1  # counts down; the mapping that meets 0 fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def am_window_alloc(self, total: int) -> int | None:
        return self._keep(self.inner.am_window_alloc(total), total)

    def am_window_map(self, fd: int, total: int) -> int | None:
        self.fail_map_at -= 1
        return None if self.fail_map_at == -1 else self._keep(self.inner.am_window_map(fd, total), total)

    def am_window_look(self, fd: int, offset: int, total: int) -> int | None:
        return self._keep(self.inner.am_window_look(fd, offset, total), total)

    def _keep(self, base: int | None, total: int) -> int | None:
        if base is not None:
            self.mapped[base] = total
        return base

    def am_window_unmap(self, base: int, total: int) -> None:
        users = [comm for comm in self.comms.values() if base in comm]
        assert not users, "a window is unmapped under a communicator"
        assert self.mapped.pop(base) == total
        self.inner.am_window_unmap(base, total)

    def am_comm_create(
        self, rank: int, world: int, bases: Any, data_bytes: int, registered_bytes: int, fds: Any
    ) -> int:
        handle = int(self.inner.am_comm_create(rank, world, bases, data_bytes, registered_bytes, fds))
        self.comms[handle] = list(bases)
        return handle

    def am_comm_destroy(self, handle: int) -> None:
        del self.comms[handle]
        self.inner.am_comm_destroy(handle)


def install() -> None:
    """Puts a proxy in the library's place for good."""
    library = WindowLibrary()
    _lib.lib = lambda: library  # type: ignore[assignment,return-value]


@contextlib.contextmanager
def counted(monkeypatch: Any) -> Iterator[WindowLibrary]:
    """A proxy in the library's place, whose windows and communicators are all gone in the end."""
    library = WindowLibrary()
    monkeypatch.setattr(_lib, "lib", lambda: library)
    yield library
    assert (library.mapped, library.comms) == ({}, {})


def exchange(comm: Communicator, value: int) -> list[int]:
    """A dispatch that sends ``value`` to every rank; everybody's values. Raises what ops raise."""
    x, ids = torch.full((comm.world, 16), float(value)), torch.arange(comm.world, dtype=torch.int32)[:, None]
    rows = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, comm.name, comm.world, comm.rank, comm.world)[0]
    return [int(row) for row in rows[: comm.world, 0]]
