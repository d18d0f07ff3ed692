"""Runs the kernels of the twin's tests/api_*.cpp: one API call each, bytes in, bytes out.

Engines: "audit", which finds instructions that touch other bytes than they declare; "checked", which finds
missing synchronisation; "fast". TWIN_CALLS_ENGINE chooses one for all tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from twin_oracle import FLAGS, INCLUDE, NATIVE, SCRATCH, TWIN, compiler, pointer, runtime_sources

Array = NDArray[np.generic]
BYTES = 8192
TYPES = {
    "f2": np.dtype(np.float16),
    "f4": np.dtype(np.float32),
    "i1": np.dtype(np.int8),
    "i2": np.dtype(np.int16),
    "i4": np.dtype(np.int32),
    "i8": np.dtype(np.int64),
    "u2": np.dtype(np.uint16),
    "u4": np.dtype(np.uint32),
}
AUDIT = NATIVE / "audit"


ENGINE = os.environ.get("TWIN_CALLS_ENGINE", "audit")


def _flags(engine: str) -> list[str]:
    before = {"audit": [f"-I{AUDIT}"], "checked": ["-DTWIN_CHECKED"], "fast": []}[engine]
    return [*FLAGS, *before, f"-I{INCLUDE}", "-O0", "-fPIC"]


@functools.cache
def _runtime(engine: str) -> Path:
    """The twin's runtime as an archive; compiled once a process."""
    directory = Path(SCRATCH.name) / f"runtime-{engine}"
    directory.mkdir()
    sources = [str(path) for path in runtime_sources(*(["checked"] if engine == "checked" else []))]
    command = [compiler(), *_flags(engine), f"-I{TWIN / 'src'}", "-c", *sources]
    result = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    assert result.returncode == 0, result.stderr
    archive = directory / "runtime.a"
    subprocess.run(["ar", "rcs", str(archive), *map(str, sorted(directory.glob("*.o")))], check=True)
    return archive


@functools.cache
def library(name: str, engine: str = ENGINE) -> ctypes.CDLL:
    """tests/api_`name`.cpp as a shared library."""
    built = Path(SCRATCH.name) / f"api-{name}-{engine}.so"
    sources = [NATIVE / f"api_{name}.cpp", *([AUDIT / "audit.cpp"] if engine == "audit" else [])]
    command = [compiler(), *_flags(engine), "-shared", *map(str, sources), str(_runtime(engine))]
    result = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    opened = ctypes.CDLL(str(built))
    opened.run_call.restype = ctypes.c_char_p
    if engine == "audit":
        opened.audit_report.restype = ctypes.c_char_p
        opened.audit_log.restype = ctypes.c_char_p
    return opened


@dataclass(frozen=True)
class Result:
    """What a kernel left: `out`, and the twin's finding or ''. `log`: declared accesses, audit only."""

    fault: str
    out: NDArray[np.uint8]
    log: list[str]

    def view(self, dtype: np.dtype) -> Array:
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
    engine: str = ENGINE,
) -> Result:
    """Runs a kernel; under audit also asserts that it declares exactly what it touches."""
    opened = library(family, engine)
    audit = engine == "audit"
    memory, sources = padded(out), (padded(a), padded(b))
    given = np.zeros(16, np.int64)
    given[: len(numbers)] = np.array(numbers, np.uint64).view(np.int64) if numbers else []
    if audit:
        opened.audit_clear()
    arguments = (pointer(sources[0]), pointer(sources[1]), pointer(memory), pointer(given))
    text = opened.run_call(name.encode(), *arguments).decode()
    log: list[str] = []
    if audit:
        found = opened.audit_report().decode()
        assert not found, f"{name}: {found}"
        log = opened.audit_log().decode().splitlines()
    return Result(text, memory, log)


def lanes_of(form: int, mask: int, width: int) -> list[int]:
    """The lanes that take part in every repeat."""
    if form == 1:
        return list(range(mask))
    return [lane for lane in range(width) if mask >> lane & 1]


def offsets(itemsize: int, where: list[tuple[int, int]], block: int, repeat: int) -> NDArray[np.int64]:
    """Element offsets of (repeat, lane) pairs; strides in blocks of 32 bytes."""
    per_block = 32 // itemsize
    at = [(r * repeat + lane // per_block * block) * per_block + lane % per_block for r, lane in where]
    return np.array(at, np.int64)
