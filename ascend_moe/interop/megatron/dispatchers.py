"""Megatron-LM's token dispatcher in six phases with an explicit handle, and the assignments that it sends.

Every rank of the ETP x EP group has L local experts: with ETP an expert is cut into etp shards, each an expert of the
group. Shard t of expert e is number ``(e // L * etp + t) * L + e % L``, so that rank ``ep_rank * etp + t``
owns it, and a token has k * etp slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe._tensors import copied_beside
from ascend_moe.comm import group_of
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import Dispatched, Dispatcher, make_dispatcher
from ascend_moe.dispatchers.padded import PaddedDispatcher, segments_and_places
from ascend_moe.errors import ArgumentError, need, need_dims, need_one_of, need_shape, typed_methods
from ascend_moe.experts.groups import CUMSUM, as_counts
from ascend_moe.interop.megatron.shared_experts import SharedExpertCall, SharedExpertMLP
from ascend_moe.ops.collectives import size_of
from ascend_moe.permute import permute
from ascend_moe.routers import get_capacity

if TYPE_CHECKING:
    from ascend_moe.ops.collectives import Group


def group_or_place(group: dist.ProcessGroup | str | None, world: int | None, rank: int | None) -> Group:
    """Return the process group, as `comm.group_of` does; for a name (a LocalCluster's too) a `Place` of W and rank."""
    if not isinstance(group, str):
        return group_of("group", group)
    if world is None or rank is None:
        raise ArgumentError("group is a name: pass world_size and rank too", argument="group")
    return Place(group, world, rank)


@dataclass
class Assignments:
    """Experts of this rank's tokens: ``ids`` (T, K) int32, -1 for an empty slot, and ``weights`` (T, K) fp32."""

    ids: Tensor
    weights: Tensor

    def send(self, x: Tensor, dispatcher: Dispatcher, max_tokens: int) -> Dispatched:
        """Dispatch the tokens x (T, H) with their weights; ``max_tokens``: the largest T of any rank, 0: T is equal."""
        return dispatcher.dispatch(x, self.ids, expert_scales=self.weights.contiguous(), max_tokens=max_tokens)

    def bring(self, rows: Tensor, dispatcher: Dispatcher, sent: Dispatched, weighted: bool) -> Tensor:
        """Combine: return (T, H), each token's sum of rows, weighted or not, fp32 in slot order, rounded once."""
        return dispatcher.combine(rows, sent, self.weights.contiguous() if weighted else None)


def assignments_of(routing_map: Tensor, probs: Tensor, slots: int, without_zeros: bool) -> Assignments:
    """Return the experts and weights of a routing map and probs (T, E), at most ``slots`` per token.

    Reads nothing on the host. without_zeros: experts with probability 0 are left out: a map padded up to a capacity
    may have more than ``slots``, and padding has probability 0.
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
    """Return the assignments with each expert replaced by its ``etp`` shards; ``local``: L."""
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
    """Assignments of N rows with one slot each. ``sources`` (N,) int64: the token of each row; ``tokens``: T."""

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

    They are the rows of the first C = ``capacity`` tokens of the expert in the map; where it has fewer, rows that are
    not sent. Rows with probability 0 are sent: their probability has a gradient, the row's result times that of the
    sum. ``local``, ``etp``: L, and shards of an expert.
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


class Splits(NamedTuple):
    """Splits of Megatron-LM's all-to-all dispatcher: int64, on the device of the rows.

    Attributes:
        input_splits: ``(ep,)``, rows to each EP rank.
        output_splits: ``(ep,)``, rows received from each EP rank, from its rank with this rank's ETP rank only.
        output_splits_tp: ``(etp,)``, rows received from each ETP rank, over all EP ranks.
        tokens_per_expert: ``(L,)``, rows of each local expert.
        num_global_tokens_per_local_expert: ``(etp * ep, L)``, rows for each local expert from each rank, that
            of ETP rank t and EP rank e at ``t * ep + e``.
        num_out_tokens: ``()``, rows sent, the sum of input_splits.
    """

    input_splits: Tensor
    output_splits: Tensor
    output_splits_tp: Tensor
    tokens_per_expert: Tensor
    num_global_tokens_per_local_expert: Tensor
    num_out_tokens: Tensor


@dataclass
class Handle:
    """State of one call, which the caller passes from phase to phase; any number may be open at once.

    Attributes:
        shape: of the hidden states. probs_dtype: of the probabilities.
        assignments: experts and weights of this rank's tokens.
        sent: ``(E,)`` int64, rows to each expert.
        arrived: after token_dispatch, its result. splits: after token_dispatch, `Splits`.
        shared: the call of the shared expert, or None without one.
        active: dispatch_preprocess's mask with a last dimension of size 1, or None.
    """

    shape: torch.Size
    probs_dtype: torch.dtype
    assignments: Assignments = field(repr=False)
    sent: Tensor = field(repr=False)
    arrived: Dispatched | None = field(default=None, repr=False)
    splits: Splits | None = field(default=None, repr=False)
    shared: SharedExpertCall | None = field(default=None, repr=False)
    active: Tensor | None = field(default=None, repr=False)

    def came(self, phase: str) -> Dispatched:
        """Return token_dispatch's result. Raise ArgumentError, which names ``phase``, if it has not been called."""
        need(self.arrived is not None, "handle", "has no rows yet: call token_dispatch before {}", phase)
        assert self.arrived is not None
        return self.arrived


@typed_methods
class TokenDispatcher:
    """Dispatch to experts and combine, in Megatron-LM's six phases.

    dispatch_preprocess, token_dispatch and dispatch_postprocess run before the experts, combine_preprocess,
    token_combine and combine_postprocess after them. token_dispatch and token_combine communicate: all ranks of the
    group call them in the same order. Everything is differentiable, for tokens and probabilities, and the backward
    pass communicates too. The three kinds return the same bits.

    Args:
        kind: "mc2": the V2 ops, rows in memory of fixed size, nothing read on the host. "alltoall", "allgather": this
            collective of torch.distributed.
        group: the ETP x EP ranks, rank ``ep_rank * etp_size + etp_rank`` (Megatron-LM's tp_ep group); None: the
            default group. Or a name, of `ascend_moe.comm_name` or a LocalCluster.
        num_experts: E, a multiple of the EP size; rank ep_rank has L = E / ep experts.
        router_topk: k, the most experts of a token.
        etp_size: ranks that share an expert. The ops then see E * etp experts and k * etp slots.
        world_size, rank: those of the group; needed with a name, else ignored.
        max_tokens: the largest T of any rank; 0: T is equal on all ranks.
        capacity_factor, pad_to_capacity: those of the router. With pad_to_capacity every expert has C rows from every
            rank, C = ceil(T * k / E * capacity_factor), at most T: shapes depend on T, k, E and the factor only. All
            ranks then have the same T. Padding is rows of tokens in the map with probability 0, which has a gradient
            as in Megatron-LM; where the map has fewer than C tokens, rows of zeros, which are not sent.
        probs_on: "experts": the rows' probabilities are for `GroupedMLP`, and combine only adds.
            "combine": combine weights the rows, and dispatch_postprocess returns ones.
        comm_alg: as for the V2 ops: the kernels' algorithm; for kind "mc2".

    Raises ArgumentError if an argument breaks one of these rules. Source: Megatron-LM ``MoEAlltoAllTokenDispatcher``,
    ``MoEAllGatherTokenDispatcher``, ``MoEFlexTokenDispatcher``.
    """

    def __init__(
        self,
        kind: str,
        group: dist.ProcessGroup | str | None,
        num_experts: int,
        router_topk: int,
        *,
        etp_size: int = 1,
        world_size: int | None = None,
        rank: int | None = None,
        max_tokens: int = 0,
        capacity_factor: float | None = None,
        pad_to_capacity: bool = False,
        probs_on: str = "experts",
        comm_alg: str = "",
    ) -> None:
        ranks = group_or_place(group, world_size, rank)
        world = size_of(ranks)
        divides = etp_size >= 1 and world % etp_size == 0
        need(divides, "etp_size", "is {}; it must divide the {} ranks of the group", etp_size, world)
        need_one_of("probs_on", probs_on, ("experts", "combine"))
        rule = "is True without a capacity: pass a capacity_factor"
        need(capacity_factor is not None or not pad_to_capacity, "pad_to_capacity", rule)
        rule = "is {} with pad_to_capacity, which needs the same T on all ranks: leave it out"
        need(not (pad_to_capacity and max_tokens), "max_tokens", rule, max_tokens)
        rule = "is {}; need the largest T of all ranks, or 0 if all are equal"
        need(max_tokens >= 0, "max_tokens", rule, max_tokens)
        self.ep_size, self.etp_size = world // etp_size, etp_size
        divides = num_experts >= 1 and num_experts % self.ep_size == 0
        need(divides, "num_experts", "is {}; it must be a multiple of the {} EP ranks", num_experts, self.ep_size)
        need(1 <= router_topk <= num_experts, "router_topk", "is {}; it must be 1..{}", router_topk, num_experts)
        self.kind, self.probs_on = kind, probs_on
        self.num_experts, self.router_topk = num_experts, router_topk
        self.local_experts = num_experts // self.ep_size
        self.capacity_factor, self.pad_to_capacity, self.max_tokens = capacity_factor, pad_to_capacity, max_tokens
        self.shared_experts: SharedExpertMLP | None = None
        dispatcher = make_dispatcher(kind, ranks, num_experts * etp_size, comm_alg)
        self._dispatcher = PaddedDispatcher(dispatcher) if pad_to_capacity else dispatcher
        self.ep_rank, self.etp_rank = divmod(dispatcher.rank, etp_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        """Copy the shared expert, which the copied layer has too; share the dispatcher."""
        copied: TokenDispatcher = copied_beside(self, memo, self._dispatcher)
        return copied

    def set_shared_experts(self, shared_experts: SharedExpertMLP) -> None:
        """Run ``shared_experts`` on this rank's tokens between the phases; combine_postprocess adds its output."""
        self.shared_experts = shared_experts

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Handle]:
        """Prepare this rank's rows for token_dispatch, and start the shared expert; no communication between EP ranks.

        Args:
            hidden_states: ``(S, B, H)`` or ``(T, H)`` bf16, fp16 or fp32.
            routing_map: ``(T, E)`` bool, the router's; T = S * B.
            probs: ``(T, E)`` float, the router's.
            mask: bool, hidden_states' shape without H, True for active tokens; results of the others are zeros, the
                shared expert's too, and their values are not read. None: all are active.

        Returns tokens ``(T, H)``; the weights of their slots ``(T, k * etp)`` float32; the handle. With pad_to_capacity
        rows by expert ``(E * etp * C, H)``, and their weights, one slot each. Raises ArgumentError if an argument
        breaks one of these rules.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        need_dims("hidden_states", tokens, 2)
        need_shape("routing_map", routing_map, (tokens.shape[0], self.num_experts))
        need_shape("probs", probs, (tokens.shape[0], self.num_experts))
        need(probs.is_floating_point(), "probs", "is {}; it must be float", probs.dtype)
        active = None
        if mask is not None:
            need_shape("mask", mask, tuple(hidden_states.shape[:-1]), dtypes=(torch.bool,))
            routing_map = routing_map.bool() & mask.reshape(-1, 1)
            active = mask.unsqueeze(-1)
        shard = self.local_experts, self.etp_size
        if self.pad_to_capacity:
            pairs = len(tokens) * self.router_topk
            capacity = min(get_capacity(pairs, self.num_experts, self.capacity_factor or 0.0), len(tokens))
            rows, assignments = padded(tokens, routing_map, probs, capacity, *shard)
            sent = torch.full((self.num_experts,), capacity, device=tokens.device)
        else:
            rows, assignments = tokens, sharded(assignments_of(routing_map, probs, self.router_topk, False), *shard)
            sent = torch.sum(routing_map.bool(), 0)
        handle = Handle(hidden_states.shape, probs.dtype, assignments, sent)
        if self.shared_experts is not None:
            handle.shared, handle.active = self.shared_experts.begin(), active
            # 0 times an inactive token's values, which may be NaN, would be in the gradients of the weights.
            handle.shared.pre_forward_comm(hidden_states if active is None else torch.where(active, hidden_states, 0))
        return rows, assignments.weights, handle

    def token_dispatch(self, tokens: Tensor, probs: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
        """Send what dispatch_preprocess returned (``tokens``, ``probs``, ``handle``) to the experts' ranks. Collective.

        Returns rows ``(A, H)`` by local expert, then source rank, and their probabilities ``(A,)`` float32; A is at
        least the number of received rows.
        """
        handle.assignments.weights = probs
        arrived = handle.arrived = handle.assignments.send(tokens, self._dispatcher, self.max_tokens)
        handle.splits = self._splits(handle, arrived)
        if handle.shared is not None:
            handle.shared.linear_fc1_forward_and_act()
        return arrived.expand_x, arrived.expand_scales

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor, handle: Handle) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts' inputs from token_dispatch's ``rows`` and ``probs``, which are in expert order already.

        Returns rows ``(A, H)``, of which the first ``tokens_per_expert.sum()`` are defined; tokens_per_expert ``(L,)``
        int64; probabilities ``(A,)`` float32, float64 if the router's are (with pad_to_capacity A is L * W * C).
        ``handle``: dispatch_preprocess's, here and below. Raises ArgumentError before token_dispatch.
        """
        handle.came("dispatch_postprocess")
        assert handle.splits is not None
        dtype = torch.float64 if handle.probs_dtype == torch.float64 else torch.float32
        if self.probs_on == "combine":
            probs = torch.ones_like(probs)
        return rows, handle.splits.tokens_per_expert, probs.to(dtype)

    def combine_preprocess(self, hidden_states: Tensor, handle: Handle) -> Tensor:
        """Return ``hidden_states`` ``(A, H)``, the experts' results in the order of the rows, unchanged.

        Raises ArgumentError if token_dispatch has not been called with ``handle``.
        """
        handle.came("combine_preprocess")
        return hidden_states

    def token_combine(self, hidden_states: Tensor, handle: Handle) -> Tensor:
        """Send the rows back and sum them: return ``(T, H)``, in float32, experts ascending, rounded once. Collective.

        ``hidden_states`` ``(n, H)``: the experts' results in the order of the rows. ``handle``: the call's.
        """
        arrived = handle.came("token_combine")
        out = handle.assignments.bring(hidden_states, self._dispatcher, arrived, self.probs_on == "combine")
        if handle.shared is not None:
            handle.shared.linear_fc2_forward()
            handle.shared.post_forward_comm()
        return out

    def combine_postprocess(self, hidden_states: Tensor, handle: Handle) -> Tensor:
        """Return ``hidden_states`` ``(T, H)`` in the shape of ``handle``'s input, plus the shared expert's output."""
        out = hidden_states.view(handle.shape)
        if handle.shared is None:
            return out
        out = out + handle.shared.get_output()
        return out if handle.active is None else torch.where(handle.active, out, 0)

    def _splits(self, handle: Handle, arrived: Dispatched) -> Splits:
        """Return the splits from this rank's counts and from dispatch's table of rows per source rank."""
        ep, etp, local = self.ep_size, self.etp_size, self.local_experts
        came = as_counts(arrived.ep_recv_counts.long(), CUMSUM).view(local, ep, etp)
        by_rank = came.sum(0)
        into = handle.sent.view(ep, local).sum(1)
        return Splits(
            into,
            by_rank[:, self.etp_rank],
            by_rank.sum(0),
            came.sum((1, 2)),
            came.permute(2, 1, 0).reshape(etp * ep, local),
            into.sum(),
        )
