"""The manager of Megatron-LM's flex dispatcher."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.errors import need, typed_methods
from ascend_moe.interop.megatron.assignments import assignments_of, group_or_place
from ascend_moe.interop.megatron.dispatchers import Handle
from ascend_moe.ops.collectives import size_of


@typed_methods
class MC2Manager:
    """The ``_comm_manager`` of Megatron-LM's ``MoEFlexTokenDispatcher``, over the V2 ops.

    It takes ``_DeepepManager``'s arguments: set ``token_dispatcher._DeepepManager = MC2Manager`` before building a
    layer with the flex dispatcher and its "deepep" backend. Its state is ``handle``: a caller with two
    micro-batches saves and restores the handle of each.

    Args:
        group: the ETP x EP process group, or its name. num_local_experts: L. router_topk: k * etp.
        num_experts: E * etp.
        config: Megatron-LM's; with ``moe_expert_capacity_factor`` slots of probability 0 are not sent.
            ``moe_router_padding_for_quantization`` is refused.
        world_size, rank: with a name.
        max_tokens: the largest T of any rank; 0: T is equal on all ranks.
        static: return all A possible rows, of which ``tokens_per_expert`` are valid; nothing is read on the host.
            False: only the valid rows, for Megatron-LM's own experts; their number is read on the host.
        comm_alg: of the V2 ops.

    Attributes:
        token_probs: ``(T, K)`` float32, after setup_metadata. dispatched_probs: ``(A,)`` float32, after dispatch. Both
            may be set, also to detached ones: Megatron-LM's overlapped schedule cuts its graph there.
        token_indices: ``(T, K)`` int32, after setup_metadata; -1: not sent.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``_DispatchManager``.
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
        """Start a call.

        Args:
            routing_map: ``(T, W, L)`` or ``(T, W * L)`` bool. probs: float, of the same shape.
        """
        tokens = routing_map.shape[0]
        routing_map, probs = (each.reshape(tokens, self.num_experts) for each in (routing_map, probs))
        assignments = assignments_of(routing_map, probs, self.router_topk, self.without_zeros)
        self.handle = Handle(routing_map.shape, probs.dtype, assignments, routing_map.bool().sum(0))

    def _call(self) -> Handle:
        need(self.handle is not None, "handle", "is None: call setup_metadata first")
        assert self.handle is not None
        return self.handle

    def _arrived(self) -> Dispatched:
        return self._call().came("this")

    @property
    def token_indices(self) -> Tensor:
        """Ids ``(T, K)`` of the call's tokens; -1: not sent."""
        return self._call().assignments.ids

    @property
    def token_probs(self) -> Tensor:
        """Probabilities ``(T, K)`` of the call's tokens; may be set."""
        return self._call().assignments.weights

    @token_probs.setter
    def token_probs(self, probs: Tensor) -> None:
        self._call().assignments.weights = probs

    @property
    def dispatched_probs(self) -> Tensor:
        """Probabilities ``(A,)`` of the received rows; may be set."""
        return self._arrived().expand_scales

    @dispatched_probs.setter
    def dispatched_probs(self, probs: Tensor) -> None:
        self._arrived().expand_scales = probs

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Send the tokens ``hidden_states`` ``(T, H)``; returns rows ``(A, H)``.

        async_finish and allocate_on_comm_stream are ignored.
        """
        handle = self._call()
        arrived = handle.arrived = handle.assignments.send(hidden_states, self._dispatcher, self.max_tokens)
        if not self.static:
            count = int(arrived.ep_recv_counts[-1])
            arrived.expand_x, arrived.expand_scales = arrived.expand_x[:count], arrived.expand_scales[:count]
        return arrived.expand_x

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``hidden_states`` ``(A, H)``, which are in expert order, and their probabilities ``(A,)``."""
        probs = self._arrived().expand_scales
        return hidden_states, probs.double() if self._call().probs_dtype == torch.float64 else probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """Return ``(L,)`` int64."""
        return self._arrived().expert_token_nums

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return ``hidden_states`` ``(A, H)``, the experts' results, unchanged."""
        self._arrived()
        return hidden_states

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Combine the rows ``hidden_states`` ``(A, H)`` to ``(T, H)`` and end the call.

        The rows are added as they are: the caller has multiplied them by their probabilities.
        async_finish and allocate_on_comm_stream are ignored.
        """
        handle, arrived = self._call(), self._arrived()
        self.handle = None
        return handle.assignments.bring(hidden_states, self._dispatcher, arrived, False)
