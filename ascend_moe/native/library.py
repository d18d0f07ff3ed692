"""Finding and loading native libraries with plain C interfaces through ctypes.

`open_library` loads and types any of them; `lib` is libascend_moe.so, the library of the CPU ops.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, TypeAlias

from .. import settings
from ..errors import LibraryError
from .build import PARTS, built_part, part_if_built, source_hash

LIBRARY_NAME = "libascend_moe.so"
# This package's operators in CANN, and the functions of their library that torch_npu calls.
OPERATORS = ("AscendMoeDistributeDispatch", "AscendMoeDistributeCombine")
OPERATOR_SYMBOLS = tuple(f"aclnn{op}GetWorkspaceSize".encode() for op in OPERATORS)
# One library per engine, from the same sources. "fast" runs in program order, "checked" detects races, "timed"
# predicts times and runs no ops (ascend_moe/predict/__init__.py).
LIBRARY_FILES = {"fast": LIBRARY_NAME, "checked": "libascend_moe_checked.so", "timed": "libascend_moe_timed.so"}

# Function name -> (result type, argument types).
Signatures: TypeAlias = Mapping[str, tuple[Any, Sequence[Any]]]

# Every function of the ops' library that Python calls.
SIGNATURES: Signatures = {
    "am_source_hash": (c_char_p, ()),
    "am_engine_is_checked": (c_int, ()),
    "am_window_total_bytes": (c_uint64, (c_uint64, c_uint64)),
    "am_window_alloc": (c_void_p, (c_uint64,)),
    "am_window_map": (c_void_p, (c_int, c_uint64)),
    "am_window_look": (c_void_p, (c_int, c_uint64, c_uint64)),
    "am_window_label": (c_int, (c_void_p, POINTER(c_uint64))),
    "am_group_text": (c_uint64, (POINTER(c_void_p), c_int, c_char_p, c_uint64)),
    "am_window_unmap": (None, (c_void_p, c_uint64)),
    "am_window_ballot": (c_uint32, (c_void_p, c_uint32, c_uint32, c_uint32)),
    "am_comm_create": (c_void_p, (c_int, c_int, POINTER(c_void_p), c_uint64, c_uint64, POINTER(c_int))),
    "am_comm_use_context": (c_int, (c_void_p, c_int)),
    "am_comm_use_servers": (c_int, (c_void_p, c_int, c_int)),
    "am_comm_destroy": (None, (c_void_p,)),
    "am_comm_mark_lost": (None, (c_void_p, c_int)),
    "am_comm_algorithm_run": (c_uint32, (c_void_p,)),
    "am_comm_traffic": (None, (c_void_p, POINTER(c_uint64))),
    "am_comm_in_op": (c_int, (c_void_p, c_int)),
    "am_comm_epoch": (c_uint32, (c_void_p,)),
    "am_comm_set_epoch": (None, (c_void_p, c_uint32)),
    "am_comm_timestamps": (None, (c_void_p, c_int, POINTER(c_uint32))),
    "am_timestamp_words": (c_uint64, ()),
    "am_timestamps_text": (c_uint64, (POINTER(c_uint32), c_char_p, c_uint64)),
    "am_comm_registered": (c_void_p, (c_void_p,)),
    "am_registered_take": (c_int, (c_void_p, c_uint64, POINTER(c_uint64))),
    "am_registered_release": (c_int, (c_void_p, c_uint32)),
    "am_registered_close": (c_int, (c_void_p,)),
    "am_registered_open": (c_void_p, (c_int, c_uint64, c_uint64)),
    "am_window_layout": (None, (c_int, POINTER(c_uint64))),
    "am_tensor_names": (c_char_p, ()),
    "am_attribute_names": (c_char_p, ()),
    "am_type_code": (c_int, (c_char_p,)),
    "am_comm_algorithm": (c_int, (c_char_p,)),
    "am_super_pod_rule": (c_char_p, ()),
    "am_cann_state_since": (c_char_p, ()),
    "am_spec_bytes": (c_uint64, ()),
    "am_check_bytes": (c_uint64, ()),
    "am_error_record_words": (c_uint64, ()),
    "am_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_plan_destroy": (None, (c_void_p,)),
    "am_call_output": (c_int, (c_void_p, c_int, POINTER(c_int64))),
    "am_plan_info": (c_uint64, (c_void_p, POINTER(c_uint64), c_uint64)),
    "am_plan_tiling": (c_uint64, (c_void_p, c_void_p, c_uint64)),
    "am_need_limits": (c_uint64, (c_char_p, c_uint64)),
    "am_need_window": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_need_tiling": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_need_ub": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_need_cann": (c_uint64, (POINTER(c_int64), c_char_p, c_uint64)),
    "am_card_rank": (c_uint64, (c_void_p, c_uint64, *[POINTER(c_uint64)] * 4)),
    "am_card_rank_words": (c_uint64, ()),
    "am_card_context": (c_uint64, (c_int, c_int, *[c_uint64] * 4, c_void_p)),
    "am_card_ub_bytes": (c_uint32, ()),
    "am_card_launch": (
        c_int,
        (c_void_p, c_void_p, c_uint32, c_uint32, c_uint64, POINTER(c_uint64), c_uint64, c_char_p, c_uint64),
    ),
    "am_run": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_char_p, c_uint64)),
    "am_bench_copy_rows": (c_int, (c_void_p, c_void_p, c_uint64, c_uint64, c_int)),
    "am_bench_weighted_sum": (c_int, (c_void_p, c_void_p, c_void_p, c_uint64, c_uint64, c_uint64, c_int)),
    "am_bench_exchange": (c_int, (c_void_p, c_void_p, c_uint64, c_uint64, c_int, c_void_p, c_int, c_int)),
    "am_bench_flag_latency": (c_double, (c_void_p, c_int)),
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
    # An editable install has two folders: Python files in the source tree, libraries in site-packages.
    package = importlib.util.find_spec("ascend_moe")
    assert package is not None
    entries = [Path(entry) for entry in package.submodule_search_locations or ()]
    if any((entry / "lib" / LIBRARY_NAME).is_file() for entry in entries):
        return entries
    return entries + _installed_copies(tuple(entries))


@functools.cache
def _installed_copies(entries: tuple[Path, ...]) -> list[Path]:
    """Return installations of this package that were built from the same native sources.

    `python -m ascend_moe` in a checkout imports the checkout, which has no libraries; `pip install .` has built them.
    """
    folders = [Path(folder, "ascend_moe") for folder in sys.path]
    copies = [copy for copy in folders if (copy / "lib" / LIBRARY_NAME).is_file() and copy not in entries]
    roots = [entry.parent for entry in entries]
    same: list[Path] = []
    with contextlib.suppress(OSError):  # no sources to compare
        ours = {source_hash(root) for root in roots}
        same = [copy for copy in copies if source_hash(copy / "_src") in ours]
    return same


def native_source_root() -> Path:
    """Return the folder of op_kernel/ and CMakeLists.txt, a source tree or _src/ of a wheel, or raise LibraryError."""
    entries = _package_paths()
    candidates = [entry.parent for entry in entries] + [entry / "_src" for entry in entries]
    for root in candidates:
        if (root / "CMakeLists.txt").is_file() and (root / "op_kernel").is_dir():
            return root
    looked = ", ".join(str(root) for root in candidates)
    raise LibraryError(f"native sources of ascend_moe not found in {looked}: install the package again")


def build_command() -> str:
    """Return a shell command that builds this installation's native libraries and installs them into it."""
    root = native_source_root()
    if (root / "Makefile").is_file() and Path(sys.prefix, "bin", "python").exists():  # a checkout
        return f"make -C {shlex.quote(str(root))} lib VENV={shlex.quote(sys.prefix)}"
    paths = (root, root / "build" / "dev", _package_paths()[0].parent, sys.executable)
    source, target, prefix, python = (shlex.quote(str(path)) for path in paths)
    return (
        f"cmake -S {source} -B {target} -DPython3_EXECUTABLE={python} && cmake --build {target} --parallel 2"
        f" && cmake --install {target} --prefix {prefix} --component lib"
    )


