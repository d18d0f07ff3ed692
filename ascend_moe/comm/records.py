"""Records that the ranks of a process group exchange through the group's store."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ascend_moe import settings
from ascend_moe.errors import CommTimeout, ConfigMismatch, PeerLost
from ascend_moe.native.liveness import born_here, machine_id, pid_namespace
from ascend_moe.native.windows import MIB

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """A rank's process, machine and settings, for the other ranks to read; the defaults describe this process.

    Attributes:
        host, machine: the host name, and an id unique among running kernels.
        pid, born, pid_space: the process's id, start in clock ticks since boot, and PID namespace.
        token: unique to this record.
        ranks_per_server, intra_node_stores, rdma_flags: the settings of these names; ranks_per_server 0: not set.
    """

    host: str = field(default_factory=lambda: socket.gethostname())
    machine: str = field(default_factory=lambda: machine_id())
    pid: int = field(default_factory=os.getpid)
    born: int = field(default_factory=born_here)
    pid_space: str = field(default_factory=pid_namespace)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    ranks_per_server: int = field(default_factory=settings.RANKS_PER_SERVER.get)
    intra_node_stores: int = field(default_factory=lambda: int(settings.INTRA_NODE_STORES.get()))
    rdma_flags: int = field(default_factory=lambda: int(settings.RDMA_FLAGS.get()))


# Properties that must be equal in a group: name, attribute of a record, its unit ("MiB": of bytes; or none), the fix.
Alike = Sequence[tuple[str, str, str, str]]
EXPORT = "export one value on every rank"
ALIKE_ON_SERVERS: Alike = (
    (settings.RANKS_PER_SERVER.name, "ranks_per_server", "", EXPORT),
    (settings.INTRA_NODE_STORES.name, "intra_node_stores", "", EXPORT),
    (settings.RDMA_FLAGS.name, "rdma_flags", "", EXPORT),
)


def compare(name: str, rank: int, mine: ProcessRecord, known: Mapping[int, ProcessRecord], alike: Alike) -> None:
    """Raise ConfigMismatch if a record of group ``name`` differs from this rank's in a property of ``alike``."""
    for other, record in sorted(known.items()):
        for what, attribute, unit, fix in alike:
            ours, theirs = (
                getattr(side, attribute) // MIB if unit == "MiB" else getattr(side, attribute)
                for side in (mine, record)
            )
            if ours != theirs:
                text = f"{what} differs in group {name!r}: {ours} {unit}".rstrip()
                text += f" on rank {rank}, " + f"{theirs} {unit}".rstrip() + f" on rank {other}: {fix}"
                raise ConfigMismatch(text, field=what, rank=other, ours=ours, theirs=theirs)


R = TypeVar("R", bound=ProcessRecord)
T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.02  # between two reads of the store
STORE_TIMEOUT_S = 1.0  # minimum time for a response of the store


def store_of(group: ProcessGroup) -> tuple[Store, int | None]:
    """Return the group's store and the group's rank that hosts it; None: torchrun's agent, another, or unknown."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._world.pg_map[group][1]
    base = getattr(store, "_underlying_non_prefix_store", store)
    if not isinstance(base, TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return store, None
    return store, distributed_c10d._world.pg_group_ranks.get(group, {}).get(0)


def answered(ask: Callable[[], T], seconds: float, prefix: str, host: int | None) -> T:
    """Return the result of ``ask``, a request to a store, run on a thread: it blocks as long as the host is stopped.

    Raises:
        PeerLost: ``ask`` raised an error. CommTimeout: it has not returned within ``seconds``. The text begins with
            ``prefix`` and names the host, rank ``host`` (as in `store_of`).
    """
    results: list[T] = []
    failures: list[Exception] = []

    def body() -> None:
        try:
            results.append(ask())
        except Exception as error:  # the store's errors have no common class
            failures.append(error)

    thread = threading.Thread(target=body, name="ascend_moe-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    reason = str(failures[0]).partition("\n")[0] if failures else ""
    seen = f"has failed ({reason})" if failures else f"has not responded for {seconds:.1f} s"
    named = "its host is unknown" if host is None else f"rank {host} normally hosts it"
    text = f"{prefix}: the store of the process group {seen}; {named}; see the host's log for why"
    raise (PeerLost if failures else CommTimeout)(text, rank=host, phase="open")


class Records(Generic[R]):
    """One record per rank of a group, exchanged through the group's store: dataclasses of the type of ``mine``.

    Attributes:
        rank: this rank. ``prefix``: start of error messages.
        mine: this rank's record, stored by the next ``exchange``.
        found: the other ranks' records that were read so far, by rank.
        responds: whether the store responded to the last ``exchange``.
    """

    def __init__(self, store: Store, host: int | None, key: str, rank: int, mine: R, prefix: str) -> None:
        """``host``: as `store_of`. ``key``: start of the keys in the store. ``prefix``: start of error messages."""
        from torch._C._distributed_c10d import PrefixStore

        self.rank, self.mine, self.prefix = rank, mine, prefix
        self.found: dict[int, R] = {}
        self.responds = True
        self._store: Any = PrefixStore(f"ascend_moe/{key}", store)
        self._host = host

    def exchange(self, ranks: list[int], seconds: float) -> None:
        """Store ``mine`` unless it is there, and add to ``found`` those records of ``ranks`` that are there by now.

        Raises PeerLost if the store fails, CommTimeout if it does not respond within ``seconds``.
        """
        mine = self.mine

        def ask() -> dict[int, R | None]:
            # Every time: the thread of an earlier opening, delayed by a stopped host, may write late.
            if self._read(self.rank) != mine:
                self._store.set(f"rank/{self.rank}", json.dumps(asdict(mine)))
            return {rank: self._read(rank) for rank in ranks}

        self.responds = False
        records = answered(ask, seconds, self.prefix, self._host)
        self.responds = True
        self.found |= {rank: record for rank, record in records.items() if record is not None}

    def _read(self, rank: int) -> R | None:
        key = f"rank/{rank}"
        if not self._store.check([key]):  # get() would block until the key is there
            return None
        try:
            return type(self.mine)(**json.loads(self._store.get(key)))
        except (TypeError, ValueError):
            return None  # written by another version
