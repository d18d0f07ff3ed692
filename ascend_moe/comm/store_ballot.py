"""Lets the ranks of a process group agree who is left by votes in its store, where no memory is theirs together: NPUs.

The rounds are those of ``ballot``. A round's decision is one key, which the first rank sets. A rank whose process has
ended on this machine is seen to have ended; of another machine's it is only seen that it does not vote. The store must
outlive the lost rank: torchrun's agent keeps one that does, that of a group without torchrun dies with rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ascend_moe.comm.ballot import Rounds
from ascend_moe.comm.board import answered

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_PAUSE_S = 0.02
_ANSWER_S = 10.0  # for the store


class StoreBallot(Rounds):
    """The rounds of ranks that share a store."""

    def __init__(
        self, name: str, rank: int, world: int, gone: Callable[[int], bool], store: Store, host: int | None, key: str
    ) -> None:
        """``host``: as ``board.store_host``. ``key``: of these ranks' group alone, the same on all of them."""
        from torch._C._distributed_c10d import PrefixStore

        super().__init__(name, rank, world, gone)
        self._store: Any = PrefixStore(f"ascend_moe/agree/{key}", store)
        self._host, self._pause_s = host, _PAUSE_S
        self._votes: dict[int, int] = {}  # the last that were seen

    def _vote(self, value: int) -> None:
        self._asked(lambda: self._store.set(f"vote/{self._rank}", str(value)))

    def _voted(self, rank: int) -> int:
        if self._votes.get(rank, 0) < 2 * (self.round + 1):
            key = f"vote/{rank}"
            self._votes[rank] = self._asked(lambda: int(self._store.get(key)) if self._store.check([key]) else 0)
        return self._votes[rank]

    def _propose(self, number: int, alive: Sequence[int]) -> None:
        text = ",".join(map(str, alive)) or "-"
        self._asked(lambda: self._store.compare_set(f"decision/{number}", "", text))

    def _decision(self, number: int) -> list[int] | None:
        key = f"decision/{number}"
        text = self._asked(lambda: self._store.get(key).decode() if self._store.check([key]) else "")
        return [int(word) for word in text.split(",") if word != "-"] if text else None

    def _asked(self, ask: Callable[[], T]) -> T:
        return answered(ask, _ANSWER_S, f"rank {self._rank}: agree of group {self._name!r}", self._host)
