"""Kernel sources to libraries."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import ArgumentError
from . import _compiler

SOURCES = (".cpp", ".cc", ".cxx", ".cce", ".asc")
CHECKED_SUFFIX = ".checked.so"

PathLike = str | os.PathLike[str]


def build(
    sources: PathLike | Iterable[PathLike],
    *,
    output: PathLike | None = None,
    defines: Iterable[str] = (),
    includes: Iterable[PathLike] = (),
    engine: str = "fast",
) -> Path:
    """Compiles AscendC kernels for the twin; returns the path that `load` opens.

    Args:
        sources: one kernel source or several, compiled by themselves and linked together.
        output: ``name.so``; the checked engine's library is ``name.checked.so`` beside it. None: the
            libraries stay in the user's cache, by the hash of everything they were compiled from.
        defines: as after ``-D``: ``"DTYPE_X=half"``.
        includes: as after ``-I``.
        engine: "fast", "checked" or "both".

    Raises:
        TwinBuildError: the compiler refuses; the message has what it said.
        ArgumentError: engine or a source is none.
    """
    paths = source_paths(sources)
    engines = engines_of(engine)
    made = {
        name: _compiler.kernel_library(paths, name, tuple(defines), tuple(map(Path, includes)))
        for name in engines
    }
    if output is None and len(engines) == 1:
        return made[engines[0]]
    target = _compiler.pair_path(tuple(made.values())) if output is None else Path(output)
    if target.suffix != ".so":
        raise ArgumentError(f"output is a file name.so, not {target}", argument="output")
    for name, library in made.items():
        _install(library, engine_path(target, name))
    return engine_path(target, engines[0])


def engines_of(engine: str) -> tuple[str, ...]:
    if engine == "both":
        return _compiler.ENGINES
    if engine not in _compiler.ENGINES:
        raise ArgumentError(f"engine is fast, checked or both, not {engine!r}", argument="engine")
    return (engine,)


def source_paths(sources: PathLike | Iterable[PathLike]) -> tuple[Path, ...]:
    given: Sequence[PathLike] = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not given:
        raise ArgumentError("sources is empty: name a kernel source", argument="sources")
    paths = tuple(Path(path) for path in given)
    for path in paths:
        if not path.is_file():
            raise ArgumentError(f"there is no source {path}", argument="sources")
    return paths


def engine_path(library: Path, engine: str) -> Path:
    """Of one engine's library, given any of them."""
    stem = library.name.removesuffix(CHECKED_SUFFIX).removesuffix(".so")
    return library.with_name(stem + (CHECKED_SUFFIX if engine == "checked" else ".so"))


def _install(library: Path, target: Path) -> None:
    """Copies at once: whoever has the old library open keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        shutil.copyfile(library, name)
        os.chmod(name, 0o755)
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
