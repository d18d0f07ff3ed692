"""Communicator: one rank's end of the windows of a group on the CPU, and the settings read when it is opened."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ascend_moe.comm.ballot import Ballot
from ascend_moe.comm.ends import GroupEnd, take_number
from ascend_moe.comm.lent import LentMemory, no_room
from ascend_moe.errors import AscendMoeError, CommBusy, CommClosed
from ascend_moe.native import binding, library, log, stamps
from ascend_moe.native.plans import ALGORITHMS
from ascend_moe.native.windows import MIB, context_kind, near_stores, ranks_per_server, rdma_flags, timeout_s

if TYPE_CHECKING:
    from ascend_moe.comm.links import Links


class Communicator(GroupEnd):
    """One rank's end: the native communicator over all ranks' windows.

    Attributes:
        name: the group_ep that finds it.
        rank, world: this end's EP rank, and the number of EP ranks.
        data_bytes, lent_bytes: sizes of one rank's data and lent area.
        context_kind, ranks_per_server: the settings' values when it was opened. ASCEND_MOE_RANKS_PER_SERVER
            simulates an A2 cluster: a rank reaches ranks of other servers by items that a copy agent carries.
        number: one of its own in this process.
        ballot: by which the ranks that are left agree who they are. Hold ``end`` while it is used.
        links: as given.
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
        live_fds: Sequence[int] | None = None,
        describe: Callable[[int], str],
        release: Callable[[], None],
        unmap: Callable[[], None] | None = None,
        alive: Callable[[], bool] | None = None,
        gone: Callable[[int], bool] = lambda rank: False,
        links: Links | None = None,
    ) -> None:
        """Creates the native communicator; owns nothing else until that has succeeded.

        Args:
            bases: address of every rank's window in this process, by rank.
            live_fds: descriptor by rank that is readable once that peer is gone; -1 for none.
            describe: says what can be seen of a peer.
            release: called once, when the native communicator is gone: unmaps and closes the rest.
            unmap: of this rank's own window, called after that, and once no window tensor lives; None:
                ``release`` sees to it, with ``when_unused``.
            alive: whether the group is still the one that this was opened for; None: always. Each call asks.
            gone: whether a rank has ended or closed its end.
            links: the connections to the other ranks' processes; None: all ranks are in this one.
        """
        binding.library()  # nothing is to be given back yet, should it be missing
        self.name = name
        self.rank = rank
        self.world = len(bases)
        self.data_bytes, self.lent_bytes = data_bytes, lent_bytes
        self.context_kind, self.ranks_per_server = context_kind(), ranks_per_server()
        self._lent: LentMemory | None = None
        self._describe = describe
        self._release, self._unmap = release, unmap
        self._close_wait_s = timeout_s() + 2
        self._handle_lock = threading.Lock()  # held for a moment; guards the handle alone
        fds = None if live_fds is None else (ctypes.c_int * self.world)(*live_fds)
        table = (ctypes.c_void_p * self.world)(*bases)
        handle = library.lib().am_comm_create(rank, self.world, table, data_bytes, lent_bytes, fds)
        if not handle:
            raise AscendMoeError(f"rank {rank}: the communicator of group {name!r} could not be created")
        self._handle: int | None = handle
        self.number = take_number(self)
        self.links = links
        self.ballot = Ballot(name, rank, list(bases), gone)
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

    @contextmanager
    def use(self) -> Iterator[int]:
        """The handle for one op: no other op and no close of this end meanwhile. Raises ``failed`` again."""
        with self.end:
            self.raise_if_failed()
            yield self.handle

    def raise_why_unusable(self) -> None:
        """Raises what keeps ops from using this end, if anything does."""
        self.raise_if_failed()
        _ = self.handle

    def describe_peer(self, rank: int) -> str:
        """Returns what can be seen of a peer now, e.g. ``process 4242 is stopped (state T)``."""
        if rank == self.rank:
            return "it is this rank"
        if self.closed:
            return "this rank has closed its communicator"
        seen = self._describe(rank)
        with self._handle_lock:
            if " is running" not in seen or self._handle is None:
                return seen
            in_op = library.lib().am_comm_in_op(self._handle, rank)
        return f"{seen}, in an op of this group" if in_op else f"{seen}, in Python code, in no op of this group"

    def lend(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """``size`` bytes of this rank's lent area, held until the returned object dies."""
        with self._handle_lock:
            handle = self.handle
            if self._lent is None:
                area = library.lib().am_comm_lent(handle) if self.lent_bytes else None
                if not area:
                    raise no_room(size, 0, 0, size)
                self._lent = LentMemory(area)
            return self._lent.take(size, self.lent_bytes)

    def when_unused(self, unmap: Callable[[], None]) -> None:
        """Calls ``unmap`` once no tensor lives in this rank's own window. The native communicator is gone."""
        if self._lent is None:
            unmap()
        else:
            self._lent.retire(unmap)

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
