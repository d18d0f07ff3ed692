"""LocalCluster: W ranks as threads of one process, over windows in plain memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

import torch

from ascend_moe.comm.communicator import Communicator
from ascend_moe.errors import ArgumentError, AscendMoeError, CommError, CommTimeout, PeerLost, with_right_names
from ascend_moe.native import binding, hang, library, log
from ascend_moe.native.windows import MIB, timeout_s, window_data_bytes, window_registered_bytes
from ascend_moe.settings import MAX_WORLD

T = TypeVar("T")
P = ParamSpec("P")

INTERRUPT_GRACE_S = 0.8  # for ranks to leave their ops after Ctrl-C

_numbers = itertools.count()
_here = threading.local()  # .places = {cluster: rank} in a rank's thread, the cluster of its run() first
_entered: dict[str, LocalCluster] = {}


@contextlib.contextmanager
def _default_dtype_kept() -> Iterator[None]:
    """Context manager: restore torch's default dtype. All threads share it, and contexts that set it, such as
    transformers' from_pretrained, leave another one behind if the ranks enter and exit them interleaved.
    """
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        if (left := torch.get_default_dtype()) != before:
            torch.set_default_dtype(before)
            text = "the ranks changed torch's default dtype, shared by all threads, to %s; restored %s: load models"
            log.say(logging.WARNING, text + " before LocalCluster.run", left, before)


def _first_cause(error: BaseException) -> BaseException:
    """Return the start of an exception's chain of causes."""
    seen = {id(error)}
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(before) in seen or isinstance(before, RankRaised):
            break
        seen.add(id(before))
        error = before
    return error


def find(name: str) -> LocalCluster | None:
    """Return the LocalCluster of this name that is inside its ``with`` block, or None."""
    return _entered.get(name)


def names() -> list[str]:
    return sorted(_entered)


class RankRaised(Exception):
    """Cause of an exception from `LocalCluster.run`; names the rank that raised it, so tracebacks show that first."""


class _Windows:
    """The windows of all ranks and the W communicators over them; freed with the last communicator."""

    def __init__(self, cluster: LocalCluster, data_bytes: int) -> None:
        self._cluster = cluster
        registered_bytes = window_registered_bytes(data_bytes)
        self._total: int = library.lib().am_window_total_bytes(data_bytes, registered_bytes)
        self._bases: list[int] = []
        self.communicators: list[Communicator] = []
        self.open: set[int] = set()  # ranks whose communicator is not closed
        try:
            for rank in range(cluster.world_size):
                base = library.lib().am_window_alloc(self._total)
                if not base:
                    raise AscendMoeError(
                        f"{cluster.name}: no memory for the {data_bytes // MIB} MiB window of rank {rank}: "
                        f"lower window_mib or HCCL_BUFFSIZE"
                    )
                self._bases.append(base)
            for rank in range(cluster.world_size):
                communicator = Communicator(
                    cluster.name,
                    rank,
                    self._bases,
                    data_bytes,
                    registered_bytes,
                    peers=self,
                    release=functools.partial(self._left, rank),
                )
                self.communicators.append(communicator)
                self.open.add(rank)
            hang.watch_threads(self)
        except BaseException:
            self.close()
            self._free()
            raise

    def state(self) -> hang.GroupState | None:
        """Return what all ranks do; None if all communicators are closed."""
        return next((state for one in self.communicators if (state := one.state()) is not None), None)

    # Implements Peers.

    def live_fds(self, world: int) -> list[int]:
        return [-1] * world

    def gone(self, rank: int) -> bool:
        return rank not in self.open or self.ended(rank)

    def ended(self, rank: int) -> bool:
        return self._cluster.has_ended(rank)

    def describe(self, rank: int) -> str:
        return self._cluster.describe_rank(rank)

    def _left(self, rank: int) -> None:
        with self._cluster.changed:
            self.open.discard(rank)
            self.mark_lost(rank)
            if not self.open:
                self._free()
            self._cluster.changed.notify_all()

    def mark_lost(self, rank: int) -> None:
        """Make waits of the other ranks for this one raise PeerLost."""
        for communicator in self.communicators:
            if communicator.rank != rank:
                communicator.mark_lost(rank)

    def _free(self) -> None:
        bases, self._bases = self._bases, []
        for rank, base in enumerate(bases):
            unmap = functools.partial(library.lib().am_window_unmap, base, self._total)
            if rank < len(self.communicators):
                self.communicators[rank].when_unused(unmap)
            else:
                unmap()

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()


