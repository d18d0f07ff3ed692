"""Copies through UB that wait change nothing: random programs, byte by byte the same as when none waits.

The same programs, whatever vector instructions the loops are compiled for.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import COMMON, NATIVE, compiler, runtime_sources

pytestmark = pytest.mark.asan

STEPS = 400
ISAS = ("baseline", "avx2", "widest")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("forward") / "forward.so"
    runtime = runtime_sources()
    sources = [NATIVE / "forward_kernels.cpp", *runtime]
    command = [compiler(), *COMMON, "-O2", "-shared", "-fPIC", *map(str, sources), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return library


@pytest.fixture
def opened(built: Path, tmp_path: Path, request: pytest.FixtureRequest) -> ctypes.CDLL:
    isa = getattr(request, "param", ISAS[-1])
    copy = shutil.copy(built, tmp_path / f"forward-{isa}.so")  # loaded anew, so that it asks again
    os.environ["ASCEND_MOE_ISA"] = isa
    try:
        library = ctypes.CDLL(str(copy))
    finally:
        del os.environ["ASCEND_MOE_ISA"]
    library.run_program.restype = ctypes.c_char_p
    library.memory_bytes.restype = ctypes.c_uint64
    return library


def memory_after(library: ctypes.CDLL, seed: int, cores: int, forwards: bool) -> NDArray[np.uint8]:
    memory = np.zeros(library.memory_bytes(), np.uint8)
    said = library.run_program(seed, STEPS, cores, int(forwards), ctypes.c_void_p(memory.ctypes.data))
    assert said == b"", said.decode()
    return memory


@pytest.mark.parametrize("cores", [1, 3, 8])
def test_waiting_copies_change_nothing(opened: ctypes.CDLL, cores: int) -> None:
    for seed in range(150):
        plain, waiting = (memory_after(opened, seed, cores, forwards) for forwards in (False, True))
        assert np.array_equal(plain, waiting), f"seed {seed}: byte {np.flatnonzero(plain != waiting)[0]}"


@pytest.mark.parametrize("opened", ISAS, indirect=True)
def test_vector_width_changes_nothing(opened: ctypes.CDLL, built: Path, tmp_path: Path) -> None:
    widest = ctypes.CDLL(str(shutil.copy(built, tmp_path / "forward-again.so")))
    widest.run_program.restype = ctypes.c_char_p
    widest.memory_bytes.restype = ctypes.c_uint64
    for seed in range(1000, 1030):
        assert np.array_equal(memory_after(opened, seed, 2, True), memory_after(widest, seed, 2, False)), seed
