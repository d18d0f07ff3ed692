"""Planned calls of a program with their expected results, and the checked engine that schedules them."""

from __future__ import annotations

import ctypes
import functools
import json
from ctypes import c_bool, c_char, c_char_p, c_int, c_int32, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ascend_moe import (
    ops,  # noqa: F401  (ops registers the schemas)
    settings,
)
from ascend_moe.errors import AscendMoeError
from ascend_moe.native import library
from ascend_moe.native.windows import MIB
from ascend_moe.ops import calls
from ascend_moe.ops.registration import OPERATORS
from ascend_moe.plan import fields_of, limits
from ascend_moe.settings import CONTEXTS, CORE_BARRIER, CORE_BARRIERS, TIMESTAMPS

from ..reference.cases import Case
from . import faults
from .faults import FINISH, SEND
from .program import Program, window_mib

GROUP = "explore"
WINDOW_MIB = 1  # of small cases; the registered area has the same size
_BLOCK = 32  # bytes; unit of UB
_NO_BLOCK = 1 << 60  # larger than the number of status blocks of any schedule
_DEADLINE_MICROS = 60_000_000  # of simulated time


@dataclass(eq=False)
class OpCall:
    """A call of an op on one rank: its tensors, and by output number the expected values, as far as defined."""

    rank: int
    name: str
    inputs: dict[str, torch.Tensor]
    attributes: dict[str, int | None]
    outputs: list[torch.Tensor] = field(default_factory=list)
    expected: dict[int, torch.Tensor] = field(default_factory=dict)
    op: int = 0  # OP_DISPATCH, OP_COMBINE
    algorithm: str = ""
    plan: int | None = None
    registered: int = 0  # as Program.registered
    number: int = 0  # of the op in the sequence
    part: int = 0  # 0, SEND or FINISH
    result: Any = None  # of the dispatch: the reference's whole result
    tiling: dict[str, int] = field(default_factory=dict)


