"""Fitting the timed engine to published times: least squares of relative errors, and which figures to fit.

Nothing public says which of the model's unknown figures the published times hang on, so every sensible pair
is fitted. ``data/soc_costs.json`` says under ``unknown`` what each is taken to be where it is not fitted and
within which bounds it is plausible, under ``pairs`` what was tried. Of the pairs whose fitted values are
plausible the one that leaves the least error on the calibration points is taken; held-out points have no part
in that.

    PYTHONPATH=. python tools/calibration_fit.py [FOLDER]     fits; writes soc_costs.json, calibration.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ascend_moe.errors import ArgumentError
from ascend_moe.plan.soc import cost_table, fitted_names, read_data
from ascend_moe.predict import calibration
from ascend_moe.predict.calibration import CALIBRATION, HELD_OUT

_ROUNDS, _STEP, _DIGITS = 6, 0.1, 3
_LEAST = 0.05  # a figure that the fit may not go below, as a share of where it began
_GAIN = 1e-5  # of the sum of squares: a round that gains less is the last
_HALVINGS = 3


@dataclass(frozen=True)
class Fit:
    """Fitted values, and the relative errors that they leave by point."""

    values: dict[str, float]
    errors: dict[str, float]

    @property
    def plausible(self) -> bool:
        """Whether all values are within the bounds that were set for them."""
        bounds = read_data("soc_costs.json")["unknown"]
        return all(bounds[name]["least"] <= value <= bounds[name]["most"] for name, value in self.values.items())

    def spread(self, role: str) -> float:
        """Root of the mean square error over points of a role."""
        of_role = np.array([self.errors[point.id] for point in calibration.points(role)])
        return float(np.sqrt((of_role**2).mean()))

    def largest(self, role: str) -> float:
        """Largest error over points of a role, without its sign."""
        return max(abs(self.errors[point.id]) for point in calibration.points(role))


def priors() -> dict[str, float]:
    """Returns what the unknown figures are taken to be where they are not fitted; where a fit begins."""
    return {name: float(one["prior"]) for name, one in read_data("soc_costs.json")["unknown"].items()}


def calibrate(names: Sequence[str] | None = None, progress: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Fits figures to the calibration points, by Gauss-Newton steps that are halved until they gain.

    The same table and kernels give the same values. They are rounded to three digits.

    Args:
        names: what to fit; None: the table's figures of kind "fitted".
        progress: is told every try.

    Raises:
        ArgumentError: more free parameters than half of the calibration points.
    """
    names, chosen = list(fitted_names() if names is None else names), calibration.points(CALIBRATION)
    if 2 * len(names) > len(chosen):
        text = f"{len(names)} fitted figures ({', '.join(names)}) for {len(chosen)} calibration points"
        raise ArgumentError(f"{text}: at most half as many are allowed", argument="soc_costs.json")
    assert set(names) <= set(cost_table(chosen[0].soc))
    begin = priors()

    def errors(values: np.ndarray) -> np.ndarray:
        fitted = {name: begin[name] * float(value) for name, value in zip(names, values, strict=True)}
        found = np.array([comparison.error for comparison in calibration.compare(chosen, begin | fitted)])
        shown = " ".join(f"{name}={value:.4g}" for name, value in fitted.items())
        progress(f"{shown}: " + " ".join(f"{100 * error:+.1f}%" for error in found))
        return found

    at = np.ones(len(names))
    here = errors(at)
    for _ in range(_ROUNDS):
        columns = []
        for i in range(len(names)):
            step = _STEP * at[i]
            columns.append((errors(at + step * np.eye(len(names))[i]) - here) / step)
        stride = -np.linalg.lstsq(np.stack(columns, 1), here, rcond=None)[0]
        for halving in range(_HALVINGS + 1):
            there = np.maximum(at + stride / 2**halving, _LEAST)
            left = errors(there)
            gain = float(here @ here) - float(left @ left)
            if gain > _GAIN:
                break
        if gain > 0:
            at, here = there, left
        if gain <= _GAIN:
            break
    return {name: float(f"{begin[name] * value:.{_DIGITS}g}") for name, value in zip(names, at, strict=True)}


def fit(names: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> Fit:
    """One pair of figures fitted, and its errors on all points that are shown."""
    values = calibrate(names, progress)
    compared = calibration.compare(calibration.points(CALIBRATION, HELD_OUT, "shown"), priors() | values)
    return Fit(values, {comparison.point.id: round(comparison.error, 4) for comparison in compared})


def choose(tried: Sequence[Fit]) -> Fit:
    """The plausible one that leaves the least error on the calibration points."""
    return min((fit for fit in tried if fit.plausible), key=lambda one: one.spread(CALIBRATION))


def tried() -> list[Fit]:
    """The fits of all pairs, as of the last calibration."""
    return [Fit(**fit) for fit in read_data("calibration.json")["tried"]]


def write(fitted: Mapping[str, float], folder: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Writes fitted values, their errors and the fits of all pairs to the data files in ``folder``."""
    table = json.loads((folder / "soc_costs.json").read_text())
    for figures in table["series"].values():
        for name, value in fitted.items():
            figures[name]["value"] = value
    (folder / "soc_costs.json").write_text(json.dumps(table, indent=1) + "\n")
    compared = calibration.compare(calibration.points(CALIBRATION, HELD_OUT, "shown"), fitted)
    document = {
        "about": "Errors of the timed engine against published_times.json, and the fits of all pairs of "
        "unknown figures, written by tools/calibration_fit.py.",
        "fitted": dict(fitted),
        "errors": {comparison.point.id: round(comparison.error, 4) for comparison in compared},
        "tried": [asdict(fit(names, progress)) for names in table["pairs"]],
    }
    (folder / "calibration.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    fitted = calibrate(progress=tell)
    for figure, value in fitted.items():
        print(f"{figure} = {value:g}")
    if len(sys.argv) > 1:
        write(fitted, Path(sys.argv[1]), tell)
