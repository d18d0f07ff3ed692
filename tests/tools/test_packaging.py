"""The installed package: the library it finds, that library's sources, what is shipped and exported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ascend_moe
from ascend_moe.errors import LibraryError
from ascend_moe.native import binding
from ascend_moe.native import library as _lib

TREE = Path(__file__).resolve().parents[2]
INSTALLED = os.environ.get("ASCEND_MOE_TEST_INSTALLED") == "1"
only_installed = pytest.mark.skipif(not INSTALLED, reason="make test sets ASCEND_MOE_TEST_INSTALLED")
only_tree = pytest.mark.skipif(not (TREE / "CMakeLists.txt").exists(), reason="not in a source tree")


@pytest.fixture(scope="module")
def source_hash() -> ModuleType:
    """tools/source_hash.py as a module, of the tree or as shipped."""
    path = _lib.native_source_root() / "tools" / "source_hash.py"
    spec = importlib.util.spec_from_file_location("source_hash", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """lib() forgets what it opened, before and after."""
    _lib.lib.cache_clear()
    yield monkeypatch
    _lib.lib.cache_clear()


# ---- which sources ----


@only_tree
@pytest.mark.asan
def test_library_was_built_from_this_tree(source_hash: ModuleType) -> None:
    assert _lib.lib().am_source_hash().decode() == source_hash.source_hash(TREE)


def test_shipped_sources_are_the_librarys(source_hash: ModuleType) -> None:
    assert _lib.lib().am_source_hash().decode() == source_hash.source_hash(_lib.native_source_root())


def test_hash_sees_contents_names_and_nothing_else(source_hash: ModuleType, tmp_path: Path) -> None:
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


def test_generated_file_is_rewritten_only_when_the_hash_changes(tmp_path: Path) -> None:
    root, out = _lib.native_source_root(), tmp_path / "hash.cpp"
    command = [sys.executable, str(root / "tools" / "source_hash.py"), str(root), "--cpp", str(out)]
    subprocess.run(command, check=True)
    os.utime(out, ns=(1, 1))
    subprocess.run(command, check=True)
    assert out.stat().st_mtime_ns == 1
    out.write_text("stale")
    subprocess.run(command, check=True)
    assert "am_source_hash" in out.read_text()


# ---- the installed package ----


@only_installed
def test_tests_run_against_the_installed_package() -> None:
    assert ascend_moe.__file__ is not None
    assert "site-packages" in Path(ascend_moe.__file__).parts
    assert Path(ascend_moe.__file__).parent != TREE / "ascend_moe"


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


@only_installed
def test_command_line_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="ascend-moe")
    assert [script.value for script in scripts] == ["ascend_moe.cli:main"]
    assert (Path(sys.executable).parent / "ascend-moe").is_file()


def test_works_from_another_directory(tmp_path: Path) -> None:
    code = (
        "from ascend_moe.native import library\n"
        "print(library.library_path()); print(library.lib().am_source_hash().decode())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(_lib.library_path()), _lib.lib().am_source_hash().decode()]


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


def test_override_must_be_a_file(no_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_library.setenv("ASCEND_MOE_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(LibraryError, match=r"ASCEND_MOE_LIBRARY=.*absent\.so is not a file"):
        _lib.lib()


def test_a_file_that_is_no_library(no_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    no_library.setenv("ASCEND_MOE_LIBRARY", str(tmp_path / "text.so"))
    with pytest.raises(LibraryError, match=r"text\.so cannot be loaded .*\n  cmake -S "):
        _lib.lib()


def test_a_library_of_other_sources_names_the_missing_function(no_library: pytest.MonkeyPatch) -> None:
    no_library.setitem(_lib.SIGNATURES, "am_not_there", (None, ()))
    with pytest.raises(LibraryError, match=r"has no function am_not_there.*\n  cmake -S ") as caught:
        _lib.lib()
    assert caught.value.symbol == "am_not_there"
