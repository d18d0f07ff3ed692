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
        need(not padded, "moe_router_padding_for_quantization", "is set; rows of an expert are not padded here")
        self.num_local_experts, self.num_experts, self.router_topk = num_local_experts, num_experts, router_topk
        self.without_zeros = getattr(config, "moe_expert_capacity_factor", None) is not None
        self.static, self.max_tokens = static, max_tokens
        self.handle: Handle | None = None
        self._dispatcher = MC2Dispatcher.from_group(ranks, num_experts, comm_alg=comm_alg)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Begin a call.

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
        """Has the ids ``(T, K)`` of the call's tokens; -1: not routed."""
        return self._call().assignments.ids

    @property
    def token_probs(self) -> Tensor:
        """Has the probabilities ``(T, K)`` of the call's tokens; may be set."""
        return self._call().assignments.weights

    @token_probs.setter
    def token_probs(self, probs: Tensor) -> None:
        self._call().assignments.weights = probs

    @property
    def dispatched_probs(self) -> Tensor:
        """Has the probabilities ``(A,)`` of the rows that have come; may be set."""
        return self._arrived().expand_scales

    @dispatched_probs.setter
    def dispatched_probs(self, probs: Tensor) -> None:
        self._arrived().expand_scales = probs

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Sends the tokens ``hidden_states`` ``(T, H)``; returns rows ``(A, H)``.

        async_finish and allocate_on_comm_stream are ignored.
        """
        handle = self._call()
        arrived = handle.arrived = handle.assignments.send(hidden_states, self._dispatcher, self.max_tokens)
        if not self.static:
            count = int(arrived.ep_recv_counts[-1])
            arrived.expand_x, arrived.expand_scales = arrived.expand_x[:count], arrived.expand_scales[:count]
        return arrived.expand_x

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``hidden_states`` ``(A, H)``, which came by expert, and their probabilities ``(A,)``."""
        probs = self._arrived().expand_scales
        return hidden_states, probs.double() if self._call().probs_dtype == torch.float64 else probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """``(L,)`` int64."""
        return self._arrived().expert_token_nums

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Returns the experts' results ``hidden_states`` ``(A, H)``, which are in the order of dispatch's rows."""
        self._arrived()
        return hidden_states

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Sends the rows ``hidden_states`` ``(A, H)`` home; returns each token's sum, ``(T, H)``. Ends the call.

        The rows are added as they are: the caller has multiplied them by their probabilities.
        async_finish and allocate_on_comm_stream are ignored.
        """
        handle, arrived = self._call(), self._arrived()
        self.handle = None
        return handle.assignments.bring(hidden_states, self._dispatcher, arrived, False)
