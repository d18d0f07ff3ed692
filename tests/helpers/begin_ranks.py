"""Has what rank processes do in the tests of begin_dispatch and begin_combine: functions that a test names."""

from __future__ import annotations

from typing import Any

import failure_cases as cases
import torch
import torch.distributed as dist

import ascend_moe
from ascend_moe.reference.cases import Case
from ascend_moe.validate import run as validate_run
from ascend_moe.validate.run import DevicePlace

BEGIN = {"dispatch": ascend_moe.begin_dispatch, "combine": ascend_moe.begin_combine}
_open: list[Any] = []  # of this process


def two_launches(op: str, place: DevicePlace, case: Case, arguments: dict[str, Any]) -> Any:
    """Stands for the call of ``validate_run``: the open call instead of the op's outputs."""
    return BEGIN[op](**arguments)


class TwoLaunches:
    """The ops of a case: ``dispatch`` and ``combine`` return open calls."""

    def __init__(self, place: DevicePlace, case: Case) -> None:
        self.place, self.case = place, case

    def dispatch(self, **changes: Any) -> Any:
        return validate_run.dispatch(self.place, self.case, call=two_launches, **changes)

    def combine(self, rows: torch.Tensor, sent: Any, **changes: Any) -> Any:
        return validate_run.combine(self.place, self.case, rows, sent, call=two_launches, **changes)


def round_trip() -> None:
    """The two ops themselves."""
    cases.run_round_trip(contract=2)


def begin(seed: int = 0) -> None:
    _open.append(TwoLaunches(cases.here(), cases.case_of(dist.get_world_size(), seed, 2)).dispatch())


def drop() -> None:
    _open.clear()


def finish(seed: int = 0) -> None:
    cases.check_dispatch(cases.here(), _open[-1].finish(), seed, 2)


def close() -> None:
    _open.clear()
    ascend_moe.close("0")
