"""The timed loop of one case on one rank: methods in turns, marks of one clock, results checked around it."""

from __future__ import annotations

import gc
import random
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_moe.bench import check, data, ffn
from ascend_moe.bench.board import Board
from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods import METHODS
from ascend_moe.bench.methods.base import OURS, Method, Place
from ascend_moe.errors import AscendMoeError

WARM_UPS = 4  # both parities of the windows, twice; the first call is reported by itself
_CLOCK = time.CLOCK_MONOTONIC  # one clock for all processes of a machine

Marks = tuple[int, int, int, int]  # ns: dispatch begins, ends, combine begins, ends


class WrongResult(AscendMoeError):
    """A method's result is not the reference's. ``.rank .method``."""


@dataclass
class CaseMarks:
    """What one rank measured of a case.

    Attributes:
        marks: method -> one Marks an iteration. first: of the first call.
        exact: methods whose sums were equal to the reference bit for bit in every check.
        missing: method -> why it did not run.
        switched_out: times the kernel took the core away from this rank while it measured.
        page_faults: of this rank meanwhile; many of them time the kernel instead of the method.
    """

    marks: dict[str, list[Marks]] = field(default_factory=dict)
    first: dict[str, Marks] = field(default_factory=dict)
    exact: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    switched_out: int = 0
    page_faults: int = 0


@torch.no_grad()
def run_case(
    case: Case, number: int, names: list[str], iterations: int, place: Place, board: Board
) -> CaseMarks:
    """Checks every method, then times ``iterations`` of each. Collective.

    Raises:
        WrongResult: before or after the timed loop, a result was wrong.
    """
    found = CaseMarks()
    pool = [[data.inputs(case, rank, entry) for rank in range(place.world)] for entry in range(WARM_UPS)]
    ids = [[one.expert_ids for one in entry] for entry in pool]
    ids += [
        [data.expert_ids(case, rank, e) for rank in range(place.world)] for e in range(WARM_UPS, data.POOL)
    ]
    most = data.most_rows(case, ids)
    rows_out = torch.empty(most, case.hidden, dtype=case.torch_dtype)
    methods = _make(case, names, place, most, rows_out, found)
    own = [entry[place.rank] for entry in pool]
    own += [data.inputs(case, place.rank, entry) for entry in range(WARM_UPS, data.POOL)]
    for method in methods:
        for one in own:
            method.ready(one)
    _check_all(case, number, methods, pool, place, board, found)
    del pool
    final = (iterations - 1) % data.POOL
    want = check.expected(case, place.rank, [data.inputs(case, rank, final) for rank in range(place.world)])
    _time(number, methods, own, iterations, want, place, board, found)
    return found


def _make(
    case: Case, names: list[str], place: Place, most: int, rows_out: torch.Tensor, found: CaseMarks
) -> list[Method]:
    made = []
    for name in names:
        why = METHODS[name].missing(place)
        if why:
            found.missing[name] = why
        else:
            made.append(METHODS[name](case, place, most, rows_out))
            found.marks[name] = []
    return made


def _once(method: Method, one: Inputs, board: Board) -> tuple[Marks, Any, torch.Tensor]:
    """One dispatch, the experts untimed, one combine; each half begins on all ranks at once."""
    now = time.clock_gettime_ns
    board.barrier()
    began = now(_CLOCK)
    arrived = method.dispatch(one)
    rows = method.expert_output(arrived)
    dispatched = now(_CLOCK)
    ffn.run(arrived.rows, arrived.scales, method.experts_of(arrived), rows)
    board.barrier()
    resumed = now(_CLOCK)
    out = method.combine(rows, one, arrived)
    return (began, dispatched, resumed, now(_CLOCK)), arrived, out


def _check_all(
    case: Case,
    number: int,
    methods: list[Method],
    pool: list[list[Inputs]],
    place: Place,
    board: Board,
    found: CaseMarks,
) -> None:
    inexact = set()
    for entry, of_all in enumerate(pool):
        want = check.expected(case, place.rank, of_all)
        for method in methods:
            board.step(number, 0)
            marks, arrived, out = _once(method, of_all[place.rank], board)
            if entry == 0:
                found.first[method.name] = marks
            if not _check(method, arrived, out, want, place):
                inexact.add(method.name)
    found.exact = [method.name for method in methods if method.name not in inexact]


def _check(method: Method, arrived: Any, out: torch.Tensor, want: check.Expected, place: Place) -> bool:
    """Whether the sums are exact."""
    fault = check.dispatch_fault(method, arrived, want)
    exact = False
    if not fault:
        fault, exact = check.combine_fault(out, want)
    if not fault and method.kind == OURS and not exact:
        fault = "combine is near the reference, but not equal to it bit for bit"
    if fault:
        raise WrongResult(f"{method.name} on rank {place.rank}: {fault}", rank=place.rank, method=method.name)
    return exact


def _time(
    number: int,
    methods: list[Method],
    own: list[Inputs],
    iterations: int,
    want: check.Expected,
    place: Place,
    board: Board,
    found: CaseMarks,
) -> None:
    """``want``: of the last iteration, so that what was timed is checked as well."""
    turns = random.Random(iterations)  # the same on all ranks: nobody always follows the same method
    gc.collect()
    gc.disable()
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        for iteration in range(iterations):
            one = own[iteration % data.POOL]
            for method in turns.sample(methods, len(methods)):
                marks, arrived, out = _once(method, one, board)
                found.marks[method.name].append(marks)
                if iteration == iterations - 1:
                    _check(method, arrived, out, want, place)
            board.step(number, iteration + 1)
    finally:
        gc.enable()
    after = resource.getrusage(resource.RUSAGE_SELF)
    found.switched_out = after.ru_nivcsw - before.ru_nivcsw
    found.page_faults = after.ru_minflt - before.ru_minflt
