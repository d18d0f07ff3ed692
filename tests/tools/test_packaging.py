"""The installed package: its libraries and sources, parts built on first use, and the choice of engine."""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ascend_moe
import ascend_vnpu
import ascendc_twin
from ascend_moe.errors import LibraryError
from ascend_moe.native import binding, build, library, log
from ascendc_twin.cache import fill_folder

TREE = Path(__file__).resolve().parents[2]
INSTALLED = os.environ.get("ASCEND_MOE_TEST_INSTALLED") == "1"
only_installed = pytest.mark.skipif(not INSTALLED, reason="make test sets ASCEND_MOE_TEST_INSTALLED")


@pytest.fixture(scope="module")
def source_hash() -> Any:
    """tools/source_hash.py, of the tree or as shipped."""
    return SimpleNamespace(**runpy.run_path(str(library.native_source_root() / "tools" / "source_hash.py")))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """lib() forgets what it opened, before and after."""
    library.lib.cache_clear()
    yield monkeypatch
    library.lib.cache_clear()


# ---- which sources ----


def test_hash_sees_contents_names_and_nothing_else(source_hash: Any, tmp_path: Path) -> None:
    for name in ("op_kernel/a.h", "op_host/b.h", "csrc/c.S", "twin/d.h", "vnpu/e.cpp", "CMakeLists.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    first = source_hash.source_hash(tmp_path)
    (tmp_path / "op_kernel" / "notes.md").write_text("x")
    for folder in ("tests", "vnpu/tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "probe.cpp").write_text("x")
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
    assert tags and all(tag.startswith(("py3-none-linux_", "py3-none-manylinux_")) for tag in tags)
    names = {str(name) for name in distribution.files or []}
    for name in ("py.typed", "lib/libascend_moe.so", "_src/CMakeLists.txt", "_src/tools/source_hash.py"):
        assert f"ascend_moe/{name}" in names
    for name in ("include/kernel_operator.h", "CMakeLists.txt", "lib/SOURCES", "py.typed", "data/soc_costs.json"):
        assert f"ascendc_twin/{name}" in names
    assert {"ascend_vnpu/py.typed", "ascend_vnpu/operators/registry.py"} <= names
    # make installs outside pip's build isolation, where torch is.
    assert f"ascend_moe/lib/{binding.LIBRARY_NAME}" in names
    unwanted = [name for name in names if name.startswith(("csrc", "twin", "vnpu", "tests", "tools", "op_"))]
    assert unwanted == []
    requires = [name for name in distribution.requires or [] if "extra ==" not in name]
    assert sorted(name.split(">")[0] for name in requires) == ["numpy", "torch"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_only_the_c_abi_is_exported() -> None:
    command = ["nm", "-D", "--defined-only", str(library.library_path())]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    assert set(library.SIGNATURES) <= exported
    assert [name for name in exported if not name.startswith("am_")] == []


# ---- what is said when it cannot be opened ----


def test_missing_library_names_places_and_the_command(no_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "ascend_moe"
    no_library.delenv("ASCEND_MOE_LIBRARY", raising=False)
    no_library.setitem(library.LIBRARY_FILES, "fast", "libabsent.so")
    no_library.setattr(library, "_package_paths", lambda: [package, *map(Path, ascend_moe.__path__)])
    with pytest.raises(LibraryError) as caught:
        library.lib()
    message = str(caught.value)
    assert str(package / "lib" / "libabsent.so") in message
    assert str(library.native_source_root()) in message and "\n" not in message
    assert message.endswith(f": build it with {library.build_command()}")
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    "path, absent, text",
    [
        ("absent.so", "", r"ASCEND_MOE_LIBRARY=.*is not a file"),
        ("text.so", "", r"_LIBRARY=.*text\.so cannot be loaded .*: unset it or rebuild it with (make -C|cmake -S) "),
        # a library of other sources
        ("", "am_not_there", r"lacks the function am_not_there.* rebuild it with (make -C|cmake -S) "),
    ],
)
def test_library_that_cannot_be_used(
    path: str, absent: str, text: str, no_library: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.so").write_text("not a library")
    if path:
        no_library.setenv("ASCEND_MOE_LIBRARY", str(tmp_path / path))
    if absent:
        no_library.setitem(library.SIGNATURES, absent, (None, ()))
    with pytest.raises(LibraryError, match=text):
        library.lib()


@pytest.mark.parametrize(
    "words", [pytest.param("run", marks=pytest.mark.nightly), "run --backend processes", "validate", "plan", "doctor"]
)
def test_a_checkout_without_libraries_says_how_to_build_them(words: str, tmp_path: Path) -> None:
    """One line on stderr, no rank that waits; `doctor` has it among its findings."""
    without = shutil.ignore_patterns("lib", "_src", "__pycache__")
    shutil.copytree(ascend_moe.__path__[0], tmp_path / "ascend_moe", ignore=without)
    (tmp_path / "op_kernel").mkdir()
    for name in ("CMakeLists.txt", "Makefile"):
        (tmp_path / name).touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_MOE")}
    command = [sys.executable, "-m", "ascend_moe", *words.split()]
    beside = [str(Path(str(package.__file__)).parents[1]) for package in (ascend_vnpu, ascendc_twin)]
    env |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *beside]), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = f"build it with make -C {tmp_path} lib VENV={sys.prefix}\n"
    if words == "doctor":
        assert done.returncode == 1 and done.stderr == "" and said in done.stdout
        assert "doctor itself failed" not in done.stdout
    else:
        assert done.returncode == 2 and done.stdout == ""
        assert re.fullmatch(rf"ascend-moe {words.split()[0]}: .*{re.escape(said)}", done.stderr), done.stderr


@pytest.mark.parametrize(("target", "parts"), [("install", ""), ("all", "all"), ("wheel", "all")])
@pytest.mark.skipif(not (TREE / "Makefile").is_file(), reason="not in a source tree")
def test_only_what_is_asked_for_is_compiled(target: str, parts: str, tmp_path: Path) -> None:
    """An installation from the sources leaves every part out, by pip and by make alike; a wheel has all."""
    options = {part.option for part in build.PARTS.values()}
    left_out = set(re.findall(r'^(ASCEND_MOE_\w+) = "OFF"$', (TREE / "pyproject.toml").read_text(), re.MULTILINE))
    assert left_out == options
    command = ["make", "-n", target, f"VENV={tmp_path / 'venv'}"]
    printed = subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"cmake\.define\.(ASCEND_MOE_\w+)=ON", printed)) == (options if parts else set())


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
    (scratch / "vnpu" / "libascendcl.so").touch()
    for engine in ("checked", "timed"):
        (scratch / f"libascend_moe_{{engine}}.so").touch()
