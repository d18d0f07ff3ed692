"""Shared memory of a run's ranks and of the process that started them: a barrier, and who is where.

One file of the run's scratch folder, mapped by all. Each rank has one cache line that it alone writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from pathlib import Path

from ascend_moe.errors import CommTimeout

_LINE = 16  # int64 words a rank: two cache lines, so that no neighbour's line is fetched along
_BARRIER, _PID, _STEP, _CASE, _DONE = range(5)
_SPINS_BEFORE_YIELD = 4000
_LOOK_AT_CLOCK = 1024
#: Bytes behind the ranks' lines, for measurements of flags.
_SCRATCH_BYTES = 4096


class Board:
    """The board of ``world`` ranks in ``folder``; ``rank`` -1: the process that started them."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        path, size = folder / "board", world * _LINE * 8 + _SCRATCH_BYTES
        if rank < 0:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")
        self._mine = max(rank, 0) * _LINE
        self._count = 0
        self._crowded = world > len(os.sched_getaffinity(0))

    def scratch_address(self) -> int:
        """Address, in this process, of the shared bytes for flags."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map, self.world * _LINE * 8))

    def use_cores(self, cores: int) -> None:
        """How many cores the ranks share: with more ranks than cores, waiting ranks give way at once."""
        self._crowded = self.world > cores

    def sign_in(self) -> None:
        self._words[self._mine + _PID] = os.getpid()

    def step(self, case: int, done: int) -> None:
        """Says that this rank goes on: iterations ``done`` of case number ``case``."""
        self._words[self._mine + _CASE] = case
        self._words[self._mine + _DONE] = done
        self._words[self._mine + _STEP] += 1

    def pid(self, rank: int) -> int:
        return self._words[rank * _LINE + _PID]

    def steps(self) -> list[int]:
        return [
            self._words[rank * _LINE + _STEP] + self._words[rank * _LINE + _BARRIER]
            for rank in range(self.world)
        ]

    def progress(self) -> tuple[int, int]:
        """(case, iterations done) of rank 0."""
        return self._words[_CASE], self._words[_DONE]

    def barrier(self, patience_s: float = 60.0) -> None:
        """Waits until all ranks are here; they leave within a few microseconds of each other.

        Raises:
            CommTimeout: naming the ranks that have not come.
        """
        self._count += 1
        words, count = self._words, self._count
        words[self._mine + _BARRIER] = count
        spins = 0
        for at in range(_BARRIER, self.world * _LINE, _LINE):
            while words[at] < count:
                spins += 1
                if self._crowded or spins > _SPINS_BEFORE_YIELD:
                    os.sched_yield()
                if spins % _LOOK_AT_CLOCK == 0:
                    self._check(spins, count, patience_s)

    def _check(self, spins: int, count: int, patience_s: float) -> None:
        now = time.monotonic()
        if spins == _LOOK_AT_CLOCK:
            self._since = now
        if now - self._since > patience_s:
            late = [rank for rank in range(self.world) if self._words[rank * _LINE + _BARRIER] < count]
            raise CommTimeout(
                f"rank {self.rank} waited {patience_s:g} s at a barrier of the benchmark for ranks {late}",
                rank=late[0] if late else self.rank,
                ranks=late,
                phase="barrier",
            )

    def close(self) -> None:
        self._words.release()
        with contextlib.suppress(BufferError):  # scratch_address was taken: the process's end unmaps it
            self._map.close()
