"""vLLM's TopKWeightAndReduce: ways in which rows of experts become rows of tokens.

Sums are float32 inside, k (or the expert) ascending, multiply then add, rounded once, as combine does it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import ArgumentError, need, need_dims, need_shape, with_typed_errors
from ascend_moe.interop.vllm.bases import TopKWeightAndReduce
from ascend_moe.permute import sum_rows


class _Equal(TopKWeightAndReduce):
    """Two objects of one class with the same attributes are equal."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


class TopKWeightAndReduceDelegate(_Equal):
    """finalize decides: the experts neither weight nor sum."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """Raises ArgumentError: a finalize that gets this class chooses another one."""
        text = "weight_and_reduce_impl is TopKWeightAndReduceDelegate, which leaves the choice to finalize; "
        raise ArgumentError(text + "apply another of the classes", argument="weight_and_reduce_impl")


class TopKWeightAndReduceNoOP(_Equal):
    """The experts have weighted and summed: their output is copied."""

    @with_typed_errors
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """fused_expert_output itself where output is None, else output, of the same shape, with its values."""
        if output is None:
            return fused_expert_output
        need_shape("output", output, tuple(fused_expert_output.shape))
        return output.copy_(fused_expert_output, non_blocking=True)


class TopKWeightAndReduceContiguous(_Equal):
    """Rows are those of (token, k) pairs, ``(T, K, H)`` or ``(T*K, H)``."""

    @with_typed_errors
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """The weighted sum over k, ``(T, H)``. fused_expert_output keeps its values.

        Args:
            output: ``(T, H)`` or None. topk_weights: ``(T, K)`` float. topk_ids: ``(T, K)``.
            apply_router_weight_on_input: the rows are only added.
        """
        tokens, topk = topk_ids.shape
        hidden = fused_expert_output.shape[-1]
        shapes = ((tokens, topk, hidden), (tokens * topk, hidden))
        need_shape("fused_expert_output", fused_expert_output, *shapes)
        rows = fused_expert_output.reshape(tokens * topk, hidden)
        places = torch.arange(tokens * topk, device=rows.device).view(tokens, topk)
        return _into(output, sum_rows(rows, places, _weights(topk_weights, apply_router_weight_on_input)))


class TopKWeightAndReduceNaiveBatched(_Equal):
    """Rows lie by local expert, ``(L, most, H)``, in the order of the tokens that chose it. One rank's tokens.

    Args:
        rank: r; the local experts are r*L to r*L + L-1.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @with_typed_errors
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        """This rank's part of the weighted sum, ``(T, H)``; zeros for a token without a local expert.

        Args:
            output: ``(T, H)`` or None. topk_weights: ``(T, K)`` float. topk_ids: ``(T, K)``, those of a token differ.
            apply_router_weight_on_input: the rows are only added.
        """
        need(fused_expert_output.dim() == 3, "fused_expert_output", "must be (L, most, H)")
        need_dims("topk_ids", topk_ids, 2, dtypes=(torch.int32, torch.int64))
        local, most, hidden = fused_expert_output.shape
        own = topk_ids.long() - self.rank * local
        own = own.masked_fill((own < 0) | (own >= local), local)
        chosen = torch.nn.functional.one_hot(own, local + 1)[..., :local]  # (T, K, L)
        earlier = chosen.sum(1).cumsum(0) - chosen.sum(1)  # (T, L) rows of an expert before this token
        row = own * most + (chosen * earlier[:, None]).sum(-1)
        row = row.masked_fill(own == local, -1)
        flat = fused_expert_output.reshape(local * most, hidden)
        return _into(output, sum_rows(flat, row, _weights(topk_weights, apply_router_weight_on_input)))


def _weights(topk_weights: Tensor, on_input: bool) -> Tensor | None:
    return None if on_input else topk_weights.float()


def _into(output: Tensor | None, values: Tensor) -> Tensor:
    if output is None:
        return values
    need_shape("output", output, tuple(values.shape))
    return output.copy_(values)


def is_delegate(weight_and_reduce_impl: Any) -> bool:
    """Whether it is our TopKWeightAndReduceDelegate or a vLLM's, or None, which leaves the choice too."""
    return weight_and_reduce_impl is None or any(
        each.__name__ == "TopKWeightAndReduceDelegate" for each in type(weight_and_reduce_impl).__mro__
    )
