"""Runs the kernels of native/api_*.cpp: one API call each, bytes in, bytes out."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import native_library, pointer

Array = NDArray[np.generic]
BYTES = 8192
TYPES = {kind: np.dtype(kind) for kind in ("f2", "f4", "i1", "i2", "i4", "i8", "u2", "u4")}
REAL = ["f2", "f4"]
FULL = 2**64 - 1
GAPS = 0x0F0F_3C3C_8001_FFFF  # a mask of uneven stretches
# "audit" finds instructions that touch other bytes than they declare; "fast" is what users run.
engines = pytest.mark.parametrize("engine", ["audit", pytest.param("fast", marks=pytest.mark.nightly)])


@functools.cache
def library(name: str, engine: str) -> ctypes.CDLL:
    """native/api_`name`.cpp as a shared library; "audit-all" has the mask forms of all element types."""
    flags = {"fast": ["-O1", "-Wno-error"], "audit-all": ["-O0", "-DALL_FORMS"]}.get(engine, ["-O0"])
    opened = ctypes.CDLL(str(native_library(f"api_{name}", engine.removesuffix("-all"), *flags)))
    opened.run_call.restype = ctypes.c_char_p
    if engine.startswith("audit"):
        opened.audit_report.restype = opened.audit_log.restype = ctypes.c_char_p
    return opened


@dataclass(frozen=True)
class Result:
    """Holds what a kernel left: `out`, and the twin's finding or ''. `log`: declared accesses, audit only."""

    fault: str
    out: NDArray[np.uint8]
    log: list[str]

    def view(self, dtype: np.dtype | type) -> Array:
        return self.out.view(dtype)


def padded(values: Array | None) -> NDArray[np.uint8]:
    """The array's bytes, with zeros up to the size of a tensor."""
    memory = np.zeros(BYTES, np.uint8)
    if values is not None:
        raw = np.ascontiguousarray(values).view(np.uint8).ravel()
        memory[: raw.size] = raw
    return memory


def run(
    family: str,
    name: str,
    numbers: list[int],
    a: Array | None = None,
    b: Array | None = None,
    out: Array | None = None,
    engine: str = "audit",
) -> Result:
    """Runs a kernel; under audit also asserts that it declares exactly what it touches."""
    opened = library(family, engine)
    memory, sources = padded(out), (padded(a), padded(b))
    given = np.zeros(16, np.int64)
    given[: len(numbers)] = np.array([n & FULL for n in numbers], np.uint64).view(np.int64)
    if engine.startswith("audit"):
        opened.audit_clear()
    arguments = (pointer(sources[0]), pointer(sources[1]), pointer(memory), pointer(given))
    text = opened.run_call(name.encode(), *arguments).decode()
    log: list[str] = []
    if engine.startswith("audit"):
        found = opened.audit_report().decode()
        assert not found, f"{name}: {found}"
        log = opened.audit_log().decode().splitlines()
    return Result(text, memory, log)


def clean(*arguments: object, **options: object) -> NDArray[np.uint8]:
    """`out` of a run in which the twin finds nothing."""
    result = run(*arguments, **options)  # type: ignore[arg-type]
    assert result.fault == "", (arguments[1:3], result.fault)
    return result.out


def lanes_of(form: int, mask: int, width: int) -> list[int]:
    """The lanes that take part in every repeat."""
    return list(range(mask)) if form == 1 else [lane for lane in range(width) if mask >> lane & 1]


def offsets(itemsize: int, where: list[tuple[int, int]], block: int, repeat: int) -> NDArray[np.int64]:
    """Element offsets of (repeat, lane) pairs; strides in blocks of 32 bytes."""
    per_block = 32 // itemsize
    at = [(r * repeat + lane // per_block * block) * per_block + lane % per_block for r, lane in where]
    return np.array(at, np.int64)


def tricky(dtype: np.dtype, seed: int, count: int) -> Array:
    """Few distinct values, so that ties, both zeros, infinities and NaN all decide somewhere."""
    rng = np.random.default_rng(seed)
    pool = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 6e-8, -6e-8, 65504.0, -65504.0]
    chosen = rng.choice(pool, rng.integers(1, 5), replace=False)
    return rng.choice(chosen, count).astype(dtype)
