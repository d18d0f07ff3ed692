"""Assignments of a rank's tokens to experts of an ETP x EP group.

Every rank of the group has L local experts: with ETP an expert is cut into etp shards, each an expert of the
group. Shard t of expert e is number ``(e // L * etp + t) * L + e % L``, so that rank ``ep_rank * etp + t``
owns it, and a token has k * etp slots.
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
from ascend_moe.dispatchers.padded import segments_and_places
from ascend_moe.errors import ArgumentError, need, need_dims, need_shape
from ascend_moe.permute import permute

if TYPE_CHECKING:
    from ascend_moe.ops.collectives import Group


def group_or_place(group: dist.ProcessGroup | str | None, world: int | None, rank: int | None) -> Group:
    """Return a group as `comm.group_of` does; a name (a LocalCluster's too) needs size and rank."""
    if not isinstance(group, str):
        return group_of("group", group)
    if world is None or rank is None:
        raise ArgumentError("group is a name: pass world_size and rank too", argument="group")
    return Place(group, world, rank)


@dataclass
class Assignments:
    """Experts of this rank's tokens: ``ids`` (T, K) int32, -1 for none, and ``weights`` (T, K) fp32."""

    ids: Tensor
    weights: Tensor

    def send(self, x: Tensor, dispatcher: Dispatcher, max_tokens: int) -> Dispatched:
        """Dispatch the tokens (T, H) with their weights."""
        return dispatcher.dispatch(x, self.ids, expert_scales=self.weights.contiguous(), max_tokens=max_tokens)

    def bring(self, rows: Tensor, dispatcher: Dispatcher, sent: Dispatched, weighted: bool) -> Tensor:
        """Combine: return (T, H), each token's sum of rows, weighted or not, fp32 in slot order, rounded once."""
        return dispatcher.combine(rows, sent, self.weights.contiguous() if weighted else None)


def assignments_of(routing_map: Tensor, probs: Tensor, slots: int, without_zeros: bool) -> Assignments:
    """Return the assignments of a routing map, by expert; nothing is read on the host.

    Args:
        routing_map: (T, E) bool, at most ``slots`` True in a row.
        probs: (T, E) float.
        slots: K.
        without_zeros: a slot with probability 0 is not sent. A map padded up to a capacity may have more True
            than slots; padding has probability 0.
    """
    chosen = routing_map.bool()
    if without_zeros:
        chosen = chosen & (probs != 0)
    order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices[:, :slots]
    taken = chosen.gather(1, order)
    if chosen.device.type == "cpu":
        rule = f"routing_map has a token with more than {slots} experts; build it with a topk of at most {slots}"
        torch._assert_async((chosen.sum(1) <= slots).all(), rule)
    ids = torch.where(taken, order, -1).to(torch.int32)
    return Assignments(ids, torch.where(taken, probs.gather(1, order).float(), 0.0))


def sharded(assignments: Assignments, local: int, etp: int) -> Assignments:
    """Return the assignments to the etp shards of every expert; ``local``: L."""
    if etp == 1:
        return assignments
    ids, shard = assignments.ids.unsqueeze(-1), torch.arange(etp, dtype=torch.int32, device=assignments.ids.device)
    numbers = torch.where(ids >= 0, (ids // local * etp + shard) * local + ids % local, -1)
    weights = assignments.weights.unsqueeze(-1).expand(numbers.shape).flatten(1)
    # By number, as from a map of all shards: both sum in one order.
    numbers = numbers.flatten(1)
    order = torch.sort(numbers.masked_fill(numbers < 0, torch.iinfo(numbers.dtype).max), dim=1, stable=True).indices
    return Assignments(numbers.gather(1, order), weights.gather(1, order))


@dataclass
class PaddedAssignments(Assignments):
    """Assignments of rows, one slot each, and ``sources`` (N,) int64: the token of each row; ``tokens``: T."""

    sources: Tensor
    tokens: int

    def bring(self, rows: Tensor, dispatcher: Dispatcher, sent: Dispatched, weighted: bool) -> Tensor:
        """Combine: return (T, H), each token's sum of rows, weighted or not, fp32 by shard number, rounded once."""
        each = dispatcher.combine(rows, sent).float()
        each = each * self.weights if weighted else each
        total = torch.zeros(self.tokens, rows.shape[1], dtype=each.dtype, device=rows.device)
        return total.index_add(0, self.sources, each).to(rows.dtype)


def padded(
    x: Tensor, routing_map: Tensor, probs: Tensor, capacity: int, local: int, etp: int
) -> tuple[Tensor, Assignments]:
    """Return C rows for each of the E * etp shards, by number: (E * etp * C, H), and their assignments.

    They are the rows of the first C tokens of the expert in the map; where it has fewer, rows that are not sent.
    Rows with probability 0 are sent: their probability has a gradient, the row's result times that of the sum.

    Args:
        x: (T, H). routing_map: (T, E) bool. probs: (T, E) float.
        capacity: C, at most T.
        local, etp: L, and shards of an expert.
    """
    tokens, experts = routing_map.shape
    sources = permute(x, routing_map, num_out_tokens=experts * capacity, drop_and_pad=True)[2]
    number, place = segments_and_places(experts * etp, capacity, x.device)
    expert = number // (local * etp) * local + number % local
    flat = sources[expert * capacity + place]
    pairs = flat * experts + expert
    taken = routing_map.bool().reshape(-1)[pairs]
    ids = torch.where(taken, number, -1).to(torch.int32).unsqueeze(1)
    weights = torch.where(taken, probs.reshape(-1)[pairs].float(), 0.0).unsqueeze(1)
    return x.index_select(0, flat), PaddedAssignments(ids, weights, flat, tokens)


def check_routing(hidden: Tensor, routing_map: Tensor, probs: Tensor, experts: int) -> None:
    """Raise unless rows (T, H), map (T, E) and probabilities (T, E) fit."""
    need_dims("hidden_states", hidden, 2)
    need_shape("routing_map", routing_map, (hidden.shape[0], experts))
    need_shape("probs", probs, (hidden.shape[0], experts))
    need(probs.is_floating_point(), "probs", "is {}; it must be float", probs.dtype)
