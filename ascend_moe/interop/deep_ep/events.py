"""Events of a stream, as DeepEP hands them out. On the CPU a call has finished when it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_moe.errors import need


def npu_here() -> Any:
    """torch.npu, where there is one that works."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None


class EventHandle:
    """Stands for the work that the NPU's current stream has until now; without an NPU for none.

    Source: DeepEP ``EventHandle``.
    """

    def __init__(self) -> None:
        npu = npu_here()
        self._event = None if npu is None else npu.current_stream().record_event()

    def current_stream_wait(self) -> None:
        """The current stream goes on when that is done."""
        npu = npu_here()
        if npu is not None and self._event is not None:
            npu.current_stream().wait_event(self._event)


class EventOverlap:
    """An event to wait for, and what is to be done after that.

    Args:
        event: None: nothing to wait for.
        extra_tensors: kept alive as long as this object.

    Source: DeepEP ``EventOverlap``.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits; then the hook is called, once. release_handle: the event is dropped.

        Raises:
            ArgumentError: there is no event; the call had no async_finish, so there is nothing to wait for.
        """
        need(self.event is not None, "event", "is None: the call had no async_finish, its results can be used at once")
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Call this once after the next wait. Raises ArgumentError when a hook is waiting already."""
        need(self.hook_after_wait is None, "hook_after_wait", "is a second hook: one is waiting already")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """``with event(release_handle=True):`` drops the event behind the block."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits at the end of the block, where there is an event."""
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)


def begin(previous_event: EventOverlap | None) -> None:
    """Waits for a call's previous_event."""
    if previous_event is not None and previous_event.event is not None:
        previous_event.current_stream_wait()


def finished(async_finish: bool, *tensors: Any) -> EventOverlap:
    """The event of a call that has just been launched on the current stream."""
    return EventOverlap(EventHandle(), tensors) if async_finish else EventOverlap()


def nothing() -> None:
    """The hook of a call that has received already."""