def engine_name() -> str:
    """Return the engine that runs the CPU ops: ASCEND_MOE_ENGINE, default "fast"."""
    return settings.ENGINE.get()


def library_path(engine: str | None = None) -> Path:
    """Return the path of the library of ``engine`` ("fast", "checked", "timed"); None: of the one that runs CPU ops.

    $ASCEND_MOE_LIBRARY is the answer for None; for an ``engine``, its library in the folder of that file, if there.
    Otherwise libraries are in lib/ of ``ascend_moe.__path__``. An engine that the installation left out is built into
    the cache, which takes a minute.

    Raises:
        LibraryError: that variable names no file, or there is no library and none can be built; the message says why.
    """
    override = settings.LIBRARY.get()
    if override and engine is not None:  # a build makes the engines' libraries side by side
        beside = override.parent / LIBRARY_FILES[engine]
        if beside.is_file():
            return beside
    elif override:
        return override
    name = engine or engine_name()
    return installed_path(LIBRARY_FILES[name]) or _first_use(name)


def installed_path(name: str) -> Path | None:
    """Return the path of the file or folder ``name`` in the installation's lib/, or None if it is not there."""
    candidates = [entry / "lib" / name for entry in _package_paths()]
    return next((path for path in candidates if path.exists()), None)


def _first_use(part: str) -> Path:
    """Return a part that the installation left out, from the cache."""
    fast = installed_path(LIBRARY_NAME)
    if fast is not None and part in PARTS:
        return built_part(part, native_source_root(), fast)
    file = LIBRARY_NAME if part == "vnpu" else LIBRARY_FILES[part]
    looked = ", ".join(str(entry / "lib" / file) for entry in _package_paths())
    raise LibraryError(f"native library not found at {looked}: build it with {build_command()}")


