"""Lets the ranks of a process group tell each other, in its store, what they post on a board."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from ascend_moe.errors import CommTimeout, PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


P = TypeVar("P", bound=_Dataclass)
T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.02  # between two looks at the store
STORE_TIMEOUT_S = 1.0  # the least time that the store gets for an answer


def store_host(store: Store, group: ProcessGroup) -> int | None:
    """The rank in the group whose process serves the store; None where that is no rank, or not known."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import distributed_c10d

    base: Any = getattr(store, "_underlying_non_prefix_store", store)
    if not isinstance(base, TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    rank: int | None = distributed_c10d._world.pg_group_ranks.get(group, {}).get(0)
    return rank


def answered(ask: Callable[[], T], seconds: float, prefix: str, host: int | None) -> T:
    """What ``ask`` reads from a store. On a thread, because a store blocks for as long as its host is stopped.

    Raises:
        PeerLost, CommTimeout: the store has failed, or has not answered within ``seconds``.
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
    seen = f"has failed ({reason})" if failures else f"has not answered for {seconds:.1f} s"
    named = "its host is not known" if host is None else f"rank {host} normally hosts it"
    text = f"{prefix}: the store of the process group {seen}; {named}; see the host's log for why"
    raise (PeerLost if failures else CommTimeout)(text, rank=host, phase="open")


class Board(Generic[P]):
    """The posts of all ranks in the group's store, each a dataclass of the type of ``mine``."""

    def __init__(self, store: Store, rank: int, mine: P, host: int | None, prefix: str, key: str) -> None:
        """``host``: as ``store_host``. ``prefix``: what errors begin with. ``key``: the place in the store."""
        from torch._C._distributed_c10d import PrefixStore

        self.mine = mine
        self.posts: dict[int, P] = {}
        self.answers = True
        self._store: Any = PrefixStore(f"ascend_moe/{key}", store)
        self._rank, self._host, self._prefix = rank, host, prefix

    def exchange(self, ranks: list[int], seconds: float) -> None:
        """Posts ``mine`` unless that is there, and reads the posts of ``ranks``."""
        mine = self.mine

        def ask() -> dict[int, P | None]:
            # Every time: the thread of an earlier opening, held up by a stopped host, may post late.
            if self._read(self._rank) != mine:
                self._store.set(f"rank/{self._rank}", json.dumps(asdict(mine)))
            return {rank: self._read(rank) for rank in ranks}

        self.answers = False
        posts = answered(ask, seconds, self._prefix, self._host)
        self.answers = True
        self.posts |= {rank: post for rank, post in posts.items() if post is not None}

    def _read(self, rank: int) -> P | None:
        key = f"rank/{rank}"
        if not self._store.check([key]):  # get() would block until the key is there
            return None
        try:
            return type(self.mine)(**json.loads(self._store.get(key)))
        except (TypeError, ValueError):
            return None  # of another version