class LocalCluster:
    """W EP ranks as threads of this process; ``run`` passes ``group_ep`` to the ranks' function.

    Args:
        world_size: number of ranks, 1..384.
        window_mib: MiB of one rank's window; default HCCL_BUFFSIZE, read when windows are opened.

    Use as a context manager, which frees the windows on exit. ``run`` may be called many times; the windows stay open
    in between, and after a failure the next ``run`` opens new ones.

    Raises:
        ArgumentError: world_size or window_mib is out of range.

    Example::

        with LocalCluster(4) as cluster:
            results = cluster.run(lambda rank, group_ep: f"{rank} of {group_ep}")
    """

    @with_right_names
    def __init__(self, world_size: int, *, window_mib: int | None = None) -> None:
        whole = isinstance(world_size, int) and not isinstance(world_size, bool)
        if not whole or not 1 <= world_size <= MAX_WORLD:
            text = f"world_size={world_size!r} must be an int in 1..{MAX_WORLD}"
            raise ArgumentError(text, argument="world_size")
        if window_mib is not None:
            window_data_bytes(window_mib)
        self.world_size = world_size
        self._number = next(_numbers)
        self.name = f"local_cluster_{os.getpid()}_{self._number}"
        self.changed = threading.Condition()  # guards everything below
        self._window_mib = window_mib
        self._windows: _Windows | None = None
        self._active: set[int] = set()  # ranks whose function is running
        self._closed: set[int] = set()  # those of them that have closed and not requested windows since
        self._errors: dict[int, tuple[float, BaseException]] = {}
        self._left_open = False  # exited or interrupted while functions ran: the last one closes
        self._parts: dict[tuple[int, ...], LocalCluster] = {}  # created by shrink, by attempt and ranks
        self._whole: LocalCluster | None = None  # the cluster that this part was made from
        self._came: set[int] = set()  # of a part: its ranks that have called shrink
        self._broken = False  # of a part: a rank ended before all had called

    def __enter__(self) -> LocalCluster:
        if self._left_open:
            raise AscendMoeError(f"{self.name}: an interrupted run() has not ended: use a new cluster")
        binding.library()  # raise here if it cannot be loaded, not on every rank's thread
        _entered[self.name] = self
        return self

    def __exit__(self, *error: object) -> None:
        _entered.pop(self.name, None)
        with self.changed:
            self._left_open = bool(self._active)
        binding.forget()
        if not self._left_open:
            self._close_windows()

    # ---- running

    def run(self, fn: Callable[Concatenate[int, str, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run ``fn(rank, group_ep, *args, **kwargs)`` on one thread per rank and wait for all.

        Returns:
            The results by rank.

        Raises:
            BaseException: the exception of the rank at the root of a failure, with ``.others`` = {rank: exception} of
                the other ranks that raised, and ``.results`` = {rank: result} of those that returned. A rank that
                fails is lost to the others, whose ops raise PeerLost at once; for a rank that merely returns they wait
                until the deadline.
            AscendMoeError: outside ``with``, or while another ``run`` is in progress.
        """
        with self.changed:
            self._check_usable()
            if self._active:
                raise AscendMoeError(f"{self.name}: run() is already in progress: use another cluster")
            self._active = set(range(self.world_size))
            self._closed = set()
            self._errors, self._parts = {}, {}
        results: dict[int, T] = {}
        with _default_dtype_kept():
            self._run_ranks(lambda rank: functools.partial(fn, rank, self.name, *args, **kwargs), results)
        if self._errors:
            self._close_windows()
            errors, self._errors = self._errors, {}
            root = self._root_cause(errors)
            with contextlib.suppress(AttributeError):
                root.results = results  # type: ignore[attr-defined]
            raise root
        return [results[rank] for rank in range(self.world_size)]

    def _run_ranks(self, function_of: Callable[[int], Callable[[], T]], results: dict[int, T]) -> None:
        """Start a thread for each rank and wait until all have ended."""
        threads: list[threading.Thread] = []
        waiting = set(range(self.world_size))  # ranks whose thread has not begun

        def body(rank: int) -> None:
            with self.changed:
                if rank not in waiting:  # run() was interrupted before
                    return
                waiting.remove(rank)
            self._body(rank, function_of(rank), results)

        try:
            for rank in range(self.world_size):
                thread = threading.Thread(target=body, args=(rank,), name=f"{self.name}-rank{rank}", daemon=True)
                try:
                    thread.start()
                    threads.append(thread)
                except RuntimeError as error:  # no more threads
                    self._finished(rank, error)
            with self.changed:
                self.changed.wait_for(lambda: not self._active)
            for thread in threads:  # their functions have returned
                thread.join()
        except BaseException:
            with self.changed:
                self._active -= waiting
                waiting.clear()
            self._interrupt()
            for thread in () if self._left_open else threads:
                thread.join()
            raise

    def _body(self, rank: int, fn: Callable[[], T], results: dict[int, T]) -> None:
        places = _here.places = {self: rank}
        raised = None
        try:
            binding.set_place(self._number * MAX_WORLD + rank + 1)
            results[rank] = fn()
        except BaseException as error:  # also SystemExit: raised again by run()
            raised = error
        for cluster, place in reversed(places.items()):  # those created by shrink first
            cluster._finished(place, raised)

    def _finished(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            if error is not None:
                self._errors[rank] = (time.monotonic(), error)
                if self._windows is not None:
                    self._windows.mark_lost(rank)
            self._active.discard(rank)
            self.changed.notify_all()
            close = (self._left_open or self._whole is not None) and not self._active
        if close:
            if self._whole is not None:
                _entered.pop(self.name, None)
            self._close_windows()

    def _interrupt(self) -> None:
        """Make the ops of all ranks return after an interrupted run(), and give them a moment."""
        with self.changed:
            self._left_open = True  # in case they need longer, or another interrupt arrives
            binding.forget()
            self._mark_all_lost()
            self.changed.notify_all()
            if self.changed.wait_for(lambda: not self._active, INTERRUPT_GRACE_S):
                self._left_open = False
        if not self._left_open:
            self._close_windows()

    def _mark_all_lost(self) -> None:
        if self._windows is not None:
            for rank in range(self.world_size):
                self._windows.mark_lost(rank)
        for part in self._parts.values():
            part._mark_all_lost()

    def _root_cause(self, raised: dict[int, tuple[float, BaseException]]) -> BaseException:
        """Return the earliest exception; for a lost peer, the exception of that peer."""
        errors = {rank: error for rank, (_, error) in raised.items()}
        root = min(raised, key=lambda rank: raised[rank][0])
        followed: set[int] = set()
        while root not in followed and isinstance(errors[root], CommError):
            followed.add(root)
            culprit = getattr(errors[root], "rank", None)
            if isinstance(errors[root], CommTimeout) or culprit not in errors:
                break
            root = culprit
        error = errors.pop(root)
        with contextlib.suppress(AttributeError):
            error.others = errors  # type: ignore[attr-defined]
        also = f"; ranks {sorted(errors)} raised too, see .others" if errors else ""
        _first_cause(error).__cause__ = RankRaised(f"rank {root} of {self.name}{also}")
        return error

    # ---- shrinking

    def has_ended(self, rank: int) -> bool:
        """Return whether the rank's function has returned or raised in the current ``run``; False outside of one."""
        return rank in self._errors or bool(self._active and rank not in self._active)

    def shrink(self, rank: int, alive: list[int], attempt: int, seconds: float) -> tuple[LocalCluster, int]:
        """Return a new cluster of the ranks ``alive``, and this thread's rank in it. Called on all of their threads.

        It exists until their functions end. ``rank``: of this thread. ``attempt``: number, new for each attempt.

        Raises:
            PeerLost: the function of one of these ranks has ended. CommTimeout: one has not called within ``seconds``.
        """
        key, deadline = (attempt, *alive), time.monotonic() + seconds
        with self.changed:
            part = self._parts.get(key)
            if part is None:
                part = self._parts[key] = LocalCluster(len(alive), window_mib=self._window_mib)
                part._whole, part._active = self, set(range(len(alive)))
            place = alive.index(rank)
            part._came.add(place)
            self.changed.notify_all()
            while len(part._came) < len(alive) and not part._broken:
                absent = [other for other in alive if alive.index(other) not in part._came]
                ended = [other for other in absent if self.has_ended(other)]
                if ended or time.monotonic() >= deadline:
                    part._broken = True
                    self.changed.notify_all()
                else:
                    self.changed.wait(min(deadline - time.monotonic(), 0.05))
            if not part._broken:
                _entered[part.name] = part
                _here.places[part] = place
                return part, place
            absent = [other for other in alive if alive.index(other) not in part._came] or [rank]
        seen = f"rank {absent[0]} has not called shrink in time: {self.describe_rank(absent[0])}"
        lost = PeerLost if self.has_ended(absent[0]) else CommTimeout
        raise lost(f"{self.name}: {seen}; call agree again", rank=absent[0], ranks=absent, phase="shrink")

    # ---- communicators

    def communicator(self, rank: int) -> Communicator:
        """Return the communicator of ``rank``; open the windows of all ranks if there are none.

        A rank that has closed its communicator gets a new one once every rank has closed its own.

        Raises:
            CommTimeout: a rank has not closed its own in time. PeerLost: its function raised. AscendMoeError: outside
                the cluster's ``with`` block.
        """
        deadline = time.monotonic() + timeout_s()
        with self.changed:
            self._closed.discard(rank)
            while True:
                self._check_usable()
                if self._windows is None or not self._windows.open:
                    self._windows = self._open()
                if rank in self._windows.open and not self._windows.communicators[rank].closed:
                    return self._windows.communicators[rank]
                for other in sorted(self._windows.open & self._errors.keys()):
                    seen = self.describe_rank(other)
                    raise PeerLost(f"{self.name}: rank {other} is lost: {seen}", rank=other, phase="open")
                if not self.changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    ranks = sorted(self._windows.open - {rank})
                    states = "; ".join(f"rank {other}: {self.describe_rank(other)}" for other in ranks)
                    raise CommTimeout(
                        f"{self.name}: new windows need close() on every rank, and ranks {ranks} have not "
                        f"closed within {timeout_s():g} s (ASCEND_MOE_TIMEOUT_S): {states}",
                        rank=ranks[0] if ranks else None,
                        ranks=ranks,
                        phase="open",
                    )

    def open_communicator(self, rank: int) -> Communicator | None:
        """Return the communicator of one rank, or None if there is none; opens nothing."""
        made = self._windows.communicators if self._windows is not None else []
        return made[rank] if rank < len(made) else None

    def _open(self) -> _Windows:
        windows = _Windows(self, window_data_bytes(self._window_mib))
        for rank in self._errors if self._active else ():
            windows.mark_lost(rank)
        return windows

    def close(self) -> None:
        """Close this rank's communicator if called in a rank's function, else those of all ranks. Idempotent.

        Raises:
            AscendMoeError: another thread than a rank's called it while run() is in progress.
        """
        rank = self.rank_here()
        if rank is not None:
            # A second close must not reach windows that another rank may have opened meanwhile.
            if self._windows is not None and rank not in self._closed:
                self._windows.communicators[rank].close()
                self._closed.add(rank)
            return
        with self.changed:
            if self._active:
                raise AscendMoeError(f"{self.name}: close it in the function of each rank, or after run() has returned")
        self._close_windows()

    def rank_here(self) -> int | None:
        """Return the rank whose function this thread runs, None in any other thread."""
        places: dict[LocalCluster, int] = getattr(_here, "places", {})
        return places.get(self)

    def describe_rank(self, rank: int) -> str:
        """Return the visible state of a rank, e.g. ``its function raised ValueError: no``."""
        if rank in self._errors:
            error = self._errors[rank][1]
            return f"its function raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        windows = self._windows
        if windows is not None and rank not in windows.open:
            return "it has closed its communicator"
        if rank not in self._active:
            return "its function has returned" if self._active else "it is a rank of this process"
        return "its function is running"

    def _close_windows(self) -> None:
        with self.changed:
            windows, self._windows = self._windows, None
        if windows is not None:
            windows.close()

    def _check_usable(self) -> None:
        if _entered.get(self.name) is not self or self._left_open:
            text = f"{self.name} is not open, or was interrupted: use a new `with LocalCluster({self.world_size})`"
            raise AscendMoeError(text)
