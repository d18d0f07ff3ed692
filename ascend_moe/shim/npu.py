"""``torch.npu`` and ``torch_npu.npu`` of the shim.

All work on CPU tensors is finished when a call returns, so streams and events have an interface but never wait. Each
thread has a current device number, set by set_device.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

DEVICES = 16  # of one A3 server
_NAME = "CPU standing in for Ascend910_9391"
_SOC_VERSION = 250  # A3's first
_state = threading.local()
config = SimpleNamespace(allow_internal_format=False)


class Event:
    """An event that is complete as soon as it is recorded; records the time, whatever enable_timing is."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: no work is pending."""

    reset = wait

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event's last record to that of ``end_event``."""
        return (end_event._time - self._time) * 1000


ExternalEvent = Event


class Stream:
    """A stream whose work is finished immediately."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.npu_stream = torch.device("cpu"), priority, 0
        self._before: list[Stream] = []

    def wait_event(self, event: Event) -> None:
        """Do nothing: no work is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: no work is pending."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(self._before.pop())


_default_stream = Stream()


def default_stream(device: Any = None) -> Stream:
    return _default_stream


def current_stream(device: Any = None) -> Stream:
    chosen: Stream = getattr(_state, "stream", _default_stream)
    return chosen


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _state.stream = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make ``stream`` the current stream within a with block; None: change nothing."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def _index(device: Any) -> int:
    """Return the number of a device, 0 for None and for a device without a number."""
    if isinstance(device, str):
        number = device.partition(":")[2]
        return int(number) if number else 0
    number = getattr(device, "index", device)
    return 0 if number is None else int(number)


def set_device(device: Any) -> None:
    _state.device = _index(device)


def current_device() -> int:
    chosen: int = getattr(_state, "device", 0)
    return chosen


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Make ``device``, as 3 or "npu:3", the current device within a with block."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def device_count() -> int:
    return DEVICES


def is_available() -> bool:
    return True


is_initialized = is_bf16_supported = is_available


def is_current_stream_capturing() -> bool:
    return False


def init() -> None:
    """Do nothing: there is no device to initialize, and no cache."""


empty_cache = init


def synchronize(device: Any = None) -> None:
    """Do nothing: no work is pending, and there are no statistics."""


reset_peak_memory_stats = synchronize


def memory_allocated(device: Any = None) -> int:
    return 0


memory_reserved = max_memory_allocated = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes of this machine's memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def get_device_name(device: Any = None) -> str:
    return _NAME


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=_NAME, total_memory=mem_get_info()[1])


def get_soc_version() -> int:
    return _SOC_VERSION


def set_compile_mode(jit_compile: bool = False) -> None:
    """Do nothing: operators are not compiled."""


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def seed() -> None:
    torch.seed()


#: what this module defines, and config
_DEFINED = [name for name, value in vars().items() if getattr(value, "__module__", None) == __name__]
__all__ = sorted(["config", *(name for name in _DEFINED if not name.startswith("_"))])
