"""Calls that must raise, and what: the typed errors that `ascend-moe validate` looks for on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import ascend_moe

from ..errors import ArgumentError, AscendMoeError, ConfigMismatch, RoutingMismatch, WindowTooSmall

if TYPE_CHECKING:
    from .run import Place

_BS, _K, _H, _LOCAL = 3, 2, 64, 2


@dataclass(frozen=True)
class Bad:
    """A call that must raise ``error`` on every rank; ``argument``: which one the error names."""

    name: str
    error: type[AscendMoeError]
    argument: str
    call: Callable[[Place], Any]
    least_world: int = 1


def _dispatch(place: Place, contract: int = 1, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "x": torch.ones(_BS, _H, dtype=torch.bfloat16),
        "expert_ids": torch.zeros(_BS, _K, dtype=torch.int32) + torch.arange(_K, dtype=torch.int32),
        "group_ep": place.group_ep,
        "ep_world_size": place.world,
        "ep_rank_id": place.rank,
        "moe_expert_num": place.world * _LOCAL,
    } | changes
    moved = {key: place.move(one) if isinstance(one, torch.Tensor) else one for key, one in values.items()}
    name = "npu_moe_distribute_dispatch" + ("_v2" if contract == 2 else "")
    return getattr(ascend_moe, name)(**moved)


def _combine(place: Place, contract: int = 1, **changes: Any) -> Any:
    """Combine of a good dispatch with these arguments changed."""
    sent = _dispatch(place, contract)
    ascend_moe.check()
    values: dict[str, Any] = {
        "expand_x": sent[0],
        "expert_ids": torch.zeros(_BS, _K, dtype=torch.int32) + torch.arange(_K, dtype=torch.int32),
        "expand_idx" if contract == 1 else "assist_info_for_combine": sent[2],
        "ep_send_counts": sent[4],
        "expert_scales": torch.ones(_BS, _K),
        "group_ep": place.group_ep,
        "ep_world_size": place.world,
        "ep_rank_id": place.rank,
        "moe_expert_num": place.world * _LOCAL,
    } | changes
    moved = {key: place.move(one) if isinstance(one, torch.Tensor) else one for key, one in values.items()}
    name = "npu_moe_distribute_combine" + ("_v2" if contract == 2 else "")
    return getattr(ascend_moe, name)(**moved)


def _other_hidden(place: Place) -> Any:
    """Rank 0 has rows of another length."""
    return _dispatch(place, x=torch.ones(_BS, _H * (2 if place.rank == 0 else 1), dtype=torch.bfloat16))


def _large(place: Place) -> Any:
    """The largest batches and rows that the rules allow: no usual window holds them."""
    ids = torch.zeros(1, 16, dtype=torch.int32)
    experts = place.world * 16
    x = torch.ones(1, 8192, dtype=torch.bfloat16)
    return _dispatch(place, x=x, expert_ids=ids, moe_expert_num=experts, global_bs=place.world * 4096)


BAD: tuple[Bad, ...] = (
    Bad("x of int32", ArgumentError, "x", lambda p: _dispatch(p, x=torch.ones(_BS, _H, dtype=torch.int32))),
    Bad(
        "x with rows of 10 bytes", ArgumentError, "x", lambda p: _dispatch(p, x=torch.ones(_BS, 5).bfloat16())
    ),
    Bad(
        "expert_ids of int64",
        ArgumentError,
        "expert_ids",
        lambda p: _dispatch(p, expert_ids=torch.zeros(_BS, _K, dtype=torch.int64)),
    ),
    Bad(
        "expert_ids of another batch",
        ArgumentError,
        "expert_ids",
        lambda p: _dispatch(p, expert_ids=torch.zeros(_BS + 1, _K, dtype=torch.int32)),
    ),
    Bad("moe_expert_num 0", ArgumentError, "moe_expert_num", lambda p: _dispatch(p, moe_expert_num=0)),
    Bad(
        "ep_world_size + 1", ArgumentError, "ep_world_size", lambda p: _dispatch(p, ep_world_size=p.world + 1)
    ),
    Bad("quant_mode 7", ArgumentError, "quant_mode", lambda p: _dispatch(p, quant_mode=7)),
    Bad(
        "scales without quant_mode",
        ArgumentError,
        "scales",
        lambda p: _dispatch(p, scales=torch.ones(p.world * _LOCAL, _H)),
    ),
    Bad(
        "x_active_mask of float32",
        ArgumentError,
        "x_active_mask",
        lambda p: _dispatch(p, 2, x_active_mask=torch.ones(_BS)),
    ),
    Bad(
        "global_bs for fewer tokens",
        ArgumentError,
        "global_bs",
        lambda p: _dispatch(p, global_bs=p.world * 2),
    ),
    Bad("tp_world_size 2", ArgumentError, "tp_world_size", lambda p: _dispatch(p, tp_world_size=2)),
    Bad("an unknown group_ep", ArgumentError, "group_ep", lambda p: _dispatch(p, group_ep="no such group")),
    Bad("comm_alg 'none'", ArgumentError, "comm_alg", lambda p: _dispatch(p, 2, comm_alg="none")),
    Bad("a window too small", WindowTooSmall, "", _large),
    Bad(
        "shared_expert_x with V1",
        ArgumentError,
        "shared_expert_x",
        lambda p: _combine(p, shared_expert_x=torch.ones(_BS, _H, dtype=torch.bfloat16)),
    ),
    Bad(
        "expert_scales of bfloat16",
        ArgumentError,
        "expert_scales",
        lambda p: _combine(p, 2, expert_scales=torch.ones(_BS, _K, dtype=torch.bfloat16)),
    ),
    Bad(
        "combine with other ids",
        RoutingMismatch,
        "",
        lambda p: _combine(p, expert_ids=torch.full((_BS, _K), -1, dtype=torch.int32)),
    ),
    Bad("another H on rank 0", ConfigMismatch, "", _other_hidden, least_world=2),
)
