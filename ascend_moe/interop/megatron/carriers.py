"""How rows and their probabilities travel between the ranks of one ETP x EP group: three ways, the same results.

Every rank of the group holds L experts of its own: with ETP an expert is cut into etp shards, which count as experts
of their own. Shard t of expert e is number ``(e // L * etp + t) * L + e % L``, so that rank ``ep_rank * etp + t``
holds it, and a token has k * etp slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_moe import npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2
from ascend_moe.comm import comm_name, group_of, process_group
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher
from ascend_moe.errors import ArgumentError, need, need_dims, need_one_of, need_shape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KINDS = ("mc2", "alltoall", "allgather")


@dataclass(frozen=True)
class Ranks:
    """The group: its name or process group, its size, and this rank."""

    group: ProcessGroup | str | None
    world: int
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup | str | None, world: int | None, rank: int | None) -> Ranks:
        """From a group as `comm.group_of`, or a name (a LocalCluster's too), which comes with size and rank."""
        if isinstance(group, str):
            if world is None or rank is None:
                raise ArgumentError("group is a name: give world_size and rank too", argument="group")
            need(type(world) is int and type(rank) is int, "world_size", "is {!r}, rank {!r}; need ints", world, rank)
            return cls(group, world, rank)
        group = group_of("group", group)
        return cls(group, group.size(), group.rank())


@dataclass
class Routes:
    """Where the slots of this rank's tokens go: ``ids`` (T, K) int32, -1 for none, and ``weights`` (T, K) fp32."""

    ids: Tensor
    weights: Tensor


@dataclass
class Arrived:
    """What came: A rows by (local expert, source rank, slot), of which the first ``ends[-1]`` are defined.

    ``probs`` (A,) fp32, ``counts`` (L,) int64, ``ends`` (L*W,) int32: running sums of the rows of each source.
    ``state``: what the carrier needs to send rows home.
    """

    rows: Tensor
    probs: Tensor
    counts: Tensor
    ends: Tensor
    state: Any


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


class Carrier(ABC):
    """Brings rows to their experts, and sums home.

    Args:
        ranks: the group.
        experts: of all ranks, a multiple of W.
        max_tokens: the largest T of any rank; 0: all ranks have the same.

    Attributes:
        most_rows: that one call takes.
    """

    most_rows = 1 << 31

    def __init__(self, ranks: Ranks, experts: int, max_tokens: int) -> None:
        need(
            max_tokens >= 0, "max_tokens", "is {}; need the largest T of any rank, or 0 where all are equal", max_tokens
        )
        self.ranks, self.experts = ranks, experts
        self.options: dict[str, Any] = {"global_bs": ranks.world * max_tokens}

    @abstractmethod
    def send(self, x: Tensor, routes: Routes) -> Arrived:
        """Send rows (T, H) and weights."""

    @abstractmethod
    def bring(self, rows: Tensor, arrived: Arrived, routes: Routes, weighted: bool) -> Tensor:
        """(T, H): for every token the sum of its rows, weighted or not, fp32 in slot order, rounded once."""


class Windows(Carrier):
    """The V2 ops. A is the most rows that can come; nothing is read on the host."""

    most_rows = 4096

    def __init__(self, ranks: Ranks, experts: int, max_tokens: int, comm_alg: str = "") -> None:
        super().__init__(ranks, experts, max_tokens)
        name = ranks.group if isinstance(ranks.group, str) else comm_name(ranks.group)
        self.place = (name, ranks.world, ranks.rank, experts)
        self.options |= {"comm_alg": comm_alg} if comm_alg else {}

    def send(self, x: Tensor, routes: Routes) -> Arrived:
        weights = routes.weights.contiguous()
        sent = npu_moe_distribute_dispatch_v2(x, routes.ids, *self.place, expert_scales=weights, **self.options)
        # Beside servers of 8 ranks the operator has more words behind the counts, for combine.
        ends = sent.ep_recv_counts[: self.experts]
        state = (sent.assist_info_for_combine, sent.ep_recv_counts)
        return Arrived(sent.expand_x, sent.expand_scales, sent.expert_token_nums, ends, state)

    def bring(self, rows: Tensor, arrived: Arrived, routes: Routes, weighted: bool) -> Tensor:
        weights = routes.weights.contiguous() if weighted else routes.weights.new_empty(0)
        triples, counts = arrived.state
        return npu_moe_distribute_combine_v2(rows, routes.ids, triples, counts, weights, *self.place, **self.options)


class Collectives(Carrier):
    """torch.distributed's all-to-all or all-gather. A is what came; counts are read on the host."""

    def __init__(self, ranks: Ranks, experts: int, max_tokens: int, kind: str) -> None:
        super().__init__(ranks, experts, max_tokens)
        group = process_group(ranks.group) if isinstance(ranks.group, str) else ranks.group
        rule = "is {!r}; kind {!r} needs a process group: use ascend_moe.comm_name(process_group), or kind 'mc2'"
        need(group is not None, "group", rule, ranks.group, kind)
        make = AllToAllDispatcher if kind == "alltoall" else AllGatherDispatcher
        self.dispatcher = make(group, experts)

    def send(self, x: Tensor, routes: Routes) -> Arrived:
        sent = self.dispatcher.dispatch(x, routes.ids, **self.options)
        # A second, narrow row tells every expert the token's weights, and which of them is its own.
        narrow = torch.cat([routes.weights, routes.ids.float()], 1)
        told = self.dispatcher.dispatch(narrow, routes.ids, **self.options).expand_x
        row = torch.arange(len(told), device=told.device)
        first = self.ranks.rank * self.dispatcher.local_experts
        owner = first + torch.searchsorted(sent.expert_token_nums.cumsum(0), row, right=True)
        weights, numbers = told.chunk(2, 1)
        probs = torch.where(numbers == owner[:, None], weights, 0).sum(1)
        return Arrived(sent.expand_x, probs, sent.expert_token_nums, sent.ep_recv_counts, sent)

    def bring(self, rows: Tensor, arrived: Arrived, routes: Routes, weighted: bool) -> Tensor:
        weights = routes.weights if weighted else torch.ones_like(routes.weights)
        return self.dispatcher.combine(rows, arrived.state, weights.contiguous())


def carrier(kind: str, ranks: Ranks, experts: int, max_tokens: int, comm_alg: str) -> Carrier:
    """The carrier of a kind."""
    need_one_of("kind", kind, KINDS)
    if kind == "mc2":
        return Windows(ranks, experts, max_tokens, comm_alg)
    need(not comm_alg, "comm_alg", "is {!r}, which kind {!r} does not take; leave it out", comm_alg, kind)
    return Collectives(ranks, experts, max_tokens, kind)


def check_routing(hidden: Tensor, routing_map: Tensor, probs: Tensor, experts: int) -> None:
    """Raise unless rows (T, H), map (T, E) and probabilities (T, E) fit."""
    need_dims("hidden_states", hidden, 2)
    need_shape("routing_map", routing_map, (hidden.shape[0], experts))
    need_shape("probs", probs, (hidden.shape[0], experts))
    need(probs.is_floating_point(), "probs", "is {}; it must be float", probs.dtype)
