"""One rank of a run, which `ascend_moe.bench.run` starts under torchrun or mpiexec.

It checks all methods and times them alternately, with the clock of the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import pickle
import random
import shutil
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ascend_moe
from ascend_moe import reference
from ascend_moe.bench.cases import INPUT_SETS, Case, Inputs, inputs
from ascend_moe.bench.methods import BARE, FLAG_BYTES, LIMIT, METHODS, OURS, Method, RankPlace, shared_memory
from ascend_moe.dispatchers import Dispatched
from ascend_moe.errors import ArgumentError, AscendMoeError, CommTimeout
from ascend_moe.native import library
from ascend_moe.native.liveness import process_gone

GLOO_TIMEOUT_S = 120.0
PROGRESS = "progress"  # file with the number of finished iterations and the name of the case
BARRIER_S = 60.0
WARM_UPS = 4  # both ping-pong buffers, twice; the first call is reported separately
REPEATS = 2  # calls of the same method, of which the last is warm: both ping-pong buffers are cached
_LINE = FLAG_BYTES // 8  # int64 words per rank
_SPINS_BEFORE_YIELD = 4000
_LOOK_AT_CLOCK = 1024
_WORK, _WORK_TIMES = 50_000, 7  # about a millisecond each time

Marks = tuple[int, int, int, int]  # ns: dispatch begins, ends, combine begins, ends


@dataclass(frozen=True)
class Job:
    """What the ranks of one run do; passed to them in the file ``job`` of the scratch folder.

    ``mpi``: mpiexec starts the ranks, not torchrun. ``pid``: the ranks end when this process ends. ``cores``: CPU cores
    of the ranks, used in turn. ``shows_progress``: rank 0 writes its progress into the file ``progress``.
    """

    cases: list[Case]
    methods: list[str]
    iterations: int
    mpi: bool
    pid: int
    cores: list[int]
    shows_progress: bool = False

    @property
    def world(self) -> int:
        return self.cases[0].world


def main(scratch: str) -> None:
    """Run one rank of the job in folder ``scratch``; rank 0 writes ``marks`` there, a failing rank ``error.json``."""
    folder = Path(scratch)
    job: Job = pickle.loads((folder / "job").read_bytes())
    threading.Thread(target=_end_with, args=(job.pid, folder), daemon=True).start()
    rank = -1
    try:
        rank, mpi = _rank_and_mpi(job)
        _run(job, folder, rank, mpi)
    except BaseException as error:
        trace = "" if isinstance(error, AscendMoeError) else traceback.format_exc()
        note = {"rank": rank, "text": f"rank {rank}: {type(error).__name__}: {error}", "trace": trace}
        with contextlib.suppress(FileExistsError), (folder / "error.json").open("x") as file:
            json.dump(note, file)
        # without atexit handlers, in which gloo and MPI would wait for other ranks
        os._exit(1)


def _run(job: Job, folder: Path, rank: int, mpi: Any) -> None:
    core = job.cores[rank % len(job.cores)]
    os.sched_setaffinity(0, {core})  # before any library starts threads, which inherit it
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job.world,
        timeout=datetime.timedelta(seconds=GLOO_TIMEOUT_S),
    )
    place = RankPlace.of(mpi=mpi)
    barrier = Barrier(place, len(job.cores))
    results, hindrance = [], measure_hindrance(rank, job.world)
    flags = shared_memory(place, 2 * FLAG_BYTES * len(job.cores))
    for number, case in enumerate(job.cases):
        of_ranks: list[Any] = [None] * job.world
        if rank == 0:
            (folder / PROGRESS).write_text(f"{number * job.iterations} {case.name}")
        progress = folder / PROGRESS if job.shows_progress and rank == 0 else None
        before = measure_latency(flags, rank, job.world)
        case_marks = run_case(job, case, place, barrier, progress, number * job.iterations)
        case_marks.hindrance = hindrance
        case_marks.latency_ns = (before, measure_latency(flags, rank, job.world))
        dist.gather_object(case_marks, of_ranks if rank == 0 else None)
        results.append(of_ranks)
    if rank == 0:
        (folder / "marks").write_bytes(pickle.dumps(results))
    barrier.wait()
    ascend_moe.close(place.group_ep)
    dist.destroy_process_group()


def _rank_and_mpi(job: Job) -> tuple[int, Any]:
    if not job.mpi:
        return int(os.environ["RANK"]), None
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # MPI needs no locks
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != job.world:
        text = f"mpiexec connected {world.size} of {job.world} ranks: mpiexec and mpi4py are from different MPI "
        text += "installations; install both from one, or leave out MPI's methods"
        raise ArgumentError(text, argument="methods")
    return world.rank, world


def _end_with(pid: int, folder: Path) -> None:
    """End this rank and remove its files when the process that started the run has ended."""
    while not process_gone(pid):
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# ---- the timed loop


def measure_hindrance(rank: int, world: int) -> float:
    """Return by what factor this rank's computation slows down while all ranks compute; 1: not at all. Collective.

    Ranks on hardware threads of one core share its units, which slows down computation more than waits for memory.
    """

    def work() -> float:
        began = time.perf_counter()
        sum(range(_WORK))
        return time.perf_counter() - began

    alone, together = [], []
    for _ in range(_WORK_TIMES):
        for turn in range(world):
            dist.barrier()  # waiting ranks sleep
            if turn == rank:
                alone.append(work())
        dist.barrier()
        together.append(work())
    return min(together) / min(alone)


def measure_latency(flags: Tensor, rank: int, world: int) -> float:
    """Return the ns that a flag takes from rank 0 to the slowest other rank; 0 with one rank or core. Collective."""
    step, slowest = 2 * FLAG_BYTES, 0.0
    for other in range(1, min(world, flags.numel() // step)):
        dist.barrier()
        if rank in (0, other):
            call, at = library.lib().am_bench_flag_latency, flags.data_ptr() + other * step
            slowest = max(slowest, min(call(at, rank == 0) for _ in range(_WORK_TIMES)))
    return slowest


class Barrier:
    """Barrier of the ranks before each op, in memory that they share; each rank writes its own cache line.

    Ranks leave it within a few microseconds of each other, unlike torch's or MPI's barriers.
    """

    def __init__(self, place: RankPlace, cores: int) -> None:
        """``cores``: cores of all ranks; with more ranks than cores, waiting ranks yield immediately. Collective."""
        self.rank, self.world = place.rank, place.world
        self._words = shared_memory(place, self.world * FLAG_BYTES).numpy().data.cast("q")
        self._spins = 0 if self.world > cores else _SPINS_BEFORE_YIELD
        self._count = 0

    def wait(self, wait_s: float = BARRIER_S) -> None:
        """Wait for all ranks; raise CommTimeout after ``wait_s`` seconds."""
        self._count += 1
        words, count = self._words, self._count
        words[self.rank * _LINE] = count
        spins, deadline = 0, time.monotonic() + wait_s
        for line in range(0, self.world * _LINE, _LINE):
            while words[line] < count:
                spins += 1
                if spins > self._spins:
                    os.sched_yield()
                if spins % _LOOK_AT_CLOCK == 0 and time.monotonic() > deadline:
                    late = [rank for rank in range(self.world) if words[rank * _LINE] < count]
                    text = f"rank {self.rank} waited {wait_s:g} s at a barrier for ranks {late}: run again when idle"
                    raise CommTimeout(text, rank=min(late, default=self.rank), ranks=late, phase="barrier")


class WrongResult(AscendMoeError):
    """Raised if a method's result differs from the reference; ``rank`` and ``method`` name where."""


