"""Calls of the algorithm direct, with rows of some ranks in window tensors, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from op_runs import RankRun, Register

import ascend_moe
from ascend_moe.reference.cases import Case, draw
from ascend_moe.reference.records import routed_pairs


def drawn(seed: int) -> Case:
    """Any legal call, the collectively wrong ones included."""
    return draw(
        seed,
        world=(1, 2, 3, 4, 5, 8),
        units=(1, 2, 3, 20, 70),
        batch=(0, 1, 3, 6, 17),
        cores=(1, 2, 3, 5, 8, 13, 24, 48),
        ids=("distinct", "any", "minus", "hot", "mixed", "duplicates", "overflow", "bad"),
    )


def registering(registers: Sequence[bool]) -> Register:
    """Rows of the ranks that register are in window tensors: of their size, of the most there may be, or inside one."""

    def register(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int) -> torch.Tensor:
        if not registers[rank]:
            return rows
        count, hidden = rows.shape
        how = (case.cores + rank) % 3
        shape, begin = ((count, max(most, count), count + 9)[how], hidden), 8 if how == 2 else 0
        place = {"group_ep": group_ep, "ep_world_size": case.world, "ep_rank_id": rank}
        made = ascend_moe.window_empty(shape, dtype=case.torch_dtype, **place)
        made[begin : begin + count] = rows
        return made[8 : 8 + count] if how == 2 else made

    return register


def check_traffic(registers: Sequence[bool], case: Case, runs: list[RankRun]) -> None:
    """Registered rows are never written by a kernel, and read where they lie, once a pair."""
    row = case.hidden * case.torch_dtype.itemsize
    for rank, (one, given) in enumerate(zip(runs, case.inputs, strict=True)):
        rows = int(one.dispatched[4][case.experts - 1])
        owners = [expert // case.local for _, _, expert in routed_pairs(given, case.experts)]
        own = owners.count(rank)
        moved = one.traffic[1]
        assert moved["written_window_registered"] == 0
        assert moved["written_window_data"] == (0 if registers[rank] else (rows - own) * row), rank
        registered_pairs = sum(registers[owner] for owner in owners)
        assert moved["read_window_registered"] == registered_pairs * row, rank
