"""DeepEP's mask of ranks, ``enable_shrink``: the ranks that are left go on as a smaller group, with the old numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

import ascend_moe
from ascend_moe.comm import membership
from ascend_moe.errors import ArgumentError, CommError, PeerLost, need, need_dtype, need_shape
from ascend_moe.interop.deep_ep.base import BufferPlace

P = ParamSpec("P")
R = TypeVar("R")


class RankMask:
    """Which ranks of a Buffer's group are left out, and the group of the others.

    Attributes:
        place: this rank's place in the group that calls now.
        alive: that group's ranks, by their numbers in the Buffer's group.
    """

    def __init__(self, first: BufferPlace) -> None:
        self._first = self.place = first
        self.world = first.world
        self.alive = list(range(first.world))
        self._to_mask: set[int] = set()
        self._ended: set[int] = set()  # of those that are left out
        self._failed = False  # here: the others have gone on without this rank

    def update(self, rank: int, mask: bool) -> None:
        """Leaves a rank out from the next call on; to be called on all others."""
        world = self.world
        need(isinstance(rank, int) and 0 <= rank < world, "rank_to_mask", "is {!r}; it must be 0..{}", rank, world - 1)
        need(rank != self._first.rank or not mask, "rank_to_mask", "is {}, this rank itself", rank)
        back = (
            "is {}, which is left out already: low_latency_clean_mask_buffer, on all ranks, takes it in again if its "
        )
        back += "process lives; where it has ended, start the job anew"
        need(mask or rank in self.alive, "rank_to_mask", back, rank)
        (self._to_mask.add if mask else self._to_mask.discard)(rank)

    def clean(self) -> None:
        """Takes all ranks in again: the next call opens windows of the whole group. To be called on all of them."""
        ended = sorted(self._ended)
        rule = "finds that ranks {} have ended, and none of them can come back: start the job anew"
        need(not ended, "low_latency_clean_mask_buffer", rule, ended)
        self._to_mask.clear()
        on_npus = membership.npu_group(self._first.group_ep) is not None
        anew = on_npus and len(self.alive) < self.world
        rule = "is of a group on NPUs that has lost ranks: make its process group and the Buffer anew, on all ranks"
        need(not anew, "low_latency_clean_mask_buffer", rule)
        if self._failed or len(self.alive) < self.world or self._left_behind():
            ascend_moe.close(self.place.group_ep)
            self.place, self.alive, self._failed = self._first, list(range(self.world)), False

    def query(self, mask_status: Tensor) -> None:
        """Writes 1 for ranks that are left out, or are to be; else 0."""
        need_shape("mask_status", mask_status, (self.world,))
        need_dtype("mask_status", mask_status, torch.int32)
        masked = [int(rank not in self.alive or rank in self._to_mask) for rank in range(self.world)]
        mask_status.copy_(torch.tensor(masked, dtype=torch.int32, device="cpu"))

    def _left_behind(self) -> bool:
        """Whether others have gone on without this rank, which has made no call since."""
        try:
            return bool(membership.closed(self._first.group_ep))
        except ArgumentError:
            return False

    def _seen_ended(self) -> list[int]:
        try:
            return membership.ended(self.place.group_ep)
        except ArgumentError:  # its windows are not open yet, or not any more
            return []

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
                result = call(*args, **kwargs)
                ascend_moe.check(self.place.group_ep)  # waits, on NPUs alone
                return result
            except CommError as error:
                before = self.alive
                self._failed = True
                self._shrink(ascend_moe.agree(self.place.group_ep))
                lost = [rank for rank in before if rank not in self.alive]
                text = f"ranks {', '.join(map(str, lost)) or 'none'} are left out from now on: repeat the step"
                raise PeerLost(f"{text}; {error}", rank=lost[0] if lost else None, ranks=lost) from error

        return run

    def _shrink(self, left: list[int]) -> None:
        """``left``: ranks of the group that calls now."""
        ended = set(self._seen_ended())
        while True:
            try:
                place = ascend_moe.shrink(self.place.group_ep, left)
                break
            except PeerLost:  # one more, within it
                left = ascend_moe.agree(self.place.group_ep)
                ended |= set(self._seen_ended())
        self._ended |= {self.alive[rank] for rank in ended if rank not in left}
        self.place, self._failed = BufferPlace(place.group_ep, place.world, place.rank), False
        self.alive = [self.alive[rank] for rank in left]
        self._to_mask.clear()

    def table(self, local_experts: int) -> Tensor | None:
        """``(E,)`` int32: the number that an expert has now, -1 where its rank is left out; None: as before."""
        if len(self.alive) == self.world:
            return None
        made: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
        table = torch.full((self.world, local_experts), -1, **made)
        table[self.alive] = torch.arange(len(self.alive) * local_experts, **made).view(-1, local_experts)
        return table.view(-1)


def mapped(ids: Tensor, table: Tensor | None) -> Tensor:
    """Ids by a table; those below 0, and those that are none, stay what they are."""
    if table is None:
        return ids
    known = (ids >= 0) & (ids < table.numel())
    moved = table.to(ids.device)[ids.clamp(0, table.numel() - 1).long()].to(ids.dtype)
    return torch.where(known, moved, torch.where(ids < 0, ids, torch.iinfo(torch.int32).max).to(ids.dtype))
