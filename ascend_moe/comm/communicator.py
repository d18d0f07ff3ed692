"""Communicator: one rank's end of the windows of a group on the CPU, and the settings read when it is opened."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ascend_moe.comm.registered import RegisteredMemory, no_room
from ascend_moe.comm.vote import WindowVote
from ascend_moe.errors import AscendMoeError, CommBusy, CommClosed
from ascend_moe.native import binding, library, log, stamps
from ascend_moe.native.plans import ALGORITHMS
from ascend_moe.native.windows import MIB, context_kind, near_stores, ranks_per_server, rdma_flags, timeout_s

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # it may go on
_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def take_number(end: Any) -> int:
    """A number of its own for one rank's end, on CPU or NPU, by which ``by_number`` knows it."""
    number = next(_numbers)
    _alive[number] = end
    return number


def by_number(number: int) -> Any:
    """The end whose ``number`` this is, while anything refers to it; None after that."""
    return _alive.get(number)


class GroupEnd:
    """Holds what a rank's ends on CPU and NPU have in common: the first fatal error, and the binding's ``end``."""

    end: binding.End
    _failed: BaseException | None = None
    _raised_again: weakref.WeakSet[BaseException] | None = None

    @property
    def failed(self) -> BaseException | None:
        return self._failed

    @failed.setter
    def failed(self, error: BaseException) -> None:
        self._failed = error
        self.end.shut()

    def raise_if_failed(self) -> None:
        """Raises the first fatal error once more (a copy: an exception object carries one traceback)."""
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
        """Drops the variables of calls that a fatal error has ended: its traceback keeps them, and tensors with them.

        The error keeps its text, its details, and the lines of its traceback.
        """
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
                    with contextlib.suppress(RuntimeError):  # it still runs
                        frame.clear()


class Peers(Protocol):
    """What is known of the other ranks of a group. Hold the communicator (`Communicator.held`) while a method runs."""

    def live_fds(self, world: int) -> Sequence[int]:
        """Return a descriptor for each rank that is readable once the rank has ended; -1 for none."""

    def gone(self, rank: int) -> bool:
        """Return whether the rank has ended or has closed its communicator."""

    def ended(self, rank: int) -> bool:
        """Return whether the rank's process, or its function in a LocalCluster, has ended."""

    def describe(self, rank: int) -> str:
        """Describe what is known of the rank now, e.g. ``process 4242 is stopped (state T)``."""


