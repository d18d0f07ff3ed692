"""Attention, computed in float32 and rounded once.

A mask's true elements are left out, as CANN has it. A query that sees no key gets the mean of all values.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .registry import effect, returns, write

# Where batch, heads, sequence and elements lie; H is heads and elements in one dimension.
_LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "BNSD_BSND")
_FULL, _LEFT_UP, _RIGHT_DOWN, _BAND = (0, 1), 2, 3, 4  # sparse modes
_SUM_LANES = 8  # elements in which CANN keeps each maximum and sum


class _Call(NamedTuple):
    """Holds what forward and backward are told alike. No shift, mask or list is None."""

    shift: Tensor | None
    drop: Tensor | None  # a bit an element, 1: kept
    mask: Tensor | None
    scale: float
    keep: float
    before: int
    after: int
    heads: int
    layout: str
    sparse: int


def _heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """(B, N, S, D) of a tensor in a layout."""
    if layout in ("BSH", "SBH"):
        x = x.reshape(*x.shape[:2], heads, -1)
        return x.transpose(1, 2) if layout == "BSH" else x.permute(1, 2, 0, 3)
    return x.transpose(1, 2) if layout == "BSND" else x


def _as_laid_out(x: Tensor, layout: str) -> Tensor:
    """The inverse of ``_heads_first``."""
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2)
    return x.transpose(1, 2) if layout in ("BSND", "BNSD_BSND") else x


def _hidden(call: _Call, queries: int, keys: int) -> Tensor | None:
    """True where a query must not see a key."""
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
    if call.sparse == _LEFT_UP:
        return column > row
    if call.sparse == _RIGHT_DOWN:
        return column > row + keys - queries
    if call.sparse == _BAND:
        last = row + keys - queries
        return (column > last + call.after) | (column < last - call.before)
    if call.sparse not in _FULL:
        raise NotImplementedError(f"the virtual NPU's attention does not support sparse_mode {call.sparse}; use 0 to 4")
    return None if call.mask is None else call.mask.bool()


def _dropped(call: _Call, shape: torch.Size) -> Tensor | None:
    """The factor of every probability."""
    if call.drop is None or call.keep >= 1:
        return None
    bits = call.drop.reshape(-1).view(torch.uint8)
    kept = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return kept.reshape(-1)[: shape.numel()].reshape(shape).float() / call.keep


class _Parts(NamedTuple):
    out: Tensor
    largest: Tensor
    total: Tensor


def _attend(inputs: list[Tensor], shift: Tensor | None, call: _Call) -> _Parts:
    """Attends: query, key and value are (B, N, S, D) each: keys and values with N or a divisor of N heads."""
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = query @ key.transpose(-1, -2)
    scores = scores * call.scale if shift is None else scores * call.scale + shift
    hidden = _hidden(call, *scores.shape[-2:])
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    largest = scores.amax(-1, keepdim=True).detach()
    powers = (scores - largest).exp()
    total = powers.sum(-1, keepdim=True)
    shares = powers / total
    factor = _dropped(call, shares.shape)
    return _Parts((shares if factor is None else shares * factor) @ value, largest, total)


def _call_of(shift: Any, drop: Any, mask: Any, numbers: tuple[Any, ...]) -> _Call:
    scale, keep, before, after, heads, layout, _, sparse = numbers[:8]
    if layout not in _LAYOUTS:
        raise NotImplementedError(f"the virtual NPU's flash attention has no layout {layout}; use one of {_LAYOUTS}")
    return _Call(shift, drop, mask, scale, keep, before, after, heads, layout, sparse)


def _inputs(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    elements = query.shape[-1] // call.heads if call.layout in ("BSH", "SBH") else 0
    heads = [call.heads, *[key.shape[-1] // elements if elements else 0] * 2]
    given = zip((query, key, value), heads, strict=True)
    return [_heads_first(x, call.layout, n).float().contiguous() for x, n in given]


@effect("aclnnFlashAttentionScore")
def _forward(query: Tensor, key: Tensor, value: Tensor, shift: Any, drop: Any, _: Any, mask: Any, *rest: Any) -> None:
    call = _call_of(shift, drop, mask, rest[1:])
    largest, total, _unused, out = rest[-4:]
    found = _attend(_inputs(call, query, key, value), None if shift is None else shift.float() * call.scale, call)
    write(out, _as_laid_out(found.out, call.layout))
    for place, part in ((largest, found.largest), (total, found.total)):
        if place is not None and place.numel():
            write(place, part.expand(*part.shape[:-1], _SUM_LANES))


@effect("aclnnFlashAttentionScoreGrad")
def _backward(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, shift: Any, drop: Any, _: Any, *rest: Any) -> None:
    call = _call_of(shift, drop, rest[0], rest[6:])
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in _inputs(call, query, key, value)]
        leaves += [] if shift is None else [shift.detach().float().requires_grad_()]
        found = _attend(leaves[:3], None if shift is None else leaves[3] * call.scale, call)
        out = _as_laid_out(found.out, call.layout)
    gradients = torch.autograd.grad(out, leaves, dy.float())
    for place, gradient in zip(rest[-4:], gradients, strict=False):
        if place is not None and place.numel():
            inner = gradient if gradient.dim() != 4 or place is rest[-1] else _as_laid_out(gradient, call.layout)
            write(place, inner)


_FUSED = """
    query key value pse_shift atten_mask lengths lengths_kv deq_scale1 quant_scale1 deq_scale2 quant_scale2
    quant_offset2 antiquant_scale antiquant_offset block_table query_padding kv_padding key_antiquant_scale
    key_antiquant_offset value_antiquant_scale value_antiquant_offset key_shared_prefix value_shared_prefix
    shared_prefix_length query_rope key_rope key_rope_antiquant_scale {} heads scale before after layout kv_heads
    sparse precise block_size antiquant lse key_antiquant value_antiquant {} out softmax_lse
