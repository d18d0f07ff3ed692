"""Compilation of kernels and of the emulator's runtime with the machine's C++ compiler, cached by content."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from .cache import Cache, digest_of, fill_folder
from .entries import MARK, Entry, find_entries, line_of
from .errors import ArgumentError, TwinBuildError, need
from .template_keys import SCAN, bound, dispatcher, find_declarations

CACHE = Cache("ASCENDC_TWIN_CACHE", "ascendc_twin")
PATIENCE = 3.0  # seconds after which a compilation is logged
_log = logging.getLogger("ascendc_twin")
SOURCES = (".cpp", ".cc", ".cxx", ".cce", ".asc")
SUFFIXES = {"fast": ".so", "checked": ".checked.so", "timed": ".timed.so"}  # of a library, by its engine

PathLike = str | os.PathLike[str]


def build(
    sources: PathLike | Iterable[PathLike],
    *,
    output: PathLike | None = None,
    defines: Iterable[str] = (),
    includes: Iterable[PathLike] = (),
    engine: str = "fast",
    tiling_keys: Iterable[int] | None = None,
    debug: bool = False,
) -> Path:
    """Compile AscendC kernels for the emulator, and return the path to pass to `load`.

    Args:
        sources: one kernel source or several; each is compiled alone, all are linked together.
        output: path ``name.so`` to write; the other engines' libraries are ``name.checked.so`` and ``name.timed.so``
            beside it. None: the libraries stay in the user's cache, by the hash of everything they were compiled from.
        defines: macros, such as ``"DTYPE_X=half"``.
        includes: folders of headers.
        engine: "fast", "checked", "timed" or, for fast and checked, "both".
        tiling_keys: the instances of template kernels to compile; None: all.
        debug: compile for gdb: without optimization, with debug information (-O0 -g).

    Raises:
        TwinBuildError: a source does not compile (the message contains the compiler's output) or has no kernel.
        ArgumentError: a source does not exist; ``engine``, ``output`` or a tiling key is not valid.
    """
    paths = source_paths(sources)
    engines = engines_of(engine)
    if output is not None:
        for name in engines:
            path = engine_path(Path(output), name)
            replaceable = not path.is_symlink() and (path.is_file() or not path.exists())
            why = "is a link or no regular file, and is not replaced: remove it"
            need(replaceable, f"output {path} {why}", "output")
    wanted = None if tiling_keys is None else frozenset(tiling_keys)
    given = (tuple(defines), tuple(map(Path, includes)), wanted, debug)
    made = {name: kernel_library(paths, name, *given) for name in engines}
    if output is None and len(engines) == 1:
        return made[engines[0]]
    target = pair_path(tuple(made.values())) if output is None else Path(output)
    need(target.suffix == ".so", f"output is {target}; it must end with .so", "output")
    for name, library in made.items():
        _install(library, engine_path(target, name))
    return engine_path(target, engines[0])


def engines_of(engine: str) -> tuple[str, ...]:
    """Return the engines to build: ("fast", "checked") for "both", else ``engine`` alone; or raise ArgumentError."""
    if engine == "both":
        return ENGINES[:2]
    need(engine in ENGINES, f"engine is {', '.join(ENGINES)} or both, not {engine!r}", "engine")
    return (engine,)


def source_paths(sources: PathLike | Iterable[PathLike]) -> tuple[Path, ...]:
    """Return one source or several as paths; raise ArgumentError if there is none, or one is not a file."""
    given: Sequence[PathLike] = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    need(bool(given), "sources is empty: name a kernel source", "sources")
    paths = tuple(Path(path) for path in given)
    for path in paths:
        need(path.is_file(), f"there is no source file {path}: correct the path", "sources")
    return paths


def engine_path(library: Path, engine: str) -> Path:
    """Return the path of the library of ``engine`` (fast, checked, timed), given any engine's for the same kernels."""
    found = next((suffix for suffix in reversed(SUFFIXES.values()) if library.name.endswith(suffix)), "")
    return library.with_name(library.name.removesuffix(found) + SUFFIXES[engine])


def _install(library: Path, target: Path) -> None:
    """Copy beside the target, then rename: processes that have opened the old library keep it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        shutil.copy(library, Path(folder) / target.name)
        (Path(folder) / target.name).replace(target)


# ---- messages during compilation


@contextlib.contextmanager
def said_if_slow(what: str) -> Iterator[None]:
    """Log ``what`` is being compiled if the with block takes longer than `PATIENCE`, and finally its duration."""
    started = time.monotonic()
    slow = threading.Timer(PATIENCE, _log.warning, [f"ascendc_twin: compiles {what}, once; {PATIENCE:.0f} s so far"])
    slow.daemon = True
    slow.start()
    try:
        yield
    finally:
        slow.cancel()
        slow.join()
    if (seconds := time.monotonic() - started) > PATIENCE:
        _log.warning("ascendc_twin: compiled %s in %.0f s", what, seconds)


# ---- the compiler

ENGINES = tuple(SUFFIXES)
_PARALLEL = 2

# As in CANN's CPU debug builds and in the AIV half of a kernel's build for A2 and A3.
_KERNEL_DEFINES = (
    *("ASCENDC_CPU_DEBUG=1", "__CCE_KT_TEST__=1", "__CCE_AICORE__=220", "__NPU_ARCH__=2201"),
    *("__DAV_C220__=1", "__DAV_C220_VEC__=1", "__vector__=", "__mix__(...)=", "__forceinline__=inline"),
    "ASCENDC_TPL_KERNEL=1",
)
# Structs of the communication context that kernels bring themselves, or find in kernel_operator.h.
_CONTEXTS = ("HcclOpResParam", "HcclRankRelationResV2", "HcclA2CombineOpParam")
# The numbers that ORIG_DTYPE_* macros are compared with.
_DATA_TYPES = (
    *("DT_FLOAT=0", "DT_FLOAT16=1", "DT_INT8=2", "DT_INT32=3", "DT_UINT8=4", "DT_INT16=6", "DT_UINT16=7"),
    *("DT_UINT32=8", "DT_INT64=9", "DT_UINT64=10", "DT_DOUBLE=11", "DT_BOOL=12", "DT_BF16=27"),
)


@functools.cache
def compiler() -> str:
    """Return the path of $CXX, or of the first of g++, c++ and clang++; raise TwinBuildError if it is missing."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise TwinBuildError(f"no C++ compiler ({wanted or 'g++, c++, clang++'}): install g++ 11 or newer, or set CXX")


@functools.cache
def _compiler_id() -> str:
    result = subprocess.run([compiler(), "--version"], capture_output=True, text=True)
    return f"{os.path.realpath(compiler())}\n{result.stdout}"


def _sources() -> Path:
    """Folder of include/ and src/: this one in an installation, the one above in a source tree."""
    here = Path(__file__).resolve().parent
    return here if (here / "include").is_dir() else here.parent


def include_directory() -> Path:
    """Return the folder of kernel_operator.h."""
    return _sources() / "include"


@functools.cache
def vendor_headers_directory() -> Path:
    """Return the folder of CANN's other headers: each includes a header of the emulator, or is an #error.

    They are written into the cache once, from the list in twin/include/vendor_headers.txt.
    """
    headers = vendor_headers((include_directory() / "vendor_headers.txt").read_text())

    def write(scratch: Path) -> None:
        for name, text in headers.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_text(text)

    folder = CACHE.place(f"vendor-headers-{digest_of(str(headers))}")
    if not folder.is_dir():
        fill_folder(folder, write)
    return folder


def vendor_headers(table: str) -> dict[str, str]:
    """Return path -> text of the headers that ``table`` lists: an #include, or an #error with the reason."""
    headers: dict[str, str] = {}
    target = ""
    for line in table.splitlines():
        if line.startswith("["):
            target = line.strip("[] ")
        elif line.strip() and not line.startswith("#"):
            folders, *names = line.split()
            for folder, name in product(folders.split("|"), names):
                path = f"{'' if folder == '.' else folder}{name}.h"
                if target == "kernel_operator.h" and folder.startswith(("adv_api/", "basic_api/", "utils/")):
                    headers[f"include/{path}"] = f'#pragma once\n\n#include "{target}"\n'
                why = f'#error "{path}: {target.removeprefix("refused: ")}"'
                body = why if target.startswith("refused: ") else f'#include "{target}"'
                headers[path] = f"#pragma once\n\n{body}\n"
    return headers


def _runtime_directory() -> Path:
    return _sources() / "src"


def _common_flags(engine: str) -> list[str]:
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
    # The same bits on every machine; UB is read as any type.
    flags += ["-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-pthread"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-march=x86-64-v2")
    return flags + ([] if engine == "fast" else [f"-DTWIN_{engine.upper()}=1"])


def _kernel_flags(
    engine: str, defines: Iterable[str], includes: Iterable[str | Path], debug: bool = False
) -> list[str]:
    given = [define.removeprefix("-D") for define in defines]
    names = {re.split(r"[=(]", define)[0] for define in given}
    preset = [d for d in (*_KERNEL_DEFINES, *_DATA_TYPES) if re.split(r"[=(]", d)[0] not in names]
    flags = [*_common_flags(engine), *(("-O0", "-g") if debug else ("-g1",))]
    flags += ["-Wall", "-Wno-unknown-pragmas", "-Wno-unused"]
    flags += [f"-D{define}" for define in (*preset, *given)]
    twin = ("-isystem", str(include_directory()), "-isystem", str(vendor_headers_directory()))
    return flags + [f"-I{path}" for path in includes] + list(twin)


def _run(command: Sequence[str], source: Path) -> str:
    """Standard output of the command. A failure raises with the compiler's whole output."""
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode == 0:
        return result.stdout
    errors = re.findall(r"^(.*?(?:fatal )?error: .*)$", result.stderr, flags=re.MULTILINE)
    first = errors[0] if errors else f"{command[0]} ended with code {result.returncode}"
    first = _refused_call(result.stderr) or first
    raise TwinBuildError(
        f"{source.name} does not compile: {first}\n{result.stderr.rstrip()}",
        source=str(source),
        command=shlex.join(command),
        output=result.stderr,
    )


def _refused_call(output: str) -> str:
    """The first call that the emulator refuses by name: the kernel's line and the sentence of refused.h."""
    said = re.search(r"static assertion failed.*?: (\w+: the emulator does not model .*)$", output, re.MULTILINE)
    if said is None:
        return ""
    before, after = output[: said.start()], output[said.end() :]
    # g++ names the place of the call before its error, clang++ after it.
    at = re.search(r"^(.+?:\d+):\d+: +required from", before[before.rfind("In instantiation of") :], re.MULTILINE)
    at = at or re.search(r"^(.+?:\d+):\d+: note: in instantiation of", after, re.MULTILINE)
    return f"{at[1]}: {said[1]}" if at else said[1]


def preprocess(source: Path, engine: str, defines: Sequence[str], includes: Sequence[str | Path]) -> str:
    """Return the preprocessed source, headers included, in which `MARK` replaces every `__global__`."""
    flags = [*_kernel_flags(engine, defines, includes), f"-D__global__={MARK}", f"-D{SCAN}"]
    return _run([compiler(), *flags, "-E", "-x", "c++", str(source)], source)


def own_text(preprocessed: str) -> str:
    """Return the lines of a preprocessed source that are not from system headers, such as the emulator's."""
    kept: list[str] = []
    of_system: dict[str, bool] = {}  # by file, from its first mark: macros of system headers mark a file again
    skip = False
    for line in preprocessed.splitlines():
        if line.startswith("# "):
            name, _, flags = line.partition('"')[2].rpartition('"')
            skip = of_system.setdefault(name, "3" in flags.split())
        elif not skip:
            kept.append(line)
    return "\n".join(kept)


@functools.cache
def runtime_digest() -> str:
    """Return a hash of all files from which the emulator's runtime is compiled."""
    digest = hashlib.sha256()
    for folder in (include_directory(), _runtime_directory()):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".h", ".cpp", ".S"):
                digest.update(f"{path.relative_to(folder)}\0".encode())
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _archive(engine: str) -> Path | None:
    """libtwin_*.a of the installation, if it was built from these sources, without sanitizers."""
    library = Path(__file__).resolve().parent / "lib"
    archive = library / f"libtwin_{engine}.a"
    try:
        sound = (library / "SOURCES").read_text() == runtime_digest() and b"__asan_" not in archive.read_bytes()
    except OSError:
        return None
    return archive if sound else None


@functools.cache
def runtime_objects(engine: str) -> tuple[str, ...]:
    """Return the files to link kernels with: objects of src/third_party, and the engine (objects or an archive)."""
    archive = _archive(engine)
    flags = [*_common_flags(engine), f"-I{include_directory()}"]
    key = digest_of(_compiler_id(), *flags, runtime_digest(), "archive" if archive else "objects")
    folder = CACHE.place(f"runtime-{engine}-{key}")
    if not folder.is_dir():
        with said_if_slow(f"the {engine} engine for kernels"):
            fill_folder(folder, lambda scratch: _compile_runtime(flags, scratch, archive is not None))
    return (*(str(path) for path in sorted(folder.glob("*.o"))), *([str(archive)] if archive else []))


def _compile_runtime(flags: list[str], folder: Path, only_third_party: bool) -> None:
    root = _runtime_directory()
    searched = root / "third_party" if only_third_party else root
    sources = [path for path in sorted(searched.rglob("*")) if path.suffix in (".cpp", ".S")]

    def compile_source(source: Path) -> None:
        name = "_".join(source.relative_to(root).with_suffix(".o").parts)
        _run([compiler(), *flags, f"-I{root}", "-c", str(source), "-o", str(folder / name)], source)

    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(compile_source, sources))


