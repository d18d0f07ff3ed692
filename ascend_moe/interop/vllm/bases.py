"""Defines the parts of vLLM's modular kernel for programs without vLLM: its names, our definitions.

vLLM 0.11 calls the two parts FusedMoEPrepareAndFinalize and FusedMoEPermuteExpertsUnpermute, later releases
FusedMoEPrepareAndFinalizeModular and FusedMoEExpertsModular. Here the later ones are subclasses of the earlier ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class FusedMoEActivationFormat(Enum):
    """How rows lie between the two parts.

    Standard: ``(M, H)``. BatchedExperts: ``(L, rows an expert has a place for, H)``.
    """

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass
class ExpertTokensMetadata:
    """Rows of each local expert.

    Attributes:
        expert_num_tokens: ``(L,)`` int32 on the device.
        expert_num_tokens_cpu: the same on the host, or None.
    """

    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor | None

    @staticmethod
    def make_from_list(expert_num_tokens_list: list[int], device: torch.device | str) -> ExpertTokensMetadata:
        """Makes both tensors from a list of counts, expert_num_tokens_list; the first on ``device``."""
        counts = torch.tensor(expert_num_tokens_list, dtype=torch.int32, device="cpu")
        return ExpertTokensMetadata(counts.to(device, non_blocking=True), counts)


class TopKWeightAndReduce(ABC):
    """How rows of experts become rows of tokens."""

    @abstractmethod
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Weights and sums ``fused_expert_output``, into ``output`` or a new tensor; returns it.

        Args:
            output: ``(T, H)``, or None.
            fused_expert_output: ``(T, K, H)`` or ``(T * K, H)``; of batched experts ``(L, places, H)``.
            topk_weights, topk_ids: ``(T, K)``.
            apply_router_weight_on_input: the rows have their weights already.
        """


#: rows, their scales, counts of the local experts, ids and weights of the rows (None: as they were given)
PrepareResultType = tuple[Tensor, Tensor | None, ExpertTokensMetadata | None, Tensor | None, Tensor | None]
ReceiverType = Callable[[], PrepareResultType]


class FusedMoEPrepareAndFinalize(ABC):
    """The part that brings rows to their experts, and what these give back to the tokens."""

    @abstractmethod
    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        """Sends the rows of this rank's tokens, and receives those for its experts.

        The arguments are those of `ascend_moe.interop.vllm.prepare_finalize.PrepareAndFinalize.prepare_async`.
        """

    @abstractmethod
    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Sends the experts' rows back, and writes the sums of this rank's tokens into ``output`` ``(T, H)``.

        The arguments are those of `ascend_moe.interop.vllm.prepare_finalize.PrepareAndFinalize.finalize_async`.
        """

    @property
    @abstractmethod
    def activation_format(self) -> Any:
        """FusedMoEActivationFormat of prepare's rows."""

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The type that prepare wants of topk_ids; None: any."""

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """Most tokens of a call of prepare; None: any number."""

    @abstractmethod
    def num_dispatchers(self) -> int:
        """Ranks that rows come from."""

    def supports_async(self) -> bool:
        """Whether there are prepare_async and finalize_async."""
        return False

    def has_prepare_no_receive(self) -> bool:
        """Whether there is prepare_no_receive, by which earlier releases send without waiting."""
        return False

    def prepare_no_receive(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> ReceiverType:
        """Sends the rows of this rank's tokens; the receiver that it returns waits for those of its experts.

        The arguments are those of `ascend_moe.interop.vllm.prepare_finalize.PrepareAndFinalize.prepare_async`.

        Raises NotImplementedError where has_prepare_no_receive is False.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prepare_no_receive; call prepare")


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    """`FusedMoEPrepareAndFinalize` as later releases name it."""

    @abstractmethod
    def output_is_reduced(self) -> bool:
        """Whether finalize leaves whole sums: no all-reduce may follow then."""


class FusedMoEPermuteExpertsUnpermute(ABC):
    """The part that runs this rank's experts."""

    @property
    @abstractmethod
    def activation_formats(self) -> tuple[Any, Any]:
        """FusedMoEActivationFormat of apply's rows and of its output."""

    @abstractmethod
    def supports_chunking(self) -> bool:
        """Whether apply may be called for a part of the rows."""

    @abstractmethod
    def supports_expert_map(self) -> bool:
        """Whether apply takes an expert_map."""

    @abstractmethod
    def workspace_shapes(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the shapes of both workspaces and of the output; args and kwargs are the sizes, by the release."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any:
        """The TopKWeightAndReduce that turns apply's output into rows of tokens."""

    @abstractmethod
    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor | None,
        workspace2: Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Runs the experts over prepare's rows, ``(M, H)`` or ``(L, places, H)``, into ``output``.

        The arguments are those of `ascend_moe.interop.vllm.experts.Experts.apply`.
        """


class FusedMoEExpertsModular(FusedMoEPermuteExpertsUnpermute):
    """`FusedMoEPermuteExpertsUnpermute` as later releases name it."""

    @staticmethod
    @abstractmethod
    def activation_format() -> Any:
        """FusedMoEActivationFormat of apply's rows."""

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """Type of workspaces and output for rows of act_dtype."""
        return act_dtype
