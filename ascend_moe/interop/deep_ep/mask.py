"""DeepEP's mask of ranks, ``enable_shrink``: the ranks that are left go on as a smaller group, with the old numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

import ascend_moe
from ascend_moe.errors import CommError, PeerLost, need, need_dtype, need_shape
from ascend_moe.interop.deep_ep.place import BufferPlace

P = ParamSpec("P")
R = TypeVar("R")


class RankMask:
    """Which ranks of a Buffer's group are left out, and the group of the others.

    Attributes:
        place: this rank's place in the group that calls now.
        alive: that group's ranks, by their numbers in the Buffer's group.
    """

    def __init__(self, first: BufferPlace) -> None:
        self._first = first
        self.place = first
        self.alive = list(range(first.world))
        self._to_mask: set[int] = set()

    def update(self, rank: int, mask: bool) -> None:
        """Leaves a rank out from the next call on; to be called on all others."""
        world = self._first.world
        need(isinstance(rank, int) and 0 <= rank < world, "rank_to_mask", "is {!r}; it must be 0..{}", rank, world - 1)
        need(rank != self._first.rank or not mask, "rank_to_mask", "is {}, this rank itself", rank)
        back = "is {}, which is left out already: a process that was started anew comes back by ascend_moe.grow, with "
        need(mask or rank in self.alive, "rank_to_mask", back + "a new Buffer of all ranks", rank)
        (self._to_mask.add if mask else self._to_mask.discard)(rank)

    def clean(self) -> None:
        """Takes all ranks in again that no call has left out yet."""
        gone = [rank for rank in range(self._first.world) if rank not in self.alive]
        rule = "finds ranks {} left out: they come back by ascend_moe.grow, with a new Buffer of all ranks"
        need(not gone, "low_latency_clean_mask_buffer", rule, gone)
        self._to_mask.clear()

    def query(self, mask_status: Tensor) -> None:
        """Writes 1 for ranks that are left out, else 0."""
        need_shape("mask_status", mask_status, (self._first.world,))
        need_dtype("mask_status", mask_status, torch.int32)
        masked = [int(rank not in self.alive or rank in self._to_mask) for rank in range(self._first.world)]
        mask_status.copy_(torch.tensor(masked, dtype=torch.int32))

    def apply(self) -> None:
        """Makes the group of the ranks that are to be left, if it is another one. Collective among them."""
        if any(rank in self._to_mask for rank in self.alive):
            self._shrink([place for place, rank in enumerate(self.alive) if rank not in self._to_mask])

    def watched(self, call: Callable[P, R]) -> Callable[P, R]:
        """The same call; when it loses a rank, the others go on without it from the next call on.

        Raises:
            PeerLost: a rank was lost in this call, on every rank that is left: its results are incomplete.
        """

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except CommError as error:
                before = self.alive
                self._shrink(ascend_moe.agree(self.place.group_ep))
                lost = [rank for rank in before if rank not in self.alive]
                text = f"ranks {', '.join(map(str, lost)) or 'none'} are left out from now on: repeat the step"
                raise PeerLost(f"{text}; {error}", rank=lost[0] if lost else None, ranks=lost) from error

        return run

    def _shrink(self, left: list[int]) -> None:
        """``left``: ranks of the group that calls now."""
        while True:
            try:
                place = ascend_moe.shrink(self.place.group_ep, left)
                break
            except PeerLost:  # one more, within it
                left = ascend_moe.agree(self.place.group_ep)
        self.place = BufferPlace(place.group_ep, place.world, place.rank)
        self.alive = [self.alive[rank] for rank in left]
        self._to_mask.clear()

    def table(self, local_experts: int) -> Tensor | None:
        """``(E,)`` int32: the number that an expert has now, -1 where its rank is left out; None: as before."""
        if len(self.alive) == self._first.world:
            return None
        table = torch.full((self._first.world, local_experts), -1, dtype=torch.int32)
        table[self.alive] = torch.arange(len(self.alive) * local_experts, dtype=torch.int32).view(-1, local_experts)
        return table.view(-1)


def mapped(ids: Tensor, table: Tensor | None) -> Tensor:
    """Ids by a table; those below 0, and those that are none, stay what they are."""
    if table is None:
        return ids
    known = (ids >= 0) & (ids < table.numel())
    moved = table.to(ids.device)[ids.clamp(0, table.numel() - 1).long()].to(ids.dtype)
    return torch.where(known, moved, torch.where(ids < 0, ids, torch.iinfo(torch.int32).max).to(ids.dtype))
