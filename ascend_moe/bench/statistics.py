"""Numbers from marks: spans over all ranks, percentiles, ratios iteration by iteration, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NOISY = 1.5  # p50 / p10

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """p10, p50 and p90 of n samples; NaN of none."""

    p10: float
    p50: float
    p90: float
    n: int

    @property
    def noisy(self) -> bool:
        return self.p50 > NOISY * self.p10

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "noisy": self.noisy}


def spread(samples: Sequence[float] | Floats) -> Spread:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        return Spread(float("nan"), float("nan"), float("nan"), 0)
    low, middle, high = np.percentile(values, [10, 50, 90])
    return Spread(float(low), float(middle), float(high), int(values.size))


def spans_us(begins: npt.ArrayLike, ends: npt.ArrayLike) -> Floats:
    """(n,) µs from (ranks, n) ns of one clock: last end minus first begin of each iteration.

    A rank's own duration would be too short where ranks share a core: its clock only starts once it runs.
    """
    first = np.asarray(begins, dtype=np.int64).min(axis=0)
    last = np.asarray(ends, dtype=np.int64).max(axis=0)
    found: Floats = (last - first) / 1e3
    return found


@dataclass(frozen=True)
class Times:
    """(n,) µs an iteration; a round trip is dispatch + combine, the experts between them left out."""

    dispatch: Floats
    combine: Floats

    @property
    def round_trip(self) -> Floats:
        return self.dispatch + self.combine


def times(marks_of_ranks: Sequence[Sequence[Sequence[int]]]) -> Times:
    """From ``marks_of_ranks[rank][iteration]`` = (dispatch begins, ends, combine begins, ends)."""
    marks = np.asarray(marks_of_ranks, dtype=np.int64).reshape(len(marks_of_ranks), -1, 4)
    return Times(spans_us(marks[:, :, 0], marks[:, :, 1]), spans_us(marks[:, :, 2], marks[:, :, 3]))


def ratio(of: Floats, to: Floats) -> Spread:
    """Iteration by iteration, then the spread of the ratios: load that hits both cancels out."""
    return spread(of / to)


def too_noisy(rows: Sequence[Spread]) -> bool:
    """More than half of the rows are noisy: their ratios are no claim."""
    return 2 * sum(row.noisy for row in rows) > len(rows)
