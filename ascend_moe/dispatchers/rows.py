"""Operations on the rows of one rank: routing order, quantization, packing and the weighted sum.

No communication. The arithmetic equals that of the window kernels, operation by operation, so that results are
bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass
class Routing:
    """Destinations of the routed tokens of one rank. A routed token is a (token, k); its flat index is t*K + k.

    Attributes:
        order: (n,) int64, flat indices in sending order: by expert id, then flat index.
        counts: (E,) int64, routed tokens per expert.
        position: (BS*K,) int64, index in ``order``; 0 if not routed.
        expand_idx: (BS*K,) int32, number of earlier ones with the same id; 0 if not routed.
        routed: (BS, K) bool, active with an id in 0..E-1.
        special: (BS, K) bool, active with an id of E or more.
        active: (BS,) bool, tokens with an active entry.
    """

    order: Tensor
    counts: Tensor
    position: Tensor
    expand_idx: Tensor
    routed: Tensor
    special: Tensor
    active: Tensor


def active_pairs(expert_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return (BS, K) bool, the active entries of ``expert_ids``, from ``mask``: (BS,), (BS, K), or None (all)."""
    if mask is None:
        return torch.ones_like(expert_ids, dtype=torch.bool)
    return mask if mask.dim() == 2 else mask[:, None].expand_as(expert_ids)


def first_invalid(expert_ids: Tensor, active: Tensor, ids: int) -> int | None:
    """Return the flat index of the first active id that is neither -1 nor in 0..ids-1, or None."""
    wrong = (active & ((expert_ids < -1) | (expert_ids >= ids))).reshape(-1)
    return int(wrong.to(torch.uint8).argmax()) if bool(wrong.any()) else None


def route(expert_ids: Tensor, active: Tensor, experts: int) -> Routing:
    """Return the `Routing` of ``active`` (BS, K) entries of ``expert_ids``; ids must have passed ``first_invalid``."""
    routed = active & (expert_ids >= 0) & (expert_ids < experts)
    flat = routed.reshape(-1)
    key = torch.where(flat, expert_ids.reshape(-1), experts)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    order = torch.argsort(key, stable=True)[: int(counts.sum())]
    position = torch.zeros_like(key, dtype=torch.int64)
    position[order] = torch.arange(order.numel(), device=key.device)
    start = counts.cumsum(0) - counts
    earlier = position - start[key.clamp(max=experts - 1).long()]
    expand_idx = torch.where(flat, earlier, 0).to(torch.int32)
    return Routing(order, counts, position, expand_idx, routed, active & (expert_ids >= experts), active.any(1))


