"""Copies through UB that wait change nothing: random programs, byte by byte the same as when none waits.

The same programs, whatever vector instructions the loops are compiled for.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import native_library

pytestmark = pytest.mark.asan

STEPS = 400


def opened(isa: str, folder: Path) -> ctypes.CDLL:
    """The programs, loaded anew, so that they ask again which instructions to use."""
    copy = shutil.copy(native_library("forward_kernels", "fast", "-O2"), folder / f"forward-{isa}.so")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_MOE_ISA", isa)
        library = ctypes.CDLL(str(copy))
    library.run_program.restype = ctypes.c_char_p
    library.memory_bytes.restype = ctypes.c_uint64
    return library


def memory_after(library: ctypes.CDLL, seed: int, cores: int, forwards: bool) -> NDArray[np.uint8]:
    memory = np.zeros(library.memory_bytes(), np.uint8)
    said = library.run_program(seed, STEPS, cores, int(forwards), ctypes.c_void_p(memory.ctypes.data))
    assert said == b"", said.decode()
    return memory


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 150), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("cores", [1, 3, 8])
def test_waiting_copies_change_nothing(cores: int, seeds: range, tmp_path: Path) -> None:
    library = opened("widest", tmp_path)
    for seed in seeds:
        plain, waiting = (memory_after(library, seed, cores, forwards) for forwards in (False, True))
        assert np.array_equal(plain, waiting), f"seed {seed}: byte {np.flatnonzero(plain != waiting)[0]}"


def test_vector_width_changes_nothing(tmp_path: Path) -> None:
    baseline, *others = (opened(isa, tmp_path) for isa in ("baseline", "avx2", "widest"))
    for seed in range(1000, 1015):
        want = memory_after(baseline, seed, 2, False)
        for library in (baseline, *others):
            assert np.array_equal(memory_after(library, seed, 2, True), want), seed
