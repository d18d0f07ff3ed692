"""Libraries with a mutant in their kernels: the clean build once, then only the kernels' objects again."""

from __future__ import annotations

import contextlib
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
from pathlib import Path

from table import Mutant

from ascend_moe.native import library
from ascend_moe.native.build import digest_of

LIBRARIES = {"fast": "ascend_moe", "checked": "ascend_moe_checked"}
FLAGS = "-O1 -w"  # for the compile's speed: what they run takes seconds
LEFT_OUT = ("TIMED", "VNPU", "TORCH", "NPU")


class BuildError(Exception):
    """What the compiler said."""


def apply(mutant: Mutant, root: Path) -> None:
    """Makes the mutant's edits in the sources below ``root``.

    Raises:
        AssertionError: an edit's old text is not in its file exactly once.
    """
    files = {edit.file: (root / edit.file).read_text() for edit in mutant.edits}
    for file, text in applied(mutant, files).items():
        (root / file).write_text(text)


def applied(mutant: Mutant, files: Mapping[str, str]) -> dict[str, str]:
    """The texts of ``files``, by path, with the mutant's edits. Raises as ``apply`` does."""
    texts = dict(files)
    for edit in mutant.edits:
        text = texts[edit.file]
        found = list(re.finditer(r"\s+".join(map(re.escape, edit.old.split())), text))
        count = len(found)
        assert count == 1, f"{mutant.name}: {edit.old!r} is in {edit.file} {count} times, not once"
        texts[edit.file] = text[: found[0].start()] + edit.new + text[found[0].end() :]
    return texts


def together(mutants: Sequence[Mutant], files: Mapping[str, str]) -> list[list[Mutant]]:
    """The mutants in few groups, each of mutants that can be applied one after the other."""
    groups: list[tuple[list[Mutant], dict[str, str]]] = []
    for mutant in mutants:
        for number, (group, texts) in enumerate(groups):
            with contextlib.suppress(AssertionError):
                groups[number] = ([*group, mutant], applied(mutant, texts))
                break
        else:
            groups.append(([mutant], applied(mutant, files)))
    return [group for group, _ in groups]


def compile_errors(mutants: Sequence[Mutant], folder: Path) -> str:
    """What a compiler says of the entries of dispatch and combine with the mutants' edits; empty: nothing."""
    source = library.native_source_root()
    shutil.copytree(source / "op_kernel", folder / "op_kernel")
    for mutant in mutants:
        apply(mutant, folder)
    include = [f"-I{folder / 'op_kernel'}", f"-I{source / 'twin' / 'include'}"]
    entries = [f'#include "ascend_moe_distribute_{op}.cpp"' for op in ("dispatch", "combine")]
    (folder / "entries.cpp").write_text("#define DTYPE_X bfloat16_t\n" + "\n".join(entries))
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-fsyntax-only", "-w", "-DTWIN_CHECKED=1", *include]
    done = subprocess.run([*command, str(folder / "entries.cpp")], capture_output=True, text=True)
    return done.stderr if done.returncode != 0 else ""


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
    """Builds under ``root``, one process at a time. A library that is there already is not built again."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()
        self.build = self.root / "build"
        self.source = library.native_source_root()
        self.root.mkdir(parents=True, exist_ok=True)
        self.cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")

    def library(self, engine: str, mutant: Mutant | None = None) -> Path:
        """The library of this engine, with the mutant in its kernels."""
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._clean(engine) if mutant is None else self._mutant(mutant, engine)

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

    def _mutant(self, mutant: Mutant, engine: str) -> Path:
        made = self.root / re.sub(r"\W+", "_", mutant.name) / f"lib{LIBRARIES[engine]}.so"
        if made.exists():
            return made
        clean = self._clean(engine)
        patched = made.parent / "source"
        shutil.rmtree(patched, ignore_errors=True)
        shutil.copytree(self.source / "op_kernel", patched / "op_kernel")
        apply(mutant, patched)
        link_file = self.build / "CMakeFiles" / f"{LIBRARIES[engine]}.dir" / "link.txt"
        link = link_file.read_text()
        compiles = []
        for command, output in self._kernels(link, mutant):
            target = made.parent / (output.replace("/", "_"))
            assert link.count(output) == 1, f"{output} is not linked once"
            link = link.replace(output, str(target))
            kernels = [str(folder / "op_kernel") for folder in (self.source, patched)]
            compiles.append([word.replace(*kernels) for word in command] + ["-o", str(target)])
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda command: _run(command, self.build), compiles))
        unfinished = made.with_suffix(".part")
        _run(shlex.split(link.replace(f"-o {clean.name}", f"-o {unfinished}")), self.build)
        unfinished.rename(made)
        return made

    def _kernels(self, link: str, mutant: Mutant) -> list[tuple[list[str], str]]:
        """Compile commands, without their outputs, and the outputs, of the kernels that the mutant is in."""
        kernels = []
        for entry in json.loads((self.build / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            output = command.pop(command.index("-o") + 1)
            command.remove("-o")
            if "/kernels_" in entry["file"] and output in link and self._depends(output, mutant):
                kernels.append((command, output))
        assert kernels, f"no kernel of the library includes a file of {mutant.name}"
        return kernels

    def _depends(self, output: str, mutant: Mutant) -> bool:
        """Whether an object was compiled from a file that the mutant edits."""
        words = (self.build / f"{output}.d").read_text().split()
        files = {os.path.normpath(self.build / word) for word in words}
        return any(str(self.source / edit.file) in files for edit in mutant.edits)


def _run(command: list[str], directory: Path | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
