"""Runs combine from window tensors on some ranks, and checks the bytes it may move."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import op_runs
import torch
from direct_cases import routed
from op_runs import Lend, RankRun

import ascend_moe
from ascend_moe.reference.cases import Case, draw


def lent_copy(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int, how: int) -> torch.Tensor:
    """The rows in a window tensor: of their size, of the most that may arrive, or in the midst of one."""
    count, hidden = rows.shape
    size = (count, max(most, count), count + 9)[how]
    made = ascend_moe.window_empty(
        (size, hidden), dtype=case.torch_dtype, group_ep=group_ep, ep_world_size=case.world, ep_rank_id=rank
    )
    begin = 8 if how == 2 else 0
    made[begin : begin + count] = rows
    return made[8 : 8 + count] if how == 2 else made


def lending(lends: Sequence[bool]) -> Lend:
    """Rows of the ranks that lend lie in their windows, each in its own way."""

    def lend(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int) -> torch.Tensor:
        if not lends[rank]:
            return rows
        return lent_copy(case, rank, group_ep, rows, most, (case.cores + rank) % 3)

    return lend


def check_traffic(lends: Sequence[bool], case: Case, runs: list[RankRun]) -> None:
    """Lent rows are never written by a kernel, and read where they lie, once a pair."""
    row = case.hidden * case.torch_dtype.itemsize
    for rank, (one, given) in enumerate(zip(runs, case.inputs, strict=True)):
        rows = int(one.dispatched[4][case.experts - 1])
        owners = given.expert_ids[routed(given)] // case.local
        own = int((owners == rank).sum())
        moved = one.traffic[1]
        assert moved["written_window_lent"] == 0
        assert moved["written_window_data"] == (0 if lends[rank] else (rows - own) * row), rank
        lent_pairs = sum(int((owners == owner).sum()) for owner in range(case.world) if lends[owner])
        assert moved["read_window_lent"] == lent_pairs * row, rank


def run_sequence(cases: list[Case], sequence: str, seed: int, rank: int, group_ep: str) -> list[RankRun]:
    """Each D opens the next case, each C combines the oldest that is open. Tensors die at odd times."""
    rng = random.Random(seed)  # the same on all ranks; who lends is drawn for every op
    done: list[RankRun] = []
    flying: list[tuple[Case, Any, torch.Tensor, torch.Tensor]] = []
    kept: list[torch.Tensor] = []
    following = iter(cases)
    for op in sequence:
        if op == "D":
            case = next(following)
            sent = op_runs.dispatch(case, rank, group_ep)
            rows = op_runs.expert_rows(case, rank, sent)
            lends, how = [rng.random() < 0.8 for _ in range(case.world)][rank], rng.randrange(3)
            given = lent_copy(case, rank, group_ep, rows, sent[0].shape[0], how) if lends else rows
            flying.append((case, sent, rows, given))
        else:
            case, sent, rows, given = flying.pop(0)
            result = op_runs.combine(case, rank, group_ep, given, sent)
            done.append(RankRun(sent, rows, result, []))
            kept.append(given)
            del given
            while kept and rng.random() < 0.7:
                kept.pop(rng.randrange(len(kept)))
    return done


def check_results(cases: list[Case], by_rank: Sequence[Sequence[RankRun]]) -> None:
    for case, runs in zip(cases, zip(*by_rank, strict=True), strict=True):
        op_runs.check_sums(case, runs, case.dispatched())


def sequence_cases(seed: int, sequence: str, world: int = 0) -> list[Case]:
    """Cases of one shape, of other values and routes each."""
    first = draw(
        seed,
        world=(world,) if world else (2, 3, 4),
        local=(1, 3),
        topk=(1, 3),
        units=(1, 5, 20),
        batch=(3, 9),
        ids=("distinct",),
        quant=("none",),
        comm_quant_mode=(0,),
        cores=(1, 3, 8),
    )
    return [replace(first, seed=seed * 1000 + number) for number in range(sequence.count("D"))]
