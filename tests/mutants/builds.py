"""Libraries with mutants in their kernels: the clean build once, then only the kernels' objects again.

All mutants that change bodies of functions are in one library an engine, which runs the one that it is told (see
switched.py). Each of the others has a library of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import switched
from table import MUTANTS, Mutant

from ascend_moe import explore
from ascend_moe.native import library
from ascend_moe.native.build import digest_of

LIBRARIES = {"fast": "ascend_moe", "checked": "ascend_moe_checked"}
FLAGS = "-O1 -w"  # for the compile's speed: what they run takes seconds
LEFT_OUT = ("TIMED", "VNPU", "TORCH", "NPU")


class BuildError(Exception):
    """Holds what the compiler said."""


def applied(mutant: Mutant, files: Mapping[str, str]) -> dict[str, str]:
    """The texts of ``files``, by path, with the mutant's edits.

    Raises:
        AssertionError: an edit's old text is not in its file exactly once.
    """
    texts = dict(files)
    for edit in mutant.edits:
        text = texts[edit.file]
        found = list(re.finditer(r"\s+".join(map(re.escape, edit.old.split())), text))
        count = len(found)
        assert count == 1, f"{mutant.name}: {edit.old!r} is in {edit.file} {count} times, not once"
        texts[edit.file] = text[: found[0].start()] + edit.new + text[found[0].end() :]
    return texts


@dataclass(frozen=True)
class Build:
    """A library, and which of its mutants runs; 0: none."""

    path: Path
    number: int = 0

    def environment(self) -> dict[str, str]:
        """For processes that open it as the package's library."""
        return {"ASCEND_MOE_LIBRARY": str(self.path), switched.VARIABLE: str(self.number)}

    def checked(self) -> ctypes.CDLL:
        """The library of the checked engine, in this process."""
        opened = explore.checked_library(self.path)
        if self.number:
            opened[switched.SELECT](self.number)
        return opened


class Sources:
    """op_kernel/ with mutants: ``number_of`` those that one text holds, ``alone`` the others."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        root = library.native_source_root()
        self.files = {edit.file: (root / edit.file).read_text() for mutant in mutants for edit in mutant.edits}
        together, self.number_of = switched.Switched(self.files), dict[str, int]()
        for number, mutant in enumerate(mutants, 1):
            edited = {edit.file: self.files[edit.file] for edit in mutant.edits}
            if together.add(number, applied(mutant, edited)):
                self.number_of[mutant.name] = number
        self.alone = [mutant for mutant in mutants if mutant.name not in self.number_of]
        self.together = together.texts()

    def write(self, folder: Path, mutant: Mutant | None = None) -> list[str]:
        """Writes the sources of all mutants at once, or of one. Returns the compiler's options for them."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(library.native_source_root() / "op_kernel", folder / "op_kernel")
        for file, text in (self.together if mutant is None else applied(mutant, self.files)).items():
            (folder / file).write_text(text)
        (folder / "mutants.h").write_text(switched.HEADER)
        # The host's files include the protocol's headers too, without mutants: the linker must not mix them up.
        return ["-include", str(folder / "mutants.h"), "-Dmoe=moe_mutant"]


