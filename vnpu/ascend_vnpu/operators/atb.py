"""Operators of ATB (Ascend Transformer Boost): rotary embedding, the paged cache and attention over it."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attend_over_pages, pages_of
from .registry import effect, write


@effect("atbLinear")
def _linear(transpose_left: int, transpose_right: int, left: Tensor, right: Tensor, total: Tensor, out: Tensor) -> None:
    left, right = (x.mT if swap else x for x, swap in ((left, transpose_left), (right, transpose_right)))
    write(out, total.float() + left.float() @ right.float())


@effect("atbRope")
def _rope(coefficient: int, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, _: Tensor, *outputs: Tensor) -> None:
    # In every head, each run of 2 * size / coefficient elements is rotated: its halves are the two coordinates.
    size = cos.shape[-1]
    halves = coefficient // 2
    for x, out in zip((query, key), outputs, strict=True):
        heads = x.float().reshape(x.shape[0], -1, size)
        first, second = heads.view(*heads.shape[:2], halves, 2, -1).unbind(-2)
        turned = torch.stack((-second, first), -2).reshape(heads.shape)
        write(out, (heads * cos.float().unsqueeze(1) + turned * sin.float().unsqueeze(1)).reshape(x.shape))


@effect("atbReshapeAndCache")
def _reshape_and_cache(_kind: int, key: Tensor, value: Tensor, _keys: Tensor, _values: Tensor, *rest: Tensor) -> None:
    slots, key_cache, value_cache = rest
    used = slots >= 0
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots[used].long()] = rows[used].to(cache.dtype)


@effect("aclnnScatterPaKvCache")
def _scatter_pages(key: Tensor, keys: Tensor, slots: Tensor, value: Tensor, values: Tensor, *how: object) -> None:
    if how[:4] != (None, None, None, "Norm"):
        raise NotImplementedError(f"the virtual NPU scatters with cache_mode Norm, not {how[3]}, and no compression")
    _reshape_and_cache(0, key, value, keys, values, slots, keys, values)


@effect("atbPagedAttention")
def _paged_attention(
    heads: int, kv_heads: int, scale: float, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, *rest: Tensor
) -> None:
    lengths, out = rest
    for row, length in enumerate(lengths.tolist()):
        key, value = (pages_of(cache, table[row], length, kv_heads) for cache in (keys, values))
        found = attend_over_pages(query[row].reshape(heads, 1, -1), key, value, scale)
        out[row] = found.reshape(out[row].shape).to(out.dtype)


@effect("AtbPagedCacheLoad", "aclnnGatherPaKvCache")
def _paged_cache_load(
    keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, key: Tensor, value: Tensor, *rest: object
) -> None:
    starts, _kind, sums, *has_starts = rest  # the last one is ATB's
    counts = lengths.long()
    if sums:
        counts = counts.diff()
    begins = starts.long() if all(has_starts) and isinstance(starts, Tensor) else torch.zeros_like(counts)
    size, at = keys.shape[1], 0
    for row, (begin, count) in enumerate(zip(begins.tolist(), counts.tolist(), strict=True)):
        places = torch.arange(begin, begin + count)
        pages = table[row].long()[places // size]
        for cache, out in ((keys, key), (values, value)):
            out[at : at + count] = cache[pages, places % size]
        at += count
