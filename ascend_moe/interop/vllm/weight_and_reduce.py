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
    """Choice left to finalize: the experts neither weight nor sum."""

    @with_signature_of(TopKWeightAndReduce.apply)
    def apply(self) -> Tensor:
        """Raise ArgumentError: finalize must choose another class."""
        text = "weight_and_reduce_impl is TopKWeightAndReduceDelegate, which leaves the choice to finalize; "
        raise ArgumentError(text + "apply another of the classes", argument="weight_and_reduce_impl")


class TopKWeightAndReduceNoOP(_Equal):
    """Copy of the experts' output, which is weighted and summed."""

    @with_signature_of(TopKWeightAndReduce.apply)
    @with_typed_errors
    def apply(self, output: Tensor | None, fused_expert_output: Tensor) -> Tensor:
        """Return fused_expert_output itself, ``(T, H)``, if output is None, else output with its values.

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
            output: ``(T, H)`` or None. topk_weights: ``(T, K)`` float. topk_ids: ``(T, K)``.
            fused_expert_output: in the class's layout; not changed.
            apply_router_weight_on_input: add the rows without weights.
        """
        places = self._places(fused_expert_output, topk_ids)
        rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])
        values = sum_rows(rows, places, None if apply_router_weight_on_input else topk_weights.float())
        if output is None:
            return values
        need_shape("output", output, tuple(values.shape))
        return output.copy_(values)


class TopKWeightAndReduceContiguous(_Summing):
    """Reduction of rows by (token, k) pair, ``(T, K, H)`` or ``(T*K, H)``."""

    def _places(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        tokens, topk = topk_ids.shape
        hidden = rows.shape[-1]
        need_shape("fused_expert_output", rows, (tokens, topk, hidden), (tokens * topk, hidden))
        return torch.arange(tokens * topk, device=rows.device).view(tokens, topk)


class TopKWeightAndReduceNaiveBatched(_Summing):
    """Reduction of rows by local expert, ``(L, most, H)``, in the order of one rank's tokens.

    The sums are this rank's part, of experts ``rank * L`` to ``rank * L + L - 1``; the ids of a token must differ.
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
    """Return whether it is a TopKWeightAndReduceDelegate, this package's or vLLM's, or None."""
    return weight_and_reduce_impl is None or any(
        each.__name__ == "TopKWeightAndReduceDelegate" for each in type(weight_and_reduce_impl).__mro__
    )