"""
_FORMS = {
    "aclnnFusedInferAttentionScoreV3": ("", ""),
    "aclnnFusedInferAttentionScoreV4": ("dequant_scale_query learnable_sink", "query_quant_mode"),
}
_PLAIN_FUSED = ("pse_shift", "atten_mask", "lengths", "lengths_kv", "block_table", "query_rope", "key_rope")
# Of queries and keys; TND and NTD are all sequences one behind the other. An output's layout may follow an underscore.
_SEQUENCE_LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND", "NTD")


def _sequences(x: Tensor, layout: str, heads: int, ends: list[int] | None) -> list[Tensor]:
    """Views (N, S, D) of every sequence."""
    if layout == "NBSD":  # of outputs
        return list(x.transpose(0, 1))
    if layout not in ("TND", "NTD"):
        return list(_heads_first(x, layout, heads))
    by_heads = x.transpose(0, 1) if layout == "TND" else x
    return [by_heads[:, start:end] for start, end in zip([0, *(ends or [])], ends or [], strict=False)]


def pages_of(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """Return (N, S, D): one sequence's keys or values, S = ``length``, from the pages whose numbers are in ``table``.

    Args:
        cache: (pages, page size, N * D), (pages, N, page size, D) or (pages, page size, N, D), N = ``heads``.
    """
    if cache.dim() == 3:
        cache = cache.view(*cache.shape[:2], heads, -1)
    elif cache.shape[1] == heads and cache.shape[2] != heads:
        cache = cache.transpose(1, 2)
    used = table[: -(-length // cache.shape[1])].long()
    return cache[used].flatten(0, 1)[:length].transpose(0, 1)


def attend_over_pages(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the unmasked attention of one sequence; arguments and result are (N, S, D), ``scale`` that of scores."""
    call = _Call(None, None, None, scale, 1.0, 0, 0, len(query), "BNSD", 0)
    return _attend([x.float().unsqueeze(0) for x in (query, key, value)], None, call).out[0]


def _need_plain(given: dict[str, Any], layout: str, out_layout: str) -> None:
    known = (*_SEQUENCE_LAYOUTS, "NBSD")
    for name, value in given.items():
        quantized = isinstance(value, Tensor) and name not in ("query", "out", "softmax_lse", *_PLAIN_FUSED)
        if quantized or layout not in _SEQUENCE_LAYOUTS or out_layout not in known:
            named = name if quantized else f"layout {given['layout']}"
            raise NotImplementedError(f"the virtual NPU's fused attention does not support {named}: call it without")


def _keys_of(given: dict[str, Any], name: str, layout: str, batch: int, ends: Any, count: Any = None) -> Tensor:
    """(N, S, D) of one sequence's keys, values or rotary keys, the first ``count`` of them; pages need a number."""
    x, heads, table = given[name], given["kv_heads"] or given["heads"], given["block_table"]
    x = x[0] if isinstance(x, list) else x
    if table is not None:
        return pages_of(x, table[batch], count, heads)
    return _sequences(x, layout, heads, ends)[batch][:, :count]


