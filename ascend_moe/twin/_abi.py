"""The C ABI of a library of kernels (twin/src/foreign/abi.h), field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

from ..errors import LibraryError

ABI = 1
MAX_ARGUMENTS = 40
TENSOR, WINDOW_DATA, WINDOW_STATE, WORKSPACE = range(4)
LAYOUTS = {"a3": 0, "a2": 1}


class Range(ctypes.Structure):
    _fields_ = (
        ("begin", c_void_p),
        ("bytes", c_uint64),
        ("name", c_char_p),
        ("doorbell", c_void_p),
        ("kind", c_int32),
        ("atomic_blocks", c_int32),
        ("owner", c_int32),
        ("reserved", c_int32),
    )


def range_of(
    address: int,
    size: int,
    name: str,
    *,
    kind: int = WORKSPACE,
    doorbell: int | None = None,
    atomic: bool = False,
    owner: int = -1,
) -> Range:
    """One range of GM. ``owner``: the rank whose window it is."""
    return Range(address, size, name.encode(), doorbell, kind, int(atomic), owner)


class Group(ctypes.Structure):
    _fields_ = (
        ("layout", c_uint32),
        ("world", c_uint32),
        ("window_bytes", c_uint64),
        ("exp_bytes", c_uint64),
        ("workspace_bytes", c_uint64),
        ("windows_in", POINTER(c_uint64)),
        ("windows_out", POINTER(c_uint64)),
        ("windows_exp", POINTER(c_uint64)),
        ("name", c_char_p),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        ("entry", c_void_p),
        ("arguments", POINTER(c_uint64)),
        ("argument_count", c_uint32),
        ("block_dim", c_uint32),
        ("tiling_key", c_uint64),
        ("ranges", POINTER(Range)),
        ("range_count", c_uint32),
        ("reserved", c_uint32),
        ("contexts", c_void_p * 2),
        ("doorbell", c_void_p),
        ("deadline_s", c_double),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("max_steps", c_uint64),
        ("policy", c_uint32),
        ("unordered", c_uint32),
        ("explicit_sync", c_uint32),
        ("pct_depth", c_uint32),
    )


class Outcome(ctypes.Structure):
    _fields_ = (
        ("rank", c_int32),
        ("reserved", c_int32),
        ("steps", c_uint64),
        ("trace_hash", c_uint64),
        ("finding", ctypes.c_char * 64),
        ("text", ctypes.c_char * 4096),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "twin_abi": (c_uint32, ()),
    "twin_engine": (c_char_p, ()),
    "twin_policies": (c_char_p, ()),
    "twin_world_create": (c_void_p, (c_uint32,)),
    "twin_world_destroy": (None, (c_void_p,)),
    "twin_world_run": (c_int, (c_void_p, POINTER(Launch), POINTER(Options), POINTER(Outcome))),
    "twin_world_run_rank": (c_int, (c_void_p, c_uint32, POINTER(Launch), POINTER(Outcome))),
    "twin_context_bytes": (c_uint64, (c_uint32, c_uint32)),
    "twin_context_offset": (c_uint64, ()),
    "twin_context_fill": (None, (POINTER(Group), c_uint32, c_void_p, c_uint64)),
    "twin_entries": (c_char_p, ()),
}


def open_library(path: str) -> ctypes.CDLL:
    """A library that `build` made, typed.

    Raises:
        LibraryError: not loadable, not a library of kernels, or built by another version.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from error
    for name, (restype, argtypes) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LibraryError(
                f"{path} has no function {name}: build it with ascend_moe.twin.build", symbol=name
            ) from None
        function.restype = restype
        function.argtypes = argtypes
    if library.twin_abi() != ABI:
        raise LibraryError(
            f"{path} was built by another version of ascend_moe (ABI {library.twin_abi()}, this is {ABI}):"
            " build it again"
        )
    return library