class PlannedProgram:
    """All calls of a program, in each rank's order, planned for the checked engine; `close` frees the plans."""

    def __init__(self, program: Program, library: ctypes.CDLL, window_bytes: int = WINDOW_MIB * MIB) -> None:
        self.program, self._library, self._window_bytes = program, library, window_bytes
        self.calls: list[OpCall] = []
        open_dispatches: list[tuple[Case, list[OpCall]]] = []
        self._number, self._algorithm = 0, ""
        self.fault = faults.fault_of(program)
        for number, op in enumerate(program.sequence):
            self._number, self._algorithm, first = number, program.algorithm_of(number), len(self.calls)
            if op in "Dd":
                open_dispatches.append(self._dispatch(program.case_of(number)))
            else:
                self._combine(*open_dispatches.pop(0))
            if op in "dc":
                self._in_two_launches(self.calls[first:])
        if self.fault:
            self._leave_out(self.fault.left_out(self.calls))

    def _leave_out(self, calls: list[OpCall]) -> None:
        for call in calls:
            self._library.am_plan_destroy(call.plan)
        self.calls = [call for call in self.calls if call not in calls]

    def _name(self, op: str) -> str:
        return f"npu_moe_distribute_{op}" + ("" if self.program.contract == 1 else "_v2")

    def _common(self, rank: int) -> dict[str, int]:
        return {
            "ep_world_size": self.program.world,
            "ep_rank_id": rank,
            "moe_expert_num": self.program.experts,
            **self.program.options,
        }

    def _dispatch(self, case: Case) -> tuple[Case, list[OpCall]]:
        made, name = list[OpCall](), self._name("dispatch")
        for rank, want in enumerate(case.dispatched()):
            given = case.dispatch_tensors(rank)
            call = OpCall(rank, name, given, OPERATORS[name].attributes(self._common(rank)))
            by_source = faults.takes_source_indices(self.program)
            index = want.assist_info.flatten() if by_source else want.expand_idx
            call.expected = {0: want.expand_x, 2: index, 3: want.expert_token_nums, 4: want.ep_recv_counts}
            scales = {
                1: want.dynamic_scales,
                5: want.tp_recv_counts if case.tp_world_size else None,
                6: want.expand_scales,
            }
            call.expected |= {place: value for place, value in scales.items() if value is not None}
            call.result = want
            self._plan(call, calls.OP_DISPATCH)
            made.append(call)
        self.calls += made
        return case, made

    def _combine(self, case: Case, dispatched: list[OpCall]) -> None:
        results, name = [call.result for call in dispatched], self._name("combine")
        rows = case.rows_of(results)
        want = case.combined(rows, results)
        for rank, sent in enumerate(dispatched):
            expand_x = torch.zeros(tuple(sent.outputs[0].shape), dtype=case.torch_dtype)
            expand_x[: rows[rank].shape[0]] = rows[rank]
            given = {
                "expand_x": expand_x,
                "expand_idx" if case.contract == 1 else "assist_info_for_combine": sent.outputs[2],
                "ep_send_counts": sent.outputs[4],
                **case.combine_tensors(rank),
            }
            call = OpCall(rank, name, given, OPERATORS[name].attributes(self._common(rank)))
            call.expected, call.result = {0: want[rank]}, sent.result
            call.registered = self.program.registered(self._number, rank)
            self._plan(call, calls.OP_COMBINE)
            self.calls.append(call)

    def _in_two_launches(self, made: list[OpCall]) -> None:
        """Split calls into one that sends and one that finishes, on the same tensors."""
        for call in made:
            second = replace(call, plan=self._planned(call, FINISH), part=FINISH)
            self._library.am_plan_destroy(call.plan)
            call.plan, call.expected, call.part = self._planned(call, SEND), {}, SEND
            self.calls.append(second)

    def _plan(self, call: OpCall, op: int) -> None:
        call.op, call.algorithm, call.number = op, self._algorithm, self._number
        if self.program.measured:  # the engine fills it before each schedule
            call.inputs["performance_info"] = torch.zeros(self.program.world, dtype=torch.int64)
        if self.fault:
            self.fault.corrupt(call)
        call.plan = self._planned(call)
        call.inputs = {name: tensor.contiguous() for name, tensor in call.inputs.items()}

    def _planned(self, call: OpCall, part: int = 0) -> int:
        shapes = tuple((name, t.dtype, tuple(t.shape)) for name, t in call.inputs.items())
        spec = calls.describe(call.op, self.program.contract, GROUP, call.algorithm, shapes, call.attributes)
        spec.part = part
        spec.comm_world, spec.comm_rank = self.program.world, call.rank
        spec.window_mib, spec.cores = self._window_bytes // MIB, self.program.cores
        spec.registered_mib, spec.list_cores = spec.window_mib, self.program.list_cores
        spec.ub_bytes = self.program.ub_bytes or (self._library.am_card_ub_bytes() if self.program.one_card else 0)
        patient = self.fault is None or self.fault.impatient != call.rank
        spec.deadline_micros = _DEADLINE_MICROS if patient else _DEADLINE_MICROS // 3
        spec.context_kind = CONTEXTS.index("a2" if self.program.servers else "table")
        spec.ranks_per_server, spec.intra_node_stores = self.program.servers, self.program.stores
        spec.core_barrier, spec.timestamps = CORE_BARRIERS.index(CORE_BARRIER.get()), int(TIMESTAMPS.get())
        spec.rdma_flags = self.program.flags
        if self.program.spare:
            row = int(call.inputs["x" if call.op == calls.OP_DISPATCH else "expand_x"][:1].nbytes) + 2 * _BLOCK
            spec.ub_bytes = self._least_ub(spec) + (self.program.spare - 1) * row
        check = calls.CheckResult()
        plan: int | None = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
        if not plan:
            raise AscendMoeError(f"explore: {self.program}: {call.name}: {check.message.decode()}")
        call.tiling = fields_of(self._library.am_need_tiling, plan)
        if not call.outputs:
            call.outputs = [torch.empty(shape, dtype=dtype) for dtype, shape in calls.outputs_of(spec)]
        return plan

    def _least_ub(self, spec: Any) -> int:
        """Return the minimum UB with which this call can be planned."""
        low, high, check = 0, limits()["ub_bytes"] // _BLOCK, calls.CheckResult()
        while low + 1 < high:
            middle = (low + high) // 2
            spec.ub_bytes = middle * _BLOCK
            plan = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
            low, high = (low, middle) if plan else (middle, high)
            self._library.am_plan_destroy(plan)
        return high * _BLOCK

    def close(self) -> None:
        """Free the plans of all calls."""
        for call in self.calls:
            if call.plan:
                self._library.am_plan_destroy(call.plan)
            call.plan = None


# ---- explore mode of the checked engine, by its C ABI

POLICIES = {"late": 0, "random": 1, "lazy": 2, "pct": 3, "replay": 4, "exhaustive": 5, "mixed": 100}


