"""Draws calls of the algorithm direct."""

from __future__ import annotations

import torch

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
