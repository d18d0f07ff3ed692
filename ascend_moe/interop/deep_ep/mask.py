"""DeepEP's mask of ranks, ``enable_shrink``: the other ranks continue as a subgroup, with their old numbers."""

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
    """Masked ranks of a Buffer's group, and the subgroup of the others.

    Attributes:
        place: this rank's place in the current subgroup.
        alive: ranks of the subgroup, by their numbers in the Buffer's group.
    """

    def __init__(self, first: BufferPlace) -> None:
        self._first = self.place = first
        self.world = first.world
        self.alive = list(range(first.world))
        self._to_mask: set[int] = set()
        self._ended: set[int] = set()  # of those that are left out
        self._failed = False  # the others have continued without this rank

    def update(self, rank: int, mask: bool) -> None:
        """Mask a rank from the next call on; call it on all others."""
        world = self.world
        need(isinstance(rank, int) and 0 <= rank < world, "rank_to_mask", "is {!r}; it must be 0..{}", rank, world - 1)
        need(rank != self._first.rank or not mask, "rank_to_mask", "is {}, this rank: pass another", rank)
        back = "is {}, which is masked: low_latency_clean_mask_buffer, on all ranks, unmasks it if its "
        back += "process is alive; otherwise restart the job"
        need(mask or rank in self.alive, "rank_to_mask", back, rank)
        (self._to_mask.add if mask else self._to_mask.discard)(rank)

    def clean(self) -> None:
        """Unmask all ranks: the next call opens windows of the whole group. Call it on all ranks."""
        ended = sorted(self._ended)
        rule = "needs live ranks, but ranks {} have ended: restart the job"
        need(not ended, "low_latency_clean_mask_buffer", rule, ended)
        self._to_mask.clear()
        on_npus = membership.npu_group(self._first.group_ep) is not None
        anew = on_npus and len(self.alive) < self.world
        rule = "is on a group of NPUs that has lost ranks: create its process group and the Buffer again, on all ranks"
        need(not anew, "low_latency_clean_mask_buffer", rule)
        if self._failed or len(self.alive) < self.world or self._left_behind():
            ascend_moe.close(self.place.group_ep)
            self.place, self.alive, self._failed = self._first, list(range(self.world)), False

    def query(self, mask_status: Tensor) -> None:
        """Write 1 for ranks that are masked, or will be; else 0."""
        need_shape("mask_status", mask_status, (self.world,))
        need_dtype("mask_status", mask_status, torch.int32)
        masked = [int(rank not in self.alive or rank in self._to_mask) for rank in range(self.world)]
        mask_status.copy_(torch.tensor(masked, dtype=torch.int32, device="cpu"))

    def _left_behind(self) -> bool:
        """Return whether others have continued without this rank."""
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
        """Create the subgroup without the ranks to mask, if there are any. Collective among its ranks."""
        if any(rank in self._to_mask for rank in self.alive):
            self._shrink([place for place, rank in enumerate(self.alive) if rank not in self._to_mask])

    def watched(self, call: Callable[P, R]) -> Callable[P, R]:
        """Return the call; if it loses a rank, the others continue without it from the next call on.

        Raises:
            PeerLost: on every remaining rank, if a rank was lost in this call, whose results are incomplete.
        """

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                result = call(*args, **kwargs)
                ascend_moe.check(self.place.group_ep)  # waits, on NPUs only
                return result
            except CommError as error:
                before = self.alive
                self._failed = True
                self._shrink(ascend_moe.agree(self.place.group_ep))
                lost = [rank for rank in before if rank not in self.alive]
                text = f"ranks {', '.join(map(str, lost)) or 'none'} are masked from now on: repeat the step"
                raise PeerLost(f"{text}; {error}", rank=lost[0] if lost else None, ranks=lost) from error

        return run

    def _shrink(self, left: list[int]) -> None:
        """Create the subgroup of ``left``, ranks of the current one."""
        ended = set(self._seen_ended())
        while True:
            try:
                place = ascend_moe.shrink(self.place.group_ep, left)
                break
            except PeerLost:  # another one was lost meanwhile
                left = ascend_moe.agree(self.place.group_ep)
                ended |= set(self._seen_ended())
        self._ended |= {self.alive[rank] for rank in ended if rank not in left}
        self.place, self._failed = BufferPlace(place.group_ep, place.world, place.rank), False
        self.alive = [self.alive[rank] for rank in left]
        self._to_mask.clear()

    def table(self, local_experts: int) -> Tensor | None:
        """Return ``(E,)`` int32: the current number of each expert, -1 for masked ranks; None: unchanged."""
        if len(self.alive) == self.world:
            return None
        made: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
        table = torch.full((self.world, local_experts), -1, **made)
        table[self.alive] = torch.arange(len(self.alive) * local_experts, **made).view(-1, local_experts)
        return table.view(-1)


def mapped(ids: Tensor, table: Tensor | None) -> Tensor:
    """Return ids mapped by a table; negative ids are not changed, invalid ones stay invalid."""
    if table is None:
        return ids
    known = (ids >= 0) & (ids < table.numel())
    moved = table.to(ids.device)[ids.clamp(0, table.numel() - 1).long()].to(ids.dtype)
    return torch.where(known, moved, torch.where(ids < 0, ids, torch.iinfo(torch.int32).max).to(ids.dtype))
