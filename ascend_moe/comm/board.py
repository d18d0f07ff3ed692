"""Where ranks find each other: every rank posts its address under its rank in the process group's store.

A post can be stale: left by an attempt that gave up, or by a communicator closed since. So a post
is only a place to try; whether somebody is there is settled by connecting (rendezvous.py).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ascend_moe.comm.liveness import machine_id, pid_namespace, process_gone, process_stat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store

FIRST_POLL_S = 0.001
LAST_POLL_S = 0.02


@dataclass(frozen=True)
class Post:
    """One attempt of one rank: where it listens, the secret to show there, and who is behind it."""

    socket: str  # abstract Unix socket
    nonce: str  # names this attempt; unlike the socket's name, only the store's readers know it
    started: int  # CLOCK_BOOTTIME in ns: of two attempts of one rank the later counts
    pid: int
    born: int
    pid_space: str
    machine: str
    host: str

    @classmethod
    def mine(cls) -> Post:
        stat = process_stat(os.getpid())
        return cls(
            socket=f"ascend_moe-{secrets.token_hex(16)}",
            nonce=secrets.token_hex(16),
            started=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            pid=os.getpid(),
            born=stat.born if stat else 0,
            pid_space=pid_namespace(),
            machine=machine_id(),
            host=socket.gethostname(),
        )

    @property
    def local(self) -> bool:
        """Its process can be reached from here."""
        return self.machine == machine_id()

    @property
    def visible_pid(self) -> int:
        """Its process id, 0 when that means nothing here."""
        return self.pid if self.local and self.pid_space == pid_namespace() else 0

    def died_since(self, born: int) -> bool:
        """Its process has ended, and the attempt began after ``born`` (clock ticks since boot).

        An older post is a leftover of a former life of the job, whose ranks nobody waits for.
        """
        began = self.started * os.sysconf("SC_CLK_TCK") // 10**9
        return bool(self.visible_pid) and began >= born and process_gone(self.pid, self.born)


class Board(threading.Thread):
    """Posts this rank's address and reads the others'; a thread, as a store blocks while its host is stopped.

    Only the calling thread sets ``wanted``; only this thread sets ``posts``, ``posted``, ``failed``
    and ``answered`` (time.monotonic() of the last answer).
    """

    def __init__(self, store: Store, rank: int, mine: Post) -> None:
        super().__init__(name="ascend_moe-board", daemon=True)
        from torch._C._distributed_c10d import PrefixStore

        self._store: Any = PrefixStore("ascend_moe/windows", store)
        self._rank = rank
        self._mine = mine
        self._halt = threading.Event()
        self.wanted: frozenset[int] = frozenset()
        self.posts: dict[int, Post] = {}
        self.posted = False
        self.failed: Exception | None = None
        self.answered = time.monotonic()

    def run(self) -> None:
        pause = FIRST_POLL_S
        try:
            while not self._halt.is_set():
                # Every round: a thread of an earlier attempt, held up by a silent store, may post late.
                if self._read(self._rank) != self._mine:
                    self._store.set(self._key(self._rank), json.dumps(asdict(self._mine)))
                    self.posted = True
                for rank in self.wanted:
                    if self._halt.is_set():
                        return
                    post = self._read(rank)
                    if post is not None:
                        self.posts[rank] = post
                self._halt.wait(pause)
                pause = min(pause * 2, LAST_POLL_S)
        except Exception as error:  # the store's errors have no common class
            self.failed = error

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank/{rank}"

    def _read(self, rank: int) -> Post | None:
        key = self._key(rank)
        found = self._store.check([key])  # get() would block until the key is there
        value = self._store.get(key) if found else None
        self.answered = time.monotonic()
        if value is None:
            return None
        try:
            return Post(**json.loads(value))
        except (TypeError, ValueError):
            return None  # of another version

    def silent_for(self) -> float:
        """Seconds since the store last answered."""
        return time.monotonic() - self.answered

    def halt(self) -> None:
        """Stops the thread; does not wait for a store that does not answer."""
        self._halt.set()
        if self.ident is not None:
            self.join(timeout=0.2)


@dataclass(frozen=True)
class StoreHost:
    """Who serves the group's store, as far as can be told."""

    rank: int | None = None  # in the group
    port: int = 0

    @classmethod
    def of(cls, store: Store, group: ProcessGroup) -> StoreHost:
        """Global rank 0 serves a TCPStore, unless torchrun's agent does."""
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed import distributed_c10d

        base: Any = getattr(store, "_underlying_non_prefix_store", store)
        if not isinstance(base, TCPStore):
            return cls()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return cls(port=base.port)
        ranks = distributed_c10d._world.pg_group_ranks.get(group, {})
        return cls(rank=ranks.get(0), port=base.port)