def compile_errors(mutants: Sequence[Mutant], folder: Path) -> str:
    """Returns what a compiler says of the entries of dispatch and combine with the mutants; empty: nothing."""
    sources, said = Sources(mutants), []
    for number, mutant in enumerate([None, *sources.alone] if sources.number_of else sources.alone):
        source, part = library.native_source_root(), folder / str(number)
        options = sources.write(part, mutant)
        include = [f"-I{part / 'op_kernel'}", f"-I{source / 'twin' / 'include'}"]
        entries = [f'#include "ascend_moe_distribute_{op}.cpp"' for op in ("dispatch", "combine")]
        (part / "entries.cpp").write_text("#define DTYPE_X bfloat16_t\n" + "\n".join(entries))
        checks = ["-std=c++17", "-fsyntax-only", "-w", "-DTWIN_CHECKED=1"]
        command = [os.environ.get("CXX", "g++"), *checks, *options, *include, str(part / "entries.cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        said += [done.stderr] if done.returncode != 0 else []
    return "\n".join(said)


def cache_root() -> Path:
    """In $ASCEND_MOE_MUTANT_CACHE, or where temporary files go: the folder of these native sources, at this place."""
    source = library.native_source_root()
    folders = ("op_kernel", "op_host", "csrc", "ascend_moe/csrc", "twin")
    files = sorted(path for folder in folders for path in (source / folder).rglob("*.[hcS]*"))
    texts = [str(path.relative_to(source)) + path.read_text() for path in files if path.is_file()]
    usual = f"{tempfile.gettempdir()}/ascend_moe-mutants-{os.getuid()}"
    folder = Path(os.environ.get("ASCEND_MOE_MUTANT_CACHE") or usual)
    return folder / digest_of(FLAGS, str(source), (source / "CMakeLists.txt").read_text(), *texts)


class MutantBuilds:
    """Builds of these mutants under ``root``, one process at a time. What is there already is not built again."""

    def __init__(self, mutants: Sequence[Mutant] = MUTANTS, root: Path | None = None) -> None:
        self.root = root or cache_root()
        self.build = self.root / "build"
        self.source = library.native_source_root()
        self.root.mkdir(parents=True, exist_ok=True)
        self.cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
        self.sources = Sources(mutants)

    def library(self, engine: str, mutant: Mutant | None = None) -> Build:
        """The library of this engine, with the mutant in its kernels."""
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if mutant is None:
                return Build(self._clean(engine))
            number = self.sources.number_of.get(mutant.name, 0)
            return Build(self._mutated(engine, None if number else mutant), number)

    def _clean(self, engine: str) -> Path:
        library = self.build / f"lib{LIBRARIES[engine]}.so"
        if not library.exists():
            settings = [
                "-DCMAKE_BUILD_TYPE=None",
                f"-DCMAKE_CXX_FLAGS={FLAGS}",
                "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                *(f"-DASCEND_MOE_{part}=OFF" for part in LEFT_OUT),
                f"-DPython3_EXECUTABLE={sys.executable}",
            ]
            source, build = ["-S", str(self.source)], ["-B", str(self.build)]
            _run([self.cmake, "-G", "Unix Makefiles", *source, *build, *settings])
            jobs = ["--parallel", str(os.cpu_count() or 1)]
            _run([self.cmake, "--build", str(self.build), "--target", LIBRARIES[engine], *jobs])
        return library

    def _mutated(self, engine: str, mutant: Mutant | None) -> Path:
        """All mutants at once, or the one that has to be alone."""
        texts = self.sources.together if mutant is None else applied(mutant, self.sources.files)
        folder = self.root / digest_of(*(text for item in sorted(texts.items()) for text in item))
        made = folder / f"lib{LIBRARIES[engine]}.so"
        if made.exists():
            return made
        clean = self._clean(engine)
        options = self.sources.write(folder / "source", mutant)
        link_file = self.build / "CMakeFiles" / f"{LIBRARIES[engine]}.dir" / "link.txt"
        link = link_file.read_text()
        compiles = []
        for command, output in self._kernels(link):
            target = folder / (output.replace("/", "_"))
            assert link.count(output) == 1, f"{output} is not linked once"
            link = link.replace(output, str(target))
            kernels = [str(root / "op_kernel") for root in (self.source, folder / "source")]
            compiles.append([word.replace(*kernels) for word in command] + [*options, "-o", str(target)])
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda command: _run(command, self.build), compiles))
        unfinished = made.with_suffix(".part")
        _run(shlex.split(link.replace(f"-o {clean.name}", f"-o {unfinished}")), self.build)
        unfinished.rename(made)
        return made

    def _kernels(self, link: str) -> list[tuple[list[str], str]]:
        """Compile commands, without their outputs, and the outputs, of the kernels."""
        kernels = []
        for entry in json.loads((self.build / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            output = command.pop(command.index("-o") + 1)
            command.remove("-o")
            if entry["file"].endswith("/kernels.cpp") and output in link:
                kernels.append((command, output))
        return kernels


def _run(command: list[str], directory: Path | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
