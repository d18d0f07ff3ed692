"""Communicator: one rank's access to the windows of a group on the CPU, with the settings at the time of opening."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ascend_moe import settings
from ascend_moe.comm.registered import RegisteredMemory, no_room
from ascend_moe.comm.vote import WindowVote
from ascend_moe.errors import AscendMoeError, CommBusy, CommClosed
from ascend_moe.native import binding, hang, library, log, timestamps
from ascend_moe.native.plans import ALGORITHMS
from ascend_moe.native.windows import MIB, context_kind, ranks_per_server, timeout_s

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # such frames may resume
_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def take_number(communicator: Any) -> int:
    """Return a new number, under which `by_number` returns this communicator (on CPU or NPU) while it exists."""
    number = next(_numbers)
    _alive[number] = communicator
    return number


def by_number(number: int) -> Any:
    """Return the communicator with this number, or None if it was freed."""
    return _alive.get(number)


class GroupCommunicator:
    """Base of communicators on CPU and NPU: the first fatal error, and the handle in the ops' library (csrc/torch)."""

    ops_handle: binding.CommHandle
    _failed: BaseException | None = None
    _raised_again: weakref.WeakSet[BaseException] | None = None

    @property
    def failed(self) -> BaseException | None:
        return self._failed

    @failed.setter
    def failed(self, error: BaseException) -> None:
        self._failed = error
        self.ops_handle.shut()

    def raise_if_failed(self) -> None:
        """Raise the first fatal error, if any: a copy of it, since an exception object has one traceback only."""
        if isinstance(self.failed, AscendMoeError):
            error = type(self.failed)(str(self.failed), **self.failed.details)
            if self._raised_again is None:
                self._raised_again = weakref.WeakSet()
            self._raised_again.add(error)
            try:
                raise error from self.failed
            finally:
                del error
        if self.failed is not None:
            raise self.failed

    def clear_tracebacks(self) -> None:
        """Clear local variables, which keep tensors alive, from the fatal errors' tracebacks; text and lines remain."""
        errors = [*(self._raised_again or ()), self._failed]
        seen: set[int] = set()
        while errors:
            error = errors.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            errors += [error.__cause__, error.__context__]
            traceback = error.__traceback__
            while traceback is not None:
                frame, traceback = traceback.tb_frame, traceback.tb_next
                if not frame.f_code.co_flags & _SUSPENDED:
                    with contextlib.suppress(RuntimeError):  # still running
                        frame.clear()


class Peers(Protocol):
    """State of the other ranks of a group. Callers hold the communicator, by `Communicator.held`, meanwhile."""

    def live_fds(self, world: int) -> Sequence[int]:
        """Return for each of ``world`` ranks a file descriptor that becomes readable when its process ends, or -1."""

    def gone(self, rank: int) -> bool:
        """Return whether the rank has ended or has closed its communicator."""

    def ended(self, rank: int) -> bool:
        """Return whether the rank's process, or its function in a LocalCluster, has ended."""

    def describe(self, rank: int) -> str:
        """Describe the rank's current state, e.g. ``process 4242 is stopped (state T)``."""


