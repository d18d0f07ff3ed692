"""Checks of the machine and of this package: Python, torch, libraries, memory, limits."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import settings
from .._text import installed_version, version_numbers
from ..errors import AscendMoeError
from ..native import binding, library
from ..native.build import source_hash
from ..native.windows import MIB, window_data_bytes
from . import Diagnostic, error, fine, warn

LEAST_PYTHON, LEAST_COMPILER = (3, 10), 11
_BUILD = "in its source tree: pip install --force-reinstall --no-deps --no-build-isolation ."


def diagnostics() -> Iterator[Diagnostic]:
    """Check Python, torch, this package's libraries, the compiler, CPU cores, memory and the limit of open files."""
    yield _python()
    yield _torch()
    yield from _library()
    yield _torch_ops()
    yield _compiler()
    yield _cores()
    yield from _memory()
    yield _descriptors()


def _python() -> Diagnostic:
    what = f"{platform.python_version()} ({sys.executable}) on {platform.machine()}, {platform.platform()}"
    if sys.version_info[:2] < LEAST_PYTHON:
        return error("python", what, "this package needs 3.10 or later", "use a newer Python")
    return fine("python", what)


def _torch() -> Diagnostic:
    version = installed_version("torch")
    if not version:
        return error("torch", "is not installed", "the operators are torch operators", "pip install torch")
    if version_numbers(version)[:2] < binding.OLDEST_TORCH:
        least = ".".join(map(str, binding.OLDEST_TORCH))
        return error("torch", version, f"this package needs {least} or later", f"pip install 'torch>={least}'")
    return fine("torch", version)


def _library() -> Iterator[Diagnostic]:
    topic = "native library"
    try:
        path = library.library_path()
        built = library.lib().am_source_hash().decode()
    except AscendMoeError as problem:
        head, fix = _halves(problem)
        if (setting := settings.setting_of(problem)) is not None:
            fix = f"unset {setting.name}, or set it to {setting.rule}"
        yield error(topic, head, "the operators on CPU, plan and validate need it", fix or _BUILD)
        return
    try:
        root = library.native_source_root()
        hashed = source_hash(root)
    except (AscendMoeError, OSError, AttributeError) as problem:
        yield warn(topic, f"{path}; its sources were not found ({problem})", "it may be outdated", _BUILD)
        return
    if hashed != built:
        why = "it was built from other sources and may contain outdated kernels"
        yield warn(topic, f"{path} was not built from the sources in {root}", why, library.build_command())
    else:
        yield fine(topic, f"{path}, built from the sources in {root}")


def _torch_ops() -> Diagnostic:
    topic, problem = "torch ops", binding.why_not()
    if problem is None:
        return fine(topic, f"{binding.library_path()}, for torch 2.10 and later")
    head, fix = _halves(problem)
    return error(topic, head, "the operators raise this", fix)


def _halves(problem: AscendMoeError) -> tuple[str, str]:
    """Return what an error states before its first colon outside of parentheses, and the fix after it."""
    head, *fix = re.split(r": *(?![^(]*\))", str(problem), maxsplit=1)
    return head, " ".join(" ".join(fix).split())


def _compiler() -> Diagnostic:
    name = os.environ.get("CXX") or "g++"
    path, why = shutil.which(name), "ascendc_twin.load, the torch_npu adapter and builds from source need one"
    if path is None:
        return warn("compiler", f"no {name}", why, "install g++ 11 or later, or set CXX")
    done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=20)
    version = done.stdout.strip() or "of unknown version"
    if "clang" not in Path(path).name and (version_numbers(version) or (LEAST_COMPILER,))[0] < LEAST_COMPILER:
        return warn("compiler", f"{path} {version}", why, "install g++ 11 or later, or set CXX")
    return fine("compiler", f"{path} {version}")


def _cores() -> Diagnostic:
    here, all_of = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    what = f"this process may use {here} of {all_of} CPU cores"
    if here == 1 and all_of > 1:
        why = "ranks on the CPU that share one core run in turns and wait for each other"
        return warn("cores", what, why, "allow more cores (taskset, cgroup, the job scheduler's options)")
    return fine("cores", what)


def _memory() -> Iterator[Diagnostic]:
    with contextlib.suppress(AscendMoeError):
        need = -(-window_data_bytes() // MIB)
        free = _available_mib()
        what = f"{free} MiB available, windows of {need} MiB per rank (HCCL_BUFFSIZE)"
        if free and free < 2 * need:
            why = "windows on the CPU are host memory, and those of two ranks do not fit"
            fix = "lower HCCL_BUFFSIZE (`ascend-moe plan` prints the minimum), or add memory"
            yield warn("memory", what, why, fix)
        else:
            yield fine("memory", what)
    try:
        os.close(os.memfd_create("ascend_moe_doctor"))
        yield fine("shared memory", "memfd works: windows between processes need no /dev/shm")
    except OSError as problem:
        why = "windows between processes are memfds"
        fix = "allow memfd_create in the container's seccomp profile, or use LocalCluster"
        yield error("shared memory", f"memfd_create fails: {problem}", why, fix)
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < 64 << 30:
        why = "every rank maps the windows of all ranks"
        yield warn("address space", f"limited to {space >> 20} MiB", why, "ulimit -v unlimited")


def _available_mib() -> int:
    """Free memory of the machine or of the container, whichever is less; 0 if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        meminfo = Path("/proc/meminfo").read_text()
        limits.append(int(re.search(r"MemAvailable:\s+(\d+)", meminfo).group(1)) >> 10)  # type: ignore[union-attr]
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        limits.append((most - used) >> 20)
    return min(limits, default=0)


def _descriptors() -> Diagnostic:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    what = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} at most"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        why = "a rank on the CPU opens a window, a socket and a process descriptor for every other rank"
        return warn("open files", what, why, "ulimit -n 4096")
    return fine("open files", what)
