"""Finds and opens libascend_moe.so, the native library behind the CPU ops: plain C, opened by ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import shlex
import sys
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ..errors import LibraryError
from .build import PARTS, built_part

LIBRARY_NAME = "libascend_moe.so"
# One library an engine, from the same sources: "fast" runs in program order, "checked" looks for races.
ENGINES = {"fast": LIBRARY_NAME, "checked": "libascend_moe_checked.so"}
# Not for ops: it runs programs of all ranks of a world (ascend_moe/timed/__init__.py).
_OTHERS = {"timed": "libascend_moe_timed.so"}

# name -> (result type, argument types). Everything Python calls is listed here and looked up when the
# library is opened, so that a library of other sources is found out at once and not in the middle of a call.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "am_source_hash": (c_char_p, ()),
    "am_window_total_bytes": (c_uint64, (c_uint64, c_uint64)),
    "am_window_alloc": (c_void_p, (c_uint64,)),
    "am_window_map": (c_void_p, (c_int, c_uint64)),
    "am_window_unmap": (None, (c_void_p, c_uint64)),
    "am_comm_create": (
        c_void_p,
        (c_int, c_int, POINTER(c_void_p), c_uint64, c_uint64, POINTER(c_int)),
    ),
    "am_comm_use_context": (c_int, (c_void_p, c_int)),
    "am_comm_use_servers": (c_int, (c_void_p, c_int)),
    "am_comm_destroy": (None, (c_void_p,)),
    "am_comm_mark_lost": (None, (c_void_p, c_int)),
    "am_comm_algorithm_run": (c_uint32, (c_void_p,)),
    "am_comm_traffic": (None, (c_void_p, POINTER(c_uint64))),
    "am_comm_set_epoch": (None, (c_void_p, c_uint32)),
    "am_comm_lent": (c_void_p, (c_void_p,)),
    "am_lent_take": (c_int, (c_void_p, c_uint64, POINTER(c_uint64))),
    "am_lent_release": (c_int, (c_void_p, c_uint32)),
    "am_lent_close": (c_int, (c_void_p,)),
    "am_window_layout": (None, (c_int, POINTER(c_uint64))),
    "am_tensor_names": (c_char_p, ()),
    "am_attribute_names": (c_char_p, ()),
    "am_type_code": (c_int, (c_char_p,)),
    "am_comm_algorithm": (c_int, (c_char_p,)),
    "am_spec_bytes": (c_uint64, ()),
    "am_check_bytes": (c_uint64, ()),
    "am_error_record_words": (c_uint64, ()),
    "am_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_plan_info": (c_uint64, (c_void_p, POINTER(c_uint64), c_uint64)),
    "am_plan_tiling": (c_uint64, (c_void_p, c_void_p, c_uint64)),
    "am_plan_destroy": (None, (c_void_p,)),
    "am_call_output": (c_int, (c_void_p, c_int, POINTER(c_int64))),
    "am_run": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_char_p, c_uint64)),
    "am_bench_copy_rows": (c_int, (c_void_p, c_void_p, c_uint64, c_uint64, c_int)),
    "am_bench_weighted_sum": (
        c_int,
        (c_void_p, c_void_p, c_void_p, c_uint64, c_uint64, c_uint64, c_int),
    ),
    "am_trace_start": (c_int, (c_uint64,)),
    "am_trace_stop": (None, ()),
    "am_trace_events": (c_uint64, (c_void_p, c_uint64, POINTER(c_uint64))),
    "am_trace_event_bytes": (c_uint64, ()),
    "am_error_is_fatal": (c_int, (c_int,)),
    "am_error_name": (c_char_p, (c_int,)),
    "am_error_message": (None, (c_void_p, c_char_p, c_uint64)),
    "am_error_fields": (None, (c_void_p, c_char_p, c_uint64)),
}


def _package_paths() -> list[Path]:
    # An editable install has two entries: Python files in the source tree, the library in site-packages.
    package = importlib.import_module("ascend_moe")
    return [Path(entry) for entry in package.__path__]


def native_source_root() -> Path:
    """Folder of op_kernel/, op_host/, csrc/, twin/, CMakeLists.txt: the source tree, or _src of a wheel.

    Raises:
        LibraryError: neither is there.
    """
    entries = _package_paths()
    candidates = [entry.parent for entry in entries] + [entry / "_src" for entry in entries]
    for root in candidates:
        if (root / "CMakeLists.txt").is_file() and (root / "op_kernel").is_dir():
            return root
    looked = ", ".join(str(root) for root in candidates)
    raise LibraryError(f"native sources of ascend_moe not found in {looked}: install the package again")


def build_command() -> str:
    """The shell command that builds the library of this installation and puts it where it is looked for."""
    root = native_source_root()
    paths = (root, root / "build" / "dev", _package_paths()[0].parent, sys.executable)
    source, target, prefix, python = (shlex.quote(str(path)) for path in paths)
    return (
        f"cmake -S {source} -B {target} -DPython3_EXECUTABLE={python} && cmake --build {target} --parallel 2"
        f" && cmake --install {target} --prefix {prefix} --component lib"
    )


def engine_name() -> str:
    """The engine that runs the CPU ops: ASCEND_MOE_ENGINE, "fast" when it is not set.

    Raises:
        LibraryError: no engine has that name.
    """
    name = os.environ.get("ASCEND_MOE_ENGINE") or "fast"
    if name not in ENGINES:
        raise LibraryError(f"ASCEND_MOE_ENGINE={name} is no engine: set it to one of {', '.join(ENGINES)}")
    return name


def library_path(engine: str | None = None) -> Path:
    """Path of an engine's library: $ASCEND_MOE_LIBRARY for the ops', else in lib/ of ``ascend_moe.__path__``.

    An engine that the installation left out is built into the cache, which takes a minute.

    Raises:
        LibraryError: no such file and no way to build it; the message has the command that builds it.
    """
    override = os.environ.get("ASCEND_MOE_LIBRARY")
    if override and engine is not None:  # the other engine's library is built beside it
        beside = Path(override).parent / (ENGINES | _OTHERS)[engine]
        if beside.is_file():
            return beside
    elif override:
        path = Path(override)
        if not path.is_file():
            raise LibraryError(
                f"ASCEND_MOE_LIBRARY={override} is not a file: unset it or name a {LIBRARY_NAME}"
            )
        return path
    name = engine or engine_name()
    return installed_path((ENGINES | _OTHERS)[name]) or _first_use(name)


def installed_path(name: str) -> Path | None:
    """A file or folder of the installation's lib/; None where the installation left it out."""
    candidates = [entry / "lib" / name for entry in _package_paths()]
    return next((path for path in candidates if path.exists()), None)


