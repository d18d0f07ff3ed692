"""The timed engine against published times: how far off it is. What is fitted: tools/calibration_fit.py.

Published times are of CANN-style kernels, so they are compared with the model of such a kernel. Which points
may be fitted to and which are held out stands in ``data/published_times.json``, fixed before any fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..plan import Request
from ..plan.soc import read_data
from . import Prediction, predict

CALIBRATION, HELD_OUT = "calibration", "held-out"


@dataclass(frozen=True)
class Point:
    """A published time. ``role``: calibration, held-out, shown (error printed, not judged) or not used."""

    id: str
    op: str
    soc: str
    ep: int
    bs: int
    hidden: int
    topk: int
    experts: int
    quant: bool
    us: float
    source: str
    trust: str
    role: str
    why: str

    @property
    def request(self) -> Request:
        """The configuration that it was published for."""
        # ``quant`` is dispatch's alone: combine's rows are bf16 either way.
        return Request(self.ep, self.experts, self.topk, self.hidden, self.bs, quant=True, soc=self.soc)


@dataclass(frozen=True)
class Compared:
    """A published time beside the model's."""

    point: Point
    us: float

    @property
    def error(self) -> float:
        """Relative, positive where the model says more."""
        return self.us / self.point.us - 1


def points(*roles: str) -> list[Point]:
    """Published times of these roles, all of them without roles."""
    every = [Point(**point) for point in read_data("published_times.json")["points"]]
    return [point for point in every if not roles or point.role in roles]


def held_out_limit() -> float:
    """The largest error that a held-out point may have, relative."""
    return float(read_data("published_times.json")["held_out_limit"])


def compare(
    chosen: list[Point], costs: Mapping[str, float] | None = None, progress: Callable[[int], object] = lambda done: None
) -> list[Compared]:
    """The model's time of each point, with these figures in place of the table's; ``progress`` hears how many."""

    @functools.cache
    def run(request: Request) -> Prediction:
        return predict(request, algorithm="cann-style", costs=costs)

    found = []
    for point in chosen:
        prediction = run(point.request)
        us = prediction.dispatch_us if point.op == "dispatch" else prediction.combine_us
        found.append(Compared(point, us))
        progress(len(found))
    return found


def errors_of(compared: list[Compared]) -> float:
    """The largest error, without its sign."""
    return max((abs(comparison.error) for comparison in compared), default=0.0)


@functools.cache
def known_errors() -> tuple[float, float]:
    """Largest errors as of the last calibration: on what was fitted, on what was held out."""
    errors: dict[str, float] = read_data("calibration.json")["errors"]
    roles = {point.id: point.role for point in points()}

    def largest(role: str) -> float:
        return max(abs(error) for name, error in errors.items() if roles[name] == role)

    return largest(CALIBRATION), largest(HELD_OUT)
