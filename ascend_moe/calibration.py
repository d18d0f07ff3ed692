"""The timed engine against published times: what is fitted, how far off the rest is.

Published times are of CANN-style kernels, so they are compared with the model of such a kernel. Which points
may be fitted to and which are held out stands in ``data/published_times.json``, fixed before any fit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ArgumentError
from .plan import Request
from .soc_costs import cost_table, fitted_names, read_data
from .timed import Prediction, predict

CALIBRATION, HELD_OUT = "calibration", "held-out"
_ROUNDS, _STEP, _DIGITS = 6, 0.1, 3
_LEAST = 0.05  # a factor or a time that the fit may not go below, as a share of where it began


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
        return Request(
            ranks=self.ep,
            experts=self.experts,
            topk=self.topk,
            hidden=self.hidden,
            batch=self.bs,
            quant=True,  # of dispatch; combine's rows are bf16 either way
            soc=self.soc,
        )


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
    every = [Point(**one) for one in read_data("published_times.json")["points"]]
    return [point for point in every if not roles or point.role in roles]


def held_out_limit() -> float:
    """The largest error that a held-out point may have, relative."""
    return float(read_data("published_times.json")["held_out_limit"])


def compare(chosen: list[Point], costs: Mapping[str, float] | None = None) -> list[Compared]:
    """The model's time of each point, with these figures in place of the table's."""

    @functools.cache
    def run(request: Request) -> Prediction:
        return predict(request, algorithm="cann-style", costs=costs)

    found = []
    for point in chosen:
        prediction = run(point.request)
        us = prediction.dispatch_us if point.op == "dispatch" else prediction.combine_us
        found.append(Compared(point, us))
    return found


def calibrate(progress: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Fits the free parameters to the calibration points: least squares of relative errors, Gauss-Newton.

    The same table and kernels give the same values. They are rounded to three digits.

    Raises:
        ArgumentError: the table has more free parameters than half of the calibration points.
    """
    names, chosen = fitted_names(), points(CALIBRATION)
    if 2 * len(names) > len(chosen):
        text = f"{len(names)} fitted figures ({', '.join(names)}) for {len(chosen)} calibration points"
        raise ArgumentError(f"{text}: at most half as many are allowed", argument="soc_costs.json")
    table = cost_table(chosen[0].soc)
    start = {name: float(read_data("soc_costs.json")["fit_begins_at"][name]) for name in names}
    assert set(names) <= set(table)

    def errors(values: np.ndarray) -> np.ndarray:
        costs = {name: start[name] * float(value) for name, value in zip(names, values, strict=True)}
        found = np.array([one.error for one in compare(chosen, costs)])
        shown = " ".join(f"{name}={value:.4g}" for name, value in costs.items())
        progress(f"{shown}: " + " ".join(f"{100 * error:+.1f}%" for error in found))
        return found

    at, best = np.ones(len(names)), None
    for _ in range(_ROUNDS):
        here = errors(at)
        columns = []
        for i in range(len(names)):
            step = _STEP * at[i]
            columns.append((errors(at + step * np.eye(len(names))[i]) - here) / step)
        if best is None or float(here @ here) < best[0] - 1e-6:
            best = (float(here @ here), at)
        else:
            break
        at = np.maximum(at - np.linalg.lstsq(np.stack(columns, 1), here, rcond=None)[0], _LEAST)
    assert best is not None
    return {
        name: float(f"{start[name] * value:.{_DIGITS}g}") for name, value in zip(names, best[1], strict=True)
    }


def errors_of(compared: list[Compared]) -> float:
    """The largest error, without its sign."""
    return max((abs(one.error) for one in compared), default=0.0)


def write(fitted: Mapping[str, float], folder: Path) -> None:
    """Writes fitted values and the errors that they leave to the data files in ``folder``."""
    table = json.loads((folder / "soc_costs.json").read_text())
    for figures in table["series"].values():
        for name, value in fitted.items():
            figures[name]["value"] = value
    (folder / "soc_costs.json").write_text(json.dumps(table, indent=1) + "\n")
    compared = compare(points(CALIBRATION, HELD_OUT, "shown"), fitted)
    document = {
        "about": "Errors of the timed engine against published_times.json, written by `ascend-moe predict "
        "--calibrate --write`.",
        "fitted": dict(fitted),
        "errors": {one.point.id: round(one.error, 4) for one in compared},
    }
    (folder / "calibration.json").write_text(json.dumps(document, indent=1) + "\n")


@functools.cache
def known_errors() -> tuple[float, float]:
    """Largest errors as of the last calibration: on what was fitted, on what was held out."""
    errors: dict[str, float] = read_data("calibration.json")["errors"]
    roles = {point.id: point.role for point in points()}

    def largest(role: str) -> float:
        return max(abs(error) for name, error in errors.items() if roles[name] == role)

    return largest(CALIBRATION), largest(HELD_OUT)