@dataclass
class CaseMarks:
    """Measurements of a case on one rank, by method: times of each iteration, and of the ``first`` round trip.

    ``marks``: times of round trips after another method's; ``warm``: after two of the same method. ``exact``: methods
    whose sums equalled the reference bit for bit in all warm-ups. ``missing``: method -> why it did not run.
    ``hindrance``, ``latency_ns``: results of `measure_hindrance` and, before and after the case, `measure_latency`.
    """

    marks: dict[str, list[Marks]] = field(default_factory=dict)
    warm: dict[str, list[Marks]] = field(default_factory=dict)
    first: dict[str, Marks] = field(default_factory=dict)
    exact: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    hindrance: float = 1.0
    latency_ns: tuple[float, float] = (0.0, 0.0)


@torch.no_grad()
def run_case(
    job: Job, case: Case, place: RankPlace, barrier: Barrier, progress: Path | None = None, before: int = 0
) -> CaseMarks:
    """Check every method against the reference, then time the job's iterations of each. Collective.

    ``progress``: file into which the finished iterations are written, added to ``before``; None: no file. Raises
    WrongResult; CommTimeout from a barrier.
    """
    result = CaseMarks()
    rows_out = torch.empty(case.most_rows, case.hidden, dtype=case.torch_dtype)
    methods: list[Method] = []
    for name in job.methods:
        if METHODS[name].needs_mpi and place.mpi is None:
            result.missing[name] = "the ranks run without MPI"
        else:
            methods.append(METHODS[name](case, place, rows_out))
            result.marks[name], result.warm[name] = [], []
    own = [inputs(case, place.rank, number) for number in range(INPUT_SETS)]
    for method in methods:
        for one_set in own:
            method.ready(one_set)
    result.exact = [method.name for method in methods]
    for number in range(WARM_UPS):
        want = expected(case, place.rank, number)
        for method in methods:
            marks, sent, out = _round_trip(method, own[number], barrier)
            result.first.setdefault(method.name, marks)
            if not _is_exact(method, sent, out, want) and method.name in result.exact:
                result.exact.remove(method.name)
    # a timed result, that of the last iteration, is checked too
    last = job.iterations - 1
    want = expected(case, place.rank, last % INPUT_SETS)
    turns = random.Random(job.iterations)  # equal on all ranks; the order of methods varies
    gc.collect()
    gc.disable()
    try:
        for iteration in range(job.iterations):
            for method in turns.sample(methods, len(methods)):
                marks, sent, out = _round_trip(method, own[iteration % INPUT_SETS], barrier)
                result.marks[method.name].append(marks)
                if iteration == last:
                    _is_exact(method, sent, out, want)
                # freed before the next call, as in a layer
                del sent, out
                for _ in range(REPEATS):
                    marks = _round_trip(method, own[iteration % INPUT_SETS], barrier)[0]
                result.warm[method.name].append(marks)
            if progress is not None:
                progress.write_text(f"{before + iteration + 1} {case.name}")
    finally:
        gc.enable()
    return result


