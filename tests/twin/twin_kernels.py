"""Sample kernels of tests/kernels, built once a process and kept in a cache of the session."""

from __future__ import annotations

import functools
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import compiler

from ascend_moe import twin
from ascend_moe.native import library

KERNELS = Path(__file__).resolve().parent / "kernels"
CHECKED = (library.native_source_root() / "twin" / "src" / "checked" / "world.cpp").is_file()
MODES = [
    "fast",
    pytest.param("checked", marks=pytest.mark.skipif(not CHECKED, reason="no checked engine")),
]


@functools.cache
def kernels(name: str, *defines: str) -> twin.Kernels:
    """tests/kernels/`name`.cpp, opened; skips where there is no compiler."""
    compiler()
    return twin.load(KERNELS / f"{name}.cpp", defines=defines)


def tiling(*numbers: int | float) -> bytes:
    """uint32 and float fields, packed."""
    return b"".join(
        struct.pack("<f", number) if isinstance(number, float) else struct.pack("<I", number)
        for number in numbers
    )


def tree_sum(values: NDArray[np.float32]) -> np.float32:
    """ReduceSum's order: a tree of neighbours in every 64, then one after another."""
    total: np.float32 | None = None
    for begin in range(0, len(values), 64):
        level = np.full(64, -0.0, np.float32)
        part = values[begin : begin + 64]
        level[: len(part)] = part
        while len(level) > 1:
            level = level[0::2] + level[1::2]
        total = level[0] if total is None else total + level[0]
    assert total is not None
    return total
