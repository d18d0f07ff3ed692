"""Rows in expert order: sorting of routed tokens, aligned blocks of rows, and the weighted sums back.

Shared by the expert-parallel layers of several frameworks. Nothing here reads a value on the host unless documented, so
that it can be captured in a graph. A routed token is a (token, k) copy; its flat index is ``t*K + k``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ascend_moe.errors import need, need_dims, need_dtype, need_shape, with_typed_errors
from ascend_moe.native.torch_npu import compute_dtype

_INDEX_DTYPES = (torch.int32, torch.int64)


class ExpertOrder(NamedTuple):
    """The routed tokens of a call in expert order; P is their number.

    Attributes:
        expert_ids: ``(P,)``, the ids in ascending order, in the given dtype.
        order: ``(P,)`` int64, the flat index t * K + k of each sorted routed token; equal ids keep their order.
        places: ``(P,)`` int32, the inverse: position of each routed token after sorting.
        bounds: ``(E + 1,)`` int64: expert e's routed tokens are at ``bounds[e]`` to ``bounds[e + 1] - 1``. Negative
            ids are before ``bounds[0]``, ids from E on after ``bounds[E]``.
    """

    expert_ids: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    bounds: torch.Tensor


@with_typed_errors
def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sort the routed tokens of a call by expert, stably.

    Args:
        expert_ids: int32 or int64, any shape; any values.
        num_experts: E.

    Raises:
        ArgumentError: the dtype is wrong or num_experts below 1.
    """
    need_dtype("expert_ids", expert_ids, *_INDEX_DTYPES)
    need(num_experts >= 1, "num_experts", "is {}; need at least 1", num_experts)
    ids, order = torch.sort(expert_ids.reshape(-1), stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    experts = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    return ExpertOrder(ids, order, places, torch.searchsorted(ids, experts))


@with_typed_errors
def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group the routed tokens of a call by expert into blocks of one size; a block contains rows of one expert only.

    Args:
        topk_ids: ``(T, K)`` int32 or int64; ids outside of 0..num_experts-1 (-1) are in no block.
        block_size: B, rows per block.
        num_experts: E, experts of all ranks.
        expert_map: ``(E,)`` int32 or int64, the local index of each expert, -1 for experts of other ranks.
        pad_sorted_ids: round the length of the first result up to a multiple of B.
        ignore_invalid_experts: experts whose entry in the map is -1 get no blocks, and blocks are in the order of
            local indices. No effect without a map.

    Returns:
        The flat index t*K + k of each row, ``(T*K + E*(B-1),)`` int32, at most ``T*K*B`` if T*K < E; ascending in a
        block, ``T*K`` for padding.
        The expert of each block, ``(ceil(length / B),)`` int32 or of the map's dtype: its local index with a map (-1:
        of another rank); unused entries contain that of expert 0 (0 with ignore_invalid_experts). The number of rows in
        all blocks, padding included, ``(1,)`` int32.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: vLLM ``moe_align_block_size``.
    """
    need_dtype("topk_ids", topk_ids, *_INDEX_DTYPES)
    need(block_size >= 1, "block_size", "is {}; need at least 1", block_size)
    if expert_map is not None:
        need_shape("expert_map", expert_map, (num_experts,), dtypes=_INDEX_DTYPES)
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    keys = topk_ids
    if expert_map is not None and ignore_invalid_experts:
        keys = expert_map[topk_ids.masked_fill(~known, 0).long()]
    pairs = sort_by_expert(keys.masked_fill(~known, -1), num_experts)
    rows = topk_ids.numel()
    length = rows + num_experts * (block_size - 1)
    length = _round_up(length, block_size) if pad_sorted_ids else length
    if rows < num_experts:
        length = min(rows * block_size, length)
    padded, ends = _padded(pairs.bounds.diff(), block_size)
    shift = ends - padded - pairs.bounds[:-1]
    place = torch.arange(rows, device=ends.device) + shift[pairs.expert_ids.clamp(min=0).long()]
    # Routed tokens without an expert share one place after the end, which is cut off.
    place = torch.where(pairs.expert_ids >= 0, place, length)
    sorted_ids = torch.full((length + 1,), rows, dtype=torch.int32, device=ends.device)
    sorted_ids[place] = pairs.order.to(torch.int32)
    starts = torch.arange(0, length, block_size, device=ends.device)
    block = torch.searchsorted(ends, starts, right=True)
    block = block.masked_fill(block == num_experts, 0).to(torch.int32)
    if expert_map is not None and not ignore_invalid_experts:
        block = expert_map[block.long()]
    return sorted_ids[:length], block, ends[-1:].to(torch.int32)


@with_typed_errors
def batched_moe_align_block_size(
    max_tokens_per_batch: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide the rows of ``(E, max_tokens_per_batch)``, of which each expert uses the first ones, into blocks.

    Args:
        max_tokens_per_batch: capacity of each expert in rows.
        block_size: B, rows per block.
        expert_num_tokens: ``(E,)`` int32 or int64, rows in use; clamped to 0..max_tokens_per_batch.

    Returns:
        The index of each row, e * max_tokens_per_batch + i, ``(E * (max_tokens_per_batch rounded up to B),)`` int32,
        ``E * max_tokens_per_batch`` for padding; the expert of each block, int32, -1 after the last one; the number of
        rows in all blocks, padding included, ``(1,)`` int32.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: vLLM ``batched_moe_align_block_size``.
    """
    need_dims("expert_num_tokens", expert_num_tokens, 1, dtypes=_INDEX_DTYPES)
    for name, value in (("max_tokens_per_batch", max_tokens_per_batch), ("block_size", block_size)):
        need(value >= 1, name, "is {}; need at least 1", value)
    experts, counts = expert_num_tokens.numel(), expert_num_tokens.long().clamp(0, max_tokens_per_batch)
    need(experts >= 1, "expert_num_tokens", "has no experts; need at least 1")
    padded, ends = _padded(counts, block_size)
    places = torch.arange(experts * _round_up(max_tokens_per_batch, block_size), device=ends.device)
    expert = torch.searchsorted(ends, places, right=True)
    used, owner = expert < experts, expert.clamp(max=experts - 1)
    row = places - (ends - padded)[owner]
    rows = torch.where(used & (row < counts[owner]), owner * max_tokens_per_batch + row, experts * max_tokens_per_batch)
    blocks = expert.masked_fill(~used, -1)[::block_size]
    return rows.to(torch.int32), blocks.to(torch.int32), ends[-1:].to(torch.int32)


