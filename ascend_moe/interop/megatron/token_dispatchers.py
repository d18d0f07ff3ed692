"""Megatron-LM's token dispatchers and the flex dispatcher's manager, by their own names and arguments.

Their state is on the object, in ``handle``: a caller with two micro-batches saves and restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.errors import need, typed_methods
from ascend_moe.interop.megatron.dispatchers import Handle, TokenDispatcher, assignments_of, group_or_place
from ascend_moe.interop.megatron.shared_experts import SharedExpertMLP
from ascend_moe.ops.collectives import size_of


@typed_methods
class MoETokenDispatcher:
    """Base of Megatron-LM's three dispatchers: the six phases of `TokenDispatcher`, with the handle on the object.

    One call is open at a time: a caller with two micro-batches saves and restores ``handle``, or uses
    `TokenDispatcher`, whose phases take the handle.

    Args:
        num_local_experts: L.
        local_expert_indices: global numbers of this rank's experts, ``ep_rank * L`` to ``ep_rank * L + L - 1``.
        config: Megatron-LM's TransformerConfig, or an object with ``num_moe_experts`` and ``moe_router_topk``;
            ``moe_expert_capacity_factor`` and ``moe_pad_expert_input_to_capacity`` may be absent.
            ``moe_router_padding_for_quantization`` and ``moe_router_padding_for_fp8`` are refused.
        pg_collection: an object with the process groups ``tp_ep`` (rank ``ep_rank * etp + etp_rank``) and ``expt_tp``
            (None: an expert is on one rank), or tp_ep_group and expt_tp_group, as in earlier releases. None: the
            default group, an expert on one rank.
        max_tokens: the largest number of tokens T of any rank; 0: T is equal on all ranks.
        world_size, rank: those of ``tp_ep``; needed if it is a group's name.

    Attributes:
        handle: `Handle` of the open call, or None.

    Raises ArgumentError if an argument breaks one of these rules. Source: Megatron-LM ``MoETokenDispatcher``.
    """

    kind: str

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any = None,
        *,
        max_tokens: int = 0,
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"):
            need(not getattr(config, name, False), name, "is set, but rows are not padded here: unset it")
        shards = _group(pg_collection, "expt_tp")
        self.phases = TokenDispatcher(
            self.kind,
            _group(pg_collection, "tp_ep"),
            config.num_moe_experts,
            config.moe_router_topk,
            etp_size=1 if shards is None else size_of(shards),
            max_tokens=max_tokens,
            world_size=world_size,
            rank=rank,
            capacity_factor=getattr(config, "moe_expert_capacity_factor", None),
            pad_to_capacity=bool(getattr(config, "moe_pad_expert_input_to_capacity", False)),
        )
        first, local = self.phases.ep_rank * self.phases.local_experts, self.phases.local_experts
        rule = "is {}; num_experts {} on {} EP ranks need {}"
        need(num_local_experts == local, "num_local_experts", rule, num_local_experts, config.num_moe_experts,
             self.phases.ep_size, local)  # fmt: skip
        own, given = list(range(first, first + local)), list(local_expert_indices)
        need(given == own, "local_expert_indices", "is {}; EP rank {} needs {}", given, self.phases.ep_rank, own)
        self.config, self.num_local_experts, self.local_expert_indices = config, num_local_experts, own
        self.num_experts, self.router_topk = config.num_moe_experts, config.moe_router_topk
        self.ep_size, self.tp_size, self.tp_rank = self.phases.ep_size, self.phases.etp_size, self.phases.etp_rank
        self.handle: Handle | None = None

    @property
    def shared_experts(self) -> SharedExpertMLP | None:
        """Shared expert that runs between the phases, or None."""
        return self.phases.shared_experts

    def set_shared_experts(self, shared_experts: SharedExpertMLP) -> None:
        """Run ``shared_experts`` on this rank's tokens between the phases; combine_postprocess adds its output."""
        self.phases.set_shared_experts(shared_experts)

    def _call(self) -> Handle:
        need(self.handle is not None, "handle", "is None: call dispatch_preprocess first")
        assert self.handle is not None
        return self.handle

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Start a call; return tokens ``(T, H)`` and the weights of their slots ``(T, k * etp)``, for token_dispatch.

        hidden_states, routing_map and probs are as of `TokenDispatcher.dispatch_preprocess`.
        """
        tokens, slots, self.handle = self.phases.dispatch_preprocess(hidden_states, routing_map, probs)
        return tokens, slots

    def token_dispatch(
        self, hidden_states: Tensor, probs: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Send dispatch_preprocess's hidden_states, probs; return rows ``(A, H)`` and their probabilities ``(A,)``.

        Only the first rows, those received, are defined. async_finish and allocate_on_comm_stream are ignored.
        """
        return self.phases.token_dispatch(hidden_states, probs, self._call())

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the received rows by local expert, tokens_per_expert ``(L,)`` int64, and the rows' probabilities.

        hidden_states and probs: token_dispatch's results, cut to the received rows, whose number is read on the host.
        """
        rows, counts, probs = self.phases.dispatch_postprocess(hidden_states, probs, self._call())
        came = int(counts.sum())
        return rows[:came], counts, probs[:came]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return ``hidden_states`` ``(A, H)``, the experts' results, unchanged."""
        return self.phases.combine_preprocess(hidden_states, self._call())

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Send ``hidden_states`` ``(n, H)``, the experts' results, back; return each token's sum ``(T, H)``.

        async_finish and allocate_on_comm_stream are ignored.
        """
        return self.phases.token_combine(hidden_states, self._call())

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """End the call; return ``hidden_states`` ``(T, H)`` in the input's shape, plus the shared expert's output."""
        handle, self.handle = self._call(), None
        return self.phases.combine_postprocess(hidden_states, handle)


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """`MoETokenDispatcher` by all-to-all. Source: Megatron-LM ``MoEAlltoAllTokenDispatcher``."""

    kind = "alltoall"


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """`MoETokenDispatcher` by all-gather. Source: Megatron-LM ``MoEAllGatherTokenDispatcher``."""

    kind = "allgather"


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """`MoETokenDispatcher` by the V2 ops. Source: Megatron-LM ``MoEFlexTokenDispatcher``."""

    kind = "mc2"


def _settable(owner: Callable[[Any], Any], name: str) -> property:
    """Return the property that is an attribute of the object's ``owner``."""
    return property(lambda self: getattr(owner(self), name), lambda self, value: setattr(owner(self), name, value))


