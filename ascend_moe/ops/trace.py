"""``ascend_moe.trace``: record a timeline of ops on the CPU twin, whose events are those of `ascendc_twin.timeline`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ascendc_twin.timeline import EVENT_BYTES, MEASURED, Event, Timeline, chrome, from_native

from .._text import write_whole
from ..errors import ArgumentError, AscendMoeError, LibraryError
from ..native import library

DEFAULT_EVENTS = 500_000  # an op of a rank has some thousands, of 64 bytes each


@dataclass
class Recording:
    """A recording, yielded by `trace`.

    Attributes:
        path: file to write at the end, or None. ``title``: title of charts.
        timeline: events of all ranks of this process, set when the last ``with`` block of the recording ends.
    """

    path: Path | None
    title: str
    timeline: Timeline = field(default_factory=lambda: Timeline(MEASURED))


_lock = threading.Lock()
_current: Recording | None = None
_users = 0


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str] | None = None, *, title: str = "", limit: int = DEFAULT_EVENTS
) -> Iterator[Recording]:
    """Record ops on the CPU: steps, waits for other ranks, SyncAll, copies of at least 4 KiB.

    Works in one process, in the rank threads of a ``LocalCluster`` (enter it around ``run``, or in every
    rank's function with the same arguments), and under torchrun, where every rank enters it: with the path
    trace.json rank 3 writes trace.rank3.json, and Perfetto opens several files. Ops on NPUs are not recorded.

    Args:
        path: file for Chrome trace JSON (open it at https://ui.perfetto.dev), or None.
        title: title of charts; default: the name of the program.
        limit: maximum number of events of this process; further ones are counted in ``Timeline.dropped``.

    Yields:
        A ``Recording``, whose ``timeline`` is set when the last ``with`` block of this recording ends.

    Raises:
        AscendMoeError: a recording to another path is active in this process, or the engine records no timeline.
        ArgumentError: the folder of ``path`` does not exist, or ``limit`` is below 1.
        OSError: a file cannot be written.
    """
    recording = _enter(Recording(_file(path), title or Path(sys.argv[0] or "python").name), limit)
    failed = True
    try:
        yield recording
        failed = False
    finally:
        if _leave(recording):
            _finish(recording, failed)


def _file(path: str | os.PathLike[str] | None) -> Path | None:
    """Return this process's file; with several processes each has its own."""
    if path is None:
        return None
    file = Path(path).absolute()
    if not file.parent.is_dir() or file.is_dir():
        raise ArgumentError(f"path={path} must be a file in a folder that exists", argument="path")
    rank = _rank()
    return file if rank is None else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def _rank() -> int | None:
    """Return the rank from torch.distributed if initialized, else from torchrun's variables, else None."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() if torch.distributed.get_world_size() > 1 else None
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdigit() and world.isdigit() and int(world) > 1 else None


def _enter(wanted: Recording, limit: int) -> Recording:
    global _current, _users
    if limit < 1:
        raise ArgumentError(f"limit={limit} must be at least 1", argument="limit")
    with _lock:
        if _current is None:
            code = library.lib().am_trace_start(limit)
            if code == 2:
                name = library.library_path().name
                raise AscendMoeError(f"the engine of {name} records no timeline: unset ASCEND_MOE_ENGINE")
            if code:
                raise AscendMoeError("another recorder uses the native library: end it, and use only ascend_moe.trace")
            _current = wanted
        elif _current.path != wanted.path:
            raise AscendMoeError(f"a trace to {_current.path or 'memory'} is going on in this process: end it first")
        _users += 1
        return _current


def _leave(recording: Recording) -> bool:
    """Read the events after the last user has exited; return whether that is so."""
    global _current, _users
    with _lock:
        _users -= 1
        if _users:
            return False
        _current = None
        library.lib().am_trace_stop()
        events, dropped = _read()
        recording.timeline = Timeline(MEASURED, events, recording.title, dropped=dropped)
        return True


def _read() -> tuple[list[Event], int]:
    """Return the events so far, and the number of dropped ones."""
    native, dropped = library.lib(), ctypes.c_uint64()
    if native.am_trace_event_bytes() != EVENT_BYTES:
        raise LibraryError(
            f"{library.library_path()} lays out timeline events differently: rebuild it with {library.build_command()}"
        )
    room = native.am_trace_events(None, 0, None)  # unfinished launches may still add some
    memory = (ctypes.c_char * (room * native.am_trace_event_bytes()))()
    native.am_trace_events(memory, room, ctypes.byref(dropped))
    return from_native(ctypes.addressof(memory), room), dropped.value


def _finish(recording: Recording, failed: bool) -> None:
    if not recording.timeline.events and not failed:
        warnings.warn("ascend_moe.trace: no op ran on the CPU meanwhile, the trace is empty", stacklevel=4)
    if recording.path is not None:
        # files of several ranks are opened together: times are on the clock of this machine
        zero = None if _rank() is None else 0.0
        write_whole(recording.path, chrome.text(recording.timeline, zero))