def vnpu_folder() -> Path:
    """Return the folder of the virtual NPU's libraries: vnpu/ beside the fast engine's, else built in the cache."""
    return _vnpu_beside() or _first_use("vnpu")


def vnpu_folder_if_built() -> Path | None:
    """Like `vnpu_folder`, but return None instead of building it."""
    fast = installed_path(LIBRARY_NAME)
    try:
        return _vnpu_beside() or (part_if_built("vnpu", native_source_root(), fast) if fast else None)
    except LibraryError:  # there is no library at all
        return None


def _vnpu_beside() -> Path | None:
    folder = library_path("fast").parent / "vnpu"
    return folder if folder.is_dir() else None


def operator_packages() -> list[Path]:
    """Return the existing folders of CANN's operator packages, in its order: ASCEND_CUSTOM_OPP_PATH, then vendors/."""
    folders = [Path(folder) for folder in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if folder]
    opp = os.environ.get("ASCEND_OPP_PATH", "")
    if opp:
        folders += sorted((Path(opp) / "vendors").glob("*"))
    return [folder for folder in folders if folder.is_dir()]


def operator_libraries() -> list[Path]:
    """Return every libcust_opapi.so that torch_npu searches, in its order."""
    paths = [package / "op_api" / "lib" / "libcust_opapi.so" for package in operator_packages()]
    return [path for path in paths if path.is_file()]


def own_operator_library() -> Path | None:
    """Return the first of `operator_libraries` that contains this package's dispatch and combine, or None."""
    found = (path for path in operator_libraries() if all(name in path.read_bytes() for name in OPERATOR_SYMBOLS))
    return next(found, None)


def open_library(path: str | Path, signatures: Signatures) -> ctypes.CDLL:
    """Load a library and type its functions.

    All functions are looked up here: a library built from other sources raises LibraryError now, not during a call.

    Args:
        path: a file, or a name for the loader.
        signatures: functions by name: (result type, argument types).
    """
    named = [each.name for each in (settings.LIBRARY, settings.CHECKED_LIBRARY) if each.text() == str(path)]
    which, fix = (f"{named[0]}={path}", "unset it or rebuild it with") if named else (path, "rebuild it with")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{which} cannot be loaded ({error}): {fix} {build_command()}") from error
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            text = f"{which} lacks the function {name}, it was built from other sources: {fix} {build_command()}"
            raise LibraryError(text, symbol=name) from None
        function.restype, function.argtypes = result, list(arguments)
    return library


def text_of(function: Any, *arguments: Any) -> str:
    """Return the text that ``function(*arguments, buffer, bytes)`` writes; for buffer None it must return the size."""
    text = ctypes.create_string_buffer(int(function(*arguments, None, 0)))
    function(*arguments, text, len(text))
    return text.value.decode()


@functools.cache
def lib() -> ctypes.CDLL:
    """Return the library of the CPU ops with the functions ``SIGNATURES``, loaded once, or raise LibraryError."""
    for setting in (settings.ISA, settings.FORWARD, settings.SEED):  # the C++ code takes invalid values for the default
        setting.get()
    return open_library(library_path(), SIGNATURES)
