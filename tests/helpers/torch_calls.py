"""Calls of the torch ops for tests: variants of arguments, and what rank processes do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ascend_moe.dispatchers.base import SpecialTensors
from ascend_moe.reference import OWN_TERMS

OPS = torch.ops.ascend_moe
EXPERTS, TOPK, HIDDEN = 4, 2, 32
Call = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")


def overload(name: str) -> Any:
    return getattr(OPS, name).default


def local_addends(value: T) -> dict[str, T]:
    """Returns ``value`` for each term that V2's combine adds and that needs no special experts, by its name."""
    return {name: value for name in OWN_TERMS if name not in SpecialTensors._fields}


@dataclass(frozen=True)
class Variant:
    """Arguments of one dispatch and one combine of a rank."""

    name: str
    version: str = ""
    dtype: torch.dtype = torch.bfloat16
    quant_mode: int = 0
    scales: bool = False
    mask: str = ""  # "", "1-D" or "2-D"
    extras: bool = False  # every other optional tensor that is accepted
    unequal: bool = False  # global_bs, and another BS on every rank
    tp: int = 0
    tokens: int = 3

    @property
    def dispatch_name(self) -> str:
        return f"npu_moe_distribute_dispatch{self.version}"

    @property
    def combine_name(self) -> str:
        return f"npu_moe_distribute_combine{self.version}"

    def batch(self, rank: int) -> int:
        return self.tokens - rank if self.unequal else self.tokens

    def _common(self, rank: int, world: int) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.mask:
            pairs = torch.arange(self.batch(rank) * TOPK).reshape(-1, TOPK) % 3 != 1
            kwargs["x_active_mask"] = pairs if self.mask == "2-D" else torch.arange(self.batch(rank)) % 3 != 1
        if self.unequal:
            kwargs["global_bs"] = world * self.batch(0)
        if self.tp:
            kwargs.update(group_tp="tp", tp_world_size=self.tp)
        return kwargs

    def ids(self, rank: int) -> torch.Tensor:
        pairs = self.batch(rank) * TOPK
        return ((torch.arange(pairs) * 3 + rank) % EXPERTS).to(torch.int32).reshape(-1, TOPK)

    def weights(self, rank: int) -> torch.Tensor:
        return torch.linspace(0.1, 1, self.batch(rank) * TOPK).reshape(-1, TOPK)

    def dispatch(self, rank: int, world: int, group_ep: str) -> Call:
        x = torch.linspace(-2, 3, self.batch(rank) * HIDDEN).reshape(-1, HIDDEN).to(self.dtype)
        kwargs = self._common(rank, world)
        kwargs |= {"quant_mode": self.quant_mode, "expert_token_nums_type": rank % 2}
        if self.scales:
            kwargs["scales"] = torch.linspace(0.5, 2, EXPERTS * HIDDEN).reshape(EXPERTS, HIDDEN)
        if self.extras:
            kwargs["expert_scales"] = self.weights(rank)
        if self.version:
            kwargs["comm_alg"] = "fullmesh_v2"
        return (x, self.ids(rank), group_ep, world, rank, EXPERTS), kwargs

    def combine(self, rank: int, world: int, group_ep: str, dispatched: Any) -> Call:
        rows = dispatched[0]
        if self.quant_mode:
            rows = (rows.float() * dispatched[1][:, None]).to(self.dtype)
        kwargs = self._common(rank, world)
        if self.extras:
            kwargs.update(tp_send_counts=dispatched[5], expand_scales=dispatched[6])
        if self.extras and self.version:
            kwargs |= {name: torch.ones(self.batch(rank), HIDDEN, dtype=self.dtype) for name in local_addends(None)}
        tensors = (rows, self.ids(rank), dispatched[2], dispatched[4], self.weights(rank))
        return (*tensors, group_ep, world, rank, EXPERTS), kwargs


VARIANTS = [
    Variant("plain"),
    Variant("plain_v2", "_v2"),
    Variant("int8_all_options", dtype=torch.float16, quant_mode=2, scales=True, mask="1-D", extras=True, tp=1),
    Variant("int8_all_options_v2", "_v2", quant_mode=2, scales=True, mask="2-D", extras=True, tp=1),
    Variant("unequal", dtype=torch.float32, unequal=True, mask="2-D"),
    Variant("unequal_v2", "_v2", dtype=torch.float32, quant_mode=2, unequal=True, extras=True),
]


def run(variant: Variant, rank: int, world: int, group_ep: str) -> tuple[Any, torch.Tensor]:
    """Dispatch's outputs and combine's, the experts being the identity."""
    args, kwargs = variant.dispatch(rank, world, group_ep)
    dispatched = overload(variant.dispatch_name)(*args, **kwargs)
    args, kwargs = variant.combine(rank, world, group_ep, dispatched)
    return dispatched, overload(variant.combine_name)(*args, **kwargs)
