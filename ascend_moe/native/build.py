"""The cache of libraries that are compiled at run time.

A part that `make` left out of an installation is built into it when it is first asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..errors import LibraryError
from . import log

BUILD_SECONDS = 1800.0  # after that a build, or the wait for another process's build, is given up
PATIENCE = 3.0  # seconds that a build of unknown length may take before a line says why nothing happens
SECONDS = 60  # that a part takes on two cores
_KEEP_DAYS = 30
_SUMS = "SHA256SUMS"

# ---- the cache


def cache_directory() -> Path:
    """$ASCEND_MOE_CACHE, else ~/.cache/ascend_moe (or under $XDG_CACHE_HOME); created for the user alone.

    Raises:
        LibraryError: it belongs to another user, or others can write there.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = settings.CACHE.get() or home / "ascend_moe"
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        return _temporary_cache()
    _need_own(path)
    return path if os.access(path, os.W_OK) else _temporary_cache()


def cached(*names: str) -> Path:
    """A place in the cache, for what is loaded from there; it may not exist yet.

    Raises:
        LibraryError: it, or a folder on the way, belongs to another user, or others can write there.
    """
    path = cache_directory()
    for name in names:
        path = path / name
        _need_own(path)
    return path


def _need_own(path: Path) -> None:
    """Raise if somebody else could have put there what this process is about to load."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return
    fix = f"remove it, or name a folder of your own in {settings.CACHE.name}"
    if seen.st_uid != os.geteuid():
        raise LibraryError(f"{path}, which code is loaded from, belongs to user {seen.st_uid}, not to you: {fix}")
    if seen.st_mode & 0o022:
        mode = oct(seen.st_mode & 0o777)[2:]
        raise LibraryError(f"{path}, which code is loaded from, can be written by others (mode {mode}): {fix}")


@functools.cache
def _temporary_cache() -> Path:
    return Path(tempfile.mkdtemp(prefix="ascend-moe-"))


def fill_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a new folder by ``make`` and renames it into place: a reader sees the whole folder or none."""
    folder.parent.mkdir(0o700, parents=True, exist_ok=True)
    forget_old(folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        make(scratch)
        _seal(scratch, scratch / _SUMS)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files(path: Path) -> list[Path]:
    """A file, or all files of a folder that are no links."""
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [each for each in found if each.is_file() and not each.is_symlink()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _seal(made: Path, sums: Path) -> None:
    """Leaves the files of ``made`` to the user alone, and writes what they are into ``sums`` beside or in it."""
    lines = []
    for path in _files(made):
        path.chmod(path.stat().st_mode & 0o700)
        lines.append(f"{_hash(path)}  {path.relative_to(sums.parent)}\n")
    sums.write_text("".join(lines))
    sums.chmod(0o600)


def sound(path: Path, sums: Path | None = None) -> Path:
    """``path``, a file or a folder of the cache, before it is loaded; ``sums``: of ``_seal``, beside it if not given.

    Raises:
        LibraryError: a file belongs to another user, can be written by others, or is not as it was built.
    """
    sums = sums or path.with_name(_SUMS)
    try:
        lines = sums.read_text().splitlines()
    except OSError as error:
        raise LibraryError(f"{path} cannot be checked ({error.strerror}: {sums}): remove {sums.parent}") from None
    known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for file in _files(path):
        _need_own(file)
        if known.get(str(file.relative_to(sums.parent))) != _hash(file):
            raise LibraryError(f"{file} is not as it was built: remove {sums.parent}, the next use builds it again")
    return path


def forget_old(cache: Path) -> None:
    """Removes folders that are older than `_KEEP_DAYS`. Processes that opened their files keep them."""
    limit = time.time() - _KEEP_DAYS * 86400
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def digest_of(*parts: str) -> str:
    """A hash of the parts and their boundaries, for names of folders in the cache."""
    return hashlib.sha256("\0".join((_SUMS, *parts)).encode()).hexdigest()[:32]


# ---- parts of the installation


@dataclass(frozen=True)
class Part:
    """A part of the native libraries: CMake's target, and what comes out, the last one last."""

    title: str
    target: str
    outputs: tuple[str, ...]

    @property
    def option(self) -> str:
        """CMake's option that adds the part."""
        return next(f"ASCEND_MOE_{name.upper()}" for name, part in PARTS.items() if part is self)


PARTS = {
    "checked": Part("the checked engine", "ascend_moe_checked", ("libtwin_checked.a", "libascend_moe_checked.so")),
    "timed": Part("the timed engine", "ascend_moe_timed", ("libtwin_timed.a", "libascend_moe_timed.so")),
    "vnpu": Part("the virtual NPU's libraries", "vnpu_libraries", ("vnpu",)),
}


def build_folder(sources: Path, fast: Path) -> Path:
    """Where the parts of these sources lie.

    The fast engine's library is in it as a link, because the virtual NPU looks for it in folders above.
    """
    return cached("native", digest_of(source_hash(sources), str(fast)))


def source_hash(sources: Path) -> str:
    """The hash of native sources, as a library that was built from them has it."""
    return str(runpy.run_path(str(sources / "tools" / "source_hash.py"))["source_hash"](sources))


def part_if_built(name: str, sources: Path, fast: Path) -> Path | None:
    """The part's main file (or folder) in the cache; None: the first use would build it."""
    made = build_folder(sources, fast) / PARTS[name].outputs[-1]
    return made if made.exists() else None


def built_part(name: str, sources: Path, fast: Path) -> Path:
    """The part's main file (or folder) in the cache; built if it is not there.

    Raises:
        LibraryError: no cmake or no compiler, the build failed, or it took longer than ``BUILD_SECONDS``.
    """
    part = PARTS[name]
    folder = build_folder(sources, fast)
    made, sums = folder / part.outputs[-1], folder / f"{name}.sums"
    if not made.exists():
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)
        forget_old(folder.parent)
        folder.mkdir(0o700, exist_ok=True)
        with one_builder(folder / f"{name}.lock", part.title):
            if not made.exists():
                _build(part, sources, folder, sums)
                with contextlib.suppress(FileExistsError):
                    (folder / fast.name).symlink_to(fast)
    with contextlib.suppress(OSError):
        os.utime(folder)  # what is used is not forgotten
    return sound(made, sums)


@contextlib.contextmanager
def one_builder(path: Path, title: str) -> Iterator[None]:
    """One process builds, the others wait for it, and say so. A process that dies lets go."""
    deadline = time.monotonic() + BUILD_SECONDS
    told = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LibraryError(
                        f"another process has been building {title} for {BUILD_SECONDS:.0f} s"
                        f" and holds {path}: end it, or build everything with `make all`"
                    ) from None
            if not told:
                tell(f"waits for another process that builds {title}")
                told = True
            time.sleep(0.1)
        yield


def tell(text: str) -> None:
    """One line to the user, who waits for a build."""
    log.configure()
    log.say(logging.WARNING, "%s", text)  # seen without any setting: it is why nothing happens for so long


@contextlib.contextmanager
def told(title: str, folder: Path, seconds: int = SECONDS) -> Iterator[None]:
    """Tells the user what is built where, about how long that takes, and how long it took."""
    tell(f"builds {title} into {folder}, once; about {seconds} s on two cores")
    started = time.monotonic()
    yield
    tell(f"built {title} in {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """Tell the user what is being made if it takes longer than `PATIENCE`, and how long it took."""
    started = time.monotonic()
    slow = threading.Timer(PATIENCE, tell, [f"compiles {what}, once; {PATIENCE:.0f} s so far"])
    slow.daemon = True
    slow.start()
    try:
        yield
    finally:
        slow.cancel()
        slow.join()
    if (seconds := time.monotonic() - started) > PATIENCE:
        tell(f"compiled {what} in {seconds:.0f} s")


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _needed(part: Part, *names: str, fix: str) -> str:
    path = next(filter(None, map(_tool, names)), None)
    if path is not None:
        return path
    raise LibraryError(
        f"{part.title} is not built yet, and there is no {', '.join(names)} to build it: {fix},"
        f" or install a wheel made by `make wheel`, which has everything"
    )


def _build(part: Part, sources: Path, folder: Path, sums: Path) -> None:
    cmake = _needed(part, "cmake", fix="pip install cmake ninja")
    wanted = os.environ.get("CXX")
    compilers = (wanted.split()[-1],) if wanted else ("g++", "c++", "clang++")
    _needed(part, *compilers, fix="install g++ 11 or newer, or set CXX")
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    others = [other.option for other in PARTS.values() if other is not part]
    generator = ["-G", "Ninja"] if "CMAKE_GENERATOR" not in os.environ and _tool("ninja") else []
    if generator:
        generator.append(f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}")
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython3_EXECUTABLE={sys.executable}", f"-D{part.option}=ON"]
    options += [f"-D{option}=OFF" for option in (*others, "ASCEND_MOE_TORCH", "ASCEND_MOE_NPU")]
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
    deadline = time.monotonic() + BUILD_SECONDS
    try:
        with told(part.title, folder):
            for command in (
                [cmake, *generator, "-S", str(sources), "-B", str(scratch), *options],
                [cmake, "--build", str(scratch), "--target", part.target, "--parallel", jobs],
            ):
                _run(part, command, deadline)
        main = part.outputs[-1]
        _seal(scratch / main, scratch / _SUMS)
        (scratch / _SUMS).rename(sums)
        for name in part.outputs:
            (scratch / name).rename(folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(part: Part, command: list[str], deadline: float) -> None:
    """Runs a step of the build. What it started ends with it, also on Ctrl-C and at the deadline."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        umask=0o077,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise LibraryError(
                f"{part.title} was not built within {BUILD_SECONDS:.0f} s: build everything with `make all`"
            ) from None
    if process.returncode != 0:
        lines = output.strip().splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        first = errors[0] if errors else lines[-1] if lines else f"code {process.returncode}"
        raise LibraryError(
            f"{part.title} does not build: {first}\n" + "\n".join(lines[-40:]), command=command, output=output
        )
