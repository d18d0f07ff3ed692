"""Megatron-LM's token dispatcher in six phases with an explicit handle, and the manager of its flex dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ascend_moe.errors import need, need_one_of, need_shape, with_typed_errors
from ascend_moe.experts.weights import copied_beside
from ascend_moe.interop.megatron.carriers import (
    Arrived,
    Ranks,
    Routes,
    Windows,
    carrier,
    check_routing,
    routes_of,
    sharded,
)
from ascend_moe.interop.megatron.padded import PaddedRows, padded, table
from ascend_moe.interop.megatron.shared_experts import SharedExpertCall, SharedExpertMLP
from ascend_moe.routing import get_capacity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Splits(NamedTuple):
    """What Megatron-LM's all-to-all dispatcher calls its splits. int64, on the device of the rows.

    Attributes:
        input_splits: ``(ep,)``, rows that this rank sends to each EP rank.
        output_splits: ``(ep,)``, rows that come from each EP rank with this rank's place in ETP.
        output_splits_tp: ``(etp,)``, rows that come by each place in ETP.
        tokens_per_expert: ``(L,)``, rows of each local expert.
        num_global_tokens_per_local_expert: ``(etp * ep, L)``, rows for each local expert from each rank, the rank
            with place t in ETP and e in EP at ``t * ep + e``.
        num_out_tokens: ``()``, rows that this rank sends, its input_splits together.
    """

    input_splits: Tensor
    output_splits: Tensor
    output_splits_tp: Tensor
    tokens_per_expert: Tensor
    num_global_tokens_per_local_expert: Tensor
    num_out_tokens: Tensor


@dataclass
class Handle:
    """All state of one call. The caller holds it between the phases; any number may be open at once.

    Attributes:
        splits: after token_dispatch, `Splits`.
    """

    shape: torch.Size
    probs_dtype: torch.dtype
    routes: Routes = field(repr=False)
    sent: Tensor = field(repr=False)  # (E,) int64, rows to each expert
    arrived: Arrived | None = field(default=None, repr=False)
    splits: Splits | None = field(default=None, repr=False)
    shared: SharedExpertCall | None = field(default=None, repr=False)


def _came(handle: Handle, phase: str) -> Arrived:
    need(handle.arrived is not None, "handle", "has no rows yet: call token_dispatch before {}", phase)
    assert handle.arrived is not None
    return handle.arrived


class TokenDispatcher:
    """Brings tokens to their experts and sums home, in Megatron-LM's six phases.

    dispatch_preprocess and token_dispatch and dispatch_postprocess come before the experts, combine_preprocess,
    token_combine and combine_postprocess behind them. token_dispatch and token_combine communicate: all ranks of the
    group call them in the same order. Everything is differentiable, for tokens and probabilities, and a backward
    communicates too. The three kinds give the same bits.

    Args:
        kind: "mc2": the V2 ops, rows in memory of fixed size, nothing read on the host. "alltoall", "allgather":
            torch.distributed's.
        group: the ETP x EP ranks, rank ``ep_rank * etp_size + etp_rank`` (Megatron-LM's tp_ep group); None: the
            default group. A name, of `ascend_moe.comm_name` or a LocalCluster, for "mc2" only.
        num_experts: E, a multiple of the EP size; rank ep_rank has L = E / ep experts.
        router_topk: k, experts a token at most.
        etp_size: ranks that share an expert. The ops then see E * etp experts and k * etp slots.
        world_size, rank: with a name.
        max_tokens: the largest T of any rank; 0: T is equal on all ranks.
        capacity_factor, pad_to_capacity: as given to the router. With pad_to_capacity every expert has C rows from
            every rank: shapes depend on T, k, E and the factor only. All ranks then have the same T. C is at most T.
            Padding is rows of tokens that the map has for the expert with probability 0, which has a gradient as in
            Megatron-LM; where the map has fewer than C tokens, rows of zeros, which do not travel.
        probs_on: "experts": the rows' probabilities are for `GroupedMLP`, and rows are only added on their way home.
            "combine": combine multiplies, and dispatch_postprocess returns ones.
        comm_alg: of the V2 ops.

    Raises:
        ArgumentError: a rule above is broken.

    Source: Megatron-LM ``MoEAlltoAllTokenDispatcher``, ``MoEAllGatherTokenDispatcher``, ``MoEFlexTokenDispatcher``.
    """

    @with_typed_errors
    def __init__(
        self,
        kind: str,
        group: ProcessGroup | str | None,
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
        ranks = Ranks.of(group, world_size, rank)
        divides = etp_size >= 1 and ranks.world % etp_size == 0
        need(divides, "etp_size", "is {}; it must divide the {} ranks of the group", etp_size, ranks.world)
        need_one_of("probs_on", probs_on, ("experts", "combine"))
        rule = "is True; it needs a capacity_factor"
        need(capacity_factor is not None or not pad_to_capacity, "pad_to_capacity", rule)
        rule = "is {} with pad_to_capacity; all ranks must have the same T then: leave it out"
        need(not (pad_to_capacity and max_tokens), "max_tokens", rule, max_tokens)
        self.ep_size, self.etp_size = ranks.world // etp_size, etp_size
        self.ep_rank, self.etp_rank = divmod(ranks.rank, etp_size)
        divides = num_experts >= 1 and num_experts % self.ep_size == 0
        need(divides, "num_experts", "is {}; it must be a multiple of the {} EP ranks", num_experts, self.ep_size)
        need(1 <= router_topk <= num_experts, "router_topk", "is {}; it must be 1..{}", router_topk, num_experts)
        self.kind, self.ranks, self.probs_on = kind, ranks, probs_on
        self.num_experts, self.router_topk = num_experts, router_topk
        self.local_experts = num_experts // self.ep_size
        self.capacity_factor, self.pad_to_capacity = capacity_factor, pad_to_capacity
        self.shared_experts: SharedExpertMLP | None = None
        carried = carrier(kind, ranks, num_experts * etp_size, max_tokens, comm_alg)
        self._carrier = PaddedRows(carried) if pad_to_capacity else carried

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        """Copies the shared expert, which the copied layer has too; the ranks and their carrier stay the same."""
        copied: TokenDispatcher = copied_beside(self, memo, self.ranks, self._carrier)
        return copied

    def set_shared_experts(self, shared_experts: SharedExpertMLP) -> None:
        """Run the shared expert between the phases; combine_postprocess adds its output."""
        self.shared_experts = shared_experts

    @with_typed_errors
    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Handle]:
        """What one rank does alone before the communication.

        Args:
            hidden_states: ``(S, B, H)`` or ``(T, H)`` bf16, fp16 or fp32.
            routing_map: ``(T, E)`` bool; T = S * B.
            probs: ``(T, E)`` float, of the router.
            mask: bool, hidden_states' shape without H, True for active tokens; the others give zeros.

        Returns:
            tokens ``(T, H)``, probabilities by slot ``(T, K)`` float32, the handle. With pad_to_capacity rows by expert
            ``(E * etp * C, H)`` and their probabilities, one slot each.

        Raises:
            ArgumentError: a rule above is broken.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        check_routing(tokens, routing_map, probs, self.num_experts)
        if mask is not None:
            need_shape("mask", mask, tuple(hidden_states.shape[:-1]), dtypes=(torch.bool,))
            routing_map = routing_map.bool() & mask.reshape(-1, 1)
        shard = self.local_experts, self.etp_size
        if self.pad_to_capacity:
            pairs = len(tokens) * self.router_topk
            capacity = min(get_capacity(pairs, self.num_experts, self.capacity_factor or 0.0), len(tokens))
            rows, routes = padded(tokens, routing_map, probs, capacity, *shard)
            sent = torch.full((self.num_experts,), capacity, device=tokens.device)
        else:
            rows, routes = tokens, sharded(routes_of(routing_map, probs, self.router_topk, False), *shard)
            sent = torch.sum(routing_map.bool(), 0)
        handle = Handle(hidden_states.shape, probs.dtype, routes, sent)
        if self.shared_experts is not None:
            handle.shared = self.shared_experts.begin()
            handle.shared.pre_forward_comm(hidden_states)
        return rows, routes.weights, handle

    @with_typed_errors
    def token_dispatch(self, tokens: Tensor, probs: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
        """Send tokens and probabilities.

        Args:
            tokens, probs, handle: what dispatch_preprocess returned.

        Returns:
            rows ``(A, H)`` by (local expert, source rank, slot) and their probabilities ``(A,)`` float32.
        """
        handle.routes.weights = probs
        arrived = handle.arrived = self._carrier.send(tokens, handle.routes)
        handle.splits = self._splits(handle, arrived)
        if handle.shared is not None:
            handle.shared.linear_fc1_forward_and_act()
        return arrived.rows, arrived.probs

    @with_typed_errors
    def dispatch_postprocess(self, rows: Tensor, probs: Tensor, handle: Handle) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as the experts take them; they came in the order of experts already.

        Args:
            rows, probs: what token_dispatch returned. handle: of this call.

        Returns:
            rows ``(A, H)``, of which the first ``tokens_per_expert.sum()`` are defined; tokens_per_expert ``(L,)``
            int64; probabilities ``(A,)`` float32, float64 where the router's are. With pad_to_capacity A is
            L * W * C.
        """
        _came(handle, "dispatch_postprocess")
        assert handle.splits is not None
        dtype = torch.float64 if handle.probs_dtype == torch.float64 else torch.float32
        if self.probs_on == "combine":
            probs = torch.ones_like(probs)
        return rows, handle.splits.tokens_per_expert, probs.to(dtype)

    @with_typed_errors
    def combine_preprocess(self, hidden_states: Tensor, handle: Handle) -> Tensor:
        """Rows of the experts' results as they came: they are in this order.

        Args:
            hidden_states: ``(A, H)``, in the order and the dtype of dispatch_postprocess's rows.
            handle: of this call.
        """
        _came(handle, "combine_preprocess")
        return hidden_states

    @with_typed_errors
    def token_combine(self, hidden_states: Tensor, handle: Handle) -> Tensor:
        """Send rows home and add them up: ``(T, H)``, float32 in slot order (experts ascend), rounded once."""
        arrived = _came(handle, "token_combine")
        out = self._carrier.bring(hidden_states, arrived, handle.routes, self.probs_on == "combine")
        if handle.shared is not None:
            handle.shared.linear_fc2_forward()
            handle.shared.post_forward_comm()
        return out

    @with_typed_errors
    def combine_postprocess(self, hidden_states: Tensor, handle: Handle) -> Tensor:
        """The result in the shape of dispatch_preprocess's hidden_states, with the shared expert's added."""
        out = hidden_states.view(handle.shape)
        return out if handle.shared is None else out + handle.shared.get_output()

    def _splits(self, handle: Handle, arrived: Arrived) -> Splits:
        """From this rank's counts and from dispatch's table of what came from each rank."""
        ep, etp, local = self.ep_size, self.etp_size, self.local_experts
        came = table(arrived.ends).view(local, ep, etp)
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


class MC2Manager:
    """The five methods that Megatron-LM's ``MoEFlexTokenDispatcher`` calls on its ``_comm_manager``, over the V2 ops.

    It has ``_DeepepManager``'s arguments: ``token_dispatcher._DeepepManager = MC2Manager`` before the layer is built,
    with the flex dispatcher and its "deepep" backend, is enough. Its state is ``handle``: a caller with two
    micro-batches keeps the handle of each and puts it back.

    Args:
        group: the ETP x EP process group, or its name. num_local_experts: L. router_topk: k * etp.
        num_experts: E * etp.
        config: Megatron-LM's; with ``moe_expert_capacity_factor`` slots of probability 0 are not sent.
            ``moe_router_padding_for_quantization`` is refused.
        world_size, rank: with a name.
        max_tokens: the largest T of any rank; 0: T is equal on all ranks.
        static: rows are all A that can come, ``tokens_per_expert`` covers those that did, nothing is read on the
            host. False: as many rows as came, which Megatron-LM's own experts need; their number is read.
        comm_alg: of the V2 ops.

    Attributes:
        token_probs: ``(T, K)`` float32, after setup_metadata. dispatched_probs: ``(A,)`` float32, after dispatch. Both
            may be replaced, by detached ones too: Megatron-LM's overlapped schedule cuts its graph there.
        token_indices: ``(T, K)`` int32, after setup_metadata; -1: not sent.

    Raises:
        ArgumentError: a rule above is broken.

    Source: Megatron-LM ``_DispatchManager``.
    """

    @with_typed_errors
    def __init__(
        self,
        group: ProcessGroup | str | None,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any = None,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        max_tokens: int = 0,
        static: bool = False,
        comm_alg: str = "",
    ) -> None:
        ranks = Ranks.of(group, world_size, rank)
        rule = "is {}; it must be {} local experts on each of {} ranks"
        fits = num_experts == num_local_experts * ranks.world
        need(fits, "num_experts", rule, num_experts, num_local_experts, ranks.world)
        padded = bool(getattr(config, "moe_router_padding_for_quantization", False))
        need(not padded, "moe_router_padding_for_quantization", "is set; rows of an expert are not padded here")
        self.num_local_experts, self.num_experts, self.router_topk = num_local_experts, num_experts, router_topk
        self.without_zeros = getattr(config, "moe_expert_capacity_factor", None) is not None
        self.static = static
        self.handle: Handle | None = None
        self._carrier = Windows(ranks, num_experts, max_tokens, comm_alg)

    @with_typed_errors
    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Begin a call.

        Args:
            routing_map: ``(T, W, L)`` or ``(T, W * L)`` bool. probs: float, of the same shape.
        """
        tokens = routing_map.shape[0]
        routing_map, probs = (each.reshape(tokens, self.num_experts) for each in (routing_map, probs))
        routes = routes_of(routing_map, probs, self.router_topk, self.without_zeros)
        self.handle = Handle(routing_map.shape, probs.dtype, routes, routing_map.bool().sum(0))

    def _open(self, arrived: bool) -> tuple[Handle, Any]:
        need(self.handle is not None, "handle", "is None: call setup_metadata first")
        assert self.handle is not None
        return self.handle, _came(self.handle, "this") if arrived else None

    @property
    def token_indices(self) -> Tensor:
        return self._open(False)[0].routes.ids

    @property
    def token_probs(self) -> Tensor:
        return self._open(False)[0].routes.weights

    @token_probs.setter
    def token_probs(self, probs: Tensor) -> None:
        self._open(False)[0].routes.weights = probs

    @property
    def dispatched_probs(self) -> Tensor:
        probs: Tensor = self._open(True)[1].probs
        return probs

    @dispatched_probs.setter
    def dispatched_probs(self, probs: Tensor) -> None:
        self._open(True)[1].probs = probs

    @with_typed_errors
    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Send tokens ``(T, H)``; returns rows ``(A, H)``. The last two arguments are ignored."""
        handle, _ = self._open(False)
        arrived = handle.arrived = self._carrier.send(hidden_states, handle.routes)
        if not self.static:
            count = int(arrived.ends[-1])
            arrived.rows, arrived.probs = arrived.rows[:count], arrived.probs[:count]
        return arrived.rows

    @with_typed_errors
    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by expert and their probabilities: they came so."""
        handle, arrived = self._open(True)
        return hidden_states, arrived.probs.double() if handle.probs_dtype == torch.float64 else arrived.probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """``(L,)`` int64."""
        counts: Tensor = self._open(True)[1].counts
        return counts

    @with_typed_errors
    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Rows of the experts' results in the order of dispatch's: the same."""
        self._open(True)
        return hidden_states

    @with_typed_errors
    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Send rows home and add them up; ends the call. The last two arguments are ignored."""
        handle, arrived = self._open(True)
        self.handle = None
        return self._carrier.bring(hidden_states, arrived, handle.routes, False)
