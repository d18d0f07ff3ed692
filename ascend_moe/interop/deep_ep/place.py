"""Which group a Buffer is of, and what its ranks tell each other before rows move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_moe import comm
from ascend_moe.errors import ArgumentError, need
from ascend_moe.ops.gather import gather_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROW_BYTES = 32  # rows of the ops are a multiple of this


@dataclass(frozen=True)
class Place:
    """This rank's place in a group: ``group_ep`` as the ops take it, W and the rank."""

    group_ep: str
    world: int
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup | tuple[str, int, int]) -> Place:
        """Of a process group, or of the three values themselves (those of a ``LocalCluster``)."""
        if isinstance(group, tuple):
            return cls(*group)
        need(group is not None, "group", "is None; pass a process group (MPI's communicators are not taken)")
        return cls(comm.comm_name(group), group.size(), group.rank())

    @cached_property
    def ranks_per_server(self) -> int:
        """0: one server."""
        here = comm.ranks_per_server(self.group_ep, self.world, self.rank)
        equal = not here or here > self.world or self.world % here == 0
        need(equal, "group", "has {} ranks, {} a server; a Buffer needs as many on every server", self.world, here)
        return here if here < self.world else 0

    def of_op(self, experts: int, tokens: int) -> dict[str, Any]:
        """What dispatch and combine take beside their tensors. ``tokens``: most of a rank, equal on all."""
        place = {"group_ep": self.group_ep, "ep_world_size": self.world, "ep_rank_id": self.rank}
        across = {"comm_alg": "hierarchy"} if self.ranks_per_server else {}
        return place | across | {"moe_expert_num": experts, "global_bs": self.world * max(tokens, 1)}

    def of_experts(self, experts: int) -> int:
        """L, local experts."""
        need(
            experts >= self.world and experts % self.world == 0,
            "num_experts",
            "is {}; it must be a multiple of the {} ranks",
            experts,
            self.world,
        )
        return experts // self.world

    def gather(self, words: Tensor) -> Tensor:
        """``(W, n)``: every rank's ``(n,)`` int32 words, in one dispatch. Collective; n is equal on all ranks."""
        return gather_rows(words, self.group_ep, self.world, self.rank)

    def most(self, x: Tensor) -> Tensor:
        """The largest number of rows of x on any rank, an int32 scalar. Collective."""
        return self.gather(torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)).max()


def not_supported(what: str, instead: str) -> ArgumentError:
    """The error of something that DeepEP has and we have not."""
    return ArgumentError(f"{what} is not supported; {instead}", argument=what)
