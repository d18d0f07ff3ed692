"""The tensors of a measurement: a pure function of case, rank and entry, so any rank can make any other's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.bench.cases import Case

POOL = 16  # id sets, one after the other: routing is fresh at every iteration
_ENTRIES, _RANKS = 0x10000, 0x100  # of seeds: more than there are


@dataclass(frozen=True)
class Inputs:
    """x (BS, H); expert_ids (BS, K) int32, distinct in a token; expert_scales (BS, K) fp32, rows sum to 1."""

    x: Tensor
    expert_ids: Tensor
    expert_scales: Tensor


def inputs(case: Case, rank: int, entry: int) -> Inputs:
    """Rank ``rank``'s inputs of pool entry ``entry``. Values are normal: denormals would time other code."""
    generator = _generator(1, rank, entry)
    x = torch.randn(case.batch, case.hidden, generator=generator).to(case.torch_dtype)
    weights = torch.rand(case.batch, case.topk, generator=generator) + 0.1
    return Inputs(x, expert_ids(case, rank, entry), weights / weights.sum(1, keepdim=True))


def _generator(what: int, rank: int, entry: int) -> torch.Generator:
    return torch.Generator().manual_seed(what * _ENTRIES * _RANKS + entry * _RANKS + rank)


def expert_ids(case: Case, rank: int, entry: int) -> Tensor:
    """The ids alone."""
    generator = _generator(0, rank, entry)
    scores = torch.rand(case.batch, case.experts, generator=generator)
    if case.skew == "zipf":
        # Gumbel's trick: the largest of log(weight) + noise are a draw by weight without repetition.
        weight = 1.0 / torch.arange(1, case.experts + 1)
        scores = weight.log() - (-scores.clamp(min=1e-12).log()).log()
    elif case.skew == "hot":
        scores[:, 0] = 2.0
    ids = scores.topk(case.topk, dim=1).indices
    order = torch.rand(case.batch, case.topk, generator=generator).argsort(1)
    return ids.gather(1, order).to(torch.int32)


def most_rows(case: Case, ids_of_all: list[list[Tensor]]) -> int:
    """Rows on the rank that receives most, over all entries; ``ids_of_all[entry][rank]``."""
    most = 0
    for ids in ids_of_all:
        owners = torch.cat([one.reshape(-1) for one in ids]) // case.local_experts
        most = max(most, int(torch.bincount(owners, minlength=case.world).max()))
    return most
