"""Calls of the algorithm direct, with rows of some ranks in window tensors, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from op_runs import RankRun, Register

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe.reference.cases import Case, draw

MANY_EXPERTS = 8  # of an owner


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


def routed(given: ref.RankInput) -> torch.Tensor:
    live = given.expert_ids >= 0
    mask = given.x_active_mask
    return live if mask is None else live & (mask if mask.dim() == 2 else mask[:, None])


def registered_copy(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int, how: int) -> torch.Tensor:
    """The rows in a window tensor: of their size, of the most that may arrive, or in the midst of one."""
    count, hidden = rows.shape
    size = (count, max(most, count), count + 9)[how]
    made = ascend_moe.window_empty(
        (size, hidden), dtype=case.torch_dtype, group_ep=group_ep, ep_world_size=case.world, ep_rank_id=rank
    )
    begin = 8 if how == 2 else 0
    made[begin : begin + count] = rows
    return made[8 : 8 + count] if how == 2 else made


def registering(registers: Sequence[bool]) -> Register:
    """Rows of the ranks that register are in their windows, each in its own way."""

    def register(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int) -> torch.Tensor:
        if not registers[rank]:
            return rows
        return registered_copy(case, rank, group_ep, rows, most, (case.cores + rank) % 3)

    return register


def check_traffic(registers: Sequence[bool], case: Case, runs: list[RankRun]) -> None:
    """Registered rows are never written by a kernel, and read where they lie, once a pair."""
    row = case.hidden * case.torch_dtype.itemsize
    for rank, (one, given) in enumerate(zip(runs, case.inputs, strict=True)):
        rows = int(one.dispatched[4][case.experts - 1])
        owners = given.expert_ids[routed(given)] // case.local
        own = int((owners == rank).sum())
        moved = one.traffic[1]
        assert moved["written_window_registered"] == 0
        assert moved["written_window_data"] == (0 if registers[rank] else (rows - own) * row), rank
        registered_pairs = sum(int((owners == owner).sum()) for owner in range(case.world) if registers[owner])
        assert moved["read_window_registered"] == registered_pairs * row, rank