def quantize_dispatch_rows(rows: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows (n, H) as the dispatch kernels do; return int8 codes (n, H) and fp32 scales (n,).

    v = fp32(rows), times ``scales`` (n, H) if passed; s = 127 / max|v|, codes = round-half-even(v * s), scale = 1 / s.
    An all-zero row has codes 0 and scale 1. The maximum ignores NaN unless the whole row is NaN; a NaN's code is 0.
    npu_dynamic_quant differs: `ascend_moe.experts.quant.dynamic_quant_rows`.
    """
    value = rows.float()
    if scales is not None:
        value = value * scales
    magnitude = value.abs()
    nan = magnitude.isnan()
    top = magnitude.masked_fill(nan, -1.0).amax(1)
    top = torch.where(top < 0, torch.nan, top)
    one = torch.ones_like(top)
    # Divide tensors: a Python scalar over a tensor is computed as reciprocal and product, rounded twice.
    factor = torch.where(top == 0, one, torch.full_like(top, 127.0) / top)
    codes = (value * factor[:, None]).round_().nan_to_num_(nan=0.0, posinf=127.0, neginf=-128.0)
    return codes.clamp_(-128, 127).to(torch.int8), one / factor


def payload(x: Tensor, expert_ids: Tensor, pairs: Tensor | None, scales: Tensor | None, quant_mode: int) -> Tensor:
    """Return (n, words) int32: the packed row of every flat index t*K + k in ``pairs`` (None: of every token).

    With quant_mode 2 rows are quantized, after multiplication by their expert's row of ``scales`` (E, H) if passed,
    which needs ``pairs``; the fp32 scale follows the codes. Ids -1 count as expert 0.
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
    """Undo ``payload``: return rows and their fp32 scales (ones if not quantized)."""
    if quant_mode == 0:
        (rows,) = unpack(words, (hidden, dtype))
        return rows, torch.ones(rows.size(0), dtype=torch.float32, device=words.device)
    codes, factors = unpack(words, (hidden, torch.int8), (1, torch.float32))
    return codes, factors.squeeze(1)


def pack(*columns: Tensor, dtype: torch.dtype = torch.int32, unit: int = 4) -> Tensor:
    """Pack rows of one or more (n, *) tensors side by side into (n, m) of ``dtype``, for transport as bytes.

    Args:
        unit: rows are padded with zeros to a multiple of this many bytes; a multiple of dtype's size.
    """
    size = sum(c.size(1) * c.element_size() for c in columns)
    whole = -(-size // unit) * unit
    if columns[0].size(0) == 0:  # empty tensors made by numpy have strides of 0, which cannot be viewed
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
    """Undo ``pack``: return an (n, columns) tensor for each (columns, dtype); a view if one layout fills the rows."""
    if len(layout) == 1 and layout[0][0] * layout[0][1].itemsize == rows.size(1) * rows.element_size():
        return [rows.view(layout[0][1])]
    raw, at, out = rows.contiguous().view(torch.uint8), 0, []
    for columns, dtype in layout:
        width = columns * dtype.itemsize
        # Always copy: a single row is contiguous in place, at an address of any alignment.
        out.append(raw[:, at : at + width].clone(memory_format=torch.contiguous_format).view(dtype))
        at += width
    return out


def beside(words: Tensor, column: Tensor) -> Tensor:
    """Append the fp32 columns ``column`` (n, c) to packed int32 rows ``words``."""
    return torch.cat([words, column.contiguous().view(torch.int32)], 1)


def apart(words: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Undo ``beside`` for this many ``columns``: return the packed rows and the fp32 columns."""
    own = words.size(1) - columns
    return words[:, :own].contiguous(), words[:, own:].contiguous().view(torch.float32)


def weighted_sum(
    rows: Tensor,
    position: Tensor,
    routing: Routing,
    expert_scales: Tensor,
    shared: Tensor | None,
    own_rows: OwnRows | None = None,
) -> Tensor:
    """Return (BS, H): the fp32 sum over ascending k of expert_scales * rows[position], + shared, cast once.

    position: (BS*K,), indices into ``rows``. own_rows: rows of special experts, added in the order of k; or None.
    """
    bs, topk = routing.routed.shape
    acc = torch.zeros(bs, rows.size(1), dtype=torch.float32, device=rows.device)
    at = position.view(bs, topk)
    for k in range(topk):
        tokens = routing.routed[:, k].nonzero().squeeze(1)
        if tokens.numel() > 0:
            index = at[:, k] if len(tokens) == bs else at[tokens, k]
            _add(acc, tokens, rows.index_select(0, index).float(), expert_scales[:, k])
        if own_rows is not None:
            for chosen, values in own_rows(k):
                _add(acc, chosen, values, expert_scales[:, k])
    if shared is not None:
        acc.add_(shared.reshape(acc.shape).float())
    acc.masked_fill_(~routing.active[:, None], 0.0)
    return acc.to(rows.dtype)


def _add(acc: Tensor, tokens: Tensor, values: Tensor, weights: Tensor) -> None:
    """Add weights (BS,) * values (n, H), at most one per token, to these tokens' rows."""
    # Two roundings, product then sum: addcmul or a matmul could fuse them.
    if len(tokens) == len(acc):
        acc.add_(values.mul_(weights[:, None]))
    else:
        acc[tokens] += values.mul_(weights[tokens, None])


# ---- rows of copy and const experts

#: For each k: tokens (n,) and their rows (n, H) fp32, which the caller may overwrite.
OwnRows = Callable[[int], Iterable[tuple[Tensor, Tensor]]]


def special_rows(expert_ids: Tensor, special: Tensor, first: int, copies: int, tensors: Any) -> OwnRows:
    """Return a function that yields, for each k, the tokens whose k-th id is a copy or const expert, and their rows.

    Args:
        expert_ids: (BS, K). special: (BS, K) bool, entries of special experts.
        first, copies: id of the first copy expert, and their number; const experts follow.
        tensors: combine's ``ori_x``, ``const_expert_alpha_1``, ``const_expert_alpha_2`` and ``const_expert_v``.
    """

    def of(k: int) -> Iterable[tuple[Tensor, Tensor]]:
        ids = torch.where(special[:, k], expert_ids[:, k].long(), -1)
        copied = ((ids >= first) & (ids < first + copies)).nonzero().squeeze(1)
        if copied.numel() > 0:
            yield copied, tensors.ori_x[copied].to(torch.float32, copy=True)
        mixed = (ids >= first + copies).nonzero().squeeze(1)
        if mixed.numel() > 0:
            place = ids[mixed] - (first + copies)
            rest = (each[place].float() for each in tensors[1:])
            yield mixed, const_rows(tensors.ori_x[mixed].float(), *rest)

    return of


def const_rows(rows: Tensor, alpha_1: Tensor, alpha_2: Tensor, v: Tensor) -> Tensor:
    """Return (n, H): a1 * row + a2 * v for rows and v (n, H), all fp32, each product rounded to fp32.

    alpha_1, alpha_2: a1 and a2, (n,); or (n, H): (a1, a2) is the softmax of their dot products with the rows.
    """
    if alpha_1.dim() == 1:
        a1, a2 = alpha_1, alpha_2
    else:
        d1, d2 = _dots(alpha_1, rows), _dots(alpha_2, rows)
        a1, a2 = _share(d1, d2), _share(d2, d1)
    own = rows * a1[:, None]
    return own.add_(v * a2[:, None])


_DOT_LANES = 256  # of the kernels' dot product: element h is added to accumulator h mod 256
_LAST_LANES = 8  # accumulators that are added one by one


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return (n,): the sums of a * b (n, H) in the kernels' order: by accumulator, pairwise, then one by one."""
    products = functional.pad(a * b, (0, -a.size(1) % _DOT_LANES)).view(len(a), -1, _DOT_LANES)
    lanes = torch.zeros_like(products[:, 0])
    for chunk in products.unbind(1):
        lanes.add_(chunk)
    while lanes.size(1) > _LAST_LANES:
        middle = lanes.size(1) // 2
        lanes = lanes[:, :middle] + lanes[:, middle:]
    total = lanes[:, 0].clone()
    for lane in lanes.unbind(1)[1:]:
        total.add_(lane)
    return total


def _share(mine: Tensor, other: Tensor) -> Tensor:
    """Return the softmax of two numbers for the first one: 1 / (1 + exp(other - mine))."""
    difference = other - mine
    # The CPU kernels' exponential is rounded once; NPUs have no float64.
    power = difference.exp() if difference.device.type == "npu" else difference.double().exp().float()
    return torch.ones_like(power) / (1 + power)
