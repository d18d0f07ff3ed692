"""Calls of dispatch and combine that are checked on the spot, for tests that make them fail.

Each case has unequal batches with an empty rank, a mask and an id of -1; the experts return rows unchanged.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe.comm.communicator import ranks_per_server
from ascend_moe.errors import AscendMoeError

TOPK, HIDDEN, MAX_BS, LOCAL = 2, 48, 4, 3
DISPATCH = {1: ascend_moe.npu_moe_distribute_dispatch, 2: ascend_moe.npu_moe_distribute_dispatch_v2}
COMBINE = {1: ascend_moe.npu_moe_distribute_combine, 2: ascend_moe.npu_moe_distribute_combine_v2}


@dataclass(frozen=True)
class Place:
    """Where a call is made from."""

    group_ep: str
    world: int
    rank: int

    def arguments(self) -> dict[str, Any]:
        place = {"group_ep": self.group_ep, "ep_world_size": self.world, "ep_rank_id": self.rank}
        return {**place, "moe_expert_num": self.world * LOCAL}


@functools.cache
def inputs(world: int, seed: int) -> list[ref.RankInput]:
    """Every rank's tokens; the same in every process."""
    gen = torch.Generator().manual_seed(1000 * world + seed)
    found = []
    for rank in range(world):
        batch = MAX_BS if world == 1 else (MAX_BS + rank + seed) % (MAX_BS + 1)
        ids = torch.rand(batch, world * LOCAL, generator=gen).argsort(1)[:, :TOPK].to(torch.int32)
        if batch:
            ids[batch // 2, 0] = -1
        found.append(
            ref.RankInput(
                x=torch.randn(batch, HIDDEN, generator=gen).to(torch.bfloat16),
                expert_ids=ids,
                x_active_mask=torch.rand(batch, generator=gen) < 0.8,
                expert_scales=torch.rand(batch, TOPK, generator=gen),
            )
        )
    return found


def dispatch(place: Place, seed: int = 0, contract: int = 1, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Calls dispatch with the case of this seed."""
    one = inputs(place.world, seed)[place.rank]
    call = {"x": one.x, "expert_ids": one.expert_ids, "x_active_mask": one.x_active_mask, **place.arguments()}
    outputs: tuple[torch.Tensor, ...] = DISPATCH[contract](
        **{**call, "global_bs": place.world * MAX_BS, **changes}
    )
    return outputs


def combine(
    place: Place, sent: tuple[torch.Tensor, ...], seed: int = 0, contract: int = 1, **changes: Any
) -> torch.Tensor:
    """Calls combine on dispatch's outputs."""
    one = inputs(place.world, seed)[place.rank]
    index = "expand_idx" if contract == 1 else "assist_info_for_combine"
    call = {"expand_x": sent[0], "expert_ids": one.expert_ids, index: sent[2], "ep_send_counts": sent[4]}
    call |= {"expert_scales": one.expert_scales, "x_active_mask": one.x_active_mask, **place.arguments()}
    result: torch.Tensor = COMBINE[contract](**{**call, "global_bs": place.world * MAX_BS, **changes})
    return result


def check_dispatch(place: Place, sent: tuple[torch.Tensor, ...], seed: int = 0, contract: int = 1) -> None:
    world = place.world
    want = ref.dispatch(inputs(world, seed), moe_expert_num=world * LOCAL, global_bs=world * MAX_BS)
    report = ref.validate(
        "dispatch",
        sent,
        want[place.rank],
        rank=place.rank,
        contract=f"v{contract}",
        ranks_per_server=ranks_per_server(),
    )
    assert report.ok, report.text


def check_combine(place: Place, result: torch.Tensor, seed: int = 0) -> None:
    one = inputs(place.world, seed)[place.rank]
    assert one.x_active_mask is not None and one.expert_scales is not None
    want = torch.zeros(one.x.shape)
    for k in range(TOPK):
        counted = (one.x_active_mask & (one.expert_ids[:, k] >= 0))[:, None]
        want = torch.where(counted, want + one.x.float() * one.expert_scales[:, k, None], want)
    assert torch.equal(result, want.to(torch.bfloat16))


def round_trip(place: Place, seed: int = 0, contract: int = 1) -> str:
    """Dispatch and combine, both compared with what they must give."""
    sent = dispatch(place, seed, contract)
    check_dispatch(place, sent, seed, contract)
    check_combine(place, combine(place, sent, seed, contract), seed)
    return "right"


# ---- outcomes


@dataclass
class Caught:
    """What a call did, with its start and end on the clock that all ranks share."""

    value: Any
    error: AscendMoeError | None
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Caught:
    began, value, error = time.monotonic(), None, None
    try:
        value = function(*args, **kwargs)
    except AscendMoeError as raised:
        error = raised
    return Caught(value, error, began, time.monotonic())


# ---- in rank processes: functions that a test names, on the default group


def here(group_ep: str = "") -> Place:
    dist = torch.distributed
    name = group_ep or ascend_moe.comm_name()
    group = dist.distributed_c10d._resolve_process_group(name)
    return Place(name, group.size(), group.rank())


def use_real_library() -> None:
    """Undoes the proxy that rank processes start with."""
    from ascend_moe.native import library as _lib

    library = _lib.lib()
    inner = getattr(library, "inner", library)
    _lib.lib = lambda: inner  # type: ignore[assignment]


def run_round_trip(seed: int = 0, group_ep: str = "", contract: int = 1) -> str:
    return round_trip(here(group_ep), seed, contract)


_kept: dict[str, tuple[int, tuple[torch.Tensor, ...]]] = {}


def run_dispatch(seed: int = 0, group_ep: str = "") -> str:
    """Keeps the outputs for ``run_combine``."""
    place = here(group_ep)
    _kept.pop(place.group_ep, None)
    sent = dispatch(place, seed)
    check_dispatch(place, sent, seed)
    _kept[place.group_ep] = seed, sent
    return "right"


def run_combine(group_ep: str = "") -> str:
    """Combines what the last dispatch gave; after one that failed, what breaks no rule that one rank sees."""
    place = here(group_ep)
    if place.group_ep in _kept:
        seed, sent = _kept[place.group_ep]
    else:
        seed, ids = 0, inputs(place.world, 0)[place.rank].expert_ids
        rows, none = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(0)
        index, counts = (
            torch.zeros(ids.numel(), dtype=torch.int32),
            torch.zeros(place.world * LOCAL, dtype=torch.int32),
        )
        sent = (rows, none, index, none, counts)
    check_combine(place, combine(place, sent, seed), seed)
    return "right"


def run_bad_then_right(seed: int = 0) -> tuple[str, str]:
    """An argument error of this rank alone, then the corrected call: (argument, outcome)."""
    place = here()
    wrong = caught(dispatch, place, seed, quant_mode=3).error
    assert wrong is not None
    time.sleep(0.2)
    return wrong.argument, round_trip(place, seed)


def new_group(ranks: list[int]) -> str:
    """A group of these ranks alone; only they call."""
    group = torch.distributed.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, torch.distributed.ProcessGroup)
    return group.group_name


def finish(seed: int) -> None:
    """Runs a last round trip and ends the process as a program does that has come to its end."""
    assert round_trip(here(), seed) == "right"
    sys.exit(0)


def finish_at_once(seed: int) -> None:
    """The same without a goodbye."""
    assert round_trip(here(), seed) == "right"
    os._exit(0)


def late_round_trip(seconds: float, seed: int = 0) -> str:
    time.sleep(seconds)
    return run_round_trip(seed)
