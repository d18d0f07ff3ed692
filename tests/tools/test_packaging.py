"""The installed package: the library it finds, that library's sources, what is shipped and exported."""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ascend_moe
from ascend_moe.errors import LibraryError
from ascend_moe.native import binding
from ascend_moe.native import library as _lib

TREE = Path(__file__).resolve().parents[2]
INSTALLED = os.environ.get("ASCEND_MOE_TEST_INSTALLED") == "1"
only_installed = pytest.mark.skipif(not INSTALLED, reason="make test sets ASCEND_MOE_TEST_INSTALLED")


@pytest.fixture(scope="module")
def source_hash() -> Any:
    """tools/source_hash.py, of the tree or as shipped."""
    return SimpleNamespace(**runpy.run_path(str(_lib.native_source_root() / "tools" / "source_hash.py")))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """lib() forgets what it opened, before and after."""
    _lib.lib.cache_clear()
    yield monkeypatch
    _lib.lib.cache_clear()


# ---- which sources ----


@pytest.mark.asan
def test_the_library_is_of_these_sources(source_hash: Any) -> None:
    """Of those that were shipped with it, and of the tree's where the tests lie in one."""
    for root in {_lib.native_source_root(), TREE}:
        if (root / "CMakeLists.txt").exists():
            assert _lib.lib().am_source_hash().decode() == source_hash.source_hash(root)


def test_hash_sees_contents_names_and_nothing_else(source_hash: Any, tmp_path: Path) -> None:
    for name in ("op_kernel/a.h", "op_host/b.h", "csrc/c.S", "twin/d.h", "vnpu/e.cpp", "CMakeLists.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    first = source_hash.source_hash(tmp_path)
    (tmp_path / "op_kernel" / "notes.md").write_text("x")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "probe.cpp").write_text("x")
    assert source_hash.source_hash(tmp_path) == first
    (tmp_path / "op_kernel" / "a.h").write_text("y")
    changed = source_hash.source_hash(tmp_path)
    assert changed != first
    (tmp_path / "op_kernel" / "a.h").rename(tmp_path / "op_kernel" / "b.h")
    assert source_hash.source_hash(tmp_path) not in (first, changed)


# ---- the installed package ----


@only_installed
def test_tests_run_against_the_installed_package() -> None:
    assert ascend_moe.__file__ is not None
    assert "site-packages" in Path(ascend_moe.__file__).parts
    assert Path(ascend_moe.__file__).parent != TREE / "ascend_moe"
    scripts = importlib.metadata.entry_points(group="console_scripts", name="ascend-moe")
    assert [script.value for script in scripts] == ["ascend_moe.cli:main"]
    assert (Path(sys.executable).parent / "ascend-moe").is_file()


@only_installed
def test_wheel_is_for_any_python_and_holds_what_it_should() -> None:
    distribution = importlib.metadata.distribution("ascend_moe")
    wheel = distribution.read_text("WHEEL") or ""
    tags = [line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: ")]
    assert tags and all(tag.startswith("py3-none-linux_") for tag in tags)
    names = {str(name) for name in distribution.files or []}
    for name in ("py.typed", "lib/libascend_moe.so", "_src/CMakeLists.txt", "_src/tools/source_hash.py"):
        assert f"ascend_moe/{name}" in names
    assert any(name.startswith("ascend_moe/_src/twin/") for name in names)
    # make installs outside pip's build isolation, where torch is.
    assert f"ascend_moe/lib/{binding.LIBRARY_NAME}" in names
    unwanted = [name for name in names if name.startswith(("csrc", "twin", "vnpu", "tests", "tools", "op_"))]
    assert unwanted == []
    requires = [name for name in distribution.requires or [] if "extra ==" not in name]
    assert sorted(name.split(">")[0] for name in requires) == ["numpy", "torch"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_only_the_c_abi_is_exported() -> None:
    command = ["nm", "-D", "--defined-only", str(_lib.library_path())]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    assert set(_lib.SIGNATURES) <= exported
    assert [name for name in exported if not name.startswith("am_")] == []


# ---- what is said when it cannot be opened ----


def test_missing_library_names_places_and_the_command(no_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "ascend_moe"
    no_library.delenv("ASCEND_MOE_LIBRARY", raising=False)
    no_library.setitem(_lib.LIBRARY_FILES, "fast", "libabsent.so")
    no_library.setattr(_lib, "_package_paths", lambda: [package, *map(Path, ascend_moe.__path__)])
    with pytest.raises(LibraryError) as caught:
        _lib.lib()
    message = str(caught.value)
    assert str(package / "lib" / "libabsent.so") in message
    assert f"cmake -S {_lib.native_source_root()} -B " in message and "--component lib" in message
    assert isinstance(caught.value, ImportError)


def test_library_is_found_under_every_package_path(no_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As in an editable install: Python files here, the library there.
    there = tmp_path / "site-packages" / "ascend_moe"
    (there / "lib").mkdir(parents=True)
    (there / "lib" / _lib.LIBRARY_NAME).touch()
    no_library.delenv("ASCEND_MOE_LIBRARY", raising=False)
    no_library.setattr(_lib, "_package_paths", lambda: [tmp_path / "tree" / "ascend_moe", there])
    assert _lib.library_path() == there / "lib" / _lib.LIBRARY_NAME


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda m, path: m.setenv("ASCEND_MOE_LIBRARY", f"{path}.absent"),
            r"ASCEND_MOE_LIBRARY=.*is not a file",
        ),
        (
            lambda m, path: m.setenv("ASCEND_MOE_LIBRARY", str(path)),
            r"text\.so cannot be loaded .*\n  cmake -S ",
        ),
        # A library of other sources.
        (
            lambda m, path: m.setitem(_lib.SIGNATURES, "am_not_there", (None, ())),
            r"has no function am_not_there.*\n  cmake -S ",
        ),
    ],
)
def test_library_that_cannot_be_used(
    change: Any, text: str, no_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.so").write_text("not a library")
    change(no_library, tmp_path / "text.so")
    with pytest.raises(LibraryError, match=text):
        _lib.lib()