def _round_trip(method: Method, inputs: Inputs, barrier: Barrier) -> tuple[Marks, Dispatched, Tensor]:
    """Run dispatch, the experts (not timed) and combine; both ops begin after a barrier of all ranks."""
    now, clock = time.clock_gettime_ns, time.CLOCK_MONOTONIC  # the same clock in all processes
    barrier.wait()
    began = now(clock)
    sent = method.dispatch(inputs)
    rows = method.expert_output(sent)
    dispatched = now(clock)
    scales = sent.dynamic_scales if sent.expand_x.dtype == torch.int8 else None
    run_experts(sent.expand_x, scales, method.experts_of(sent), rows)
    barrier.wait()
    resumed = now(clock)
    out = method.combine(rows, inputs, sent)
    return (began, dispatched, resumed, now(clock)), sent, out


def _is_exact(method: Method, sent: Dispatched, out: Tensor, want: Expected) -> bool:
    """Return whether the sums are exact; raise WrongResult if the result is wrong."""
    fault = "" if method.kind == LIMIT else dispatch_fault(sent, want)
    exact = False
    if not fault:
        fault, exact = combine_fault(out, want)
    if not fault and method.kind in (BARE, OURS) and not exact:
        fault = "combine is close to the reference, but not equal bit for bit"
    if fault:
        rank = method.place.rank
        raise WrongResult(f"{method.name} on rank {rank}: {fault}", rank=rank, method=method.name)
    return exact


