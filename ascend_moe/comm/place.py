"""Place: the group and rank of a caller, passed on by everything above the ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from ascend_moe import comm
from ascend_moe.errors import ArgumentError, need

AnyPlace = TypeVar("AnyPlace", bound="Place")


@dataclass(frozen=True)
class Place:
    """The calling rank of a group: the group's name ``group_ep`` (as for the ops), its size ``world``, and ``rank``.

    Raises:
        ArgumentError: a field has the wrong type, or rank is not in 0..world-1. Whether the group exists is unchecked.
    """

    group_ep: str
    world: int
    rank: int

    def __post_init__(self) -> None:
        name, world, rank = self.group_ep, self.world, self.rank
        need(isinstance(name, str), "group_ep", "is a {}; it must be a group's name", type(name).__name__)
        need(isinstance(world, int) and world >= 1, "world", "is {!r}; it must be a number of ranks, at least 1", world)
        fits = isinstance(rank, int) and 0 <= rank < world
        need(fits, "rank", "is {!r}; it must be 0..{}, one of the {} ranks of group {!r}", rank, world - 1, world, name)

    @classmethod
    def of(cls: type[AnyPlace], group: object = None, argument: str = "group", **more: Any) -> AnyPlace:
        """Return this rank's place in a group. Collective on a process group's first use, as `comm.comm_name` is.

        Args:
            group: a Place; the tuple (name, W, rank); the name of a live group (of a LocalCluster only in the thread
                of a rank); or a group as in `comm.group_of`. None: the default process group.
            argument: the caller's name for ``group`` in error messages.
            more: values of the fields that a subclass adds.

        Raises:
            ArgumentError: ``group`` is none of these. Other errors: opening the group's windows failed.
        """
        if isinstance(group, Place):
            return cls(group.group_ep, group.world, group.rank, **more)
        if isinstance(group, tuple):
            kinds = tuple(map(type, group))
            rule = "is the tuple {}; pass a ProcessGroup, or (name, W, rank): a string and two numbers"
            need(kinds == (str, int, int), argument, rule, group)
            rule = "is {}: rank {} of {} ranks; as a tuple it must be (name, W, rank) with a rank of 0..W-1"
            need(0 <= group[2] < group[1], argument, rule, group, group[2], group[1])
            return cls(*group, **more)
        name = comm.name_of(argument, group)
        world, rank = comm.size_and_rank(name) or (0, None)
        need(world > 0, argument, "is {!r}, which names no open group: use ascend_moe.comm_name(process_group)", name)
        if rank is None:
            text = f"{argument} is {name!r}, a LocalCluster's: call it in the thread of a rank, by cluster.run"
            raise ArgumentError(text, argument=argument)
        return cls(name, world, rank, **more)

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the ops' keyword arguments group_ep, ep_world_size and ep_rank_id, and those in ``more``."""
        return {"group_ep": self.group_ep, "ep_world_size": self.world, "ep_rank_id": self.rank, **more}
