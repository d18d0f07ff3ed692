"""Events of a stream, as in DeepEP, and waiting times of a call for each rank.

On the CPU a call has finished when it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ascend_moe.comm.place import Place
from ascend_moe.errors import need, need_dtype, need_shape

P = ParamSpec("P")
R = TypeVar("R")


def npu_here() -> Any:
    """Return torch.npu if an NPU is available, else None."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None


class EventHandle:
    """Event of the NPU's current stream at construction; without an NPU it does nothing.

    Source: DeepEP ``EventHandle``.
    """

    def __init__(self) -> None:
        npu = npu_here()
        self._event = None if npu is None else npu.current_stream().record_event()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for that work."""
        npu = npu_here()
        if npu is not None and self._event is not None:
            npu.current_stream().wait_event(self._event)


class EventOverlap:
    """Event to wait for, and a hook that runs after the wait.

    Args:
        event: None: nothing to wait for.
        extra_tensors: referenced as long as this object.

    Source: DeepEP ``EventOverlap``.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait, then call the hook, once. release_handle: drop the event.

        Raises:
            ArgumentError: there is no event, because the call had no async_finish.
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
        """Call ``hook_after_wait`` once after the next wait. Raises ArgumentError if a hook is registered."""
        need(self.hook_after_wait is None, "hook_after_wait", "is a second hook: another is registered")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return itself: ``with event(release_handle=True):`` drops the event after the block."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait at the end of the block, if there is an event."""
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)


def begin(previous_event: EventOverlap | EventHandle | None) -> None:
    """Wait for a call's previous_event."""
    if previous_event is not None and getattr(previous_event, "event", previous_event) is not None:
        previous_event.current_stream_wait()


def finished(async_finish: bool, *tensors: Any) -> EventOverlap:
    """Return the event of a call that was just launched on the current stream."""
    return EventOverlap(EventHandle(), tensors) if async_finish else EventOverlap()


def nothing() -> None:
    """Do nothing: the hook of a call that has already received."""


class WaitStats:
    """Waiting statistics of a caller, or None, to which the ops' performance_info is added.

    Args:
        argument: its name in errors.
        stats: ``(W,)``: µs for each source rank are added; or ``(W, W)``: to this rank's row, so that the sum of the
            ranks' tensors contains all waits. int64 or int32. On the device of x.
        x: the rows of the call.
        place: this rank's place.

    Raises:
        ArgumentError: stats has another shape, dtype or device.
    """

    def __init__(self, argument: str, stats: Tensor | None, x: Tensor, place: Place) -> None:
        self._row, self._times, self._ranks = stats, Tensor(), list(range(place.world))
        if stats is None:
            return
        need_shape(argument, stats, (place.world,), (place.world, place.world))
        need_dtype(argument, stats, torch.int64, torch.int32)
        need(stats.device == x.device, argument, "is on {}, x on {}; move it there", stats.device, x.device)
        self._row = stats if stats.dim() == 1 else stats[place.rank]

    def given(self, ranks: list[int]) -> dict[str, Tensor]:
        """Return the op's keyword argument; ``ranks``: the op's ranks, by their numbers in the Buffer's group."""
        if self._row is None:
            return {}
        self._ranks = ranks
        self._times = torch.zeros(len(ranks), dtype=torch.int64, device=self._row.device)
        return {"performance_info": self._times}

    def after(self, call: Callable[P, R]) -> Callable[P, R]:
        """Return the call, after which the waits are added."""
        row = self._row
        if row is None:
            return call

        @functools.wraps(call)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            result = call(*args, **kwargs)
            row[self._ranks] += self._times.to(row.dtype)
            return result

        return timed