# ---- checks: rows of dispatch bit for bit, sums within the error of the order of addition


def run_experts(rows: Tensor, scales: Tensor | None, experts: Tensor, out: Tensor) -> None:
    """Multiply each row by a factor of its expert, in place of real experts; not timed and equal for every method.

    Write the output for ``rows`` (>= n, H), int8 if there are fp32 ``scales`` (>= n,), into ``out[:n]``. ``experts``
    (n,): global expert ids; the factor, 1 + id % 7 / 8, lets the sums show most rows sent to a wrong expert.
    """
    count = experts.numel()
    factors = (1 + (experts % 7).float() / 8)[:, None]
    if scales is None:
        torch.mul(rows[:count], factors.to(rows.dtype), out=out[:count])
    else:
        out[:count] = rows[:count].float().mul_(scales[:count, None]).mul_(factors)


@dataclass(frozen=True)
class Expected:
    """Expected results of a rank: dispatch's, and combine's sums (BS, H), added in ascending k.

    ``slack``: largest error of sums added in another order, before they are rounded to their dtype.
    """

    dispatched: reference.DispatchResult
    sums: Tensor
    slack: float


def expected(case: Case, rank: int, number: int) -> Expected:
    """Return a rank's expected results for input set ``number``, by the reference, without communication."""
    call = case.call(number)
    dispatched = call.dispatched()
    rows = []
    for owner, result in enumerate(dispatched):
        local = torch.arange(case.local_experts).repeat_interleave(result.expert_token_nums)
        rows.append(torch.empty(result.expand_x.shape, dtype=case.torch_dtype))
        run_experts(result.expand_x, result.dynamic_scales, local + owner * case.local_experts, rows[-1])
    weights = inputs(case, rank, number).expert_scales
    largest = max(float(part.abs().max()) for part in rows if part.numel()) * float(weights.abs().max())
    slack = 2 * case.topk**2 * torch.finfo(torch.float32).eps * largest
    return Expected(dispatched[rank], call.combined(rows, dispatched)[rank], slack)


def dispatch_fault(sent: Dispatched, want: Expected) -> str:
    """Return a description of the first difference of dispatch's rows, scales and counts from ``want``, or ""."""
    result, count = want.dispatched, want.dispatched.expand_x.size(0)
    if not torch.equal(sent.expert_token_nums.long(), result.expert_token_nums):
        return "rows per expert differ from the reference"
    if not torch.equal(sent.expand_x[:count], result.expand_x):
        wrong = (sent.expand_x[:count] != result.expand_x).any(1).nonzero()
        where = f"first at row {int(wrong[0])} of {count}" if len(wrong) else "NaN"
        return f"expand_x differs from the reference, {where}"
    wanted = result.dynamic_scales
    if wanted is not None and not torch.equal(sent.dynamic_scales[:count], wanted):
        return "dynamic_scales differ from the reference"
    return ""


def combine_fault(got: Tensor, want: Expected) -> tuple[str, bool]:
    """Return a description of the first sum beyond rounding errors, or "", and whether all are equal bit for bit."""
    if got.shape != want.sums.shape or got.dtype != want.sums.dtype:
        return f"is {tuple(got.shape)} {got.dtype}, not {tuple(want.sums.shape)} {want.sums.dtype}", False
    if torch.equal(got, want.sums):
        return "", True
    # sums that differ by `slack` may round to adjacent values
    allowed = want.slack + 2 * torch.finfo(got.dtype).eps * want.sums.float().abs()
    wrong = ~((got.float() - want.sums.float()).abs() <= allowed)  # true for NaN too
    if not bool(wrong.any()):
        return "", False
    token, column = (int(i) for i in wrong.nonzero()[0])
    values = f"{float(got[token, column])}, reference {float(want.sums[token, column])}"
    return f"combine differs at token {token}, column {column}: {values}", False