_ARRAYS = ("inputs", "outputs", "expected", "expected_bytes", "output_bytes")


class _Step(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("compare", c_int32),
        ("plan", c_void_p),
        *((name, c_void_p) for name in _ARRAYS),
        *((name, c_uint32) for name in ("outputs_count", "accepted", "registered", "reserved")),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, c_uint64) for name in ("seed", "schedules", "max_steps")),
        *((name, c_uint32) for name in ("policy", "store_order", "explicit_sync", "hang_is_finding")),
        *((name, c_uint32) for name in ("pct_depth", "epoch", "vary_epoch", "trace", "reordered")),
        ("choices", c_void_p),
        ("choice_count", c_uint64),
        ("kill_rank", c_int32),
        ("kill_step", c_uint64),
        ("stall_rank", c_int32),
        ("stall_step", c_uint64),
        *((name, c_int32) for name in ("slow_rank", "slow_core", "slow_link")),
        ("corrupt_block", c_uint64),
        *((name, c_uint32) for name in ("corrupt_word", "corrupt_xor")),
        *((name, c_bool) for name in ("corrupt_stale", "corrupt_torn", "kill_unseen")),
    ]


class RunResult(ctypes.Structure):
    """Result of `World.run`: totals over its schedules, and unless ``failed`` is 0 kind, text and seed of a finding."""

    _fields_ = [
        *((name, c_uint64) for name in ("schedules", "steps", "instructions", "switches", "status_blocks")),
        *((name, c_uint64) for name in ("last_hash", "choices", "failed_seed")),
        ("failed", c_uint32),
        ("time_passed", c_uint32),
        ("kind", c_char * 64),
        ("message", c_char * 1024),
    ]


def _fail(run: RunResult, seed: int, kind: str, message: str) -> None:
    """Store a finding in a run, unless the message is empty."""
    if message:
        run.failed, run.failed_seed = 4, seed
        run.kind, run.message = kind.encode(), message.encode()[:1000]


