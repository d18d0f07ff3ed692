"""What the machine does at best, with 1..W ranks at it at once: row copies, weighted sums, flags."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ascend_moe.bench import data, native
from ascend_moe.bench.board import Board
from ascend_moe.bench.cases import Case
from ascend_moe.bench.methods import Place

REPEATS = 15
PING_PONGS = 200
_PATIENCE_US = 10_000_000

Spans = list[tuple[int, int]]  # ns: begin, end; one a repeat


def measure(cases: list[Case], place: Place, board: Board) -> dict[str, Any]:
    """This rank's spans, of the case with most bytes: ``{what: {ranks at it: Spans}}``, and flags in ns."""
    case = max(cases, key=lambda one: one.combine_bytes)
    one = data.inputs(case, place.rank, 0)
    pairs = case.batch * case.topk
    places = torch.arange(pairs)
    rows = torch.empty(pairs, case.hidden, dtype=case.torch_dtype)
    sources = native.pointers(one.x, places // case.topk)
    summed = torch.empty_like(one.x)

    work = {f"copy, {name}": native.row_copy(rows, sources, name) for name in native.COPIES}
    work["weighted sum"] = native.weighted_sum(summed, native.pointers(rows, places), one.expert_scales)
    spans: dict[str, dict[str, Spans]] = {}
    for what, function in work.items():
        function()
        spans[what] = {
            str(active): _spans(function, active, place, board) for active in range(1, place.world + 1)
        }
    flags = {how: _flag(how, place, board) for how in native.WAITS} if place.world > 1 else {}
    return {"bytes": case.combine_bytes, "case": case.name, "spans": spans, "flags_ns": flags}


def _spans(function: Callable[[], None], active: int, place: Place, board: Board) -> Spans:
    """Ranks 0..active-1 work at once, the others wait."""
    found: Spans = []
    for _ in range(REPEATS):
        board.step(0, 0)
        board.barrier()
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        if place.rank < active:
            function()
            found.append((began, time.clock_gettime_ns(time.CLOCK_MONOTONIC)))
        board.barrier()
    return found


def _flag(how: str, place: Place, board: Board) -> list[float]:
    """One-way times of a flag between ranks 0 and 1, ns, one a round of ping-pongs; empty on other ranks."""
    found: list[float] = []
    for number in range(REPEATS):
        board.step(0, 0)
        board.barrier()
        if place.rank < 2:
            first = 1 + (list(native.WAITS).index(how) * REPEATS + number) * PING_PONGS
            address = board.scratch_address()
            ns = native.flag_round(address, place.rank, first, PING_PONGS, how, _PATIENCE_US)
            if ns >= 0 and place.rank == 0:
                found.append(ns / (2 * PING_PONGS))
    return found
