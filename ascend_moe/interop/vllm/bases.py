"""Base classes of vLLM's modular kernel and its TopKWeightAndReduce, by vLLM's names, for programs without vLLM.

The reductions of experts' rows to tokens' rows sum in float32, k (or the expert) ascending, multiply then add, rounded
once, as combine does.

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

from ascend_moe.errors import ArgumentError, need, need_dims, need_shape, with_signature_of, with_typed_errors
from ascend_moe.permute import sum_rows


class FusedMoEActivationFormat(Enum):
    """Layout of rows: Standard ``(M, H)``, or BatchedExperts ``(L, most, H)``, with ``most`` places for each expert."""

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass
class ExpertTokensMetadata:
    """Rows per local expert: expert_num_tokens ``(L,)`` int32; expert_num_tokens_cpu: a copy on the host, or None."""

    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor | None

    @staticmethod
    def make_from_list(expert_num_tokens_list: list[int], device: torch.device | str) -> ExpertTokensMetadata:
        """Return the metadata of counts ``expert_num_tokens_list``: one tensor on ``device``, one on the CPU."""
        counts = torch.tensor(expert_num_tokens_list, dtype=torch.int32, device="cpu")
        return ExpertTokensMetadata(counts.to(device, non_blocking=True), counts)


class TopKWeightAndReduce(ABC):
    """Base of classes that weight experts' rows and sum them to one row per token."""

    @abstractmethod
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Weight and sum ``fused_expert_output`` into ``output`` or a new tensor; return it.

        Args:
            output: ``(T, H)``; None: a new tensor.
            fused_expert_output: ``(T, K, H)`` or ``(T * K, H)``; of batched experts ``(L, most, H)``; not changed.
            topk_weights, topk_ids: ``(T, K)``, the weights float.
            apply_router_weight_on_input: the rows are already weighted: only add them.
        """


@dataclass(frozen=True)
class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """Marker of experts that neither weight nor sum their rows, and leave that to finalize."""

    @with_signature_of(TopKWeightAndReduce.apply)
    def apply(self) -> Tensor:
        """Raise ArgumentError: finalize must apply one of the other classes."""
        text = "weight_and_reduce_impl is TopKWeightAndReduceDelegate, which leaves the choice to finalize; "
        fix = "apply TopKWeightAndReduceContiguous, or for batched rows TopKWeightAndReduceNaiveBatched"
        raise ArgumentError(text + fix, argument="weight_and_reduce_impl")


@dataclass(frozen=True)
class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """Plain copy of experts' output that is already weighted and summed."""

    @with_signature_of(TopKWeightAndReduce.apply)
    @with_typed_errors
    def apply(self, output: Tensor | None, fused_expert_output: Tensor) -> Tensor:
        """Copy fused_expert_output ``(T, H)`` into output and return output; None: return fused_expert_output itself.

        Raises ArgumentError if output has another shape.
        """
        if output is None:
            return fused_expert_output
        need_shape("output", output, tuple(fused_expert_output.shape))
        return output.copy_(fused_expert_output, non_blocking=True)


class _Summing(TopKWeightAndReduce):
    @abstractmethod
    def _places(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        """Return ``(T, K)``: the row of each pair; -1: none."""

    @with_signature_of(TopKWeightAndReduce.apply)
    @with_typed_errors
    def apply(
        self, output: Tensor | None, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of each token's rows, ``(T, H)``; zeros for a token without any."""
        places = self._places(fused_expert_output, topk_ids)
        rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])
        values = sum_rows(rows, places, None if apply_router_weight_on_input else topk_weights.float())
        if output is None:
            return values
        need_shape("output", output, tuple(values.shape))
        return output.copy_(values)


