"""What vLLM's FusedMoE does between data-parallel ranks, with its names: all tokens to every rank, and sums back."""

from __future__ import annotations

import torch
from torch import distributed as dist

from ascend_moe.comm import group_of
from ascend_moe.dispatchers.base import ROW_DTYPES
from ascend_moe.errors import need, need_dtype, need_shape, with_typed_errors
from ascend_moe.ops.collectives import gather


@with_typed_errors
def naive_multicast(
    x: torch.Tensor, cu_tokens_across_dp: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """All ranks' tokens, one after the other in rank order. One all-gather of the largest batch's size.

    Args:
        x: ``(T, ...)``, this rank's; all but T and the values equal on all ranks.
        cu_tokens_across_dp: ``(W,)`` int32 or int64 on the CPU: tokens of all ranks up to and with rank r. Equal on
            all ranks.
        group: of the W data-parallel ranks; None: the default group.

    Returns:
        ``(tokens of all ranks, ...)``.

    Raises:
        ArgumentError: a rule above is broken.

    Source: vLLM's ``naive_multicast``.
    """
    ranks = group_of("group", group)
    need(x.dim() >= 1, "x", "is a scalar; it must be (T, ...)")
    counts = _counts(cu_tokens_across_dp, ranks)
    rank, most = ranks.rank(), max(counts)
    rule = "has {} tokens, cu_tokens_across_dp {} for rank {}"
    need(x.shape[0] == counts[rank], "x", rule, x.shape[0], counts[rank], rank)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    return torch.cat([rows[:count] for rows, count in zip(gather(padded, ranks), counts, strict=True)])


@with_typed_errors
def all_reduce_dp(
    partial: torch.Tensor, cu_tokens_across_dp: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The sum of all data-parallel ranks' parts, of it this rank's tokens. Added up in float32, rounded once.

    Args:
        partial: ``(tokens of all ranks, H)`` bf16, fp16 or fp32.
        cu_tokens_across_dp, group: as `naive_multicast`.

    Returns:
        ``(T, H)`` of partial's type.

    Raises:
        ArgumentError: a rule above is broken.

    Source: vLLM's FusedMoE forward with data parallelism.
    """
    ranks = group_of("group", group)
    counts = _counts(cu_tokens_across_dp, ranks)
    rule = "is {}; it must have the {} tokens of cu_tokens_across_dp"
    need(partial.dim() == 2 and partial.shape[0] == sum(counts), "partial", rule, partial.shape, sum(counts))
    first = sum(counts[: ranks.rank()])
    return all_reduce_tp(partial, ranks)[first : first + counts[ranks.rank()]]


@with_typed_errors
def all_reduce_tp(partial: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of all ranks' parts. Added up in float32, rounded once; partial stays as it is.

    Args:
        partial: any shape, bf16, fp16 or fp32.
        group: of the tensor-parallel (or expert-parallel) ranks; None: the default group.

    Returns:
        partial's shape and type.

    Raises:
        ArgumentError: a rule above is broken.

    Source: vLLM's ``tensor_model_parallel_all_reduce``.
    """
    need_dtype("partial", partial, *ROW_DTYPES)
    total = partial.float() if partial.dtype != torch.float32 else partial.clone()
    dist.all_reduce(total, group=group_of("group", group))
    return total.to(partial.dtype)


def _counts(cu_tokens: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """Tokens of each rank."""
    name = "cu_tokens_across_dp"
    need_shape(name, cu_tokens, (group.size(),), dtypes=(torch.int32, torch.int64))
    ends = cu_tokens.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    need(min(counts) >= 0, name, "is {}; it must not fall: running sums of the ranks' tokens", ends)
    return counts
