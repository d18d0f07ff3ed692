"""Works on the rows of one rank: routing order, quantization, packing and the weighted sum.

No communication here. The arithmetic is that of the window kernels, operation by operation, so that
results agree in every bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Routing:
    """Where the (token, k) pairs of one rank go. Flat index of a pair: t*K + k.

    Attributes:
        order: (n,) int64, flat indices in sending order: by expert id, then flat index.
        counts: (E,) int64, pairs per expert.
        position: (BS*K,) int64, place of a pair in ``order``; 0 where not routed.
        expand_idx: (BS*K,) int32, earlier pairs with the same id; 0 where not routed.
        routed: (BS, K) bool, active pairs whose id is not -1.
        active: (BS,) bool, tokens with an active pair.
    """

    order: Tensor
    counts: Tensor
    position: Tensor
    expand_idx: Tensor
    routed: Tensor
    active: Tensor


def active_pairs(expert_ids: Tensor, mask: Tensor | None) -> Tensor:
    """(BS, K) bool from a 1-D, 2-D or absent mask."""
    if mask is None:
        return torch.ones_like(expert_ids, dtype=torch.bool)
    return mask if mask.dim() == 2 else mask[:, None].expand_as(expert_ids)


def first_invalid(expert_ids: Tensor, active: Tensor, experts: int) -> int | None:
    """Flat index of the first active id that is neither -1 nor in 0..E-1."""
    wrong = (active & ((expert_ids < -1) | (expert_ids >= experts))).reshape(-1)
    return int(wrong.to(torch.uint8).argmax()) if bool(wrong.any()) else None


def route(expert_ids: Tensor, active: Tensor, experts: int) -> Routing:
    """Sorts the routed pairs by expert, stably; ids must have passed ``first_invalid``."""
    routed = active & (expert_ids >= 0)
    flat = routed.reshape(-1)
    key = torch.where(flat, expert_ids.reshape(-1), experts)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    order = torch.argsort(key, stable=True)[: int(counts.sum())]
    position = torch.zeros_like(key, dtype=torch.int64)
    position[order] = torch.arange(order.numel(), device=key.device)
    start = counts.cumsum(0) - counts
    earlier = position - start[key.clamp(max=experts - 1).long()]
    expand_idx = torch.where(flat, earlier, 0).to(torch.int32)
    return Routing(order, counts, position, expand_idx, routed, active.any(1))


def quantize_dispatch_rows(rows: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows as dispatch kernels do: int8 codes (n, H) and fp32 scales (n,), of fp32(rows) [* scales (n, H)].

    s = 127 / max|v|, codes = round-half-even(v * s), scale = 1 / s; an all-zero row has codes 0 and
    scale 1. NaN is left out of the maximum unless nothing else is there; its code is 0. npu_dynamic_quant has another
    contract: `ascend_moe.experts.quant.dynamic_quant_rows`.
    """
    value = rows.float()
    if scales is not None:
        value = value * scales
    magnitude = value.abs()
    nan = magnitude.isnan()
    top = magnitude.masked_fill(nan, -1.0).amax(1)
    top = torch.where(top < 0, torch.nan, top)
    one = torch.ones_like(top)
    # Tensor by tensor: a Python scalar over a tensor is a reciprocal and a product, rounded twice.
    factor = torch.where(top == 0, one, torch.full_like(top, 127.0) / top)
    codes = (value * factor[:, None]).round_().nan_to_num_(nan=0.0, posinf=127.0, neginf=-128.0)
    return codes.clamp_(-128, 127).to(torch.int8), one / factor


def payload(x: Tensor, expert_ids: Tensor, pairs: Tensor | None, scales: Tensor | None, quant_mode: int) -> Tensor:
    """(n, words) int32: the row of every flat index in ``pairs`` (None: of every token), packed.

    Quantized rows (quant_mode 2) have their fp32 scale behind the codes. Ids -1 count as expert 0.
    """
    topk = expert_ids.size(1)
    tokens = None if pairs is None else pairs // topk
    if quant_mode == 0:
        return pack(x if tokens is None else x.index_select(0, tokens))
    if scales is None:  # a token's K rows are equal: quantize it once
        codes, factors = quantize_dispatch_rows(x)
        words = pack(codes, factors[:, None])
        return words if tokens is None else words.index_select(0, tokens)
    assert pairs is not None and tokens is not None
    experts = expert_ids.reshape(-1)[pairs].clamp(min=0).long()
    codes, factors = quantize_dispatch_rows(x.index_select(0, tokens), scales.index_select(0, experts))
    return pack(codes, factors[:, None])


