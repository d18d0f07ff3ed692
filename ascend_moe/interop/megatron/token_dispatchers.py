"""Megatron-LM's token dispatchers by their own names and arguments, over `TokenDispatcher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ascend_moe.errors import need, typed_methods
from ascend_moe.interop.megatron.dispatchers import Handle, TokenDispatcher
from ascend_moe.interop.megatron.shared_experts import SharedExpertMLP
from ascend_moe.ops.collectives import size_of


@typed_methods
class MoETokenDispatcher:
    """Base of Megatron-LM's three dispatchers, whose state is on the object.

    One call is open at a time: a caller with two micro-batches saves and restores ``handle``, or uses
    `TokenDispatcher`, whose phases take the handle.

    Args:
        num_local_experts: L.
        local_expert_indices: global numbers of this rank's experts, ``ep_rank * L`` to ``ep_rank * L + L - 1``.
        config: Megatron-LM's TransformerConfig, or an object with ``num_moe_experts`` and ``moe_router_topk``;
            ``moe_expert_capacity_factor`` and ``moe_pad_expert_input_to_capacity`` may be absent.
            ``moe_router_padding_for_quantization`` and ``moe_router_padding_for_fp8`` are refused.
        pg_collection: has the process groups ``tp_ep`` (rank ``ep_rank * etp + etp_rank``) and ``expt_tp``, or with
            ``_group`` after these names, as in earlier releases; ``expt_tp`` None: an expert is on one rank.
            If pg_collection is None, the default group is used.
        max_tokens: the largest number of tokens T of any rank; 0: T is equal on all ranks.
        world_size, rank: those of ``tp_ep``; required if it is a group's name.

    Attributes:
        handle: `Handle` of the open call, or None.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``MoETokenDispatcher``.
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
        need(given == own, "local_expert_indices", "is {}; EP rank {} owns {}", given, self.phases.ep_rank, own)
        self.config, self.num_local_experts, self.local_expert_indices = config, num_local_experts, own
        self.num_experts, self.router_topk = config.num_moe_experts, config.moe_router_topk
        self.ep_size, self.tp_size, self.tp_rank = self.phases.ep_size, self.phases.etp_size, self.phases.etp_rank
        self.handle: Handle | None = None

    @property
    def shared_experts(self) -> SharedExpertMLP | None:
        """The shared expert that runs between the phases, or None."""
        return self.phases.shared_experts

    def set_shared_experts(self, shared_experts: SharedExpertMLP) -> None:
        """Run the shared expert of ``shared_experts`` between the phases; combine_postprocess adds its output."""
        self.phases.set_shared_experts(shared_experts)

    def _call(self) -> Handle:
        need(self.handle is not None, "handle", "is None: call dispatch_preprocess first")
        assert self.handle is not None
        return self.handle

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Start a call; return tokens ``(T, H)`` and probabilities by slot, for token_dispatch.

        Args:
            hidden_states, routing_map, probs: as of `TokenDispatcher.dispatch_preprocess`.
        """
        tokens, slots, self.handle = self.phases.dispatch_preprocess(hidden_states, routing_map, probs)
        return tokens, slots

    def token_dispatch(
        self, hidden_states: Tensor, probs: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Send tokens and probabilities; return rows ``(A, H)`` and their probabilities ``(A,)``.

        Args:
            hidden_states, probs: what dispatch_preprocess returned.
            async_finish, allocate_on_comm_stream: ignored.
        """
        return self.phases.token_dispatch(hidden_states, probs, self._call())

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the received rows by expert, tokens_per_expert ``(L,)`` int64 and probabilities.

        The number of rows is read on the host.

        Args:
            hidden_states, probs: what token_dispatch returned.
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
        """Combine the rows to ``(T, H)``.

        Args:
            hidden_states: the experts' results.
            async_finish, allocate_on_comm_stream: ignored.
        """
        return self.phases.token_combine(hidden_states, self._call())

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return ``hidden_states`` ``(T, H)`` in the shape of dispatch_preprocess's, with the shared expert's added.

        Ends the call.
        """
        handle, self.handle = self._call(), None
        return self.phases.combine_postprocess(hidden_states, handle)


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Dispatch by all-to-alls. Source: Megatron-LM ``MoEAlltoAllTokenDispatcher``."""

    kind = "alltoall"


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Dispatch by all-gather. Source: Megatron-LM ``MoEAllGatherTokenDispatcher``."""

    kind = "allgather"


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """Dispatch by the V2 ops. Source: Megatron-LM ``MoEFlexTokenDispatcher``."""

    kind = "mc2"


def _group(pg_collection: Any, name: str) -> Any:
    """Return a group of the collection, by its name in this or in earlier releases."""
    return getattr(pg_collection, name, None) or getattr(pg_collection, f"{name}_group", None)
