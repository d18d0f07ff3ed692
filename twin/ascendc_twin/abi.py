"""The C ABI of a kernel library (twin/src/third_party/launcher.cpp), and `Engine`, which opens such a library."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .entries import Entry, entry_of
from .errors import ArgumentError, LibraryError, need
from .timeline import from_native
from .timing import Timing, links_of, path_of

ABI = 5
MAX_ARGUMENTS = 40
_SHOWN_KEYS = 32
TENSOR, WINDOW_DATA, WINDOW_STATE, WORKSPACE = range(4)
REACH_ALL, REACH_MEMORY, REACH_RDMA = range(3)  # loads and stores, items of BatchWrite, or both
LAYOUTS = {"a3": 0, "a2": 1}
LINKS = {"stores": REACH_MEMORY, "rdma": REACH_RDMA}


class Range(ctypes.Structure):
    """A range of global memory (GM) that a kernel may access: TwinRange in C++."""

    _fields_ = (
        ("begin", c_void_p),
        ("bytes", c_uint64),
        ("name", c_char_p),
        ("doorbell", c_void_p),
        *((name, c_int32) for name in ("kind", "atomic_blocks", "owner", "data", "reach", "reserved")),
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
    reach: int = REACH_ALL,
) -> Range:
    """Return ``size`` bytes of global memory at ``address`` that a kernel may access; findings call them ``name``.

    ``kind``: TENSOR, WINDOW_DATA, ... ``doorbell``: address of a uint32 that each store increments, to wake the owner.
    ``atomic``: 32-byte blocks are stored and read whole. ``owner``: the rank whose window it is; -1: no window.
    ``reach``: what may access it: loads and stores (REACH_MEMORY), BatchWrite (REACH_RDMA) or both (REACH_ALL).
    """
    return Range(address, size, name.encode(), doorbell, kind, int(atomic), owner, reach=reach)


class Group(ctypes.Structure):
    """Addresses and sizes of the windows of a group of ranks, for `twin_context_fill`: GroupWindows in C++."""

    _fields_ = (
        *((name, c_uint32) for name in ("layout", "world")),
        *((name, c_uint64) for name in ("peer_table", "window_bytes", "exp_bytes", "workspace_bytes")),
        *((name, POINTER(c_uint64)) for name in ("windows_in", "windows_out", "windows_exp")),
        ("name", c_char_p),
        ("multi_server", c_uint32),
    )


class Launch(ctypes.Structure):
    """One rank's launch of a kernel: TwinLaunch in C++."""

    _fields_ = (
        ("entry", c_void_p),
        ("arguments", POINTER(c_uint64)),
        ("argument_count", c_uint32),
        ("block_dim", c_uint32),
        ("tiling_key", c_uint64),
        ("name", c_char_p),
        ("ranges", POINTER(Range)),
        ("range_count", c_uint32),
        ("warn", c_uint32),
        ("contexts", c_void_p * 2),
        ("doorbell", c_void_p),
        ("deadline_s", c_double),
    )


class Options(ctypes.Structure):
    """Options of a run: the schedule of the checked engine; costs, time limit and events of the timed one."""

    _fields_ = (
        *((name, c_uint64) for name in ("seed", "max_steps")),
        *((name, c_uint32) for name in ("policy", "unordered", "explicit_sync", "pct_depth")),
        ("costs", POINTER(c_double)),
        ("limit_ns", c_double),
        ("events", c_uint64),
    )


class TwinOutcome(ctypes.Structure):
    """The result of a run: counts, times and warnings; after a failure also the rank, the finding and its text."""

    _fields_ = (
        ("rank", c_int32),
        ("reserved", c_int32),
        ("steps", c_uint64),
        ("trace_hash", c_uint64),
        ("total_ns", c_double),
        ("vector_ns", c_double),
        ("sync_alls", c_uint64),
        ("events", c_void_p),
        ("event_count", c_uint64),
        ("dropped", c_uint64),
        ("finding", ctypes.c_char * 64),
        ("text", ctypes.c_char * 4096),
        ("suspect", ctypes.c_char * 1024),
        ("warnings", ctypes.c_char * 8192),
    )


# Function name -> (result type, argument types).
_SIGNATURES: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "twin_abi": (c_uint32, ()),
    "twin_engine": (c_char_p, ()),
    "twin_policies": (c_char_p, ()),
    "twin_cost_names": (c_char_p, ()),
    "twin_world_create": (c_void_p, (c_uint32,)),
    "twin_world_destroy": (None, (c_void_p,)),
    "twin_world_run": (c_int, (c_void_p, POINTER(Launch), POINTER(Options), POINTER(TwinOutcome))),
    "twin_world_run_rank": (c_int, (c_void_p, c_uint32, POINTER(Launch), POINTER(TwinOutcome))),
    "twin_world_times": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "twin_context_bytes": (c_uint64, (c_uint32, c_uint32)),
    "twin_context_fill": (None, (POINTER(Group), c_uint32, c_void_p, c_uint64)),
    "twin_entries": (c_char_p, ()),
}