# ---- kernel libraries ----


@dataclass(frozen=True)
class Unit:
    """A kernel source, its kernel entries, and the -D flags that this source alone needs."""

    source: Path
    entries: tuple[Entry, ...]
    flags: tuple[str, ...] = ()

    def compiled(self, folder: Path, number: int) -> Path:
        """Return the source, or for templates a new ``folder/number-*.cpp``, which adds the selection by tiling key."""
        templates = [dispatcher(entry) for entry in self.entries if entry.instances]
        if not templates:
            return self.source
        path = folder / f"{number}-{self.source.stem}.cpp"
        path.write_text(f'#include "{self.source.resolve()}"\n{"".join(templates)}')
        return path


def kernel_library(
    sources: Sequence[Path],
    engine: str,
    defines: Sequence[str],
    includes: Sequence[str | Path],
    tiling_keys: Collection[int] | None = None,
    debug: bool = False,
) -> Path:
    """Return the path of one engine's library in the cache, compiled if it is not there. See `build`."""
    texts = [preprocess(source, engine, defines, includes) for source in sources]
    units = [unit_of(source, own_text(text), tiling_keys) for source, text in zip(sources, texts, strict=True)]
    entries = [entry for unit in units for entry in unit.entries]
    known = {instance.key for entry in entries for instance in entry.instances}
    if unknown := sorted(set(tiling_keys or ()) - known):
        raise ArgumentError(
            f"tiling_keys: no template kernel has {unknown[0]}; known: {', '.join(map(str, sorted(known))) or 'none'}",
            argument="tiling_keys",
        )
    if not entries:
        names = ", ".join(source.name for source in sources)
        raise TwinBuildError(
            f'{names}: no kernel entry: a kernel is `extern "C" __global__ __aicore__ void name(GM_ADDR ...)`, or a'
            " __global__ template with ASCENDC_TPL_ARGS_DECL and ASCENDC_TPL_SEL"
        )
    objects = runtime_objects(engine)
    flags = _kernel_flags(engine, defines, includes, debug)
    key = digest_of(_compiler_id(), *flags, *texts, _entry_table(entries), *objects, runtime_digest())
    folder = CACHE.place(f"{sources[0].stem}-{engine}-{key}")
    if not folder.is_dir():
        with said_if_slow(f"{', '.join(source.name for source in sources)} for the {engine} engine"):
            fill_folder(folder, lambda scratch: _compile(units, flags, objects, scratch))
    return CACHE.sound(folder / "kernels.so")


