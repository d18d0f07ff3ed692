"""The checked library's explore mode through its C ABI."""

from __future__ import annotations

import ctypes
import functools
import json
from ctypes import c_char, c_char_p, c_int, c_int32, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_moe import settings
from ascend_moe.comm.communicator import MIB
from ascend_moe.native import library
from ascend_moe.ops import calls

from .calls import LENT_MIB, WINDOW_MIB, PlannedProgram
from .program import Program

POLICIES = {"late": 0, "random": 1, "lazy": 2, "pct": 3, "replay": 4, "exhaustive": 5, "mixed": 100}


_ARRAYS = ("inputs", "outputs", "expected", "expected_bytes", "output_bytes")


class _Step(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("compare", c_int32),
        ("plan", c_void_p),
        *((name, c_void_p) for name in _ARRAYS),
        ("outputs_count", c_uint32),
        ("accepted", c_uint32),
        ("lent", c_uint32),
        ("reserved", c_uint32),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, c_uint64) for name in ("seed", "schedules", "max_steps")),
        *((name, c_uint32) for name in ("policy", "store_order", "explicit_sync", "hang_is_finding")),
        *((name, c_uint32) for name in ("pct_depth", "epoch", "vary_epoch", "trace")),
        ("choices", c_void_p),
        ("choice_count", c_uint64),
        *((name, c_int32) for name in ("kill_rank", "stall_rank", "slow_rank", "slow_core", "slow_link")),
        *((name, c_uint32) for name in ("corrupt_word", "corrupt_xor", "corrupt_how")),
        *((name, c_uint64) for name in ("kill_step", "stall_step", "corrupt_block")),
    ]


class RunResult(ctypes.Structure):
    """What came of one call of ``World.run``: totals over its schedules, and the first finding."""

    _fields_ = [
        *((name, c_uint64) for name in ("schedules", "steps", "instructions", "switches", "status_blocks")),
        *((name, c_uint64) for name in ("last_hash", "choices", "failed_seed")),
        ("failed", c_uint32),
        ("time_passed", c_uint32),
        ("kind", c_char * 64),
        ("message", c_char * 1024),
    ]


_SIGNATURES = {
    "am_engine_is_checked": (c_int, ()),
    "am_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_plan_destroy": (None, (c_void_p,)),
    "am_error_message": (None, (c_void_p, c_char_p, c_uint64)),
    "am_error_name": (c_char_p, (c_int,)),
    "am_explore_create": (c_void_p, (c_int, c_uint64, c_uint64)),
    "am_explore_destroy": (None, (c_void_p,)),
    "am_explore_servers": (c_int, (c_void_p, c_int)),
    "am_explore_program": (None, (c_void_p, c_void_p, c_int)),
    "am_explore_run": (None, (c_void_p, c_void_p, c_void_p)),
    "am_explore_distinct": (c_uint64, (c_void_p,)),
    "am_explore_forget": (None, (c_void_p,)),
    "am_explore_choices": (c_uint64, (c_void_p, c_int, c_void_p, c_uint64)),
    "am_explore_polls": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_explore_trace": (c_int, (c_void_p, c_char_p, c_char_p)),
    "am_explore_code": (c_int, (c_void_p, c_int, c_void_p)),
}


@functools.cache
def _open(path: str) -> ctypes.CDLL:
    return library.open_library(path, _SIGNATURES)


