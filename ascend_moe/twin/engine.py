"""One engine's library of kernels, opened: its entries, its ranks between launches, its schedules."""

from __future__ import annotations

import ctypes
import threading
import weakref
from pathlib import Path

from ..errors import ArgumentError
from . import _abi
from ._entries import Entry, Parameter

_NOT_BY_SEED = ("replay", "exhaustive")


class Engine:
    """A library that `build` made, for one engine.

    Raises:
        LibraryError: it is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = _abi.open_library(str(path))
        self.mode = str(self.library.twin_engine().decode())
        self.policies: tuple[str, ...] = tuple(self.library.twin_policies().decode().split(","))
        self.entries = {one.name: one for one in map(_entry, self._lines())}
        self._worlds: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def _lines(self) -> list[str]:
        return list(self.library.twin_entries().decode().splitlines())

    def entry(self, name: str) -> Entry:
        try:
            return self.entries[name]
        except KeyError:
            raise ArgumentError(
                f"{self.path.name} has no kernel {name!r}; it has {', '.join(self.entries)}", argument="name"
            ) from None

    def address(self, name: str) -> int:
        """Where the entry's code is."""
        try:
            function = getattr(self.library, self.entry(name).symbol)
        except AttributeError:
            raise ArgumentError(
                f'the entry {name} has no C name: declare it extern "C"', argument="name"
            ) from None
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def world(self, size: int, group: int) -> int:
        """Native ranks, kept for later launches; ``group`` tells worlds apart that run at the same time."""
        with self._lock:
            if (size, group) not in self._worlds:
                handle = self.library.twin_world_create(size)
                if not handle:
                    raise MemoryError(f"no memory for the cores of {size} ranks")
                self._worlds[size, group] = handle
                weakref.finalize(self, self.library.twin_world_destroy, handle)
            return self._worlds[size, group]

    def schedule(
        self, seed: int, policy: str | None, *, unordered: bool, auto_sync: bool, max_steps: int
    ) -> _abi.Options:
        """How to run; only the checked engine looks at it."""
        name = policy or ("late" if seed == 0 else "random")
        allowed = [one for one in self.policies if one not in _NOT_BY_SEED]
        if name not in allowed:
            raise ArgumentError(f"policy is one of {', '.join(allowed)}, not {name!r}", argument="policy")
        return _abi.Options(seed, max_steps, self.policies.index(name), int(unordered), int(not auto_sync), 3)


def _entry(line: str) -> Entry:
    """`name symbol kind:parameter,...`"""
    name, symbol, listed = line.split(" ", 2)
    fields = [one.partition(":") for one in listed.split(",") if one]
    return Entry(name, symbol, tuple(Parameter(parameter, kind) for kind, _, parameter in fields))


def policy_in_turn(done: int) -> str:
    """The policy of the (done + 1)-th schedule of an exploration."""
    return "late" if done == 0 else ("random", "lazy", "pct")[(done - 1) % 3]