def open_kernels(path: str) -> ctypes.CDLL:
    """Open a library that `build` of this version made, and declare its functions' types; or raise LibraryError."""
    try:
        library = ctypes.CDLL(os.path.abspath(path))  # the loader would search elsewhere for a name without a folder
    except OSError as error:
        fix = "build it with ascendc_twin.build"
        if "static TLS" in str(error):  # of 512 bytes each library takes 8, for the quickest access to its core
            fix = "for over about 64 kernels start Python with GLIBC_TUNABLES=glibc.rtld.optional_static_tls=65536"
        raise LibraryError(f"{path} cannot be loaded ({error}): {fix}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LibraryError(f"{path} has no function {name}: build it with ascendc_twin.build") from None
        function.restype, function.argtypes = result, list(arguments)
    if library.twin_abi() != ABI:
        raise LibraryError(
            f"{path} was built by another version of ascendc_twin (ABI {library.twin_abi()}, this is {ABI}):"
            " build it again with ascendc_twin.build"
        )
    return library


class Engine:
    """An opened kernel library of one engine: its kernel entries, the options of its runs, and its native ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = open_kernels(str(path))
        self.mode = str(self.library.twin_engine().decode())
        self.policies: tuple[str, ...] = tuple(self.library.twin_policies().decode().split(","))
        self.cost_names: tuple[str, ...] = tuple(self.library.twin_cost_names().decode().split())
        lines = self.library.twin_entries().decode().splitlines()
        self.entries = {entry.name: entry for entry in map(entry_of, lines)}
        self._worlds: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def entry(self, name: str) -> Entry:
        """Return the kernel entry of this name, or raise ArgumentError if there is none."""
        need(name in self.entries, f"{self.path.name} has no kernel {name!r}; it has {', '.join(self.entries)}", "name")
        return self.entries[name]

    def check_key(self, name: str, key: int) -> None:
        """Raise ArgumentError if ``name`` is a template kernel and ``key`` selects no instance that can run."""
        instances = self.entry(name).instances
        found = next((instance for instance in instances if instance.key == key), None)
        if not instances or (found is not None and not found.refused):
            return
        if found is not None:
            raise ArgumentError(f"{name}: tiling_key {found}: use one of tiling_keys({name!r})", argument="tiling_key")
        shown = "; ".join(map(str, instances[:_SHOWN_KEYS]))
        more = f"; and {len(instances) - _SHOWN_KEYS} more: tiling_keys({name!r})" * (len(instances) > _SHOWN_KEYS)
        raise ArgumentError(f"{name}: tiling_key {key} is none of its keys: {shown}{more}", argument="tiling_key")

    def address(self, name: str) -> int:
        """Return the address of the function of kernel ``name``; raise ArgumentError if it is not exported."""
        try:
            function = getattr(self.library, self.entry(name).symbol)
        except AttributeError:
            raise ArgumentError(f'the entry {name} has no C name: declare it extern "C"', argument="name") from None
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def world(self, size: int, group: int) -> int:
        """Return the handle of ``size`` native ranks, created on first use. Each ``group`` has its own."""
        with self._lock:
            if (size, group) not in self._worlds:
                handle = self.library.twin_world_create(size)
                if not handle:
                    raise MemoryError(f"no memory for the cores of {size} ranks: launch fewer ranks")
                self._worlds[size, group] = handle
                weakref.finalize(self, self.library.twin_world_destroy, handle)
            return self._worlds[size, group]

    def schedule(self, seed: int, policy: str | None, *, unordered: bool, auto_sync: bool, max_steps: int) -> Options:
        """Return options with a schedule, which only the checked engine uses. ``policy``: see `Kernels.launch`."""
        name = policy or ("late" if seed == 0 else "random")
        allowed = [policy for policy in self.policies if policy not in ("replay", "exhaustive")]
        need(name in allowed, f"policy is one of {', '.join(allowed)}, not {name!r}", "policy")
        return Options(seed, max_steps, self.policies.index(name), int(unordered), int(not auto_sync), 3)

    def timed(self, costs: Mapping[str, float], limit_s: float, events: int) -> Options:
        """Return options for the timed engine: costs by name, limit of modelled time, number of events to record."""
        options = Options(limit_ns=limit_s * 1e9, events=events)
        options.costs = (c_double * len(self.cost_names))(*(costs[name] for name in self.cost_names))
        return options

    def times(self, world: int, native: TwinOutcome) -> Timing:
        """Return the predicted times of the last timed run of ``world``, whose outcome is ``native``."""
        size = self.library.twin_world_times(world, None, 0)
        text = ctypes.create_string_buffer(size)
        self.library.twin_world_times(world, text, size)
        path, _, links = text.value.decode().partition("\n\n")
        return Timing(
            native.total_ns / 1e3,
            path_of(path.splitlines()),
            *links_of(links.splitlines(), native.total_ns),
            native.vector_ns / 1e3,
            from_native(native.events or 0, native.event_count),
            int(native.steps),
            int(native.sync_alls),
            int(native.dropped),
        )


def policy_in_turn(done: int) -> str:
    """Return the policy of the schedule after ``done`` others: "late", then "random", "lazy" and "pct" in turn."""
    return "late" if done == 0 else ("random", "lazy", "pct")[(done - 1) % 3]