def unit_of(source: Path, text: str, tiling_keys: Collection[int] | None = None) -> Unit:
    """Return the kernels of ``source``, preprocessed in ``text``, and its flags. ``tiling_keys``: see `build`."""
    declarations = find_declarations(text)
    # A template that no tiling key selects is called by other functions of the source.
    entries = [
        bound(entry, declarations, tiling_keys) if entry.template else entry
        for entry in find_entries(text)
        if declarations or not entry.template
    ]
    if "twin_tpl(STRUCT" in text and re.search(r"\bTWIN_TILING_STRUCT_is_not_registered_\w+\s+\w+\s*;", text):
        raise TwinBuildError(
            f"{source.name}: GET_TILING_DATA takes its struct from ASCENDC_TPL_TILING_STRUCT_SEL, and the emulator"
            " compiles all instances together: use GET_TILING_DATA_WITH_STRUCT, which names the struct"
        )
    return Unit(source, tuple(entries), tuple(_context_flags(text)))


def _context_flags(text: str) -> Iterator[str]:
    """Return kernel_operator.h's declarations of the context structs that the source uses and does not define."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)  # braces are counted
    for name in _CONTEXTS:
        use = re.search(rf"(?<![\w:]){name}\b", text)
        struct = rf"\bstruct\s[^;{{}}]*\b{name}\s*(?::[^;{{]*)?{{"
        own = re.search(rf"{struct}|\busing\s+{name}\s*=|\busing\s[\w:]+::{name}\s*;|}}\s*{name}\s*;", text)
        if use is None or re.search(r"\busing\s+namespace\s+[\w:]*HcclContextDef\b", text):
            continue
        if own is None:
            yield f"-DTWIN_LACKS_{name}"
        elif own[0].startswith("struct") and use.start() < own.start() and _outermost(text, own.start()):
            yield f"-DTWIN_AWAITS_{name}"


def _headers_first(output: str, unit: Unit, preprocessing: Sequence[str]) -> list[str]:
    """Flags that include the headers of context structs whose fields a source reads before these headers stand."""
    awaited = [flag.removeprefix("-DTWIN_AWAITS_") for flag in unit.flags if flag.startswith("-DTWIN_AWAITS_")]
    headers = []
    for name in awaited:
        if not re.search(rf"incomplete type \W*(?:struct )?{name}\b", output):
            continue
        text = _run(preprocessing, unit.source)
        struct = re.search(rf"\bstruct\s[^;{{}}]*\b{name}\s*(?::[^;{{]*)?{{", text)
        files = re.findall(r'^# \d+ "([^"<]+)"', text[: struct.start()] if struct else "", re.MULTILINE)
        if files and files[-1] != files[0]:  # the source itself
            headers.append(files[-1])
    return [word for header in ("kernel_operator.h", *headers) for word in ("-include", header)] if headers else []


def _outermost(text: str, place: int) -> bool:
    return text.count("{", 0, place) == text.count("}", 0, place)


def pair_path(libraries: Sequence[Path]) -> Path:
    """Return the path kernels.so in a cache folder for copies of the engines' libraries, side by side."""
    names = [library.parent.name for library in libraries]
    folder = CACHE.place(f"pair-{digest_of(*names)}")
    folder.mkdir(0o700, parents=True, exist_ok=True)
    return folder / "kernels.so"


