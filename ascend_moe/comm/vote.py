"""Agreement of a group's remaining ranks: votes and decisions in the first page of its windows.

In each round every rank votes in its own page. A rank that sees the votes of all who can still vote, or whose deadline
has passed, writes the list of voters into its own page and then its number into the round's single decision word, in
the page of rank 0, unless the word is already set. The list of the rank in that word is the decision. So all ranks get
the same list whatever happens: a rank that dies at any step has decided for all or for none, and a late rank finds the
decision. The pages are shared memory: those of a dead rank remain until nobody maps them. No kernel reads them. Ranks
without shared memory vote in a store instead (`StoreVote`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ascend_moe.comm.records import answered
from ascend_moe.errors import AscendMoeError, CommTimeout
from ascend_moe.native import library
from ascend_moe.settings import MAX_WORLD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

ROUNDS = 32
_VOTED = 0  # twice the round of a rank's last vote, plus 1 if it succeeded
_DECIDED = 1  # by round, in rank 0's page: 1 + the rank whose list is the decision
_LISTS = 64  # by round: a bit per rank; word 63 marks a closed window (peers.py)
_BITS = 32
_LIST_WORDS = MAX_WORLD // _BITS
_PAUSE_S = 0.001  # between two checks of the votes
_STORE_PAUSE_S = 0.02
_RESPONSE_S = 10.0  # timeout of the store


class Rounds:
    """One rank's part in the voting rounds of its group; a subclass stores the votes in windows or in a store.

    Attributes:
        round: number of the last decided round; 0 before any.
        members: the ranks that the last `agree` returned; all ranks before any.
    """

    def __init__(self, name: str, rank: int, world: int, gone: Callable[[int], bool], clock: Any = time) -> None:
        """``gone``: returns whether a rank can no longer vote. ``clock``: has monotonic() and sleep(), for tests."""
        self._name, self._rank, self._gone, self._clock = name, rank, gone, clock
        self._pause_s, self._world = _PAUSE_S, world
        self.round = 0
        self.members = list(range(world))

    def agree(self, seconds: float) -> list[int]:
        """Return the remaining ranks: those of ``members`` that call this within ``seconds``. Collective among them.

        Raises:
            CommTimeout: the others have decided without this rank.
            AscendMoeError: the group has voted ``ROUNDS`` times, the limit.
        """
        decision = self._decide(self.members, True, seconds) if self._rank in self.members else self.members
        self.members = decision
        if self._rank not in decision:
            raise CommTimeout(
                f"rank {self._rank}: group {self._name!r} has continued as ranks {', '.join(map(str, decision))} "
                f"without this rank, which called after their deadline: end this process",
                rank=self._rank,
                ranks=decision,
                phase="agree",
            )
        return decision

    def gone(self) -> list[int]:
        """Return the ranks that can no longer vote (lost or closed), as this rank sees it."""
        return [rank for rank in range(self._world) if self._gone(rank)]

    def all_fine(self, ranks: Sequence[int], fine: bool, seconds: float) -> bool:
        """Vote ``fine``; return, equally on all ``ranks``, whether all voted True within ``seconds``. Collective."""
        return self._decide(ranks, fine, seconds) == list(ranks)

    def _decide(self, ranks: Sequence[int], fine: bool, seconds: float) -> list[int]:
        """Vote in the next round; return those of ``ranks`` that voted ``fine``, according to the decision."""
        number = self.round + 1
        if number > ROUNDS:
            text = f"rank {self._rank}: group {self._name!r} has voted {ROUNDS} times, the limit: close or recreate it"
            raise AscendMoeError(text, rank=self._rank)
        self._vote(2 * number + int(fine))
        deadline = self._clock.monotonic() + seconds
        while (decision := self._decision(number)) is None:
            late = self._clock.monotonic() >= deadline
            left = [rank for rank in ranks if not self._gone(rank)]
            if late or all(self._voted(rank) >= 2 * number for rank in left):
                self._propose(number, [rank for rank in left if self._voted(rank) > 2 * number])
            else:
                self._clock.sleep(self._pause_s)
        self.round = number
        return decision

    def _vote(self, value: int) -> None:
        """Store this rank's vote: twice the round, plus 1 if ``fine``."""
        raise NotImplementedError

    def _voted(self, rank: int) -> int:
        """Return the last vote of a rank; 0 before any."""
        raise NotImplementedError

    def _propose(self, number: int, alive: Sequence[int]) -> None:
        """Make this list the decision of a round, unless there is one."""
        raise NotImplementedError

    def _decision(self, number: int) -> list[int] | None:
        """Return the decision of a round, or None before it."""
        raise NotImplementedError


class WindowVote(Rounds):
    """The voting rounds of ranks that share memory: votes are words in the first pages of their windows."""

    def __init__(
        self, name: str, rank: int, bases: Sequence[int], gone: Callable[[int], bool], clock: Any = time
    ) -> None:
        """``bases``: address of every rank's window in this process. The others: as in `Rounds`."""
        super().__init__(name, rank, len(bases), gone, clock)
        self._bases = bases

    def _vote(self, value: int) -> None:
        self._swap(self._rank, _VOTED, self._word(self._rank, _VOTED), value)

    def _voted(self, rank: int) -> int:
        return self._word(rank, _VOTED)

    def _propose(self, number: int, alive: Sequence[int]) -> None:
        begin = _LISTS + (number - 1) * _LIST_WORDS
        for at in range(_LIST_WORDS):
            bits = sum(1 << (rank % _BITS) for rank in alive if rank // _BITS == at)
            self._swap(self._rank, begin + at, 0, bits)
        self._swap(0, _DECIDED + number - 1, 0, self._rank + 1)

    def _decision(self, number: int) -> list[int] | None:
        chosen = self._word(0, _DECIDED + number - 1)
        if not chosen:
            return None
        begin = _LISTS + (number - 1) * _LIST_WORDS
        words = [self._word(chosen - 1, begin + at) for at in range(_LIST_WORDS)]
        return [rank for rank in range(len(self._bases)) if words[rank // _BITS] >> rank % _BITS & 1]

    def _word(self, rank: int, word: int) -> int:
        return self._swap(rank, word, 0, 0)

    def _swap(self, rank: int, word: int, expected: int, desired: int) -> int:
        return int(library.lib().am_window_ballot(self._bases[rank], word, expected, desired))


class StoreVote(Rounds):
    """The voting rounds of ranks that share a store but no memory: NPUs.

    A round's decision is one key, set by the first rank. The end of a process is detected on this machine only; ranks
    of other machines are only seen not to vote. The store must outlive the lost rank: torchrun's agent hosts one that
    does, without torchrun it dies with rank 0.
    """

    def __init__(
        self, name: str, rank: int, world: int, gone: Callable[[int], bool], store: Store, host: int | None, key: str
    ) -> None:
        """``host``: as in `records.store_of`. ``key``: start of the keys, unique to this group, equal on its ranks."""
        from torch._C._distributed_c10d import PrefixStore

        super().__init__(name, rank, world, gone)
        self._store: Any = PrefixStore(f"ascend_moe/agree/{key}", store)
        self._host, self._pause_s = host, _STORE_PAUSE_S
        self._votes: dict[int, int] = {}  # the last ones seen

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
        return answered(ask, _RESPONSE_S, f"rank {self._rank}: agree of group {self._name!r}", self._host)