class Communicator(GroupCommunicator):
    """One rank's communicator on the CPU: the native communicator over all ranks' windows.

    Attributes:
        name: its group_ep.
        rank, world: EP rank and number of EP ranks.
        data_bytes, registered_bytes: bytes of one rank's data area, and of its memory for registered buffers.
        context_kind, ranks_per_server: the settings at the time of opening, the first as an index into ``CONTEXTS``.
            ASCEND_MOE_RANKS_PER_SERVER simulates an A2 cluster: a copy agent in place of RDMA reaches other servers.
        number: unique in this process.
        vote: the ranks' votes on who remains in the group; use it within ``held``.
        peers: state of the other ranks.
        failed: the first fatal error, set by the op that detected it; later ops raise it again at once.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        bases: Sequence[int],
        data_bytes: int,
        registered_bytes: int,
        *,
        peers: Peers,
        release: Callable[[], None],
        unmap: Callable[[], None] | None = None,
        alive: Callable[[], bool] | None = None,
    ) -> None:
        """Create the native communicator; if that fails, the caller still has to release windows and peers.

        Args:
            bases: address of every rank's window in this process, by rank.
            peers: state of the other ranks.
            release: called once after the native communicator is destroyed: unmaps and closes the rest.
            unmap: unmaps this rank's own window; called after ``release``, once no window tensor is alive. None:
                ``release`` does it, with ``when_unused``.
            alive: returns whether the process group still exists; called by every op. None: always.
        """
        binding.library()  # fails before anything has to be released
        self.name = name
        self.rank = rank
        self.world = len(bases)
        self.data_bytes, self.registered_bytes = data_bytes, registered_bytes
        self.context_kind, self.ranks_per_server = context_kind(), ranks_per_server()
        self._registered: RegisteredMemory | None = None
        self.peers, self._bases = peers, list(bases)
        self._release, self._unmap = release, unmap
        self._close_wait_s = timeout_s() + 2
        self._handle_lock = threading.Lock()  # held briefly; guards only the handle
        fds = (ctypes.c_int * self.world)(*peers.live_fds(self.world))
        table = (ctypes.c_void_p * self.world)(*bases)
        handle = library.lib().am_comm_create(rank, self.world, table, data_bytes, registered_bytes, fds)
        if not handle:
            raise AscendMoeError(f"rank {rank}: no memory for the communicator of group {name!r}: run fewer ranks")
        self._handle: int | None = handle
        self.number = take_number(self)
        self.vote = WindowVote(name, rank, list(bases), peers.gone)
        self.alive, lib = alive, library.lib()
        servers, stores = self.ranks_per_server, int(settings.INTRA_NODE_STORES.get())
        if lib.am_comm_use_context(handle, self.context_kind) or lib.am_comm_use_servers(handle, servers, stores):
            lib.am_comm_destroy(handle)
            raise AscendMoeError(f"rank {rank}: no memory for the context of group {name!r}: run fewer ranks")
        self.ops_handle = binding.CommHandle(  # its lock is held while an op runs
            number=self.number,
            communicator=handle,
            world=self.world,
            rank=rank,
            window_mib=data_bytes // MIB,
            registered_mib=registered_bytes // MIB,
            context_kind=self.context_kind,
            ranks_per_server=self.ranks_per_server,
            intra_node_stores=stores,
            rdma_flags=int(settings.RDMA_FLAGS.get()),
            of_process_group=alive is not None,
        )
        log.opened(name, rank, self.world, data_bytes // MIB, registered_bytes // MIB)
        hang.watch(self)

    @property
    def handle(self) -> int:
        """Native handle, valid until ``close``, then CommClosed is raised. Ops must use it within ``use()``."""
        if self._handle is None:
            text = f"rank {self.rank}: the communicator of group {self.name!r} is closed: call an op to open a new one"
            raise CommClosed(text, rank=self.rank)
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    @property
    def algorithm(self) -> str:
        """Algorithm of this rank's last op: "window", "direct", "hierarchy", or "" before any. Raises as ``use``."""
        with self.use() as handle:
            return ALGORITHMS[library.lib().am_comm_algorithm_run(handle)]

    @property
    def epoch(self) -> int:
        """Epoch (number) of this rank's last op on the group, failed or not; 0 before any, or if closed."""
        with self.ops_handle:
            return 0 if self._handle is None else int(library.lib().am_comm_epoch(self._handle))

    def timestamps(self, op: str) -> list[timestamps.Timestamp]:
        """Return the timestamps of the last ``op``, "dispatch" or "combine"; empty without `settings.TIMESTAMPS`."""
        with self.use() as handle:
            return timestamps.of_communicator(handle, op)

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Context manager: yield the native handle, excluding other ops and close; raise ``failed`` or CommClosed."""
        with self.ops_handle:
            self.raise_if_failed()
            yield self.handle

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: keep the windows mapped, excluding ops and close; works after failures, not after close."""
        with self.ops_handle:
            _ = self.handle
            yield

    def raise_why_unusable(self) -> None:
        """Raise ``failed`` if an op has failed, CommClosed if this is closed; else return."""
        self.raise_if_failed()
        _ = self.handle

    def describe_peer(self, rank: int) -> str:
        """Return the visible state of a peer, e.g. ``process 4242 is stopped (state T)``."""
        if rank == self.rank:
            return "it is this rank"
        with self._handle_lock:  # prevents close, which unmaps the peer's window
            if self._handle is None:
                return "this rank has closed its communicator"
            seen = self.peers.describe(rank)
            if " is running" not in seen:
                return seen
            in_op = library.lib().am_comm_in_op(self._handle, rank)
        return f"{seen}, in an op of this group" if in_op else f"{seen}, in no op of this group"

    def state(self) -> hang.GroupState | None:
        """Return what every rank of the group is doing, read from the windows; None if this communicator is closed."""
        with self._handle_lock:
            if self._handle is None:
                return None
            total = library.lib().am_window_total_bytes(self.data_bytes, self.registered_bytes)
            found = hang.of_windows(self.name, self.name, self._bases, total, lambda pid: "")
            ranks = (replace(one, process=self.peers.describe(one.rank)) for one in found.ranks)
            return replace(found, ranks=tuple(ranks))

    def register(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """Return a registered buffer of ``size`` bytes, released with the returned object. Raises WindowTooSmall."""
        with self._handle_lock:
            handle = self.handle
            if self._registered is None:
                area = library.lib().am_comm_registered(handle) if self.registered_bytes else None
                if not area:
                    raise no_room(size, 0, 0, size)
                self._registered = RegisteredMemory(area)
            return self._registered.take(size, self.registered_bytes)

    def when_unused(self, unmap: Callable[[], None]) -> None:
        """Call ``unmap`` as soon as no tensor is alive in this rank's window. Destroy the native communicator first."""
        if self._registered is None:
            unmap()
        else:
            self._registered.retire(unmap)

    def mark_lost(self, peer: int) -> None:
        """Make this rank's waits for ``peer`` raise PeerLost from now on; for ranks that are threads of one process."""
        with self._handle_lock:
            if self._handle is not None:
                library.lib().am_comm_mark_lost(self._handle, peer)

    def close(self, *, wait_s: float | None = None) -> None:
        """Destroy the communicator. Local and idempotent; waits for an op that another thread runs on it.

        Clears the frames of fatal errors' tracebacks, which may keep window tensors alive.

        Args:
            wait_s: seconds to wait for that op; None: ASCEND_MOE_TIMEOUT_S at the time of opening, and 2 s.

        Raises:
            CommBusy: the op is still running after ``wait_s``; nothing was closed.
        """
        if not self.ops_handle.acquire(timeout=self._close_wait_s if wait_s is None else wait_s):
            text = f"rank {self.rank}: an op is still running on group {self.name!r}: close it after the op"
            raise CommBusy(text, rank=self.rank)
        try:
            with self._handle_lock:
                handle, self._handle = self._handle, None
            self.ops_handle.shut()
            self.clear_tracebacks()
            if handle is not None:
                binding.forget()
                try:
                    library.lib().am_comm_destroy(handle)
                finally:
                    self._release()
                    if self._unmap is not None:
                        self.when_unused(self._unmap)
        finally:
            self.ops_handle.release()