# ---- rows in expert order, and back


@with_typed_errors
def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: torch.Tensor | None = None,
    align_size: int = 0,
    return_batch_invariant_inverse_map: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, None, torch.Tensor | None]:
    """Return a row for every True in a routing map, ordered by expert, then by token.

    Args:
        tokens: ``(T, H)``.
        routing_map: ``(T, E)`` bool or integers; True or not 0: the token goes to the expert.
        probs: ``(T, E)``, permuted alike.
        num_out_tokens: rows of the result: the number of Trues (not checked), or with drop_and_pad E * C. None: the
            number of Trues, read on the host.
        fused: ignored, there is one implementation.
        drop_and_pad: every expert gets C rows, C at most T: those of its first C tokens, filled up with tokens not
            routed to it. Ignored if num_out_tokens is None.
        tokens_per_expert: returned unchanged.
        align_size, return_batch_invariant_inverse_map: must be 0 (or 1, the same) and False.

    Returns:
        rows ``(N, H)``; probs of the rows ``(N,)`` or None; the token of each row ``(N,)`` int64; None;
        tokens_per_expert. Rows and probs are differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``permute``.
    """
    need_dims("tokens", tokens, 2)
    need_dims("routing_map", routing_map, 2)
    whole = not (routing_map.is_floating_point() or routing_map.is_complex())
    need(whole, "routing_map", "is {}; it must be bool, or integers", routing_map.dtype)
    count, experts = routing_map.shape
    need_shape("tokens", tokens, (count, tokens.shape[1]))
    need(align_size in (0, 1), "align_size", "is {}; padding of experts is not supported: pass 0", align_size)
    rule = "is True; unpermute always adds in one order: pass False"
    need(not return_batch_invariant_inverse_map, "return_batch_invariant_inverse_map", rule)
    by_expert = routing_map.bool().t()
    if drop_and_pad and num_out_tokens is not None:
        capacity = num_out_tokens // experts
        fits = num_out_tokens % experts == 0 and capacity <= count
        rule = "is {}; with drop_and_pad need a multiple of {} experts, at most {}"
        need(fits, "num_out_tokens", rule, num_out_tokens, experts, experts * count)
        row = torch.arange(num_out_tokens, device=tokens.device)
        owner = row // capacity
        sources = _trues_first(by_expert).reshape(-1)[owner * count + row % capacity]
        pairs = owner * count + sources
    else:
        flat = by_expert.reshape(-1)
        pairs = _trues_first(flat)[: int(flat.sum()) if num_out_tokens is None else num_out_tokens]
        sources = pairs % max(count, 1)
    chosen = None
    if probs is not None:
        need_shape("probs", probs, tuple(routing_map.shape))
        chosen = probs.t().reshape(-1).index_select(0, pairs)
    return tokens.index_select(0, sources), chosen, sources, None, tokens_per_expert