def open_rows(words: Tensor, hidden: int, dtype: torch.dtype, quant_mode: int) -> tuple[Tensor, Tensor]:
    """Undoes ``payload``: rows and their fp32 scales (ones, when not quantized)."""
    if quant_mode == 0:
        (rows,) = unpack(words, (hidden, dtype))
        return rows, torch.ones(rows.size(0), dtype=torch.float32, device=words.device)
    codes, factors = unpack(words, (hidden, torch.int8), (1, torch.float32))
    return codes, factors.squeeze(1)


def pack(*columns: Tensor, dtype: torch.dtype = torch.int32, unit: int = 4) -> Tensor:
    """Rows of one or more (n, *) tensors side by side as (n, m) of ``dtype``: what carries rows does not look at them.

    Args:
        unit: bytes that a row is a multiple of, zeros behind the last column; a multiple of dtype's size.
    """
    size = sum(c.size(1) * c.element_size() for c in columns)
    whole = -(-size // unit) * unit
    if columns[0].size(0) == 0:  # tensors that numpy has made have strides of 0 then, which no view takes
        return torch.empty(0, whole // dtype.itemsize, dtype=dtype, device=columns[0].device)
    if len(columns) == 1 and size == whole:
        rows = columns[0].contiguous()
        aligned = rows.storage_offset() * rows.element_size() % dtype.itemsize == 0
        return (rows if aligned else rows.clone()).view(dtype)
    out = torch.empty(columns[0].size(0), whole, dtype=torch.uint8, device=columns[0].device)
    at = 0
    for column in columns:
        width = column.size(1) * column.element_size()
        out[:, at : at + width] = column.contiguous().view(torch.uint8)
        at += width
    out[:, at:] = 0
    return out.view(dtype)


def unpack(rows: Tensor, *layout: tuple[int, torch.dtype]) -> list[Tensor]:
    """Undoes ``pack``: (n, columns) tensors for each (columns, dtype), with memory of their own unless there is one."""
    if len(layout) == 1 and layout[0][0] * layout[0][1].itemsize == rows.size(1) * rows.element_size():
        return [rows.view(layout[0][1])]
    raw, at, out = rows.contiguous().view(torch.uint8), 0, []
    for columns, dtype in layout:
        width = columns * dtype.itemsize
        # A copy always: one row alone is contiguous where it stands, at an address of any parity.
        out.append(raw[:, at : at + width].clone(memory_format=torch.contiguous_format).view(dtype))
        at += width
    return out


def beside(words: Tensor, column: Tensor) -> Tensor:
    """Packed rows with fp32 columns (n, c) behind their own words."""
    return torch.cat([words, column.contiguous().view(torch.int32)], 1)


def apart(words: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Undoes ``beside``: the rows' own words, and the fp32 columns."""
    own = words.size(1) - columns
    return words[:, :own].contiguous(), words[:, own:].contiguous().view(torch.float32)


def segments(counts: Tensor, starts: Tensor) -> Tensor:
    """Indices of consecutive segments: ``counts[i]`` of them from ``starts[i]``, for every i in order."""
    ends = counts.cumsum(0)
    shift = torch.repeat_interleave(starts - (ends - counts), counts)
    return shift + torch.arange(shift.numel(), device=counts.device)


def weighted_sum(
    rows: Tensor, position: Tensor, routing: Routing, expert_scales: Tensor, shared: Tensor | None
) -> Tensor:
    """(BS, H): fp32 sum over ascending k of expert_scales * rows[position], + shared; one cast."""
    bs, topk = routing.routed.shape
    acc = torch.zeros(bs, rows.size(1), dtype=torch.float32, device=rows.device)
    at = position.view(bs, topk)
    for k in range(topk):
        tokens = routing.routed[:, k].nonzero().squeeze(1)
        if tokens.numel() == 0:
            continue
        every = tokens.numel() == bs
        index, weight = (at[:, k], expert_scales[:, k]) if every else (at[tokens, k], expert_scales[tokens, k])
        # Two roundings, product then sum: addcmul or a matmul could fuse them.
        term = rows.index_select(0, index).float().mul_(weight[:, None])
        if every:
            acc.add_(term)
        else:
            acc[tokens] += term
    if shared is not None:
        acc.add_(shared.reshape(acc.shape).float())
    acc.masked_fill_(~routing.active[:, None], 0.0)
    return acc.to(rows.dtype)
