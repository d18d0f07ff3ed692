"""The native library as the tests of communicators see it, and a stand-in for an op over its windows.

A proxy in its place keeps count of what is mapped and created.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import time
from collections.abc import Iterator
from typing import Any

from ascend_moe.comm.communicator import Communicator, timeout_s
from ascend_moe.errors import CommTimeout, PeerLost
from ascend_moe.native import library as _lib

PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


class WindowLibrary:
    """Proxy that keeps accounts."""

    def __init__(self) -> None:
        self.inner: Any = _lib.lib()
        self.mapped: dict[int, int] = {}  # base -> bytes
        self.comms: dict[int, dict[str, Any]] = {}  # handle -> what it was created with
        self.fail_map_at = -1  # counts down; the mapping that meets 0 fails
        self.before_map: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def am_window_alloc(self, total: int) -> int | None:
        return self._keep(self.inner.am_window_alloc(total), total)

    def am_window_map(self, fd: int, total: int) -> int | None:
        if self.before_map is not None:
            self.before_map()
        self.fail_map_at -= 1
        return None if self.fail_map_at == -1 else self._keep(self.inner.am_window_map(fd, total), total)

    def _keep(self, base: int | None, total: int) -> int | None:
        if base is not None:
            self.mapped[base] = total
        return base

    def am_window_unmap(self, base: int, total: int) -> None:
        users = [comm for comm in self.comms.values() if base in comm["bases"]]
        assert not users, "a window is unmapped under a communicator"
        assert self.mapped.pop(base) == total
        self.inner.am_window_unmap(base, total)

    def am_comm_create(
        self, rank: int, world: int, bases: Any, data_bytes: int, lent_bytes: int, fds: Any
    ) -> int:
        handle = int(self.inner.am_comm_create(rank, world, bases, data_bytes, lent_bytes, fds))
        self.comms[handle] = {
            "bases": list(bases),
            "fds": list(fds) if fds is not None else [-1] * world,
            "total": int(self.inner.am_window_total_bytes(data_bytes, lent_bytes)),
            "epoch": 0,
            "lost": set(),
        }
        return handle

    def am_comm_destroy(self, handle: int) -> None:
        del self.comms[handle]
        self.inner.am_comm_destroy(handle)

    def am_comm_mark_lost(self, handle: int, peer: int) -> None:
        self.comms[handle]["lost"].add(peer)
        self.inner.am_comm_mark_lost(handle, peer)


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
    """Stands for an op: writes ``value`` into everybody's window, waits for and returns everybody's.

    Raises PeerLost and CommTimeout as ops do, and ``comm.failed`` again.
    """
    with comm.use() as handle:
        state = _lib.lib().comms[handle]  # type: ignore[attr-defined]
        state["epoch"] += 1
        epoch, world = state["epoch"], comm.world
        # The last page of a window belongs to its data area. Two halves: a peer may be one exchange ahead.
        half = state["total"] - PAGE + (epoch % 2) * (PAGE // 2)
        for base in state["bases"]:
            slot = (ctypes.c_uint64 * 2).from_address(base + half + 16 * comm.rank)
            slot[1] = value
            slot[0] = epoch
        mine = (ctypes.c_uint64 * (2 * world)).from_address(state["bases"][comm.rank] + half)
        deadline = time.monotonic() + timeout_s()
        while True:
            gone = _gone(state)  # looked at before the last look at the slots
            missing = [rank for rank in range(world) if mine[2 * rank] != epoch]
            if not missing:
                return [int(mine[2 * rank + 1]) for rank in range(world)]
            late = time.monotonic() > deadline
            for rank in missing:
                if rank in gone or late:
                    kind = PeerLost if rank in gone else CommTimeout
                    comm.failed = kind(f"rank {rank}: {comm.describe_peer(rank)}", rank=rank)
                    raise comm.failed
            time.sleep(0.001)


def _gone(state: dict[str, Any]) -> set[int]:
    poll = select.poll()
    ranks = {fd: rank for rank, fd in enumerate(state["fds"]) if fd >= 0}
    for fd in ranks:
        poll.register(fd, select.POLLIN)
    return {ranks[fd] for fd, _ in poll.poll(0)} | state["lost"]