def _group(pg_collection: Any, name: str) -> Any:
    """Return a group of the collection, by its name in this or in earlier releases."""
    return getattr(pg_collection, name, None) or getattr(pg_collection, f"{name}_group", None)


@typed_methods
class MC2Manager:
    """The ``_comm_manager`` of Megatron-LM's ``MoEFlexTokenDispatcher``, over the V2 ops.

    It takes ``_DeepepManager``'s arguments: set ``token_dispatcher._DeepepManager = MC2Manager`` before building a
    layer with the flex dispatcher and its "deepep" backend. Its state is ``handle``, as of `MoETokenDispatcher`.

    Args:
        group: the ETP x EP process group, or its name. num_local_experts: L. router_topk: k * etp.
        num_experts: E * etp.
        config: Megatron-LM's TransformerConfig, or None; with ``moe_expert_capacity_factor`` slots of probability 0 are
            not sent. ``moe_router_padding_for_quantization`` is refused.
        world_size, rank, max_tokens, comm_alg: as for `TokenDispatcher`.
        static: dispatch returns all A rows of its memory, of which the first ``tokens_per_expert.sum()`` are valid;
            nothing is read on the host. False: only these, for Megatron-LM's experts; reads their number on the host.

    Attributes:
        token_probs: ``(T, K)`` float32, after setup_metadata. dispatched_probs: ``(A,)`` float32, after dispatch. Both
            may be set, also to detached ones: Megatron-LM's overlapped schedule cuts its graph there.
        token_indices: ``(T, K)`` int32, after setup_metadata; -1: not sent.

    Raises ArgumentError if an argument breaks one of these rules. Source: Megatron-LM ``_DispatchManager``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | str | None,
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
        ranks = group_or_place(group, world_size, rank)
        rule = "is {}; it must be {} local experts on each of {} ranks"
        fits = num_experts == num_local_experts * size_of(ranks)
        need(fits, "num_experts", rule, num_experts, num_local_experts, size_of(ranks))
        padded = bool(getattr(config, "moe_router_padding_for_quantization", False))
        need(not padded, "moe_router_padding_for_quantization", "is set, but rows are not padded here: unset it")
        self.num_local_experts, self.num_experts, self.router_topk = num_local_experts, num_experts, router_topk
        self.without_zeros = getattr(config, "moe_expert_capacity_factor", None) is not None
        self.static, self.max_tokens = static, max_tokens
        self.handle: Handle | None = None
        self._dispatcher = MC2Dispatcher.from_group(ranks, num_experts, comm_alg=comm_alg)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Start a call with the router's routing_map, ``(T, W, L)`` or ``(T, W * L)`` bool, and probs, float, alike."""
        tokens = routing_map.shape[0]
        routing_map, probs = (each.reshape(tokens, self.num_experts) for each in (routing_map, probs))
        assignments = assignments_of(routing_map, probs, self.router_topk, self.without_zeros)
        self.handle = Handle(routing_map.shape, probs.dtype, assignments, routing_map.bool().sum(0))

    def _call(self) -> Handle:
        need(self.handle is not None, "handle", "is None: call setup_metadata first")
        assert self.handle is not None
        return self.handle

    def _arrived(self) -> Dispatched:
        return self._call().came("this, in MC2Manager dispatch")

    token_indices = property(lambda self: self._call().assignments.ids)
    token_probs = _settable(lambda self: self._call().assignments, "weights")
    dispatched_probs = _settable(lambda self: self._arrived(), "expand_scales")

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Send ``hidden_states`` ``(T, H)`` to the experts' ranks; return rows ``(A, H)`` by local expert.

        async_finish, allocate_on_comm_stream: ignored. Raises ArgumentError before setup_metadata.
        """
        handle = self._call()
        arrived = handle.arrived = handle.assignments.send(hidden_states, self._dispatcher, self.max_tokens)
        if not self.static:
            count = int(arrived.ep_recv_counts[-1])
            arrived.expand_x, arrived.expand_scales = arrived.expand_x[:count], arrived.expand_scales[:count]
        return arrived.expand_x

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``hidden_states`` ``(A, H)``, dispatch's rows, as they are, and their probabilities ``(A,)``."""
        probs = self._arrived().expand_scales
        return hidden_states, probs.double() if self._call().probs_dtype == torch.float64 else probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """Return the number of received rows of each local expert, ``(L,)`` int64. Call it after dispatch."""
        return self._arrived().expert_token_nums

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return ``hidden_states`` ``(A, H)``, the experts' results, unchanged."""
        self._arrived()
        return hidden_states

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Send ``hidden_states`` ``(A, H)``, the experts' results, back; return the sums ``(T, H)``; end the call.

        The sum has no weights: the experts have multiplied the rows. async_finish, allocate_on_comm_stream: ignored.
        """
        handle, arrived = self._call(), self._arrived()
        self.handle = None
        return handle.assignments.bring(hidden_states, self._dispatcher, arrived, False)
