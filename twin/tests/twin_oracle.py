"""Compiles the twin's arithmetic headers into small libraries, for the tests that compare them with numpy."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ascendc_twin.cache import digest_of, forget_old
from ascendc_twin.compiling import CACHE, runtime_objects

TWIN = Path(__file__).resolve().parents[1]
NATIVE = TWIN / "tests" / "native"
INCLUDE = TWIN / "include"
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
SANITIZE = os.environ.get("ASCEND_MOE_SANITIZE", "")  # as the library was built: `make asan`
SANITIZED = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"] if SANITIZE else []
COMMON = [*FLAGS, *SANITIZED, f"-I{INCLUDE}"]


def compiler() -> str:
    """The C++ compiler to use; skips the test where there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@functools.cache
def _folder() -> Path:
    """Where everything that is compiled from these sources lies: for all processes, and for later runs."""
    files = sorted(
        path for name in ("include", "src", "tests/native") for path in (TWIN / name).rglob("*") if path.is_file()
    )
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    machine = {line for line in lines if line.startswith(("flags", "Features"))}  # for -march=native
    texts = [path.read_text(errors="replace") for path in files]
    folder = CACHE.directory() / "tests" / digest_of(version, *COMMON, *sorted(machine), *map(str, files), *texts)
    folder.mkdir(parents=True, exist_ok=True)
    forget_old(folder.parent)
    os.utime(folder)
    return folder


AUDIT = NATIVE / "audit"
# The fast engine; the checked one; the fast one that finds instructions that touch other bytes than declared.
ENGINES = {"fast": [], "checked": ["-DTWIN_CHECKED"], "audit": [f"-I{AUDIT}"]}


def _compiled(name: str, *arguments: str, wait: bool = True) -> str:
    """The compiler's output of this name, made by one process; "" where another is at it and nobody waits."""
    made = _folder() / name
    with made.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return ""
        if not made.exists():
            part = made.with_suffix(".part")
            result = subprocess.run([compiler(), *arguments, "-o", str(part)], capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            part.rename(made)
    return str(made)


@functools.cache
def _runtime(engine: str) -> list[str]:
    """The twin's runtime for an engine; with sanitizers it is compiled here, and processes share it."""
    if not SANITIZE:
        return list(runtime_objects("checked" if engine == "checked" else "fast"))
    parts = ["core", "fast", "checked"] if engine == "checked" else ["core", "fast"]
    sources = [path for part in parts for path in sorted((TWIN / "src" / part).glob("*.[cS]*"))]
    flags = [*ENGINES[engine], *COMMON, f"-I{TWIN / 'src'}", "-O1", "-fPIC", "-c"]
    names = {path: f"{engine}-{path.parent.name}-{path.stem}.o" for path in sources}
    for path, name in names.items():
        _compiled(name, *flags, str(path), wait=False)
    return [_compiled(name, *flags, str(path)) for path, name in names.items()]


@functools.cache
def native_library(name: str, engine: str, *flags: str) -> Path:
    """native/`name`.cpp with the twin's runtime."""
    options = [*ENGINES[engine], *COMMON, *(flags or ["-O1"]), "-fPIC", "-c"]
    stem, runtime = "-".join((name, engine, *flags)), _runtime(engine)
    own = [_compiled(f"{stem}.o", *options, str(NATIVE / f"{name}.cpp"))]
    own += [_compiled("audit.o", *options, str(AUDIT / "audit.cpp"))] if engine == "audit" else []
    return Path(_compiled(f"{stem}.so", *SANITIZED, "-shared", *own, *runtime))


def syntax_errors(code: str, directory: Path, *flags: str) -> str:
    """Returns what the compiler says about `code`; empty when it compiles."""
    source = directory / "snippet.cpp"
    source.write_text(code)
    command = [compiler(), *COMMON, *flags, "-fsyntax-only", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode == 0) == (result.stderr == ""), result.stderr
    return result.stderr


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """The array's address, for a C function. The array must be contiguous and outlive the call."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def bits(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """The array's bytes as unsigned integers of its own width."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind not in "iub"  # ml_dtypes' bfloat16 is of kind 'V'


def assert_same(got: NDArray[np.generic], want: NDArray[np.generic], *inputs: NDArray[np.generic]) -> None:
    """Equal bits; a NaN equals any NaN. Names the first difference and the inputs there."""
    assert got.dtype == want.dtype and got.shape == want.shape
    same = bits(got) == bits(want)
    if is_float(got.dtype):
        with np.errstate(invalid="ignore"):
            same |= (got != got) & (want != want)
    if same.all():
        return
    at = int(np.argmin(same))
    shown = ", ".join(f"{a[at]!r} (0x{int(bits(a)[at]):x})" for a in inputs if a.shape == got.shape)
    pytest.fail(
        f"{int((~same).sum())} of {same.size} differ, first at {at}: "
        f"got {got[at]!r} (0x{int(bits(got)[at]):x}), want {want[at]!r} (0x{int(bits(want)[at]):x}), "
        f"input {shown}"
    )


def vector_samples(dtype: np.dtype, seed: int, count: int = 20_000) -> NDArray[np.generic]:
    """Special values and their combinations, ordinary numbers, and random bits. Same length for one dtype."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if not is_float(dtype):
        info = np.iinfo(dtype)
        special = np.array([0, 1, info.min, info.max, info.min + 1, info.max - 1, 3, info.max // 2], dtype)
        small = rng.integers(max(info.min, -200), min(info.max, 200), count, dtype)
        return np.concatenate([rng.permutation(np.repeat(special, 40)), raw, small])
    values = np.array([0, 1, 2, 1.5, 0.1, 3, np.inf, np.nan, 65504, 65519, 1e-7, 6e-8, 6.1e-5, 1e30, 3e38, 1e-40])
    with np.errstate(over="ignore"):
        special = np.concatenate([values, -values]).astype(dtype)
    normal = (rng.standard_normal(count) * np.exp2(rng.integers(-12, 12, count))).astype(dtype)
    return np.concatenate([rng.permutation(np.repeat(special, 40)), raw, normal])
