"""What the ranks of this machine do, read from their windows: which rank is behind, and who waits for it.

`live` maps the windows of other processes for reading only. `of_files` reads copies of state areas, for NPUs. `watch`
starts a thread that writes what `live` finds while an op of this process takes long.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .. import settings
from .._text import table
from ..errors import ArgumentError
from . import library, log
from .liveness import describe_process
from .windows import DONE, MEMFD, PAGE_BYTES, opening_of

_VNPU_MEMFD = "ascend_moe_vnpu_hccl"  # vnpu/hccl/rendezvous.cpp: the windows of all ranks in one file
_VNPU_ALIGN = 64 << 10  # kMapAlign of vnpu/hccl/comm.h


@dataclass(frozen=True)
class RankState:
    """State of one rank of a group, read from its window.

    Attributes:
        pid: the rank's process; 0: unknown, or it has ended.
        op, algorithm, epoch: of its last op; "" and 0: none. An epoch is the number of an op on the group.
        phase: what the rank is doing in this op; "" if it is in no op.
        seconds: how long the rank has been in the op; 0: unknown.
        awaits: the ranks that it is waiting for.
        error, culprit: name of its fatal error, and the rank that caused that; "" and -1 without.
        process: a description of the process's state.
    """

    rank: int
    pid: int = 0
    op: str = ""
    algorithm: str = ""
    epoch: int = 0
    phase: str = ""
    seconds: float = 0.0
    awaits: tuple[int, ...] = ()
    error: str = ""
    culprit: int = -1
    process: str = "has no window: it has not called, or its process has ended"


@dataclass(frozen=True)
class GroupState:
    """The state of a group's ranks, in rank order; ``key`` distinguishes groups of the same ``name``."""

    key: str
    name: str
    ranks: tuple[RankState, ...]


def of_windows(
    key: str, name: str, bases: Sequence[int | None], total: int, process: Callable[[int], str]
) -> GroupState:
    """Return the state of a group, read from its windows; ``key`` and ``name`` are stored in the result.

    Args:
        bases: address of each rank's window in this process, in rank order; None: it is missing.
        total: bytes of a window. ``process``: returns the description of the process with a pid.
    """
    lib = library.lib()
    empty = lib.am_window_alloc(total) if None in bases else None
    try:
        table = (ctypes.c_void_p * len(bases))(*(empty if base is None else base for base in bases))
        room = 1 << 16
        while True:
            text = ctypes.create_string_buffer(room)
            needed = lib.am_group_text(table, len(bases), text, room)
            if needed < room:
                break
            room = needed + 4096  # it may grow meanwhile
        lines = text.value.decode().split("\n")
    finally:
        if empty is not None:
            lib.am_window_unmap(empty, total)
    return GroupState(key, name, tuple(_rank_of(rank, line, process) for rank, line in enumerate(lines[: len(bases)])))


def _rank_of(rank: int, line: str, process: Callable[[int], str]) -> RankState:
    if not line:
        return RankState(rank)
    pid, op, algorithm, epoch, phase, nanoseconds, awaits, error, culprit = line.split("\t")
    waits = tuple(int(peer) for peer in awaits.split(",") if peer)
    known = int(pid), op, algorithm, int(epoch), phase, int(nanoseconds) / 1e9, waits, error, int(culprit)
    return RankState(rank, *known, process(int(pid)) if int(pid) else "")


# ---- live


@dataclass(frozen=True)
class _Window:
    base: int
    mapped: int  # bytes, of the file that it is in
    at: int  # where that begins
    total: int
    rank: int
    world: int
    pid: int
    key: str
    name: str
    word: str  # of the opening; DONE: it has a communicator