_SIGNATURES = {
    "am_engine_is_checked": (c_int, ()),
    "am_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_plan_destroy": (None, (c_void_p,)),
    "am_card_ub_bytes": (c_uint32, ()),
    "am_need_tiling": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_error_message": (None, (c_void_p, c_char_p, c_uint64)),
    "am_error_name": (c_char_p, (c_int,)),
    "am_explore_create": (c_void_p, (c_int, c_uint64, c_uint64)),
    "am_explore_destroy": (None, (c_void_p,)),
    "am_explore_servers": (c_int, (c_void_p, c_int, c_int)),
    "am_explore_one_card": (None, (c_void_p, c_int)),
    "am_explore_program": (c_int, (c_void_p, c_void_p, c_int)),
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
    """Open the library of the checked engine: ``path``, else $ASCEND_MOE_CHECKED_LIBRARY, else the installed one."""
    chosen = path or settings.CHECKED_LIBRARY.get() or library.library_path("checked")
    return _open(str(chosen))


@functools.cache
def error_codes(library: ctypes.CDLL) -> dict[str, int]:
    """Return for each error name a bit mask of its error codes, bit c for code c; "", no error, has bit 0."""
    bits = {"": 1}
    for code in range(1, 32):
        name = library.am_error_name(code).decode()
        bits[name] = bits.get(name, 0) | 1 << code
    return bits


@dataclass(frozen=True)
class Faults:
    """Faults injected into every schedule; by default none (a rank, core or link of -1, status block 0).

    A killed rank stops forever at a step of the schedule, or earlier if no other rank can continue; with
    ``kill_unseen`` its process is not reported as lost, as if it hung. A stalled rank stops until no other rank can
    continue and the killed rank has been detected. A slow rank, core or link is chosen a hundred times less often.
    Status block number ``corrupt_block`` (from 1, in the order of arrival) has one word xored, keeps its old contents
    ("stale"), or arrives by half ("torn").
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
    kill_unseen: bool = False


@dataclass(frozen=True)
class Options:
    """Options for the choice of schedules.

    ``policy``: a key of POLICIES. ``store_order``: "fifo", "unordered", or "both" by seed. ``explicit_sync``: dependent
    vector instructions need PipeBarrier<PIPE_V>, as without a compiler that inserts it. ``hang_is_finding`` False: time
    passes when nothing can continue, so that waits expire. ``pct_depth``: of policy "pct"; 0: 2 or 3 by seed.
    ``epoch``: epoch before the first op; ``vary_epoch``: by seed instead. ``trace``: record for `World.write_trace`.
    ``reordered``: the agent between servers moves 512-byte blocks of an item in any order, as with ``flags``.
    ``choices``: for policies "replay" and "exhaustive". ``max_steps``: a schedule with more steps counts as a hang.
    """

    policy: str = "mixed"
    store_order: str = "both"
    explicit_sync: bool = True
    hang_is_finding: bool = True
    pct_depth: int = 0
    epoch: int = 0
    vary_epoch: bool = True
    trace: bool = False
    reordered: bool = False
    choices: tuple[int, ...] = ()
    max_steps: int = 3_000_000
    faults: Faults = field(default_factory=Faults)


class World:
    """W ranks and their windows on the checked engine; a context manager. `load` plans a program, `run` executes it."""

    def __init__(self, world: int, library: ctypes.CDLL | None = None, window_mib: int = WINDOW_MIB) -> None:
        self.library = library if library is not None else checked_library()
        self.size, self.window_bytes = world, window_mib * MIB
        self._handle = self.library.am_explore_create(world, self.window_bytes, self.window_bytes)
        if not self._handle:
            raise MemoryError(f"no memory for {world} windows of {window_mib} MiB: use fewer ranks or smaller windows")
        self.program: PlannedProgram | None = None
        self.survived = 0  # schedules after which the surviving ranks continued
        self._keep: list[object] = []
        self._rest: World | None = None  # the survivors'

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free windows and plans."""
        if self._rest is not None:
            self._rest.close()
        self._rest = None
        if self._handle:
            self.library.am_explore_program(self._handle, None, 0)
            self.library.am_explore_destroy(self._handle)
        self._handle = None
        if self.program is not None:
            self.program.close()
        self.program = None

    def load(self, case: Program, accepted: int = 1, compare: bool = True) -> PlannedProgram:
        """Plan the calls of ``case`` for `run`. ``accepted``: bit mask of error codes that are no findings; 1: none is.

        ``compare`` False: do not check results. Raises AscendMoeError if a call cannot be planned; MemoryError.
        """
        before, program = self.program, PlannedProgram(case, self.library, self.window_bytes)
        codes = error_codes(self.library)
        steps = (_Step * len(program.calls))()
        self._keep = [steps]
        if self.library.am_explore_servers(self._handle, case.servers, case.stores):
            raise MemoryError(f"no memory for the staging buffers of {self.size} ranks: use fewer ranks")
        self.library.am_explore_one_card(self._handle, case.one_card)
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
            step.outputs_count, step.accepted, step.registered = count, accepted, call.registered
            if program.fault:
                step.accepted = sum({codes[outcome.error] for outcome in program.fault.outcomes(call)})
            arrays: tuple[Any, ...] = (inputs, outputs, expected, lengths, sizes)
            for name, array in zip(_ARRAYS, arrays, strict=True):
                setattr(step, name, ctypes.addressof(array))
            self._keep.append(arrays)
        if self.library.am_explore_program(self._handle, steps, len(steps)):
            self.library.am_explore_program(self._handle, None, 0)
            program.close()
            raise MemoryError(f"{case}: rows do not fit into {self.window_bytes // MIB} MiB: pass a larger window_mib")
        self.program = program
        if before is not None:
            before.close()
        return program

    def run(self, seed: int, schedules: int = 1, options: Options | None = None) -> RunResult:
        """Run schedules ``seed`` .. ``seed + schedules - 1`` of the loaded program, up to the first finding."""
        options = options or Options()
        assert self.program is not None
        if self.program.fault and options.faults == Faults():
            return self._run_with_fault(self.program.fault, seed, schedules, options)
        return self._run(seed, schedules, options)

    def _run_with_fault(self, fault: faults.Fault, seed: int, schedules: int, options: Options) -> RunResult:
        """Run schedules one by one and check the errors after each."""
        options, total, plain = replace(options, hang_is_finding=False), RunResult(), RunResult()
        if fault.in_flight:  # equal for every schedule, so that each can be repeated
            whole = Faults(corrupt_block=_NO_BLOCK)  # corrupts no block
            plain = self._run(0, 1, Options(hang_is_finding=False, faults=whole))
        for number in range(seed, seed + schedules):
            injected = Faults(**fault.injected(plain.steps, plain.status_blocks, number))
            run = self._run(number, 1, replace(options, faults=injected))
            if not run.failed:
                _fail(run, number, "wrong failure", fault.judge(self._by_rank()))
            if not run.failed:
                self._go_on(*fault.goes_on(number), number, options, run)
            for name in ("schedules", "steps", "instructions", "switches", "status_blocks", "time_passed"):
                setattr(run, name, getattr(run, name) + getattr(total, name))
            total = run
            if run.failed:
                break
        return total

    def _go_on(self, rest: Program | None, wrong: str, number: int, options: Options, run: RunResult) -> None:
        """Run ``rest`` on the surviving ranks with new windows, and store its result in ``run``."""
        _fail(run, number, "wrong agreement", wrong)
        if rest is None or run.failed:
            return
        if self._rest is None or (self._rest.size, self._rest.window_bytes) != (rest.world, window_mib(rest) * MIB):
            if self._rest is not None:
                self._rest.close()
            self._rest = World(rest.world, self.library, window_mib(rest))
        if self._rest.program is None or self._rest.program.program != rest:
            self._rest.load(rest)
        # the choices of ``run`` are those of the schedule with the fault
        policy = options.policy if options.policy in ("late", "random", "lazy", "pct") else "mixed"
        own = replace(options, policy=policy, choices=(), faults=Faults(), hang_is_finding=True, trace=False)
        after = self._rest.run(number, 1, own)
        self.survived += 1
        for name in ("steps", "instructions", "switches", "status_blocks"):
            setattr(run, name, getattr(run, name) + getattr(after, name))
        if after.failed:
            _fail(run, number, after.kind.decode(), f"after a loss, of {rest}: {after.message.decode()}")

    def _by_rank(self) -> list[list[tuple[str, str]]]:
        """Return name and text of the error of each call, by rank; ("", ...) for none."""
        assert self.program is not None
        seen: list[list[tuple[str, str]]] = [[] for _ in range(self.size)]
        for call, (code, text) in zip(self.program.calls, self.errors(), strict=True):
            name = self.library.am_error_name(code).decode() if code > 0 else "" if code == 0 else faults.UNFINISHED
            seen[call.rank].append((name, text))
        return seen

    def _run(self, seed: int, schedules: int, options: Options) -> RunResult:
        assert self.program is not None
        choices = (c_uint16 * max(len(options.choices), 1))(*options.choices)
        values = {**vars(options), **vars(options.faults), "seed": seed, "schedules": schedules}
        values |= {
            "policy": POLICIES[options.policy],
            "store_order": ("fifo", "unordered", "both").index(options.store_order),
            "reordered": options.reordered or self.program.program.flags,
            "choices": ctypes.addressof(choices),
            "choice_count": len(options.choices),
            "corrupt_stale": options.faults.corrupt_how == "stale",
            "corrupt_torn": options.faults.corrupt_how == "torn",
        }
        given = _Options(**{field[0]: values[field[0]] for field in _Options._fields_})
        result = RunResult()
        self.library.am_explore_run(self._handle, ctypes.byref(given), ctypes.byref(result))
        return result

    def choices(self, widths: bool = False) -> list[int]:
        """Return the choices of the last schedule, or with ``widths`` (policy "exhaustive") each one's alternatives."""
        count = self.library.am_explore_choices(self._handle, int(widths), None, 0)
        out = (c_uint16 * max(count, 1))()
        self.library.am_explore_choices(self._handle, int(widths), out, count)
        return list(out[:count])

    def distinct(self) -> int:
        """Return the number of distinct traces since the world was created or `forget` was called."""
        return int(self.library.am_explore_distinct(self._handle))

    def forget(self) -> None:
        """Reset the counts of `distinct` and `polls`."""
        self.library.am_explore_forget(self._handle)

    def polls(self) -> dict[str, tuple[int, int]]:
        """Return by place in the kernel how often its flag was polled and not ready, or ready, since `forget`."""
        text = library.text_of(self.library.am_explore_polls, self._handle)
        lines = (line.split() for line in text.splitlines())
        return {place: (int(waiting), int(ready)) for place, waiting, ready in lines}

    def errors(self) -> list[tuple[int, str]]:
        """Return (error code, message) of every call in the last schedule; code 0: no error, -1: it did not end."""
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
        """Write the last schedule to a file of JSON lines, of which the first describes the world; raise OSError.

        That schedule must have been run with ``trace=True, vary_epoch=False`` and this ``epoch``.
        """
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
            raise OSError(f"{path} cannot be written: pass a path in a writable folder")
