"""Parts that an installation left out: built once, by one process, with errors that help.

A stand-in for cmake writes the files, so that no compiler runs."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascend_moe.errors import LibraryError
from ascend_moe.native import build, library

SOURCES = library.native_source_root()
CMAKE = """#!{python}
import os, pathlib, sys, time
folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if "--build" in sys.argv:
    {during}
    scratch = pathlib.Path(sys.argv[sys.argv.index("--build") + 1])
    (scratch / "vnpu").mkdir()
    for engine in ("checked", "timed"):
        (scratch / f"libtwin_{{engine}}.a").touch()
        (scratch / f"libascend_moe_{{engine}}.so").touch()
"""
CHILD = """
import pathlib, sys
from ascend_moe.native import build
print(build.built_part("checked", pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
"""


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fast engine's library of an installation without the rest; its cache, and the stand-in on PATH."""
    monkeypatch.setenv("ASCEND_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    tools(tmp_path, monkeypatch, "time.sleep(0.2)")
    path = tmp_path / "lib" / library.LIBRARY_NAME
    path.parent.mkdir()
    path.touch()
    return path


def tools(root: Path, monkeypatch: pytest.MonkeyPatch, during: str) -> None:
    folder = root / "tools"
    folder.mkdir(exist_ok=True)
    for name, text in (("cmake", CMAKE.format(python=sys.executable, during=during)), ("g++", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def calls(fast: Path) -> list[str]:
    return (fast.parents[1] / "tools" / "calls").read_text().splitlines()


@pytest.mark.parametrize("name", build.PARTS)
def test_a_part_is_built_once_and_told(name: str, fast: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = build.built_part(name, SOURCES, fast)
    assert made.name == build.PARTS[name].outputs[-1] and made.exists()
    assert (made.parent / fast.name).resolve() == fast
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"ascend_moe: builds {build.PARTS[name].title} into ") and "about" in lines[0]
    assert build.built_part(name, SOURCES, fast) == made
    assert build.build_folder(SOURCES, fast.with_name("other.so")) != made.parent
    configure, compiling = calls(fast)
    assert f"-D{build.PARTS[name].option}=ON" in configure and "-DASCEND_MOE_TORCH=OFF" in configure
    assert f"--target {build.PARTS[name].target}" in compiling
    assert capsys.readouterr().err == ""


def test_two_processes_build_once(fast: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(SOURCES), str(fast)]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stdout == runs[1].stdout and len(calls(fast)) == 2
    assert sum("builds" in run.stderr and "waits" not in run.stderr for run in runs) == 1


def test_a_failing_build_names_the_error(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(fast.parents[1], monkeypatch, 'print("a.cpp:1: error: no"); sys.exit(2)')
    with pytest.raises(LibraryError, match=r"checked engine does not build: a\.cpp:1: error: no"):
        build.built_part("checked", SOURCES, fast)
    folder = build.build_folder(SOURCES, fast)
    assert [path.name for path in folder.iterdir()] == ["checked.lock"], "nothing half-built stays"


def test_a_build_that_hangs_is_ended(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(fast.parents[1], monkeypatch, "time.sleep(100)")
    monkeypatch.setattr(build, "BUILD_SECONDS", 2.0)
    started = time.monotonic()
    with pytest.raises(LibraryError, match="not built within 2 s: build everything with `make all`"):
        build.built_part("timed", SOURCES, fast)
    assert time.monotonic() - started < 50


def test_a_lock_that_is_never_let_go_ends_the_wait(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.build_folder(SOURCES, fast)
    folder.mkdir(parents=True)
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); time.sleep(100)"
    command = [sys.executable, "-u", "-c", hold, str(folder / "checked.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        monkeypatch.setattr(build, "BUILD_SECONDS", 0.5)
        try:
            with pytest.raises(LibraryError, match=r"another process has been building the checked engine"):
                build.built_part("checked", SOURCES, fast)
        finally:
            holder.kill()


@pytest.mark.parametrize("missing", ["cmake", "g++"])
def test_without_a_tool_the_fix_is_named(missing: str, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build._tool
    absent = {"cmake": ("cmake",), "g++": ("g++", "c++", "clang++")}[missing]
    monkeypatch.setattr(build, "_tool", lambda name: None if name in absent else real(name))
    with pytest.raises(LibraryError, match=rf"there is no {missing.replace('+', '[+]')}.*make wheel"):
        build.built_part("checked", SOURCES, fast)


def test_an_engine_left_out_is_taken_from_the_cache(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fast.parents[1]
    monkeypatch.delenv("ASCEND_MOE_LIBRARY", raising=False)
    monkeypatch.setattr(library, "_package_paths", lambda: [package])
    monkeypatch.setattr(library, "native_source_root", lambda: SOURCES)
    folder = build.build_folder(SOURCES, fast)
    assert library.library_path("checked") == folder / "libascend_moe_checked.so"
    assert library.library_path("timed") == folder / "libascend_moe_timed.so"
    assert library.vnpu_folder() == folder / "vnpu"
    assert library.library_path("fast") == fast