"""


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fast engine's library of an installation without the rest; its cache, and the shim on PATH."""
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
def test_a_part_is_built_once_and_logged(name: str, fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = build.built_part(name, SOURCES, fast)
    assert made.name == build.PARTS[name].output and made.exists()
    assert (made.parent / fast.name).resolve() == fast
    lines, count = list(caplog.messages), len(caplog.messages)
    assert {record.levelname for record in caplog.records} == {"WARNING"}  # seen without any setting
    assert lines[0].startswith(f"ascend_moe: building {build.PARTS[name].title} into ") and "about" in lines[0]
    assert build.built_part(name, SOURCES, fast) == made
    assert build.build_folder(SOURCES, fast.with_name("other.so")) != made.parent
    configure, compiling = calls(fast)
    assert f"-D{build.PARTS[name].option}=ON" in configure and "-DASCEND_MOE_TORCH=OFF" in configure
    assert f"--target {build.PARTS[name].target}" in compiling
    assert len(caplog.messages) == count


def test_a_cache_that_others_can_write_is_refused(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.built_part("timed", SOURCES, fast)
    cache = fast.parents[1] / "cache"
    folders = (cache, cache / "native", made.parent)
    assert [oct(folder.stat().st_mode & 0o777) for folder in folders] == ["0o700"] * 3
    for folder in folders:
        for mode in (0o770, 0o702):
            folder.chmod(mode)
            said = rf"{folder}, which code is loaded from, can be written by others .*name a folder of your own in "
            with pytest.raises(LibraryError, match=said + "ASCEND_MOE_CACHE"):
                build.built_part("timed", SOURCES, fast)
        folder.chmod(0o755)
    assert build.built_part("timed", SOURCES, fast) == made
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(LibraryError, match=rf"{cache}, .* belongs to user {os.getuid()}, not to you"):
        build.built_part("timed", SOURCES, fast)


def test_a_user_without_a_cache_gets_a_folder_that_goes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = "import os, sys; from ascendc_twin import cache; os.path.expanduser = lambda path: path\n"
    program += "where = cache.Cache('NO', 'ascend_moe').directory(); print(where, where.is_dir())"
    env = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | {"TMPDIR": str(tmp_path)}
    for more in ({}, {"XDG_CACHE_HOME": str(tmp_path / "file")}):  # no home, and one that cannot be written
        done = subprocess.run([sys.executable, "-c", program], env=env | more, capture_output=True, text=True)
        assert re.fullmatch(rf"{tmp_path}/ascend-moe-\w+ True\n", done.stdout), done
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_loaded_is_what_was_built(fast: Path, tmp_path: Path) -> None:
    made = build.built_part("vnpu", SOURCES, fast)
    file = next(path for path in made.rglob("*") if path.is_file())
    as_built = file.read_bytes()
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(as_built + b" ")
    with pytest.raises(LibraryError, match=rf"{file} is not as it was built: remove {made.parent}, the next use"):
        build.built_part("vnpu", SOURCES, fast)
    file.write_bytes(as_built)
    file.chmod(0o620)
    with pytest.raises(LibraryError, match=rf"{file}, which code is loaded from, can be written by others"):
        build.built_part("vnpu", SOURCES, fast)
    file.chmod(0o600)
    (made / "added.so").touch()
    with pytest.raises(LibraryError, match=r"added\.so is not as it was built"):
        build.built_part("vnpu", SOURCES, fast)
    folder = tmp_path / "made"
    fill_folder(folder, lambda scratch: (scratch / "a.so").write_text("code") and None)
    assert (folder / "a.so").stat().st_mode & 0o777 == 0o600
    assert build.sound(folder / "a.so") == folder / "a.so"
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(LibraryError, match=r"a\.so cannot be checked \(No such file or directory: .*\): remove"):
        build.sound(folder / "a.so")


def test_blanks_around_the_folder_of_the_cache_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CACHE", f" {tmp_path / 'cache'} ")
    assert build.cache_directory() == tmp_path / "cache"


def test_two_processes_build_once(
    fast: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.logger, "handlers", [logging.StreamHandler(sys.__stderr__)])
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        made = [pool.submit(build.built_part, "checked", SOURCES, fast) for _ in range(2)]
    assert made[0].result() == made[1].result() and len(calls(fast)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert sum("builds" in line and "waits" not in line for line in lines) == 1, lines


def test_a_failing_build_names_the_error(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(fast.parents[1], monkeypatch, 'print("a.cpp:1: error: no"); sys.exit(2)')
    with pytest.raises(LibraryError, match=r"building the checked engine failed: a\.cpp:1: error: no"):
        build.built_part("checked", SOURCES, fast)
    folder = build.build_folder(SOURCES, fast)
    assert [path.name for path in folder.iterdir()] == ["checked.lock"], "nothing half-built stays"


@pytest.mark.parametrize("missing", ["cmake", "g++"])
def test_without_a_tool_the_fix_is_named(missing: str, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build._tool
    absent = {"cmake": ("cmake",), "g++": ("g++", "c++", "clang++")}[missing]
    monkeypatch.setattr(build, "_tool", lambda name: None if name in absent else real(name))
    with pytest.raises(LibraryError, match=rf"building it needs {missing.replace('+', '[+]')}.*make wheel"):
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


@pytest.mark.parametrize("engine", ["", "fast", "checked"])
def test_the_setting_chooses_the_engine(engine: str, no_library: pytest.MonkeyPatch) -> None:
    no_library.setenv("ASCEND_MOE_ENGINE", engine)
    no_library.delenv("ASCEND_MOE_LIBRARY", raising=False)
    assert library.lib().am_engine_is_checked() == (engine == "checked")