@dataclass(frozen=True)
class TopKWeightAndReduceContiguous(_Summing):
    """Weighted sum of rows in the order of (token, k), ``(T, K, H)`` or ``(T*K, H)``."""

    def _places(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        tokens, topk = topk_ids.shape
        hidden = rows.shape[-1]
        need_shape("fused_expert_output", rows, (tokens, topk, hidden), (tokens * topk, hidden))
        return torch.arange(tokens * topk, device=rows.device).view(tokens, topk)


@dataclass(frozen=True)
class TopKWeightAndReduceNaiveBatched(_Summing):
    """Weighted sum of batched rows ``(L, most, H)``: an expert's rows in the order of the tokens that chose it.

    Only experts ``rank * L`` to ``rank * L + L - 1`` add to the sums; the ids of a token must differ.
    """

    rank: int

    def _places(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        need(rows.dim() == 3, "fused_expert_output", "is {}; it must be (L, rows of an expert, H)", rows.shape)
        need_dims("topk_ids", topk_ids, 2, dtypes=(torch.int32, torch.int64))
        local, most, _ = rows.shape
        own = topk_ids.long() - self.rank * local
        own = own.masked_fill((own < 0) | (own >= local), local)
        chosen = torch.nn.functional.one_hot(own, local + 1)[..., :local]  # (T, K, L)
        earlier = chosen.sum(1).cumsum(0) - chosen.sum(1)  # (T, L) rows of an expert before this token
        row = own * most + (chosen * earlier[:, None]).sum(-1)
        return row.masked_fill(own == local, -1)


def is_delegate(weight_and_reduce_impl: Any) -> bool:
    """Return whether the argument is None or a TopKWeightAndReduceDelegate, this package's or vLLM's."""
    return weight_and_reduce_impl is None or any(
        each.__name__ == "TopKWeightAndReduceDelegate" for each in type(weight_and_reduce_impl).__mro__
    )


#: rows, their scales, counts of the local experts, ids and weights of the rows (None: the caller's)
PrepareResultType = tuple[Tensor, Tensor | None, ExpertTokensMetadata | None, Tensor | None, Tensor | None]
ReceiverType = Callable[[], PrepareResultType]


class FusedMoEPrepareAndFinalize(ABC):
    """Base of vLLM's first part of a modular kernel: dispatch of rows to experts, and combine of their results."""

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
        """Send this rank's tokens to their experts, and return the rows received for this rank's experts.

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
        """Send the experts' rows back, and write the weighted sums of this rank's tokens into ``output`` ``(T, H)``.

        The arguments are those of `ascend_moe.interop.vllm.prepare_finalize.PrepareAndFinalize.finalize_async`.
        """

    @property
    @abstractmethod
    def activation_format(self) -> Any:
        """FusedMoEActivationFormat of the rows that prepare returns."""

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the dtype that prepare needs for topk_ids; None: any."""

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """Return the most tokens that a rank may pass to prepare; None: any number."""

    @abstractmethod
    def num_dispatchers(self) -> int:
        """Return the number of ranks that dispatch rows to each other."""

    def supports_async(self) -> bool:
        """Return whether prepare_async and finalize_async exist, which send without waiting."""
        return False

    def has_prepare_no_receive(self) -> bool:
        """Return whether prepare_no_receive exists, earlier releases' prepare_async."""
        return False

    @with_signature_of(prepare)
    def prepare_no_receive(self) -> ReceiverType:
        """Send the rows as `prepare` does; return a receiver, which waits for and returns prepare's results.

        Raises NotImplementedError if has_prepare_no_receive is False.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prepare_no_receive; call prepare")


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    """`FusedMoEPrepareAndFinalize` by the name of vLLM's later releases."""

    @abstractmethod
    def output_is_reduced(self) -> bool:
        """Return whether finalize writes complete sums, so that no all-reduce may follow."""


class FusedMoEPermuteExpertsUnpermute(ABC):
    """Base of vLLM's second part of a modular kernel: the experts of this rank."""

    @property
    @abstractmethod
    def activation_formats(self) -> tuple[Any, Any]:
        """FusedMoEActivationFormat of the rows that apply takes, and of its output."""

    @abstractmethod
    def supports_chunking(self) -> bool:
        """Return whether apply may be called for a part of the rows."""

    @abstractmethod
    def supports_expert_map(self) -> bool:
        """Return whether apply takes an expert_map."""

    @abstractmethod
    def workspace_shapes(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the shapes of both workspaces and the output (vLLM 0.11: and a dtype) for its args and kwargs."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return the TopKWeightAndReduce object that weights and sums apply's output for each token."""

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
        """Run the experts on prepare's rows, ``(M, H)`` or ``(L, most, H)``, and write the results into ``output``.

        The arguments are those of `ascend_moe.interop.vllm.experts.Experts.apply`.
        """


class FusedMoEExpertsModular(FusedMoEPermuteExpertsUnpermute):
    """`FusedMoEPermuteExpertsUnpermute` by the name of vLLM's later releases."""

    @staticmethod
    @abstractmethod
    def activation_format() -> Any:
        """Return the FusedMoEActivationFormat of the rows that apply takes."""

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """Return act_dtype: workspaces and the output have the dtype of the activations."""
        return act_dtype