def checked_library(path: str | Path | None = None) -> ctypes.CDLL:
    """The library of the checked engine: ``path``, $ASCEND_MOE_CHECKED_LIBRARY, or the installed one."""
    chosen = path or settings.CHECKED_LIBRARY.get() or library.library_path("checked")
    return _open(str(chosen))


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose in every schedule. Ranks of -1: nothing of the kind.

    A killed rank stops for ever at a step of the schedule, a stalled one until nobody else can move; a slow
    rank, core or link is chosen a hundred times less often. Status block number ``corrupt_block`` (from 1, as
    they land) has a word xored, keeps its old contents ("stale"), or lands by half ("torn").
    """

    kill_rank: int = -1
    kill_step: int = 0
    stall_rank: int = -1
    stall_step: int = 0
    slow_rank: int = -1
    slow_core: int = -1
    slow_link: int = -1
    corrupt_block: int = 0
    corrupt_word: int = 0
    corrupt_xor: int = 0
    corrupt_how: str = "xor"


@dataclass(frozen=True)
class Options:
    """How schedules are chosen. ``store_order``: "fifo", "unordered", or "both" by seed.

    ``explicit_sync``: dependent vector instructions need PipeBarrier<PIPE_V> (no help from a compiler).
    ``accepted``: error codes that an op may end with, beside success; ``hang_is_finding`` False lets time
    pass when nothing can move, so that waits expire.
    """

    policy: str = "mixed"
    store_order: str = "both"
    explicit_sync: bool = True
    hang_is_finding: bool = True
    pct_depth: int = 0
    epoch: int = 0
    vary_epoch: bool = True
    trace: bool = False
    choices: tuple[int, ...] = ()
    max_steps: int = 3_000_000
    faults: Faults = field(default_factory=Faults)


class World:
    """W ranks with windows of their own; ``load`` gives them a program, ``run`` schedules it."""

    def __init__(self, world: int, library: ctypes.CDLL | None = None, window_mib: int = WINDOW_MIB) -> None:
        self.library = library if library is not None else checked_library()
        self.size, self.window_bytes = world, window_mib * MIB
        self._handle = self.library.am_explore_create(world, self.window_bytes, LENT_MIB * MIB)
        if not self._handle:
            raise MemoryError(f"no memory for {world} windows of {window_mib} MiB")
        self.program: PlannedProgram | None = None
        self._keep: list[object] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives windows and plans back."""
        if self._handle:
            self.library.am_explore_program(self._handle, None, 0)
            self.library.am_explore_destroy(self._handle)
        self._handle = None
        if self.program is not None:
            self.program.close()
        self.program = None

    def load(self, case: Program, accepted: int = 1, compare: bool = True) -> PlannedProgram:
        """Plans the program's calls. ``accepted``: bits of the error codes that no op is blamed for."""
        before, program = self.program, PlannedProgram(case, self.library, self.window_bytes)
        steps = (_Step * len(program.calls))()
        self._keep = [steps]
        if self.library.am_explore_servers(self._handle, case.servers):
            raise MemoryError(f"no memory for the staging of {self.size} ranks")
        index = {name: at for at, name in enumerate(calls.tensor_names())}
        for step, call in zip(steps, program.calls, strict=True):
            inputs = (c_void_p * len(index))()
            for name, tensor in call.inputs.items():
                inputs[index[name]] = tensor.data_ptr() or None
            count = len(call.outputs)
            outputs = (c_void_p * count)(*(tensor.data_ptr() or None for tensor in call.outputs))
            sizes = (c_uint64 * count)(*(tensor.numel() * tensor.element_size() for tensor in call.outputs))
            expected, lengths = (c_void_p * count)(), (c_uint64 * count)()
            for output, tensor in call.expected.items():
                call.expected[output] = tensor = tensor.contiguous()
                lengths[output] = tensor.numel() * tensor.element_size()
                expected[output] = tensor.data_ptr() if lengths[output] else None
            step.rank, step.compare, step.plan = call.rank, int(compare), call.plan
            step.outputs_count, step.accepted, step.lent = count, accepted, call.lent
            arrays: tuple[Any, ...] = (inputs, outputs, expected, lengths, sizes)
            for name, array in zip(_ARRAYS, arrays, strict=True):
                setattr(step, name, ctypes.addressof(array))
            self._keep.append(arrays)
        self.library.am_explore_program(self._handle, steps, len(steps))
        self.program = program
        if before is not None:
            before.close()
        return program

    def run(self, seed: int, schedules: int = 1, options: Options | None = None) -> RunResult:
        """Runs schedules ``seed`` .. ``seed + schedules - 1``, at most to the first finding."""
        options = options or Options()
        choices = (c_uint16 * max(len(options.choices), 1))(*options.choices)
        values = {**vars(options), **vars(options.faults), "seed": seed, "schedules": schedules}
        values |= {
            "policy": POLICIES[options.policy],
            "store_order": ("fifo", "unordered", "both").index(options.store_order),
            "choices": ctypes.addressof(choices),
            "choice_count": len(options.choices),
            "corrupt_how": ("xor", "stale", "torn").index(options.faults.corrupt_how),
        }
        given = _Options(**{field[0]: values[field[0]] for field in _Options._fields_})
        result = RunResult()
        self.library.am_explore_run(self._handle, ctypes.byref(given), ctypes.byref(result))
        return result

    def choices(self, widths: bool = False) -> list[int]:
        """Choices of the last schedule, or (exhaustive policy) how many each of them had."""
        count = self.library.am_explore_choices(self._handle, int(widths), None, 0)
        out = (c_uint16 * max(count, 1))()
        self.library.am_explore_choices(self._handle, int(widths), out, count)
        return list(out[:count])

    def distinct(self) -> int:
        """Different traces since the world was made or ``forget`` was called."""
        return int(self.library.am_explore_distinct(self._handle))

    def forget(self) -> None:
        """Starts the counts of ``distinct`` and ``polls`` afresh."""
        self.library.am_explore_forget(self._handle)

    def polls(self) -> dict[str, tuple[int, int]]:
        """By place in the kernel: how often a look at flags led to another look, and how often it led on."""
        size = self.library.am_explore_polls(self._handle, None, 0)
        text = ctypes.create_string_buffer(size)
        self.library.am_explore_polls(self._handle, text, size)
        lines = (line.split() for line in text.value.decode().splitlines())
        return {place: (int(waiting), int(ready)) for place, waiting, ready in lines}

    def errors(self) -> list[tuple[int, str]]:
        """(error code, message) of every op of the last schedule; code -1 for one that did not end."""
        assert self.program is not None
        found = []
        text = ctypes.create_string_buffer(1024)
        record = (c_int32 * 64)()
        for step in range(len(self.program.calls)):
            code = self.library.am_explore_code(self._handle, step, record)
            text.value = b""
            if code > 0:
                self.library.am_error_message(record, text, 1024)
            found.append((code, text.value.decode()))
        return found

    def write_trace(self, path: str | Path, epoch: int = 0) -> None:
        """The last schedule (run with ``trace=True``) as JSON lines, the first of them about the world."""
        assert self.program is not None
        case = self.program.program
        header = {
            "world": case.world,
            "cores": case.cores,
            "data_bytes": self.window_bytes,
            "localExperts": case.local,
            "epoch0": epoch,
            "case": str(case),
        }
        if not self.library.am_explore_trace(self._handle, str(path).encode(), json.dumps(header).encode()):
            raise OSError(f"{path} cannot be written")
