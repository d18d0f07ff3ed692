"""Simulation of the vote of surviving ranks on their membership, with an order of steps drawn by a seed.

It runs ``ascend_moe.comm.vote`` on separate pages. A step is a word of a page that a rank reads or writes; between two
steps any other rank may run, die, or detect the death of another. Time is counted in waits of the ranks. A rank votes
after its ops have ended, and no op of the new group begins before all its ranks have voted, so the ops of both groups
and the vote can be simulated one after the other.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_moe.comm.vote import Rounds, WindowVote
from ascend_moe.errors import AscendMoeError, CommTimeout

_PAGE = 4096
_STREAM = 6
_NEVER = 1e9  # seconds
_SHORT = 0.02
_MOST_STEPS = 5000  # usually about 400
_LATER = (16, 60)  # limits of the step at which another rank dies: in the first round, or in any


@dataclass
class Agreement:
    """Result of the simulated votes: the ranks that the survivors agreed on, and what went wrong, or ""."""

    members: list[int] = field(default_factory=list)
    wrong: str = ""


class _Dies(BaseException):
    """Raised to end the thread of a rank that dies."""


class _Rank(threading.Thread):
    """One rank: it agrees and opens the new windows with the others, repeatedly if that has failed on one."""

    def __init__(self, votes: Votes, rank: int) -> None:
        super().__init__(name=f"explore-rank{rank}", daemon=True)
        self.rank, self.votes = rank, votes
        self.turn = threading.Semaphore(0)
        self.wakes, self.steps = 0.0, 0
        self.decisions: list[list[int]] = []
        self.error: BaseException | None = None
        self.left_out = False
        self.dies_at = -1  # of its steps
        self.vote = votes.vote(votes, self)

    def run(self) -> None:
        self.turn.acquire()
        try:
            while True:
                members = self.vote.agree(self.votes.seconds)
                if self.vote.all_fine(members, self.votes.fine(self.rank, self.vote.round + 1), self.votes.seconds):
                    if self.votes.failed_in == self.vote.round:
                        raise AssertionError("continues, although the windows of another rank did not open")
                    return
        except CommTimeout as late:
            self.left_out = late.ranks == self.vote.members
            self.error = None if self.left_out else late
        except _Dies:
            self.votes.dead.add(self.rank)
        except BaseException as error:
            self.error = error
        finally:
            self.votes.running.discard(self.rank)
            self.votes.moved.release()

    def step(self) -> None:
        """Yield to the other ranks."""
        self.votes.moved.release()
        self.turn.acquire()
        self.steps += 1
        if self.steps == self.dies_at or self.votes.over:
            raise _Dies

    # the clock of its vote
    def monotonic(self) -> float:
        return self.votes.now

    def sleep(self, seconds: float) -> None:
        self.wakes = self.votes.now + seconds
        self.step()


class SteppedVote(WindowVote):
    """A `WindowVote` in which other ranks may run before each word that a rank exchanges."""

    def __init__(self, votes: Votes, rank: _Rank) -> None:
        super().__init__("explore", rank.rank, votes.bases, lambda other: votes.seen_dead(rank.rank, other), rank)
        self._step, self._decisions = rank.step, rank.decisions

    def _swap(self, rank: int, word: int, expected: int, desired: int) -> int:
        self._step()
        return super()._swap(rank, word, expected, desired)

    def _decide(self, ranks: Sequence[int], fine: bool, seconds: float) -> list[int]:
        decision = super()._decide(ranks, fine, seconds)
        self._decisions.append(decision)
        return decision


class Votes:
    """Simulated votes of ``world`` ranks after rank ``lost`` has died, in an order of steps drawn by ``seed``."""

    def __init__(self, world: int, lost: int, seed: int, vote: Callable[[Votes, _Rank], Rounds] = SteppedVote):
        self.rng, self.vote = np.random.default_rng([seed, _STREAM]), vote
        self._pages = [ctypes.create_string_buffer(_PAGE) for _ in range(world)]
        self.bases = [ctypes.addressof(page) for page in self._pages]
        self.now, self.over = 0.0, False
        self.dead = {lost}
        self._seen: set[tuple[int, int]] = set()
        self.moved = threading.Semaphore(0)
        self.running = set(range(world)) - self.dead
        self._lost, self._ranks = lost, {rank: _Rank(self, rank) for rank in sorted(self.running)}
        others = self.rng.permutation(sorted(self.running)).tolist()
        self.failed_in = 0  # the round after a failed opening
        self._fails = others[0] if self.rng.integers(4) == 0 else -1
        # in two of five another rank dies; in one of five a rank arrives after the others' timeout
        fate = int(self.rng.integers(5)) if len(others) > 1 else 4
        self._late = others[0] if fate == 2 else -1
        self.seconds = _NEVER if self._late < 0 else _SHORT
        if fate < 2:
            self._ranks[others[0]].dies_at = int(self.rng.integers(1, _LATER[fate]))

    def fine(self, rank: int, number: int) -> bool:
        """Return whether a rank has opened its windows in round ``number``; the first opening may fail on one rank."""
        if rank != self._fails or self.failed_in:
            return True
        self.failed_in = number
        return False

    def seen_dead(self, looker: int, other: int) -> bool:
        """Return whether rank ``looker`` sees that ``other`` is dead: from a random time after its death on."""
        if other in self.dead and self.rng.integers(2):
            self._seen.add((looker, other))
        return (looker, other) in self._seen

    def play(self) -> Agreement:
        """Run the ranks until all have agreed, or for _MOST_STEPS steps, and return the result."""
        for rank in self._ranks.values():
            rank.start()
        steps = 0
        while self.running and steps < _MOST_STEPS:
            able = sorted(self.running - {self._late}) or sorted(self.running)
            chosen = self._ranks[able[int(self.rng.integers(len(able)))]]
            self.now = max(self.now, chosen.wakes)
            chosen.turn.release()
            self.moved.acquire()
            steps += 1
        waiting = sorted(self.running)
        self.over = True
        for number in waiting:
            self._ranks[number].turn.release()
        for each in self._ranks.values():
            each.join()
        if waiting:
            return Agreement(wrong=f"ranks {waiting} have not agreed after {steps} steps")
        return self._judged()

    def _judged(self) -> Agreement:
        ranks = self._ranks.values()
        decisions = max((rank.decisions for rank in ranks), key=len)
        done = [rank for rank in ranks if rank.rank not in self.dead and not rank.left_out]
        members = decisions[-1] if decisions else []
        for rank in ranks:
            if rank.error is not None:
                return Agreement(wrong=f"rank {rank.rank} raises {type(rank.error).__name__}: {rank.error}")
            if rank.decisions != decisions[: len(rank.decisions)]:
                return Agreement(wrong=f"rank {rank.rank} has decided {rank.decisions}, another rank {decisions}")
            if rank in done and (rank.rank not in members or rank.decisions != decisions):
                return Agreement(wrong=f"rank {rank.rank} continues after {rank.decisions}, others after {decisions}")
            if rank.left_out and self._late < 0:
                return Agreement(wrong=f"rank {rank.rank} is not in {decisions}, although no rank was late")
        if self._lost in {rank for decision in decisions for rank in decision}:
            return Agreement(wrong=f"rank {self._lost} has died before, but is in {decisions}")
        return Agreement(members)


def agreed(world: int, lost: int, seed: int) -> Agreement:
    """Simulate the vote of the survivors of ``world`` ranks after ``lost``, a rank, has died, in ``seed``'s order.

    Another rank may die or vote late. A fault, also a missing native library, is in the result's ``wrong``.

    Raises:
        AscendMoeError: no more threads can be started.
    """
    try:
        return Votes(world, lost, seed).play()
    except RuntimeError as error:  # no more threads
        raise AscendMoeError(f"explore: the surviving ranks cannot vote: {error}") from error