def _trues_first(values: torch.Tensor) -> torch.Tensor:
    """Return indices along the last dimension: those of True, then those of False, each ascending."""
    return torch.sort((~values).to(torch.int8), dim=-1, stable=True).indices


@with_typed_errors
def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: torch.Size | tuple[int, ...],
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: torch.Tensor | None = None,
    batch_invariant_inverse_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the rows of every token, in the order of the rows; tokens without rows get zeros.

    Args:
        permuted_tokens: ``(N, H)``.
        sorted_indices: ``(N,)`` int64, the token of each row, from `permute`.
        restore_shape: ``(T, H)``.
        probs: ``(T, E)``: factors of the rows, applied in the wider dtype of the two. None: no factors.
        routing_map: ``(T, E)``, as passed to `permute`; required with probs, else ignored.
        fused: ignored, there is one implementation.
        drop_and_pad: as passed to `permute`; affects probs only.
        pad_offsets, batch_invariant_inverse_map: must be None.

    Returns:
        ``(T, H)`` in permuted_tokens' dtype. Differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``unpermute``.
    """
    need_dims("permuted_tokens", permuted_tokens, 2)
    need_shape("sorted_indices", sorted_indices, (permuted_tokens.shape[0],), dtypes=(torch.int64,))
    given = {"pad_offsets": pad_offsets, "batch_invariant_inverse_map": batch_invariant_inverse_map}
    for name, value in given.items():
        need(value is None, name, "is not supported: experts are not padded and the order is fixed; pass None")
    rows = permuted_tokens
    if probs is not None:
        need(routing_map is not None, "routing_map", "is None; probs need it: pass permute's routing_map")
        assert routing_map is not None
        count, experts = probs.shape
        need_shape("routing_map", routing_map, (count, experts))
        if drop_and_pad:
            owner = torch.arange(rows.shape[0], device=rows.device) // (rows.shape[0] // experts)
            pairs = owner * count + sorted_indices
        else:
            pairs = _trues_first(routing_map.bool().t().reshape(-1))[: rows.shape[0]]
        rows = rows * probs.t().reshape(-1).index_select(0, pairs).unsqueeze(1)
    total = torch.zeros(tuple(restore_shape), dtype=rows.dtype, device=rows.device)
    return total.index_add(0, sorted_indices, rows).to(permuted_tokens.dtype)


@with_typed_errors
def sort_chunks_by_idxs(
    input: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cut rows into chunks and reorder the chunks. Reads nothing on the host.

    Args:
        input: ``(N, ...)``.
        split_sizes: ``(C,)`` int32 or int64, rows of each chunk, N together.
        sorted_idxs: ``(C,)`` int32 or int64, each of 0..C-1 once (not checked); ``sorted_idxs[i]`` becomes the i-th.
        probs: ``(N, ...)``, reordered alike.
        fused: ignored, there is one implementation.

    Returns:
        rows and probs. Differentiable.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: Megatron-LM ``sort_chunks_by_idxs``.
    """
    need_dims("split_sizes", split_sizes, 1, dtypes=_INDEX_DTYPES)
    need_shape("sorted_idxs", sorted_idxs, tuple(split_sizes.shape), dtypes=_INDEX_DTYPES)
    sizes, order = split_sizes.to(input.device).long(), sorted_idxs.to(input.device).long()
    starts = (sizes.cumsum(0) - sizes)[order]
    ends = sizes[order].cumsum(0)
    rows = torch.arange(input.shape[0], device=input.device)
    chunk = torch.searchsorted(ends, rows, right=True).clamp(max=max(len(order) - 1, 0))
    places = rows - (ends - sizes[order])[chunk] + starts[chunk]
    return input[places], None if probs is None else probs[places]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _padded(counts: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts rounded up to whole blocks, and their running sums."""
    padded = (counts + block_size - 1) // block_size * block_size
    return padded, padded.cumsum(0)


def need_pairs(tokens: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raise ArgumentError unless the shapes of ids and weights fit ``tokens`` tokens.

    Args:
        tokens: T.
        topk_ids: ``(T, K)`` int32 or int64, K at least 1.
        topk_weights: ``(T, K)``.
    """
    need_dims("topk_ids", topk_ids, 2, dtypes=_INDEX_DTYPES)
    fits = topk_ids.shape[0] == tokens and topk_ids.shape[1] >= 1
    need(fits, "topk_ids", "is {} for {} tokens; it must be (T, K), K at least 1", topk_ids.shape, tokens)
    need_shape("topk_weights", topk_weights, tuple(topk_ids.shape))


def need_map(expert_map: torch.Tensor, experts: int, local: int) -> None:
    """Raise ArgumentError unless expert_map is ``(E,)`` int32 or int64 with entries of -1 to L - 1. Reads its values.

    Args:
        expert_map: the local index of each expert, -1 for experts of other ranks.
        experts, local: E and L.
    """
    need_shape("expert_map", expert_map, (experts,), dtypes=_INDEX_DTYPES)
    low, high = (int(end) for end in expert_map.aminmax())
    rule = "has entries from {} to {}; each must be -1 or an index of one of the {} experts in w1, 0 to {}"
    need(low >= -1 and high < local, "expert_map", rule, low, high, local, local - 1)


def segment_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the segment index of each of ``rows`` contiguous rows, ``(rows,)`` int64.

    Args:
        ends: ``(n,)`` int32 or int64, running sums of the segments' sizes; rows after the last get index n.
    """
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def padded_places(ends: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return the position of each row, ``(rows,)``, if every one of n segments is padded to ``width`` rows.

    Args:
        ends, rows: as of `segment_of_rows`. Rows after the last segment get ``n * width``; longer segments overlap.
    """
    segment = segment_of_rows(ends, rows)
    known = segment.clamp(max=len(ends) - 1)
    begins = ends - ends.diff(prepend=ends.new_zeros(1))
    inside = torch.arange(rows, dtype=ends.dtype, device=ends.device) - begins[known]
    return torch.where(segment < len(ends), known * width + inside, len(ends) * width)


def rows_at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return ``rows[places]`` of ``(N, H)`` rows, with zeros for indices out of range."""
    inside = (places >= 0) & (places < rows.shape[0])
    if rows.shape[0] == 0:
        return rows.new_zeros((places.shape[0], rows.shape[1]))
    return torch.where(inside.unsqueeze(1), rows[places.masked_fill(~inside, 0)], 0)


def sum_rows(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return for every token the sum over k of ``weights[t, k] * rows[places[t, k]]``.

    Computes in float32 (float64 for float64 rows), k ascending, each product rounded before the addition, and rounds to
    ``dtype`` once at the end. An inf or NaN with weight 0 adds nothing.

    Args:
        rows: ``(N, H)`` float.
        places: ``(T, K)`` int64; indices out of range add nothing.
        weights: ``(T, K)`` float; None: all 1.
        dtype: dtype of the result; None: that of rows.

    Returns:
        ``(T, H)``, differentiable.
    """
    wide = compute_dtype(rows.dtype)
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for k in range(places.shape[1]):
        row = rows_at(rows, places[:, k]).to(wide)
        if weights is not None:
            weight = weights[:, k : k + 1].to(wide)
            row = torch.where((weight == 0) & ~row.isfinite(), 0, row) * weight
        total = total + row
    return total.to(dtype or rows.dtype)
