"""Where the slots of a rank's tokens go in an ETP x EP group, and the dispatcher of that group.

Every rank of the group holds L experts of its own: with ETP an expert is cut into etp shards, which count as experts
of their own. Shard t of expert e is number ``(e // L * etp + t) * L + e % L``, so that rank ``ep_rank * etp + t``
holds it, and a token has k * etp slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.comm import group_of
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import Dispatched, Dispatcher
from ascend_moe.errors import ArgumentError, need, need_dims, need_shape

if TYPE_CHECKING:
    from ascend_moe.ops.collectives import Group


def group_or_place(group: dist.ProcessGroup | str | None, world: int | None, rank: int | None) -> Group:
    """A group as `comm.group_of`; a name (a LocalCluster's too) comes with size and rank."""
    if not isinstance(group, str):
        return group_of("group", group)
    if world is None or rank is None:
        raise ArgumentError("group is a name: give world_size and rank too", argument="group")
    return Place(group, world, rank)


@dataclass
class Routes:
    """Where the slots of this rank's tokens go: ``ids`` (T, K) int32, -1 for none, and ``weights`` (T, K) fp32."""

    ids: Tensor
    weights: Tensor

    def send(self, x: Tensor, dispatcher: Dispatcher, max_tokens: int) -> Dispatched:
        """Rows of the tokens (T, H), with their weights."""
        return dispatcher.dispatch(x, self.ids, expert_scales=self.weights.contiguous(), max_tokens=max_tokens)

    def bring(self, rows: Tensor, dispatcher: Dispatcher, sent: Dispatched, weighted: bool) -> Tensor:
        """(T, H): for every token the sum of its rows, weighted or not, fp32 in slot order, rounded once."""
        return dispatcher.combine(rows, sent, self.weights.contiguous() if weighted else None)


def routes_of(routing_map: Tensor, probs: Tensor, slots: int, without_zeros: bool) -> Routes:
    """The slots of a map, by expert. Nothing is read on the host.

    Args:
        routing_map: (T, E) bool, at most ``slots`` True in a row.
        probs: (T, E) float.
        slots: K.
        without_zeros: a slot with probability 0 goes nowhere. A map that is padded up to a capacity may have more
            True than slots; those that are padding have probability 0.
    """
    chosen = routing_map.bool()
    if without_zeros:
        chosen = chosen & (probs != 0)
    order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices[:, :slots]
    taken = chosen.gather(1, order)
    if chosen.device.type == "cpu":
        rule = f"routing_map has a token with more than {slots} experts; build it with topk that fits"
        torch._assert_async((chosen.sum(1) <= slots).all(), rule)
    ids = torch.where(taken, order, -1).to(torch.int32)
    return Routes(ids, torch.where(taken, probs.gather(1, order).float(), 0.0))


def sharded(routes: Routes, local: int, etp: int) -> Routes:
    """Routes to the etp shards of every expert; ``local``: L."""
    if etp == 1:
        return routes
    ids, shard = routes.ids.unsqueeze(-1), torch.arange(etp, dtype=torch.int32, device=routes.ids.device)
    numbers = torch.where(ids >= 0, (ids // local * etp + shard) * local + ids % local, -1)
    weights = routes.weights.unsqueeze(-1).expand(numbers.shape).flatten(1)
    # By number, as a map of all shards gives them: then both have one order of the sum.
    numbers = numbers.flatten(1)
    order = torch.sort(numbers.masked_fill(numbers < 0, torch.iinfo(numbers.dtype).max), dim=1, stable=True).indices
    return Routes(numbers.gather(1, order), weights.gather(1, order))


def check_routing(hidden: Tensor, routing_map: Tensor, probs: Tensor, experts: int) -> None:
    """Raise unless rows (T, H), map (T, E) and probabilities (T, E) fit."""
    need_dims("hidden_states", hidden, 2)
    need_shape("routing_map", routing_map, (hidden.shape[0], experts))
    need_shape("probs", probs, (hidden.shape[0], experts))
    need(probs.is_floating_point(), "probs", "is {}; it must be float", probs.dtype)
