"""A kernel with one broken line, to see that the checks find it: patched and built in a scratch folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ascend_moe.errors import LibraryError
from ascend_moe.native import library as _lib

_PARTS = ("cmake", "op_kernel", "op_host", "csrc", "twin", "vnpu", "CMakeLists.txt", "tools/source_hash.py")
_SHOWN_LINES = 20  # of a failed build


@dataclass(frozen=True)
class Mutant:
    """One line of one file, and what it becomes."""

    file: str
    find: str
    replace: str
    effect: str


MUTANTS: dict[str, Mutant] = {
    "row": Mutant(
        "op_kernel/common/quantize.h",
        "x_[static_cast<uint64_t>(token) * rowBytes_]",
        "x_[static_cast<uint64_t>(token / 2) * rowBytes_]",
        "dispatch sends the row of another token",
    ),
    "weight": Mutant(
        "op_kernel/window/sum.h",
        "scaleBuf_.Get<float>().GetValue(i)",
        "scaleBuf_.Get<float>().GetValue(inChunk * info_->topK)",
        "combine weighs all K rows of a token with the weight of its first",
    ),
    "count": Mutant(
        "op_kernel/common/dispatch_outputs.h",
        "tokenNumsType == 0 ? end : end - before",
        "tokenNumsType == 0 ? end : (end - before) / 2",
        "dispatch tells every expert half its rows",
    ),
}


def break_line(one: Mutant, root: Path) -> str:
    """Patches the mutant's line below ``root``; returns "file:line".

    Raises:
        LibraryError: the line is not there exactly once.
    """
    path = root / one.file
    lines = path.read_text().splitlines(keepends=True)
    hits = [number for number, line in enumerate(lines) if one.find in line]
    if len(hits) != 1 or lines[hits[0]].count(one.find) != 1:
        raise LibraryError(
            f"{one.file} has {one.find!r} {len(hits)} times, not once: the mutant must follow the kernel"
        )
    lines[hits[0]] = lines[hits[0]].replace(one.find, one.replace)
    path.write_text("".join(lines))
    return f"{one.file}:{hits[0] + 1}"


def build_broken(one: Mutant, scratch: Path) -> tuple[Path, str]:
    """Copies the native sources into ``scratch``, breaks the line and builds, unoptimised.

    Returns:
        The library's path, and "file:line" of what was broken.

    Raises:
        LibraryError: no cmake, or the build fails.
    """
    root, source, build = _lib.native_source_root(), scratch / "src", scratch / "build"
    for part in _PARTS:
        target = source / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / part).is_dir():
            shutil.copytree(root / part, target)
        else:
            shutil.copy(root / part, target)
    place = break_line(one, source)
    # pip puts cmake and ninja beside the interpreter, which need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise LibraryError(
            "--inject builds a library and finds no cmake: pip install cmake ninja", symbol="cmake"
        )
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    options = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    cores = str(len(os.sched_getaffinity(0)))
    configure = [cmake, "-S", str(source), "-B", str(build), *generator, *options]
    compile_ = [cmake, "--build", str(build), "--target", "ascend_moe", "--parallel", cores]
    for command in (configure, compile_):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        if done.returncode:
            tail = (done.stdout + done.stderr).splitlines()[-_SHOWN_LINES:]
            raise LibraryError("\n".join(["the broken library does not build:", *tail]))
    return build / _lib.LIBRARY_NAME, place
