"""Cache of native libraries compiled at run time.

A part that `make` left out of an installation is built on first use.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ascendc_twin.cache import Cache, digest_of, forget_old, seal

from .. import settings
from ..errors import LibraryError
from . import log

BUILD_SECONDS = 1800.0  # limit of a build, and of the wait for another process's build
SECONDS = 60  # typical build time of a part on two cores
CACHE = Cache(settings.CACHE.name, "ascend_moe", LibraryError)
cache_directory, cached, sound = CACHE.directory, CACHE.place, CACHE.sound

# ---- parts of the installation


@dataclass(frozen=True)
class Part:
    """An optional part of the native libraries: title, CMake target, and the file or folder it produces."""

    title: str
    target: str
    output: str

    @property
    def option(self) -> str:
        """CMake option that enables the part."""
        return next(f"ASCEND_MOE_{name.upper()}" for name, part in PARTS.items() if part is self)


PARTS = {
    "checked": Part("the checked engine", "ascend_moe_checked", "libascend_moe_checked.so"),
    "timed": Part("the timed engine", "ascend_moe_timed", "libascend_moe_timed.so"),
    "vnpu": Part("the virtual NPU's libraries", "vnpu_libraries", "vnpu"),
}


def build_folder(sources: Path, fast: Path) -> Path:
    """Return the path of the cache folder for the parts built from the source tree ``sources``; it may not exist yet.

    `built_part` puts a link to ``fast`` there, the fast engine's library, which the virtual NPU looks for.
    """
    return cached("native", digest_of(source_hash(sources), str(fast)))


def source_hash(sources: Path) -> str:
    """Return the hash of the native sources in a source tree; libraries built from them contain it."""
    return str(runpy.run_path(str(sources / "tools" / "source_hash.py"))["source_hash"](sources))


def part_if_built(name: str, sources: Path, fast: Path) -> Path | None:
    """Return the file or folder of the part ``name`` of `PARTS` in the cache, or None if it is not built."""
    made = build_folder(sources, fast) / PARTS[name].output
    return made if made.exists() else None


def built_part(name: str, sources: Path, fast: Path) -> Path:
    """Return part ``name`` of `PARTS` in the cache, file or folder, built if missing; ``fast``: fast engine's library.

    Raises:
        LibraryError: cmake or a compiler is missing, the build failed, or it took longer than ``BUILD_SECONDS``.
    """
    part = PARTS[name]
    folder = build_folder(sources, fast)
    made, sums = folder / part.output, folder / f"{name}.sums"
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
        os.utime(folder)  # recently used folders are not removed
    return sound(made, sums)


@contextlib.contextmanager
def one_builder(path: Path, title: str) -> Iterator[None]:
    """Context manager: hold the lock file ``path`` for a build; after waiting ``BUILD_SECONDS`` raise LibraryError."""
    deadline = time.monotonic() + BUILD_SECONDS
    reported = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LibraryError(
                        f"another process has been building {title} for {BUILD_SECONDS:.0f} s"
                        f" and holds the lock {path}: stop it, or build everything with `make all`"
                    ) from None
            if not reported:
                report(f"waiting for another process that builds {title}")
                reported = True
            time.sleep(0.1)
        yield


def report(text: str) -> None:
    """Log a line on a build at level warning, because the user waits for it."""
    log.configure()
    log.say(logging.WARNING, "%s", text)  # WARNING is visible by default: it explains the wait


@contextlib.contextmanager
def reported_build(title: str, folder: Path, seconds: int = SECONDS) -> Iterator[None]:
    """Context manager around a build: log what is built where, the expected ``seconds``, and the actual time."""
    report(f"building {title} into {folder} (once per version; about {seconds} s on two cores)")
    started = time.monotonic()
    yield
    report(f"built {title} in {time.monotonic() - started:.0f} s")


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _needed(part: Part, *names: str, fix: str) -> str:
    path = next(filter(None, map(_tool, names)), None)
    if path is not None:
        return path
    raise LibraryError(
        f"{part.title} is not built, and building it needs {' or '.join(names)}: {fix},"
        f" or install a wheel made by `make wheel`, which contains everything"
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
        with reported_build(part.title, folder):
            for command in (
                [cmake, *generator, "-S", str(sources), "-B", str(scratch), *options],
                [cmake, "--build", str(scratch), "--target", part.target, "--parallel", jobs],
            ):
                _run(part, command, deadline)
        seal(scratch / part.output, scratch / sums.name)
        (scratch / sums.name).rename(sums)
        (scratch / part.output).rename(folder / part.output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(part: Part, command: list[str], deadline: float) -> None:
    """Run a step of the build; its child processes end with it, also on Ctrl-C and at the deadline."""
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
            f"building {part.title} failed: {first}\n" + "\n".join(lines[-40:]), command=command, output=output
        )