class Communicator(GroupEnd):
    """One rank's end: the native communicator over all ranks' windows.

    Attributes:
        name: the group_ep that finds it.
        rank, world: this end's EP rank, and the number of EP ranks.
        data_bytes, lent_bytes: bytes of one rank's data area, and of its registered buffers.
        context_kind, ranks_per_server: the settings' values when it was opened. ASCEND_MOE_RANKS_PER_SERVER
            simulates an A2 cluster: a rank reaches ranks of other servers by items that a copy agent carries.
        number: one of its own in this process.
        vote: by which the ranks that are left agree who they are. Use it in ``held``.
        peers: as given.
        failed: the first fatal error, set by the op that met it; later ops raise it again at once.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        bases: Sequence[int],
        data_bytes: int,
        lent_bytes: int,
        *,
        peers: Peers,
        release: Callable[[], None],
        unmap: Callable[[], None] | None = None,
        alive: Callable[[], bool] | None = None,
    ) -> None:
        """Creates the native communicator; owns nothing else until that has succeeded.

        Args:
            bases: address of every rank's window in this process, by rank.
            peers: what is known of the other ranks.
            release: called once, when the native communicator is gone: unmaps and closes the rest.
            unmap: of this rank's own window, called after that, and once no window tensor lives; None:
                ``release`` sees to it, with ``when_unused``.
            alive: whether the group is still the one that this was opened for; None: always. Each call asks.
        """
        binding.library()  # nothing is to be given back yet, should it be missing
        self.name = name
        self.rank = rank
        self.world = len(bases)
        self.data_bytes, self.lent_bytes = data_bytes, lent_bytes
        self.context_kind, self.ranks_per_server = context_kind(), ranks_per_server()
        self._registered: RegisteredMemory | None = None
        self.peers = peers
        self._release, self._unmap = release, unmap
        self._close_wait_s = timeout_s() + 2
        self._handle_lock = threading.Lock()  # held for a moment; guards the handle alone
        fds = (ctypes.c_int * self.world)(*peers.live_fds(self.world))
        table = (ctypes.c_void_p * self.world)(*bases)
        handle = library.lib().am_comm_create(rank, self.world, table, data_bytes, lent_bytes, fds)
        if not handle:
            raise AscendMoeError(f"rank {rank}: the communicator of group {name!r} could not be created")
        self._handle: int | None = handle
        self.number = take_number(self)
        self.vote = WindowVote(name, rank, list(bases), peers.gone)
        self.alive, lib = alive, library.lib()
        servers, near = self.ranks_per_server, near_stores()
        if lib.am_comm_use_context(handle, self.context_kind) or lib.am_comm_use_servers(handle, servers, near):
            lib.am_comm_destroy(handle)
            raise AscendMoeError(f"rank {rank}: no memory for the context of group {name!r}")
        self.end = binding.End(  # its lock is held while an op runs
            number=self.number,
            communicator=handle,
            world=self.world,
            rank=rank,
            window_mib=data_bytes // MIB,
            lent_mib=lent_bytes // MIB,
            context_kind=self.context_kind,
            ranks_per_server=self.ranks_per_server,
            near_stores=near,
            rdma_flags=rdma_flags(),
            of_process_group=alive is not None,
        )
        log.opened(name, rank, self.world, data_bytes // MIB, lent_bytes // MIB)

    @property
    def handle(self) -> int:
        """Native handle, valid until ``close``. Ops hold ``use()`` while they pass it on."""
        if self._handle is None:
            raise CommClosed(f"rank {self.rank}: the communicator of group {self.name!r} is closed", rank=self.rank)
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    @property
    def algorithm(self) -> str:
        """Returns what this rank's last op ran: "window", "direct", or "" when none has run."""
        with self.use() as handle:
            return ALGORITHMS[library.lib().am_comm_algorithm_run(handle)]

    @property
    def epoch(self) -> int:
        """The number on the wire of this rank's last op, failed or not; 0 when none has run, or when closed."""
        with self.end:
            return 0 if self._handle is None else int(library.lib().am_comm_epoch(self._handle))

    def stamps(self, op: str) -> list[stamps.Stamp]:
        """What the cores of this rank's last dispatch or combine have left; none without `settings.STAMPS`."""
        with self.use() as handle:
            return stamps.of_communicator(handle, op)

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """The handle for one op: no other op and no close of this end meanwhile. Raises ``failed`` again."""
        with self.end:
            self.raise_if_failed()
            yield self.handle

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the windows mapped: no op and no close meanwhile. A communicator that has failed will do."""
        with self.end:
            _ = self.handle
            yield

    def raise_why_unusable(self) -> None:
        """Raises what keeps ops from using this end, if anything does."""
        self.raise_if_failed()
        _ = self.handle

    def describe_peer(self, rank: int) -> str:
        """Returns what can be seen of a peer now, e.g. ``process 4242 is stopped (state T)``."""
        if rank == self.rank:
            return "it is this rank"
        with self._handle_lock:  # no close, which unmaps the peer's window, meanwhile
            if self._handle is None:
                return "this rank has closed its communicator"
            seen = self.peers.describe(rank)
            if " is running" not in seen:
                return seen
            in_op = library.lib().am_comm_in_op(self._handle, rank)
        return f"{seen}, in an op of this group" if in_op else f"{seen}, in Python code, in no op of this group"

    def lend(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """A registered buffer of ``size`` bytes, held until the returned object dies."""
        with self._handle_lock:
            handle = self.handle
            if self._registered is None:
                area = library.lib().am_comm_lent(handle) if self.lent_bytes else None
                if not area:
                    raise no_room(size, 0, 0, size)
                self._registered = RegisteredMemory(area)
            return self._registered.take(size, self.lent_bytes)

    def when_unused(self, unmap: Callable[[], None]) -> None:
        """Calls ``unmap`` once no tensor lives in this rank's own window. The native communicator is gone."""
        if self._registered is None:
            unmap()
        else:
            self._registered.retire(unmap)

    def mark_lost(self, peer: int) -> None:
        """Threads only: waits of this end for ``peer`` raise PeerLost from now on."""
        with self._handle_lock:
            if self._handle is not None:
                library.lib().am_comm_mark_lost(self._handle, peer)

    def close(self, *, wait_s: float | None = None) -> None:
        """Destroys this end. Local and idempotent; waits for an op that another thread runs on it.

        Window tensors that only the traceback of a fatal error has live no longer, whoever has the error.

        Args:
            wait_s: seconds to wait for that op, default the deadline of an op and 2 s.

        Raises:
            CommBusy: the op is still running then; nothing was closed.
        """
        if not self.end.acquire(timeout=self._close_wait_s if wait_s is None else wait_s):
            text = f"rank {self.rank}: an op still runs on group {self.name!r}: close it after the op"
            raise CommBusy(text, rank=self.rank)
        try:
            with self._handle_lock:
                handle, self._handle = self._handle, None
            self.end.shut()
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
            self.end.release()
