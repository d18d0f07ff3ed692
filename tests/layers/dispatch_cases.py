"""Random collective calls of dispatch and combine, all the awkward kinds included, for any implementation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

import ascend_moe.reference as ref


@dataclass
class Case:
    """One call of every rank. ``labels`` say what it covers."""

    inputs: list[ref.RankInput]
    experts: int
    quant_mode: int
    global_bs: int
    nums_type: int
    labels: set[str] = field(default_factory=set)


def make_case(seed: int, world: int) -> Case:
    """The case of a seed; its routing may be a collective error (``ref.check`` says so)."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    local, topk = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 4, 8])
    hidden = rng.choice([16, 32, 48, 7])
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    quant_mode = rng.choice([0, 2])
    smooth = quant_mode == 2 and rng.random() < 0.5
    unequal, mask = rng.random() < 0.5, rng.choice(["none", "1d", "2d"])
    ids_kind = rng.choice(
        ["distinct", "any", "minus", "hot", "bad"] if rng.random() < 0.5 else ["any", "minus"]
    )
    max_bs = rng.choice([1, 3, 6])
    inputs = []
    for rank in range(world):
        bs = rng.randint(0, max_bs) if unequal and rank else (0 if unequal and max_bs < 4 else max_bs)
        inputs.append(_rank_input(rng, gen, bs, hidden, topk, world * local, dtype, smooth, mask, ids_kind))
    case = Case(inputs, world * local, quant_mode, world * max_bs if unequal else 0, rng.choice([0, 1]))
    case.labels = {f"mask {mask}", f"ids {ids_kind}", str(dtype), f"quant {quant_mode}{' smooth' * smooth}"}
    case.labels |= {"unequal batches"} if unequal else set()
    case.labels |= {"zero-token rank"} if any(i.x.shape[0] == 0 for i in inputs) else set()
    case.labels |= {"shared expert"} if any(i.shared_expert_x is not None for i in inputs) else set()
    fault = ref.check(inputs, case.experts, case.global_bs)
    case.labels |= {fault.kind} if fault else set()
    return case


def _rank_input(
    rng: random.Random,
    gen: torch.Generator,
    bs: int,
    hidden: int,
    topk: int,
    experts: int,
    dtype: torch.dtype,
    smooth: bool,
    mask: str,
    ids_kind: str,
) -> ref.RankInput:
    x = torch.randn(bs, hidden, generator=gen)
    for t in range(bs):
        draw = rng.random()
        if draw < 0.1:
            x[t] = 0
        elif draw < 0.15:
            x[t, 0] = float("nan")
        elif draw < 0.2:
            x[t, -1] = float("inf")
    if ids_kind == "distinct" and topk <= experts:
        ids = torch.rand(bs, experts, generator=gen).argsort(1)[:, :topk]
    elif ids_kind == "hot":
        ids = torch.where(
            torch.rand(bs, topk, generator=gen) < 0.7, 0, torch.randint(experts, (bs, topk), generator=gen)
        )
    else:
        ids = torch.randint(-1 if ids_kind == "minus" else 0, experts, (bs, topk), generator=gen)
    if ids_kind == "bad" and bs:
        ids[rng.randrange(bs), rng.randrange(topk)] = rng.choice([-2, experts, 1 << 30])
    masks = {
        "none": None,
        "1d": torch.rand(bs, generator=gen) < 0.7,
        "2d": torch.rand(bs, topk, generator=gen) < 0.7,
    }
    return ref.RankInput(
        x=x.to(dtype),
        expert_ids=ids.to(torch.int32),
        scales=torch.rand(experts, hidden, generator=gen) + 0.5 if smooth else None,
        x_active_mask=masks[mask],
        expert_scales=torch.randn(bs, topk, generator=gen),
        shared_expert_x=torch.randn(bs, hidden, generator=gen).to(dtype) if rng.random() < 0.5 else None,
    )


def expert_rows(
    expand_x: torch.Tensor, counts: torch.Tensor, world: int, rank: int, dtype: torch.dtype
) -> torch.Tensor:
    """Any function of a row and its expert, with NaN rows behind the defined ones, in x's dtype."""
    total = int(counts[-1])
    ends = counts[world - 1 :: world]
    expert = torch.searchsorted(ends.contiguous(), torch.arange(total, dtype=ends.dtype), right=True)
    weight = (1 + (expert + rank * ends.numel()).float() / 7)[:, None]
    rows = (expand_x[:total].float() * weight + weight / 3).to(dtype)
    return torch.cat([rows, torch.full((3, rows.shape[1]), float("nan"), dtype=dtype)])
