"""Ranks as threads of a C++ program, over the C ABI: for the sanitizers, without an interpreter.

`make asan` and `make tsan` build the program as they build the library; elsewhere it is an ordinary test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from twin_oracle import compiler

from ascend_moe.native import library as _lib

pytestmark = [pytest.mark.asan, pytest.mark.tsan]

HERE = Path(__file__).resolve().parent
INCLUDES = [HERE.parents[1] / name for name in ("op_kernel", "op_host", "csrc")]
SANITIZE = os.environ.get("ASCEND_MOE_SANITIZE", "")


@pytest.fixture(scope="module")
def rank_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, linked with the library under test."""
    program = tmp_path_factory.mktemp("rank_threads") / "rank_threads"
    library = _lib.library_path("fast")
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += [f"-I{path}" for path in INCLUDES] + [f"-fsanitize={SANITIZE}"] * bool(SANITIZE)
    source = HERE.parent / "kernels" / "native" / "rank_threads.cpp"
    files = [source, library, f"-Wl,-rpath,{library.parent}", "-o", program]
    command = [compiler(), *flags, *files]
    built = subprocess.run(command, capture_output=True, text=True, env=_plain())
    assert built.returncode == 0, built.stderr
    return program


def _plain() -> dict[str, str]:
    """This environment without the sanitizers' libraries, which only Python needs to be told of."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=280, env=_plain())


def test_ranks_that_run_free(rank_threads: Path) -> None:
    """Sequences across the wrap of the epoch, a rank that goes."""
    done = run(rank_threads, "ops", "40")
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert done.stdout == "rank_threads: 12 shapes, each 40 ops and a rank that goes: 0 wrong\n"


def test_that_wrong_rows_are_noticed(rank_threads: Path) -> None:
    done = run(rank_threads, "canary")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "combine's x of rank" in done.stderr and "Sanitizer" not in done.stderr
