"""How long a call waited for each rank, added up where the caller wants it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ascend_moe.comm.place import Place
from ascend_moe.errors import need, need_dtype, need_shape
from ascend_moe.timeline.record import events_of
from ascend_moe.timeline.stats import waited_for

P = ParamSpec("P")
R = TypeVar("R")


class Costs:
    """The cost statistics that a caller gives, or none.

    Args:
        argument: its name in errors.
        stats: ``(W,)``: µs for each source rank are added; or ``(W, W)``, of which only this rank's row is, so that the
            sum over the ranks' tensors is who waited for whom. int64, or int32. On the CPU.

    Raises:
        ArgumentError: it has another shape or dtype, or is on an NPU: kernels do not time their waits there.
    """

    def __init__(self, argument: str, stats: Tensor | None, place: Place) -> None:
        self._row, self._place = stats, place
        if stats is None:
            return
        need_shape(argument, stats, (place.world,), (place.world, place.world))
        need_dtype(argument, stats, torch.int64, torch.int32)
        rule = "is on {}, where the kernels do not time their waits; pass None"
        need(stats.device.type == "cpu", argument, rule, stats.device)
        self._row = stats if stats.dim() == 1 else stats[place.rank]

    def of(self, call: Callable[P, R]) -> Callable[P, R]:
        """The same call, whose waits are added. A recording of `ascend_moe.trace` may be going on."""
        row = self._row
        if row is None:
            return call

        @functools.wraps(call)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with events_of(self._place.rank) as events:
                result = call(*args, **kwargs)
            waited = waited_for(events, self._place.world)
            row.add_(torch.tensor([round(micros) for micros in waited], dtype=row.dtype))
            return result

        return timed
