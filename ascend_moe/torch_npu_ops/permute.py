"""Movement of rows to their experts and back: npu_moe_token_permute and _unpermute, npu_moe_finalize_routing,
npu_moe_re_routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_moe.errors import ArgumentError, need, need_dims, need_only, need_shape, need_unset
from ascend_moe.native.torch_npu import compute_dtype, npu_operator
from ascend_moe.permute import rows_at, sum_rows
from ascend_moe.torch_npu_ops.sharding import takes_shards

_INDEX_DTYPES = (torch.int32, torch.int64)


@takes_shards
@npu_operator
def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy every token's row once for each of its experts and sort the copies by expert, stably.

    Args:
        tokens: ``(T, H)``, any dtype.
        indices: ``(T, K)`` or ``(T,)`` int32 or int64: experts of each token.
        num_out_tokens: number of first rows to keep; None or 0: all; negative: all but that many last ones.
        padded_mode: must be False.

    Returns:
        rows ``(num_out, H)``, differentiable; for each (token, k) the index of its row, also if it was cut off,
        ``(T*K,)`` int32.

    If all tensors are DTensors of one mesh, so are the results: sharded or partial tokens are first resharded along H,
    indices are replicated.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_token_permute``, which is called for NPU tensors.
    """
    need_dims("tokens", tokens, 2)
    need_dims("indices", indices, 1, 2, dtypes=_INDEX_DTYPES)
    rows_of = "is {} for {} tokens; it must have one row per token"
    need(indices.shape[0] == tokens.shape[0], "indices", rows_of, indices.shape, tokens.shape[0])
    need(not padded_mode, "padded_mode", "is True; off the NPU it must be False")
    pairs = indices.numel()
    wanted = num_out_tokens or 0
    need(wanted >= -pairs, "num_out_tokens", "is {}; with {} rows it must be at least {}", wanted, pairs, -pairs)
    order = torch.sort(indices.reshape(-1), stable=True).indices
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(pairs, dtype=torch.int32, device=order.device)
    kept = order[:wanted] if wanted > 0 else order[: pairs + wanted]
    return tokens[kept // (indices.shape[1] if indices.dim() == 2 else 1)], places


@takes_shards
@npu_operator
def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Sum rows per token, weighted by probs.

    float32 inside, k ascending, multiply then add, one rounding. An inf or NaN with weight 0 adds nothing.

    Args:
        permuted_tokens: ``(rows, H)`` float.
        sorted_indices: ``(T*K,)`` int32 or int64, as returned by ``npu_moe_token_permute``; indices out of range (cut
            off, or -1) add nothing.
        probs: ``(T, K)`` float; None: K is 1 and the weight 1.
        padded_mode: must be False. restore_shape: has no effect, as only padded mode uses it.

    Returns:
        ``(T, H)`` of permuted_tokens' dtype, differentiable.

    DTensors: as for ``npu_moe_token_permute``.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_token_unpermute``, which is called for NPU tensors.
    """
    need_dims("permuted_tokens", permuted_tokens, 2)
    need(permuted_tokens.is_floating_point(), "permuted_tokens", "is {}; it must be float", permuted_tokens.dtype)
    need_dims("sorted_indices", sorted_indices, 1, dtypes=_INDEX_DTYPES)
    need(not padded_mode, "padded_mode", "is True; off the NPU it must be False")
    shape = (sorted_indices.numel(), 1)
    if probs is not None:
        need_dims("probs", probs, 2)
        fits = probs.numel() == sorted_indices.numel()
        rule = "is {}; need (T, K) with the {} elements of sorted_indices"
        need(fits, "probs", rule, probs.shape, sorted_indices.numel())
        shape = (probs.shape[0], probs.shape[1])
    return sum_rows(permuted_tokens, sorted_indices.to(torch.int64).reshape(shape), probs)


@npu_operator
def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """Return ``skip1 + skip2 + sum over j of scales[t, j] * (row(t, j) + bias[expert(t, j)])``.

    float32 inside, in that order, j ascending, one rounding.

    Args:
        expanded_permuted_rows: ``(rows, H)`` float, or ``(E, C, H)`` with drop_pad_mode 1 and 3.
        skip1, skip2: ``(T, H)`` or None; skip2 needs skip1.
        bias: ``(E, H)`` or None; needs export_for_source_row.
        scales: ``(T, K)``, or None: weight 1, and K is ``k``.
        expanded_src_to_dst_row: ``(T*K,)`` int32: row of (t, j) at ``j*T + t`` with drop_pad_mode 0
            and 1, at ``t*K + j`` with 2 and 3; -1: no row.
        export_for_source_row: ``(T, K)`` int32, the expert of each (t, j); used for bias only.
        drop_pad_mode: 0 to 3, see above. k: K if scales is None; None: 1.

    Returns:
        ``(T, H)`` of the rows' dtype.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_finalize_routing``, which is called for NPU tensors.
    """
    mode = drop_pad_mode or 0
    need_only("drop_pad_mode", mode, 0, 1, 2, 3)
    name = "expanded_permuted_rows"
    need_dims(name, expanded_permuted_rows, 3 if mode in (1, 3) else 2)
    need(expanded_permuted_rows.is_floating_point(), name, "is {}; it must be float", expanded_permuted_rows.dtype)
    rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    places = _places(expanded_src_to_dst_row, scales, k, column_first=mode in (0, 1), rows=rows.shape[0])
    tokens, topk = places.shape
    dtype = compute_dtype(rows.dtype)
    total = rows.new_zeros(tokens, rows.shape[1], dtype=dtype)
    need(skip1 is not None or skip2 is None, "skip2", "requires skip1")
    for name, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None:
            need_shape(name, skip, (tokens, rows.shape[1]))
            total = total + skip.to(dtype)
    experts = None if bias is None else _experts(bias, export_for_source_row, (tokens, topk), rows.shape[1])
    for j in range(topk):
        value = rows_at(rows, places[:, j]).to(dtype)
        if bias is not None and experts is not None:
            value = value + bias[experts[:, j]].to(dtype)
        total = total + (value if scales is None else value * scales[:, j : j + 1].to(dtype))
    return total.to(rows.dtype)


def _places(
    flat: torch.Tensor, scales: torch.Tensor | None, k: int | None, column_first: bool, rows: int
) -> torch.Tensor:
    """Return the row of every (t, j), ``(T, K)`` int64."""
    name = "expanded_src_to_dst_row"
    need_dims(name, flat, 1, dtypes=_INDEX_DTYPES)
    if scales is not None:
        need_dims("scales", scales, 2)
        fits = scales.numel() == flat.numel()
        need(fits, "scales", "is {}; it must have the {} entries of {}", scales.shape, flat.numel(), name)
        tokens, topk = scales.shape
    else:
        topk = 1 if k is None else k
        whole = topk >= 1 and flat.numel() % topk == 0
        need(whole, "k", "is {}; it must divide the {} entries of {}", topk, flat.numel(), name)
        tokens = flat.numel() // topk
    inside = bool(((flat >= -1) & (flat < rows)).all())
    need(inside, name, "must contain rows in 0..{}, or -1 for none", rows - 1)
    places = flat.to(torch.int64)
    return places.reshape(topk, tokens).t() if column_first else places.reshape(tokens, topk)


def _experts(bias: torch.Tensor, experts: torch.Tensor | None, shape: tuple[int, int], hidden: int) -> torch.Tensor:
    need_dims("bias", bias, 2)
    need(bias.shape[1] == hidden, "bias", "is {}; its rows must have {} elements", bias.shape, hidden)
    name = "export_for_source_row"
    if experts is None:
        raise ArgumentError(f"{name} is None; pass it, or omit bias", argument=name)
    need_shape(name, experts, shape)
    inside = bool(((experts >= 0) & (experts < bias.shape[0])).all())
    need(inside, name, "must contain experts 0..{}, the rows of bias", bias.shape[0] - 1)
    return experts.to(torch.int64)


@npu_operator
def npu_moe_re_routing(
    tokens: torch.Tensor,
    expert_token_num_per_rank: torch.Tensor,
    *,
    per_token_scales: torch.Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reorder rows from (source rank, expert) to (expert, source rank) order.

    Args:
        tokens: ``(A, H)``, any dtype: all rows of rank 0, then of rank 1, each by expert.
        expert_token_num_per_rank: ``(R, E)`` int32 or int64 counts; their sum may be below A.
        per_token_scales: ``(A, ...)``, moved with the rows.
        expert_token_num_type: must be 1 (counts). idx_type: must be 0 (gather). tokens_dtype: must be None.

    Returns:
        tokens ``(A, H)``; their scales (without per_token_scales ``(A,)`` fp32 zeros); for each returned row its
        original index, ``(A,)`` int32; numbers of rows by expert, ``(E,)`` in the counts' dtype.
        Rows beyond the sum of the counts are zero off the NPU, undefined on it.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_re_routing``, which is called for NPU tensors.
    """
    name = "expert_token_num_per_rank"
    need_dims("tokens", tokens, 2)
    need_dims(name, expert_token_num_per_rank, 2, dtypes=_INDEX_DTYPES)
    need_only("expert_token_num_type", expert_token_num_type, 1)
    need_only("idx_type", idx_type, 0)
    need_unset(tokens_dtype=tokens_dtype)
    counts, rows = expert_token_num_per_rank.to(torch.int64), tokens.shape[0]
    total = int(counts.sum())
    fits = bool(((counts >= 0) & (counts <= rows)).all()) and total <= rows
    need(fits, name, "must not be negative, and their sum, {}, must be at most {}, the rows of tokens", total, rows)
    ends = counts.reshape(-1).cumsum(0).reshape(counts.shape)
    starts, lengths = (ends - counts).t().reshape(-1), counts.t().reshape(-1)
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    source = torch.arange(total, device=shift.device) + shift
    index = shift.new_zeros(rows, dtype=torch.int32)
    index[:total] = source.to(torch.int32)
    scales = shift.new_zeros(rows, dtype=torch.float32)
    if per_token_scales is not None:
        fits = per_token_scales.dim() >= 1 and per_token_scales.shape[0] == rows
        need(fits, "per_token_scales", "is {} for {} tokens; need one row each", per_token_scales.shape, rows)
        scales = _moved(per_token_scales, source)
    sums = counts.sum(0).to(expert_token_num_per_rank.dtype)
    return _moved(tokens, source), scales, index, sums


def _moved(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return ``rows[source]``, padded with zeros to the size of ``rows``."""
    moved = torch.zeros_like(rows)
    moved[: len(source)] = rows[source]
    return moved