def live(pids: Sequence[int] | None = None) -> list[GroupState]:
    """Return the state of every group with a window in a process of this machine that this user may inspect.

    Args:
        pids: ids of the processes to inspect; None: all.
    """
    found: dict[tuple[int, int], list[_Window]] = {}
    try:
        for pid in pids or [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with contextlib.suppress(OSError):  # another user's, or it has ended
                for link in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        _look(link.path, pid, found)
        groups: dict[str, dict[int, _Window]] = {}
        for window in (each for windows in found.values() for each in windows):
            groups.setdefault(window.key, {})[window.rank] = window
        return [_group_of(key, members) for key, members in sorted(groups.items())]
    finally:
        for window in (windows[0] for windows in found.values() if windows):
            library.lib().am_window_unmap(window.at, window.mapped)


def _look(path: str, pid: int, found: dict[tuple[int, int], list[_Window]]) -> None:
    """Map the file behind a descriptor if windows are in it."""
    target = os.readlink(path)
    if not target.startswith((f"/memfd:{MEMFD} ", f"/memfd:{_VNPU_MEMFD} ")):
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        stat = os.fstat(fd)
        if (file := (stat.st_dev, stat.st_ino)) in found or stat.st_size < PAGE_BYTES:
            return
        base = library.lib().am_window_look(fd, 0, stat.st_size)
        found[file] = []
        if not base:
            return
        vnpu = _VNPU_MEMFD in target
        places = _heads(fd) if vnpu else iter([(0, os.pread(fd, PAGE_BYTES, 0))])
        for at, head in places:
            window = _window_of(base + at, head, pid, str(stat.st_ino) if vnpu else "")
            if window is not None and at + window.total <= stat.st_size:
                found[file].append(replace(window, at=base, mapped=stat.st_size))
        if not found[file]:
            library.lib().am_window_unmap(base, stat.st_size)
    finally:
        os.close(fd)


def _heads(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield place and first page of what may be a window; holes of the file are skipped, not filled."""
    at = 0
    with contextlib.suppress(OSError):  # no data behind this
        while True:
            data = os.lseek(fd, at, os.SEEK_DATA) // _VNPU_ALIGN * _VNPU_ALIGN
            yield data, os.pread(fd, PAGE_BYTES, data)
            at = data + _VNPU_ALIGN


def _window_of(base: int, head: bytes, pid: int, hccl: str) -> _Window | None:
    """Return the window that begins with this page, or None: it is none, or is not used any more."""
    words = (ctypes.c_uint64 * 5)()
    known = library.lib().am_window_label(ctypes.create_string_buffer(head, PAGE_BYTES), words)
    rank, world, owner, total, closed = words
    if closed or (hccl and not known):
        return None
    if hccl:
        return _Window(base, 0, 0, total, rank, world, owner, hccl, f"of HCCL, memfd {hccl}", DONE)
    opening = opening_of(head)
    if opening is None:
        return None
    if not known:
        total, owner = PAGE_BYTES, pid
    key = opening.digest or f"{opening.name} {opening.world} {_parent_of(pid)}"
    word = DONE if known else opening.word
    return _Window(base, 0, 0, total, opening.rank, opening.world, owner, key, opening.name, word)


def _parent_of(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
    return ""


def _group_of(key: str, members: dict[int, _Window]) -> GroupState:
    first = next(iter(members.values()))
    if all(window.word == DONE for window in members.values()):
        bases = [members[rank].base if rank in members else None for rank in range(first.world)]
        return of_windows(key, first.name, bases, first.total, describe_process)
    ranks = []
    missing = tuple(rank for rank in range(first.world) if rank not in members)
    for rank in range(first.world):
        window = members.get(rank)
        state = RankState(rank)
        if window is not None:
            waits = missing if window.word != DONE else ()
            state = RankState(
                rank, window.pid, "open", phase="open", awaits=waits, process=describe_process(window.pid)
            )
        ranks.append(state)
    return GroupState(key, first.name, tuple(ranks))


# ---- who is behind


@dataclass(frozen=True)
class Behind:
    """A rank that blocks its group: ``waiters`` wait for it; it waits for none, or in a circle. ``why``: a sentence."""

    key: str  # of the group
    group: str
    rank: int
    pid: int
    waiters: tuple[int, ...]
    why: str


def steady(before: Sequence[GroupState], now: Sequence[GroupState]) -> list[GroupState]:
    """Return ``now`` with only the waits that last: in ``before`` the rank waited for that peer in the same op."""
    seen = {(group.key, one.rank, one.epoch, peer) for group in before for one in group.ranks for peer in one.awaits}

    def kept(group: GroupState, one: RankState) -> RankState:
        return replace(one, awaits=tuple(p for p in one.awaits if (group.key, one.rank, one.epoch, p) in seen))

    return [replace(group, ranks=tuple(kept(group, one) for one in group.ranks)) for group in now]


def behind(groups: Sequence[GroupState]) -> list[Behind]:
    """Return the ranks that block ``groups``: others wait for them, directly or through further ranks.

    A rank that itself waits, in this group or in another, is not behind. If ranks wait for each other in a circle, the
    groups were called in different orders, and the rank with the most waiters is returned. A rank that has failed
    counts as waiting for the rank that its error names.
    """
    waiters: Counter[Any] = Counter()
    places: dict[Any, list[tuple[GroupState, RankState]]] = {}
    links: dict[Any, set[Any]] = defaultdict(set)  # between a rank and those that it waits for, both ways
    waiting = set()

    def wait(node: Any, peer: Any, counts: bool) -> None:
        waiters[peer] += counts
        waiting.add(node)
        links[node].add(peer)
        links[peer].add(node)

    for group in groups:
        pids = [one.pid for one in group.ranks if one.pid]
        nodes = [one.pid if pids.count(one.pid) == 1 else (group.key, one.rank) for one in group.ranks]
        idle = {peer for one in group.ranks for peer in one.awaits if not group.ranks[peer].awaits}
        for node, one in zip(nodes, group.ranks, strict=True):
            places.setdefault(node, []).append((group, one))
            if one.error and 0 <= one.culprit < len(nodes):
                wait(node, nodes[one.culprit], one.culprit != one.rank)
            for peer in one.awaits:
                wait(node, nodes[peer], peer in idle or not idle)  # relays of hierarchy wait in their turn
    found = []
    for job in _connected(links):
        waited = [node for node in job if waiters[node]]
        last = [node for node in waited if node not in waiting]
        last = last or [node for node in waited if waiters[node] == max(waiters[node] for node in waited)]
        found += [_behind_of(group, one, places[node]) for node in last for group, one in places[node]]
    return [each for each in found if each is not None]


def _connected(links: dict[Any, set[Any]]) -> Iterator[list[Any]]:
    """Yield the connected parts of a graph: jobs of one machine that have nothing to do with each other."""
    seen = set()
    for start in links:
        part, todo = [], [start]
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                part.append(node)
                todo += links[node]
        if part:
            yield part


def _behind_of(group: GroupState, one: RankState, all_places: list[tuple[GroupState, RankState]]) -> Behind | None:
    failed = {other.rank for other in group.ranks if other.error and other.culprit == one.rank}
    waiters = tuple(other.rank for other in group.ranks if one.rank in other.awaits or other.rank in failed)
    if not waiters:
        return None
    if not one.epoch and not one.op:
        doing = "has called no op of it"
    elif one.phase and not one.awaits:
        doing = f"is in {one.op}, epoch {one.epoch}, phase {one.phase}"
    elif one.phase:
        doing = f"waits in {one.op}, epoch {one.epoch}"
    else:
        doing = f"is in no op of it since epoch {one.epoch}" + (f" ({one.op})" if one.op else "")
    for other, state in all_places:
        if other is not group and state.phase:
            doing += f", but in {state.op} of group {other.name}, epoch {state.epoch}"
    first = next(other for other in group.ranks if other.rank in waiters)
    what = f"{first.op}, epoch {first.epoch}" if not first.error else f"{first.op} ({first.error})"
    noun = f"rank {waiters[0]} waits" if len(waiters) == 1 else f"ranks {', '.join(map(str, waiters))} wait"
    why = f"group {group.name}: rank {one.rank} {doing}; {noun} for it in {what}"
    return Behind(group.key, group.name, one.rank, one.pid, waiters, why + (f"; {one.process}" if one.process else ""))


def text(groups: Sequence[GroupState], found: Sequence[Behind]) -> str:
    """Return a table of each group's ranks, and a line for each of ``found``, the result of `behind`."""
    lines = []
    for group in groups:
        rows: list[list[object]] = [["rank", "process", "op", "algorithm", "epoch", "phase", "s", "waits for", "state"]]
        for one in group.ranks:
            waits = ",".join(map(str, one.awaits)) or "-"
            state = f"{one.error} about rank {one.culprit}" if one.error else one.process
            spent = f"{one.seconds:.1f}" if one.seconds else "-"
            cells = (one.op, one.algorithm if one.op else "", one.epoch or "", one.phase)
            rows.append([one.rank, str(one.pid or "-"), *(cell or "-" for cell in cells), spent, waits, state])
        lines += [f"group {group.name}, {len(group.ranks)} ranks:", *table(rows), ""]
    lines += [f"behind: {each.why}" for each in found] or ["no rank waits for another"]
    return "\n".join(lines)


# ---- copies of state areas


def of_files(files: Sequence[Path]) -> GroupState:
    """Return a group's state from copies of its ranks' state areas, in rank order; not for several A2 servers.

    Raises:
        ArgumentError: a file cannot be read, or is no copy of a state area of a rank that has run an op.
    """
    lib = library.lib()
    total, bases = lib.am_window_total_bytes(0, 0), []
    try:
        for file in files:
            raw = contents(file, total - PAGE_BYTES)
            bases.append(lib.am_window_alloc(total))
            ctypes.memmove(bases[-1] + PAGE_BYTES, raw, len(raw))
        made = of_windows("", "in the files", bases, total, lambda pid: "")
    finally:
        for base in bases:
            lib.am_window_unmap(base, total)
    for file, one in zip(files, made.ranks, strict=True):
        if one.process:
            rule = "does not begin with a control block: copy the whole state area, windowsExp on an A3 or the last MiB"
            raise ArgumentError(f"{file} {rule} of windowsIn on an A2, of a rank that has run an op", argument="files")
    return made


def contents(file: Path, most: int) -> bytes:
    """Return the first ``most`` bytes of a file. Raises ArgumentError if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(most)
    except OSError as error:
        raise ArgumentError(f"{file} cannot be read: {error.strerror}", argument="files") from error


# ---- the watchdog


class Threads(Protocol):
    """Ranks that are threads of this process, whose windows have no descriptor."""

    def state(self) -> GroupState | None:
        """Return the state of the group; None: its windows are closed."""


_threads: weakref.WeakSet[Threads] = weakref.WeakSet()


def watch(communicator: Any) -> None:
    """Run the watchdog of this process until the communicator is closed, if ASCEND_MOE_WATCHDOG_S is set."""
    _watchdog.watch(communicator)


def watch_threads(ranks: Threads) -> None:
    """Let the watchdog also inspect ranks that are threads of this process."""
    _threads.add(ranks)


class _Watchdog:
    """A thread that writes what it finds while an op takes long; it ends when all communicators are closed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the thread, which a forked child does not have."""
        self._lock, self._runs = threading.Lock(), False
        self._communicators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._written: set[tuple[str, int, bool]] = set()  # group, epoch, whether a rank was named

    def watch(self, communicator: Any) -> None:
        """Add a communicator, and start the thread unless it runs."""
        with self._lock:
            self._communicators.add(communicator)
            if not self._runs and settings.WATCHDOG_S.get() is not None:
                self._runs = True
                threading.Thread(target=self._run, name="ascend_moe-watchdog", daemon=True).start()

    def _run(self) -> None:
        while (seconds := self._period()) is not None:
            time.sleep(min(1.0, seconds / 4))
            with contextlib.suppress(OSError, ArgumentError):  # no descriptor is left, or no folder
                self._look(seconds)

    def _period(self) -> float | None:
        """Return ASCEND_MOE_WATCHDOG_S; None, and the thread must end: it is not set, or nothing is open."""
        with self._lock:
            is_open = any(not getattr(one, "closed", False) for one in self._communicators)
            seconds = settings.WATCHDOG_S.get() if is_open else None
            self._runs = seconds is not None
            return seconds

    def _look(self, seconds: float) -> None:
        """Write a file if an op takes longer than ``seconds``."""
        pid = os.getpid()
        own = live([pid]) + _states_of_threads()
        slow = [(group, one) for group in own for one in group.ranks if one.pid == pid and one.seconds > seconds]
        late = {(group.key, one.epoch) for group, one in slow}
        if all((*one, True) in self._written for one in late):
            return
        groups = [group for group in live() + _states_of_threads() if any(group.key == key for key, _ in late)]
        found = behind(groups)
        if (now := {(*one, bool(found)) for one in late}) - self._written:
            self._written |= now
            _write(groups, found)


_watchdog = _Watchdog()
os.register_at_fork(after_in_child=_watchdog.reset)


def _states_of_threads() -> list[GroupState]:
    return [state for state in (ranks.state() for ranks in list(_threads)) if state is not None]


def _write(groups: list[GroupState], found: list[Behind]) -> None:
    path, _ = log.saved(f"ascend_moe_hang_{os.getpid()}_", ".txt", text(groups, found))
    why = f": {found[0].why}" if found else ""
    log.say(logging.WARNING, "an op takes more than %s s%s; all ranks: %s", settings.WATCHDOG_S.text(), why, path)