def _first_use(part: str) -> Path:
    """A part of the native libraries that the installation left out, from the cache."""
    fast = installed_path(LIBRARY_NAME)
    if fast is not None and part in PARTS:
        return built_part(part, native_source_root(), fast)
    file = LIBRARY_NAME if part == "vnpu" else (ENGINES | _OTHERS)[part]
    looked = ", ".join(str(entry / "lib" / file) for entry in _package_paths())
    raise LibraryError(f"native library not found at {looked}: build it with\n  {build_command()}")


def vnpu_folder() -> Path:
    """Folder of the virtual NPU's libraries: vnpu/ beside the fast engine's, else in the cache.

    Raises:
        LibraryError: as ``library_path``.
    """
    beside = library_path("fast").parent / "vnpu"
    return beside if beside.is_dir() else _first_use("vnpu")


@functools.cache
def lib() -> ctypes.CDLL:
    """The opened library, every function of ``SIGNATURES`` typed. Opened once per process.

    Raises:
        LibraryError: not found, not loadable, or built from other sources (a function is missing).
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(
            f"{path} cannot be loaded ({error}): rebuild it with\n  {build_command()}"
        ) from error
    for name, (restype, argtypes) in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LibraryError(
                f"{path} has no function {name}, it was built from other sources:"
                f" rebuild it with\n  {build_command()}",
                symbol=name,
            ) from None
        function.restype = restype
        function.argtypes = argtypes
    return library
