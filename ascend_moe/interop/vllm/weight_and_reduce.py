"""vLLM's TopKWeightAndReduce: reductions of experts' rows to tokens' rows.

Sums are in float32, k (or the expert) ascending, multiply then add, rounded once, as in combine.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import ArgumentError, need, need_dims, need_shape, with_signature_of, with_typed_errors
from ascend_moe.interop.vllm.bases import TopKWeightAndReduce
from ascend_moe.permute import sum_rows


class _Equal(TopKWeightAndReduce):
    """Base of classes whose objects are equal if their attributes are."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


class TopKWeightAndReduceDelegate(_Equal):
    """Marker of experts that neither weight nor sum their rows, and leave that to finalize."""

    @with_signature_of(TopKWeightAndReduce.apply)
    def apply(self) -> Tensor:
        """Raise ArgumentError: finalize must apply one of the other classes."""
        text = "weight_and_reduce_impl is TopKWeightAndReduceDelegate, which leaves the choice to finalize; "
        fix = "apply TopKWeightAndReduceContiguous, or for batched rows TopKWeightAndReduceNaiveBatched"
        raise ArgumentError(text + fix, argument="weight_and_reduce_impl")


class TopKWeightAndReduceNoOP(_Equal):
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


class _Summing(_Equal):
    @abstractmethod
    def _places(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        """Return ``(T, K)``: the row of each pair; -1: none."""

    @with_signature_of(TopKWeightAndReduce.apply)
    @with_typed_errors
    def apply(
        self, output: Tensor | None, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of each token's rows, ``(T, H)``; zeros for a token without any.

        Args:
            output: ``(T, H)`` to write to and return; None: a new tensor. topk_weights: ``(T, K)`` float.
            topk_ids: ``(T, K)``. fused_expert_output: rows in the layout of the class; not changed.
            apply_router_weight_on_input: the rows are weighted already: add them without weights.
        """
        places = self._places(fused_expert_output, topk_ids)
        rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])
        values = sum_rows(rows, places, None if apply_router_weight_on_input else topk_weights.float())
        if output is None:
            return values
        need_shape("output", output, tuple(values.shape))
        return output.copy_(values)


class TopKWeightAndReduceContiguous(_Summing):
    """Weighted sum of rows in the order of (token, k), ``(T, K, H)`` or ``(T*K, H)``."""

    def _places(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        tokens, topk = topk_ids.shape
        hidden = rows.shape[-1]
        need_shape("fused_expert_output", rows, (tokens, topk, hidden), (tokens * topk, hidden))
        return torch.arange(tokens * topk, device=rows.device).view(tokens, topk)


class TopKWeightAndReduceNaiveBatched(_Summing):
    """Weighted sum of batched rows ``(L, most, H)``: an expert's rows in the order of the tokens that chose it.

    Only experts ``rank * L`` to ``rank * L + L - 1`` add to the sums; the ids of a token must differ.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

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
