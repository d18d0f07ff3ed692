"""The sample kernels in kernels/, built once a session, and rows for those that exchange some."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import numpy as np
import pytest
from twin_oracle import compiler

import ascendc_twin

KERNELS = Path(__file__).resolve().parent / "kernels"
MODES = ["fast", "checked"]
modes = pytest.mark.parametrize("mode", MODES)
engines = pytest.mark.parametrize("mode", [*MODES, pytest.param("timed", marks=pytest.mark.nightly)])
HALF = "DTYPE_X=half"


@functools.cache
def kernels(name: str, *defines: str) -> ascendc_twin.Kernels:
    """kernels/`name`.cpp, opened; skips where there is no compiler."""
    compiler()
    return ascendc_twin.load(KERNELS / f"{name}.cpp", defines=defines)


def tiling(*numbers: int | float) -> bytes:
    """uint32 and float fields, packed."""
    return b"".join(struct.pack("<f" if isinstance(n, float) else "<I", n) for n in numbers)


class Swap:
    """An all-to-all: `y` of a rank becomes what the ranks' `x` hold for it."""

    def __init__(self, world: int, rows: int, width: int, dtype: type, seed: int = 0) -> None:
        x = np.random.default_rng(seed).integers(1, 255, (world, world, rows, width))
        self.x = x.astype(dtype)
        self.y = np.zeros_like(self.x)
        self.args = [[self.x[rank], self.y[rank]] for rank in range(world)]

    def check(self) -> None:
        assert np.array_equal(self.y, self.x.swapaxes(0, 1)), "rows are missing"

    def chunk_tilings(self, step: int = 1) -> list[bytes]:
        """Tiling of chunk_exchange for every rank."""
        world, _, rows, width = self.x.shape
        return [tiling(rank, world, rows, width // 480, step) for rank in range(world)]
