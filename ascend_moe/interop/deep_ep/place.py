"""Which group a Buffer is of, and what its ranks tell each other before rows move."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ascend_moe import comm
from ascend_moe.errors import ArgumentError, need
from ascend_moe.fused.arguments import place_in
from ascend_moe.ops.gather import gather_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh | str | tuple[str, int, int]

ROW_BYTES = 32  # rows of the ops are a multiple of this
MOST_EXPERTS = 1 << 16  # tensors have a number for each: far above what the ops take, and small


@dataclass(frozen=True)
class Place:
    """This rank's place in a group: ``group_ep`` as the ops take it, W and the rank."""

    group_ep: str
    world: int
    rank: int

    def __post_init__(self) -> None:
        given = (self.group_ep, self.world, self.rank)
        fits = isinstance(self.group_ep, str) and all(type(number) is int for number in given[1:])
        need(fits, "group", "is {}; as a tuple it must be (name, W, rank): a string and two numbers", given)
        rule = "is {}: rank {} of {} ranks; as a tuple it must be (name, W, rank) with a rank of 0..W-1"
        need(0 <= self.rank < self.world, "group", rule, given, self.rank, self.world)

    @classmethod
    def of(cls, group: Group) -> Place:
        """Of a group as `comm.group_of` takes it, or of the three values themselves (those of a ``LocalCluster``).

        Raises:
            ArgumentError: it is none of these, or has no such rank. Collective on a group's first use: as `comm_name`.
        """
        if isinstance(group, tuple):
            need(len(group) == 3, "group", "is a tuple of {}; it must be (name, W, rank)", len(group))
            return cls(*group)
        need(group is not None, "group", "is None; pass a process group (MPI's communicators are not taken)")
        return cls(*place_in(group))

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
        need_whole("num_experts", experts, self.world, MOST_EXPERTS)
        need(
            experts % self.world == 0,
            "num_experts",
            "is {}; it must be a multiple of the {} ranks",
            experts,
            self.world,
        )
        return experts // self.world

    def gather(self, words: Tensor) -> Tensor:
        """``(W, n)``: every rank's ``(n,)`` int32 words, in one dispatch. Collective; n is equal on all ranks."""
        return gather_rows(words, self.group_ep, self.world, self.rank)


def need_whole(argument: str, value: object, least: int, most: int = 2**31 - 1) -> None:
    """Raise unless ``value`` is a whole number within these."""
    rule = "is {!r}; it must be a whole number of {}..{}"
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    need(whole and least <= value <= most, argument, rule, value, least, most)  # type: ignore[operator]


def not_supported(what: str, instead: str) -> ArgumentError:
    """The error of something that DeepEP has and we have not."""
    return ArgumentError(f"{what} is not supported; {instead}", argument=what)