def _fused(names: list[str], *values: Any) -> None:
    given = dict(zip(names, values, strict=True))
    layout, _, out_layout = given["layout"].partition("_")
    _need_plain(given, layout, out_layout or layout)
    heads, together, paged = given["heads"], layout in ("TND", "NTD"), given["block_table"] is not None
    ends = given["lengths"] if together else None
    ends_kv = given["lengths_kv"] if together and not paged else None
    queries = _sequences(given["query"], layout, heads, ends)
    outs = _sequences(given["out"], out_layout or layout, heads, ends)
    ropes = given["query_rope"]
    turned = None if ropes is None else _sequences(ropes, layout, heads, ends)
    starts = [0, *(ends or [])]
    for batch, (query, out) in enumerate(zip(queries, outs, strict=True)):
        rows = query.shape[1] if together else _length(given["lengths"], batch, query.shape[1])
        whole = 0 if paged else _keys_of(given, "key", layout, batch, ends_kv).shape[1]
        keys = whole if ends_kv else _length(given["lengths_kv"], batch, whole)
        if not rows:
            continue
        out[:, :rows], lse = 0, torch.full((heads, rows, 1), torch.inf)  # without keys
        if keys:
            key, value = (_keys_of(given, name, layout, batch, ends_kv, keys).float() for name in ("key", "value"))
            seen = query[:, :rows].float()
            if turned is not None:
                seen = torch.cat((seen, turned[batch][:, :rows].float()), -1)
                key = torch.cat((key, _keys_of(given, "key_rope", layout, batch, ends_kv, keys).float()), -1)
            call, shift = _part_of(given, batch, rows, keys)
            found = _attend([seen[None], key[None], value[None]], shift, call)
            out[:, :rows], lse = found.out[0].to(out.dtype), (found.total.log() + found.largest)[0]
        if given["lse"] and together:
            given["softmax_lse"][starts[batch] : starts[batch] + rows] = lse.transpose(0, 1)
        elif given["lse"]:
            given["softmax_lse"][batch, :, :rows] = lse


def _part_of(given: dict[str, Any], batch: int, rows: int, keys: int) -> tuple[_Call, Tensor | None]:
    """One sequence's call, and what is added to its scores."""
    mask, shift = given["atten_mask"], given["pse_shift"]
    whole = None if mask is None or given["sparse"] not in _FULL else mask.reshape(-1, *mask.shape[-2:])
    seen = None if whole is None else whole[batch if len(whole) > 1 else 0, :rows, :keys]
    limits = (given["before"], given["after"], given["heads"], "BNSD", given["sparse"])
    call = _Call(None, None, seen, given["scale"], 1.0, *limits)
    if shift is None:
        return call, None
    return call, shift[slice(batch, batch + 1) if len(shift) > 1 else slice(None), :, :rows, :keys].float()


def _length(lengths: list[int] | None, batch: int, whole: int) -> int:
    """How many of a sequence count; a list of one is for all."""
    if not lengths:
        return whole
    return lengths[batch] if len(lengths) > 1 else lengths[0]


for _name, _words in _FORMS.items():
    effect(_name)(functools.partial(_fused, _FUSED.format(*_words).split()))


@returns("aclnnAttentionUpdate", outputs=2)
def _attention_update(sums: list[Tensor], parts: list[Tensor], _: int) -> tuple[Tensor, Tensor]:
    """The attention over all keys from that over parts of them. The logarithm of a part without keys is inf."""
    logs = torch.stack(sums)
    logs = logs.masked_fill(logs == torch.inf, -torch.inf)
    shares = logs.softmax(0).nan_to_num(0)
    return (shares.unsqueeze(-1) * torch.stack(parts).float()).sum(0), logs.logsumexp(0)


# ---- multi-head latent attention


@returns("aclnnInterleaveRope")
def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours are the two coordinates; in the result all first coordinates come before all second ones."""
    first, second = x[..., ::2].float(), x[..., 1::2].float()
    return torch.cat((first, second), -1) * cos.float() + torch.cat((-second, first), -1) * sin.float()


@effect("aclnnKvRmsNormRopeCache")
def _latent_to_cache(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *rest: Any) -> None:
    rope_cache, latent_cache, *quantized, epsilon, mode, wanted, rope_out, latent_out = rest
    if mode != "PA" or any(x is not None for x in quantized):
        raise NotImplementedError(f"the virtual NPU's latent cache needs cache_mode PA (not {mode}), no quantization")
    size = gamma.numel()
    latent = functional.rms_norm(kv[..., :size].float(), [size], gamma.float(), epsilon)
    used = slots >= 0
    for rows, cache, out in (
        (_turned(kv[..., size:], cos, sin), rope_cache, rope_out),
        (latent, latent_cache, latent_out),
    ):
        cache.view(-1, rows.shape[-1])[slots[used]] = rows.reshape(-1, rows.shape[-1])[used].to(cache.dtype)
        if wanted:
            write(out, rows)