def _compile(units: Sequence[Unit], flags: list[str], objects: Sequence[str], folder: Path) -> None:
    visible = '-D__global__=__attribute__((visibility("default")))'
    entries = [entry for unit in units for entry in unit.entries]
    table = folder / "entries.cpp"
    table.write_text(_entry_table(entries))
    made = [*units, Unit(table, ())]
    compiled = [str(folder / f"{i}.o") for i in range(len(made))]

    def compile_unit(number: int) -> None:
        unit = made[number]
        source = str(unit.compiled(folder, number))
        command = [compiler(), *flags, *unit.flags, visible, "-x", "c++"]
        try:
            _run([*command, "-c", source, "-o", compiled[number]], unit.source)
        except TwinBuildError as error:
            first = _headers_first(error.output, unit, [*command, "-E", source])
            if not first:
                raise
            _run([*command, *first, "-c", source, "-o", compiled[number]], unit.source)

    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(compile_unit, range(len(made))))
    exports = folder / "exports.map"
    names = "".join(f" {entry.symbol};" for entry in entries if entry.symbol)
    exports.write_text(f"{{ global: twin_*;{names} local: *; }};\n")
    link = [compiler(), "-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,--no-undefined", "-Wl,-z,noexecstack"]
    link += [f"-Wl,--version-script={exports}"]
    _run([*link, "-o", str(folder / "kernels.so"), *compiled, *objects], units[0].source)
    for path in folder.iterdir():
        if path.name != "kernels.so":
            path.unlink()


def _entry_table(entries: Sequence[Entry]) -> str:
    """A function that lists the entries, a line each, as abi.py reads them."""
    body = "\n".join(f'    "{line_of(entry)}\\n"' for entry in entries)
    head = 'extern "C" __attribute__((visibility("default"))) const char* twin_entries();\n'
    return f"{head}const char* twin_entries() {{\n    return\n{body};\n}}\n"


if __name__ == "__main__":  # writes the digest beside the archives that the build makes (CMakeLists.txt)
    Path(sys.argv[1]).write_text(runtime_digest())
