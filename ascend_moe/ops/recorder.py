"""Flight recorder: the last calls of every rank, without their tensors, for diagnosing missing ranks.

The C++ library of the ops records them (csrc/torch/handle.h). They are written to a file when an op raises CommTimeout
or PeerLost, and logged at level debug.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from .. import comm, settings
from ..comm.communicator import by_number
from ..errors import AscendMoeError, CommTimeout, PeerLost
from ..native import binding, log
from ..native.binding import RecordedCall
from . import calls

_here = threading.local()  # .seen: serial of the last processed call of this thread
_MOST_COMMUNICATORS = 256
_algorithms: dict[tuple[int, str], str] = {}  # last logged algorithm by communicator and op


def last() -> RecordedCall | None:
    """Return this thread's last recorded call, or None if it was returned before. Shape inference is not recorded."""
    call = binding.last_call()
    if call is None or call.serial == getattr(_here, "seen", 0):
        return None
    _here.seen = call.serial
    return call


def returned(missed: bool) -> None:
    """Log that this thread's call has returned; ``missed``: it was not in the cache, so its algorithm may be new."""
    call = last()
    if call is None:
        return
    if missed:
        _log_algorithm(call)
    if log.logger.isEnabledFor(logging.DEBUG):  # reading the epoch takes a lock
        _log(call, "returned", _epoch_of(call))


def failed(error: BaseException, call: RecordedCall | None = None) -> None:
    """Record that ``call`` (None: this thread's) raised; for CommTimeout and PeerLost write a file, named in it."""
    call = call or last()
    if call is None:
        return
    missed = isinstance(error, (CommTimeout, PeerLost))
    epoch = _epoch_of(call) if missed or log.logger.isEnabledFor(logging.DEBUG) else 0
    outcome = f"{type(error).__name__}: {error}"
    communicator = by_number(call.communicator)
    if communicator is not None and call.number:
        communicator.ops_handle.call_failed(call, epoch, outcome)
    _log(call, outcome, epoch)
    if missed and isinstance(error, AscendMoeError) and "calls" not in error.details:
        last_calls = communicator.ops_handle.last_calls() if communicator else []
        lines = [_line(wall, _text(one, what, at)) for wall, one, what, at in last_calls]
        own = [] if call.number and lines else [_line(time.time(), _text(call, outcome, epoch))]
        head = f"the last calls of rank {call.rank} on group {call.group}, oldest first; process {os.getpid()}"
        text = "\n".join([head, *lines, *own])
        where, written = log.saved(f"ascend_moe_rank{call.rank}_", "_calls.txt", text)
        if written:
            error.details["calls"] = where
        error.args = (f"{error}; the last calls of rank {call.rank}: {where}",)


def _epoch_of(call: RecordedCall) -> int:
    """Return the call's epoch, or 0 if it is unknown, as on an NPU."""
    with contextlib.suppress(AscendMoeError):  # closed meanwhile
        return comm.epoch_on(call.group, call.rank)
    return 0


def _text(call: RecordedCall, outcome: str, epoch: int) -> str:
    head = f"call {call.number}, {call.op} on {call.group}"
    alg = f", comm_alg {call.comm_alg}" if call.comm_alg else ""
    at = f", epoch {epoch}" if epoch else ""
    took = f"{call.took / 1e3:.0f} µs" if call.took >= 0 else "?"
    return f"{head}{alg}{at}: {call.tensors}; {took}, {outcome}"


def _log(call: RecordedCall, outcome: str, epoch: int) -> None:
    if log.logger.isEnabledFor(logging.DEBUG):
        log.say(logging.DEBUG, "%s", _text(call, outcome, epoch), rank=call.rank)


def _log_algorithm(call: RecordedCall) -> None:
    try:
        algorithm = comm.algorithm_on(call.group, call.rank)  # a thread may be a rank of several clusters
    except AscendMoeError:  # closed meanwhile
        return
    op = "dispatch" if "dispatch" in call.op.removeprefix("npu_moe_distribute_") else "combine"
    if _algorithms.get((call.communicator, op)) == algorithm:
        return
    while len(_algorithms) >= 2 * _MOST_COMMUNICATORS:
        _algorithms.pop(next(iter(_algorithms)), None)
    _algorithms[call.communicator, op] = algorithm
    log.say(logging.INFO, "%s on group %s runs %s", op, call.group, algorithm, rank=call.rank)
    asked = calls.comm_algorithm(call.comm_alg)
    dispatched = _algorithms.get((call.communicator, "dispatch"))
    if asked != "window" and (op, algorithm, dispatched) == ("combine", "window", "direct"):
        text = "combine on group %s falls back to window, dispatch ran direct: %s is too small (see ascend-moe plan)"
        log.say(logging.WARNING, text, call.group, settings.HCCL_BUFFSIZE.name, rank=call.rank)


def _line(wall: float, text: str) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(wall))}.{wall % 1 * 1e6:06.0f} {text}"
