"""The flight recorder: the last calls of every rank, without their tensors, for the day when a rank does not come.

A call adds a few names and shapes to a ring. They are written to a file when an op raises CommTimeout or PeerLost, and
each call is a record of the log where that is at debug.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import comm, log, settings
from ..errors import AscendMoeError, CommTimeout, PeerLost

KEPT = 200  # calls of a rank
_MOST_RINGS = 256
_PLAIN = frozenset((str, int, float, bool, type(None)))  # what is no tensor is told fastest by its type
_here = threading.local()  # .last: this thread's last call


class Ring:
    """What is kept of one rank of one group."""

    def __init__(self, group: str, rank: int) -> None:
        self.group, self.rank = group, rank
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.numbers = itertools.count(1)
        self.algorithms: dict[str, str] = {}  # of each op, as it was last logged


_rings: dict[tuple[str, int], Ring] = {}  # by group and rank


class Call:
    """One call of one rank, while it runs and afterwards.

    ``tensors``: place among the op's arguments, dtype, shape. ``epoch``: its number on the wire, which errors name; 0
    where it was not looked at, because nobody reads records, or cannot be, as on an NPU.
    """

    __slots__ = ("began", "comm_alg", "epoch", "micros", "number", "op", "outcome", "ring", "tensors", "wall")

    def __init__(self, op: Recorder, ring: Ring, comm_alg: str, tensors: list[tuple[int, Any, Any]]) -> None:
        self.op, self.ring, self.comm_alg, self.tensors = op, ring, comm_alg, tensors
        self.number = next(ring.numbers)
        self.micros, self.outcome, self.epoch = -1.0, "did not return", 0
        self.wall, self.began = time.time(), time.perf_counter()

    def __str__(self) -> str:
        shapes = ", ".join(f"{self.op.names[at]} {str(dtype)[6:]} {tuple(shape)}" for at, dtype, shape in self.tensors)
        alg = f", comm_alg {self.comm_alg}" if self.comm_alg else ""
        took = f"{self.micros:.0f} µs" if self.micros >= 0 else "?"
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        head = f"call {self.number}, {self.op.name} on {self.ring.group}{alg}{epoch}"
        return f"{head}: {shapes}; {took}, {self.outcome}"


class Recorder:
    """Makes the calls of one op; ``names`` are its arguments in their order."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name, self.names = name, tuple(names)
        self._at = {each: at for at, each in enumerate(self.names)}
        places = [self._at.get(each, len(self.names)) for each in ("group_ep", "ep_rank_id", "comm_alg")]
        self._group, self._rank, self._alg = places

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call, from now on; None where a compiler looks for shapes, or nothing is to be kept."""
        count = len(args)
        group = args[self._group] if self._group < count else kwargs.get("group_ep")
        rank = args[self._rank] if self._rank < count else kwargs.get("ep_rank_id")
        comm_alg = args[self._alg] if self._alg < count else kwargs.get("comm_alg")
        if type(group) is not str or type(rank) is not int:
            return None
        tensors = []
        given: Iterable[tuple[int, Any]] = enumerate(args)
        if kwargs:
            given = (*given, *((self._at.get(name, -1), value) for name, value in kwargs.items()))
        for at, value in given:
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                if at >= 0:
                    tensors.append((at, value.dtype, value.shape))
            elif kind not in _PLAIN and isinstance(value, torch.Tensor):
                return None
        ring = _rings.get((group, rank))
        if ring is None:
            if len(_rings) >= _MOST_RINGS:  # the oldest group's
                _rings.pop(next(iter(_rings)), None)
            ring = _rings[group, rank] = Ring(group, rank)
        call = Call(self, ring, comm_alg or "", tensors)
        ring.calls.append(call)
        _here.last = call
        return call


def last() -> Call | None:
    """This thread's last call."""
    return getattr(_here, "last", None)


def end(call: Call, fresh: bool) -> None:
    """The call has returned. ``fresh``: no equal call came before, so its algorithm may be another one."""
    call.micros, call.outcome = 1e6 * (time.perf_counter() - call.began), "returned"
    if fresh:
        _tell_algorithm(call)
    if log.logger.isEnabledFor(logging.DEBUG):  # else nobody reads it, and it takes a lock
        _take_epoch(call)
    _log(call)


def fail(call: Call, error: BaseException) -> None:
    """The call has raised. A rank that is missed is worth a file, whose name goes into the error's text."""
    call.micros, call.outcome = 1e6 * (time.perf_counter() - call.began), f"{type(error).__name__}: {error}"
    if not isinstance(error, (CommTimeout, PeerLost)):
        _log(call)
        return
    _take_epoch(call)
    _log(call)
    if "calls" not in error.details:
        path = _write(call.ring)
        if path:
            error.details["calls"] = path
            error.args = (f"{error}; the last calls of rank {call.ring.rank}: {path}",)


def _take_epoch(call: Call) -> None:
    with contextlib.suppress(AscendMoeError):  # closed meanwhile
        call.epoch = comm.epoch_on(call.ring.group, call.ring.rank)


def _log(call: Call) -> None:
    if log.logger.isEnabledFor(logging.DEBUG):
        log.say(logging.DEBUG, "%s", call, rank=call.ring.rank)


def _tell_algorithm(call: Call) -> None:
    ring = call.ring
    try:
        algorithm = comm.algorithm_on(ring.group, ring.rank)  # a thread may be a rank of several clusters
    except AscendMoeError:  # closed meanwhile
        return
    op = "dispatch" if "dispatch" in call.op.name.removeprefix("npu_moe_distribute_") else "combine"
    if ring.algorithms.get(op) == algorithm:
        return
    ring.algorithms[op] = algorithm
    log.say(logging.INFO, "%s on group %s runs %s", op, ring.group, algorithm, rank=ring.rank)
    asked = call.comm_alg or settings.COMM_ALG.get() or "auto"
    if asked != "window" and (op, algorithm, ring.algorithms.get("dispatch")) == ("combine", "window", "direct"):
        text = "combine on group %s falls back to window, dispatch runs direct: see ascend-moe plan, %s is too small"
        log.say(logging.WARNING, text, ring.group, settings.HCCL_BUFFSIZE.name, rank=ring.rank)


def _write(ring: Ring) -> str:
    """The rank's calls in a new file; its name, "" where none can be written."""
    lines = [f"the last calls of rank {ring.rank} on group {ring.group}, oldest first; process {os.getpid()}"]
    lines += map(_line, list(ring.calls))
    try:
        head, folder = f"ascend_moe_rank{ring.rank}_", settings.CALLS.get()
        file, path = tempfile.mkstemp(prefix=head, suffix="_calls.txt", dir=folder)
        with os.fdopen(file, "w", encoding="utf-8") as text:
            text.write("\n".join(lines) + "\n")
    except OSError:
        return ""
    return path


def _line(call: Call) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(call.wall))}.{call.wall % 1 * 1e6:06.0f} {call}"
