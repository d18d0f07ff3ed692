"""Expansion of tokens by expert: npu_moe_init_routing, its v2, and npu_moe_compute_expert_tokens.

The routed tokens (token, k) are sorted by expert, stably, and each gets a copy of its token's row. Before that
npu_moe_update_expert replaces logical experts by their physical copies, and drops weak choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ascend_moe.errors import need, need_dims, need_dtype, need_only, need_shape
from ascend_moe.experts.quant import dynamic_quant_rows, to_int8
from ascend_moe.native.torch_npu import npu_operator, resolve_dtype

UNQUANTIZED, STATIC, DYNAMIC = -1, 0, 1
CUMSUM, COUNTS, PAIRS = 0, 1, 2
GATHER, SCATTER = 0, 1
BY_RANK, BY_TOKEN = 0, 1
_MAX_EXPERTS = 10240


@npu_operator
def npu_moe_init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy every token's row once for each of its experts, in expert order.

    Args:
        x: ``(T, H)``, any dtype.
        row_idx: ``(T, K)`` int32, each number of 0..T*K-1 once; the copy named n is of row ``x[n % T]``. Entry (t, j)
            is j * T + t if returned by ``npu_moe_gating_top_k_softmax``.
        expert_idx: ``(T, K)`` int32: experts of the copies. Copies of one expert keep their (t, j) order.
        active_num: ``active_num * K`` is the maximum number of rows; at least 0.

    Returns:
        rows ``(min(T, active_num) * K, H)`` of x's dtype; for each name n the index of its row, also if cut off,
        ``(T*K,)`` int32; the experts, sorted, ``(T*K,)`` int32.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_init_routing``, which is called for NPU tensors.
    """
    need_dims("x", x, 2)
    need_dims("expert_idx", expert_idx, 2)
    tokens, pairs = x.shape[0], expert_idx.numel()
    need(expert_idx.shape[0] == tokens, "expert_idx", "is {}; this x needs ({}, K)", expert_idx.shape, tokens)
    need_shape("row_idx", row_idx, tuple(expert_idx.shape))
    for name, value in (("row_idx", row_idx), ("expert_idx", expert_idx)):
        need_dtype(name, value, torch.int32)
    need(active_num >= 0, "active_num", "is {}; it must be at least 0", active_num)
    names = row_idx.reshape(-1).to(torch.int64)
    within = bool(((names >= 0) & (names < pairs)).all())
    once = within and bool((torch.bincount(names, minlength=pairs) == 1).all())
    need(once, "row_idx", "must contain every number in 0..{} (T*K) once", pairs - 1)
    experts, order = torch.sort(expert_idx.reshape(-1), stable=True)
    names = names[order]
    places = torch.empty_like(names, dtype=torch.int32)
    places[names] = torch.arange(pairs, dtype=torch.int32, device=names.device)
    used = min(tokens, active_num) * expert_idx.shape[1]
    return x[names[:used] % max(tokens, 1)], places, experts


@npu_operator
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    """Return where each expert's rows end: the running sums of the numbers of rows per expert.

    Args:
        sorted_expert_for_source_row: ``(rows,)`` int32, non-decreasing; ids of num_expert and above are ignored.
        num_expert: experts, 1..10240.

    Returns:
        ``(num_expert,)`` int32: entry e is the number of rows of the experts 0..e.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_compute_expert_tokens``, which is called for NPU tensors.
    """
    experts = sorted_expert_for_source_row
    name = "sorted_expert_for_source_row"
    need_dims(name, experts, 1, dtypes=(torch.int32,))
    need(bool((experts[1:] >= experts[:-1]).all()), name, "must not decrease: sort it first")
    need(1 <= num_expert <= _MAX_EXPERTS, "num_expert", "is {}; it must be in 1..{}", num_expert, _MAX_EXPERTS)
    ids = torch.arange(num_expert, dtype=torch.int32, device=experts.device)
    return torch.searchsorted(experts.contiguous(), ids, right=True).to(torch.int32)


class _Placed(NamedTuple):
    """Active routed tokens in expert order: flat (token, k) index, expert, and row of expanded_x (-1: dropped)."""

    pair: torch.Tensor
    expert: torch.Tensor
    row: torch.Tensor
    rows: int  # of expanded_x


@npu_operator
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = CUMSUM,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = UNQUANTIZED,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = GATHER,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy every token's row once for each of its active experts, in expert order, optionally quantized.

    Args:
        x: ``(T, H)`` bf16, fp16, fp32, or int8 without quantization.
        expert_idx: ``(T, K)`` int32; ids outside of the active range get no row.
        scale: unquantized ``(T,)`` fp32, copied along with the rows; static ``(1,)``; dynamic: None,
            ``(1, H)`` or one smoothing row per active expert, ``(stop - start, H)`` fp32.
        offset: static: None or ``(1,)``.
        active_num: maximum rows of expanded_x; 0 or below: T*K.
        expert_capacity: drop_pad_mode 1: rows per expert, at least 1.
        expert_num: experts, at most 10240; required without active_expert_range, with pairs or drop_pad_mode 1.
        drop_pad_mode: 0: contiguous rows. 1: expert_capacity rows per expert, further ones dropped, missing rows zero;
            needs all experts and row_idx_type 0, and returns no tokens or counts.
        expert_tokens_num_type: 0 running sums, 1 counts, 2 pairs (expert, count) of experts with rows.
        expert_tokens_num_flag: False: the expert tokens in the result are zeros.
        quant_mode: -1 none. 0 static: ``rint(x * scale + offset)`` in float16. 1 dynamic: a scale per row,
            formulas in `ascend_moe.experts.quant`.
        active_expert_range: ``[start, stop]``, experts start..stop-1 are active; empty: all, 0..expert_num-1.
        row_idx_type: 0: for each (token, k) its row. 1: for each row its (token, k).
        x_dtype: None, or x's own dtype.

    Returns:
        expanded_x ``(rows, H)``, rows T*K or ``min(active_num, T*K)``, or ``(expert_num, expert_capacity,
        H)``; x's dtype or int8;
        expanded_row_idx ``(T*K,)`` int32, -1 for none (also beyond active_num: not cut);
        expert tokens int64 ``(stop - start,)``, pairs ``(expert_num, 2)``;
        expanded_scale fp32, one for each row.
        Rows after the last active row, and outputs not requested, are zero off the NPU, undefined on it.

    Raises:
        ArgumentError: an argument breaks one of these rules; int4, fp8 and modes of the 950 series exist on NPUs only.

    Source: torch_npu ``npu_moe_init_routing_v2``, which is called for NPU tensors.
    """
    given = dict(locals())
    read_as = resolve_dtype(x_dtype, "x_dtype")
    need(read_as in (None, x.dtype), "x_dtype", "is {}; off the NPU it must be x's own, {}, or None", read_as, x.dtype)
    need_only("quant_mode", quant_mode, UNQUANTIZED, STATIC, DYNAMIC)
    need_only("drop_pad_mode", drop_pad_mode, 0, 1)
    need_only("expert_tokens_num_type", expert_tokens_num_type, CUMSUM, COUNTS, PAIRS)
    need_only("row_idx_type", row_idx_type, GATHER, SCATTER)
    drop = drop_pad_mode == 1
    first, stop = _active_range(active_expert_range, expert_num, drop)
    call = SimpleNamespace(**given, drop=drop, first=first, stop=stop)
    _check(call)
    placed = _place(call)
    counts = torch.bincount(placed.expert - first, minlength=stop - first)
    tokens = _tokens(call, counts)
    if not expert_tokens_num_flag:
        tokens = torch.zeros_like(tokens)
    index = torch.full_like(expert_idx.reshape(-1), -1, dtype=torch.int32)
    if row_idx_type == SCATTER:
        index[: len(placed.pair)] = placed.pair.to(torch.int32)
    else:
        index[placed.pair] = placed.row.to(torch.int32)
    expanded, expanded_scale = _expand(call, placed)
    if drop:
        expanded = expanded.reshape(expert_num, expert_capacity, x.shape[1])
    return expanded, index, tokens, expanded_scale


def _active_range(given: Sequence[int], expert_num: int, drop: bool) -> tuple[int, int]:
    name = "active_expert_range"
    if len(given) == 0 or drop:
        need(1 <= expert_num <= _MAX_EXPERTS, "expert_num", "is {}; it must be 1..{}", expert_num, _MAX_EXPERTS)
    if len(given) == 0:
        return 0, expert_num
    last = expert_num if expert_num > 0 else _MAX_EXPERTS
    rule = "is {}; it must be [start, stop], 0 <= start < stop <= {}"
    need(len(given) == 2 and 0 <= given[0] < given[1] <= last, name, rule, list(given), last)
    whole = not drop or list(given) == [0, expert_num]
    need(whole, name, "is {}; drop_pad_mode 1 needs all experts, [0, {}]", list(given), expert_num)
    return given[0], given[1]


def _check(call: Any) -> None:
    x, ids = call.x, call.expert_idx
    need_dims("x", x, 2)
    need_dims("expert_idx", ids, 2)
    need(ids.shape[0] == x.shape[0], "expert_idx", "is {}; this x needs ({}, K)", ids.shape, x.shape[0])
    need_dtype("expert_idx", ids, torch.int32)
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    if call.quant_mode == UNQUANTIZED:
        dtypes.append(torch.int8)
    need_dtype("x", x, *dtypes)
    if call.drop:
        rule = "is {}; with drop_pad_mode 1 it must be at least 1"
        need(call.expert_capacity >= 1, "expert_capacity", rule, call.expert_capacity)
        rule = "is {}; with drop_pad_mode 1 it must be 0"
        need(call.row_idx_type == GATHER, "row_idx_type", rule, call.row_idx_type)
        counted = not call.expert_tokens_num_flag or call.expert_tokens_num_type == COUNTS
        rule = "is {}; with drop_pad_mode 1 it must be 1"
        need(counted, "expert_tokens_num_type", rule, call.expert_tokens_num_type)
    if call.expert_tokens_num_type == PAIRS:
        enough = call.expert_num >= call.stop - call.first
        rule = "is {}; pairs need at least {}, the active experts"
        need(enough, "expert_num", rule, call.expert_num, call.stop - call.first)
    _check_scale(call)


def _check_scale(call: Any) -> None:
    x, scale, offset = call.x, call.scale, call.offset
    need(scale is not None or call.quant_mode != STATIC, "scale", "is missing: static quantization needs it")
    need(offset is None or call.quant_mode == STATIC, "offset", "needs quant_mode 0 (static)")
    if scale is not None:
        active = call.stop - call.first
        shapes: dict[int, list[tuple[int, ...]]] = {
            UNQUANTIZED: [(x.shape[0],)],
            STATIC: [(1,)],
            DYNAMIC: [(active, x.shape[1]), (1, x.shape[1])],
        }
        need_shape("scale", scale, *shapes[call.quant_mode], dtypes=(torch.float32,))
    if offset is not None:
        need_shape("offset", offset, (1,), dtypes=(torch.float32,))


def _place(call: Any) -> _Placed:
    flat = call.expert_idx.reshape(-1).to(torch.int64)
    active = (flat >= call.first) & (flat < call.stop)
    order = torch.sort(flat.masked_fill(~active, call.stop), stable=True).indices
    pair = order[: int(active.sum())]
    expert = flat[pair]
    row = torch.arange(len(pair), device=pair.device)
    if not call.drop:
        rows = flat.numel() if call.active_num <= 0 else min(call.active_num, flat.numel())
        return _Placed(pair, expert, row, rows)
    counts = torch.bincount(expert, minlength=call.expert_num)
    position = row - (counts.cumsum(0) - counts)[expert]
    row = torch.where(position < call.expert_capacity, expert * call.expert_capacity + position, -1)
    return _Placed(pair, expert, row, call.expert_num * call.expert_capacity)


def _tokens(call: Any, counts: torch.Tensor) -> torch.Tensor:
    if call.expert_tokens_num_type == CUMSUM:
        return counts.cumsum(0)
    if call.expert_tokens_num_type == COUNTS:
        return counts
    pairs = counts.new_zeros((call.expert_num, 2))
    filled = counts.nonzero().flatten()
    pairs[: len(filled)] = torch.stack([filled + call.first, counts[filled]], 1)
    return pairs


def _expand(call: Any, placed: _Placed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expanded_x ``(rows, H)`` and expanded_scale."""
    kept = (placed.row >= 0) & (placed.row < placed.rows)
    row, expert = placed.row[kept], placed.expert[kept]
    token = placed.pair[kept] // max(call.expert_idx.shape[1], 1)
    values, scale = call.x[token], call.scale
    scales = values.new_zeros(placed.rows, dtype=torch.float32)
    if call.quant_mode == DYNAMIC:
        values = values.float()
        if scale is not None:
            values = values * (scale if scale.shape[0] == 1 else scale[expert - call.first])
        values, row_scales = dynamic_quant_rows(values)
        scales[row] = row_scales
    elif call.quant_mode == STATIC:
        assert scale is not None  # _check_scale
        values = values.half() * scale.half()
        values = to_int8(values if call.offset is None else values + call.offset.half())
    elif scale is not None:
        scales[row] = scale[token]
    expanded = values.new_zeros((placed.rows, call.x.shape[1]))
    expanded[row] = values
    return expanded, scales


# ---- copies of experts


@npu_operator
def npu_moe_update_expert(
    expert_ids: torch.Tensor,
    eplb_table: torch.Tensor,
    *,
    expert_scales: torch.Tensor | None = None,
    pruning_threshold: torch.Tensor | None = None,
    active_mask: torch.Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = BY_RANK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distribute the tokens of experts with several copies over the copies; drop choices of small weight.

    Args:
        expert_ids: ``(BS, K)`` int32 or int64 logical experts 0..E-1; -1 (not routed) stays -1.
        eplb_table: ``(E, F)`` int32: row e is the number of copies of e, 1..F-1, then their physical ids.
        expert_scales: ``(BS, K)`` float routing weights; requires pruning_threshold.
        pruning_threshold: ``(K,)`` or ``(1, K)`` fp32: (t, k) is routed if its weight is at least
            ``pruning_threshold[k]`` times the sum of token t's weights (fp32, k ascending).
        active_mask: ``(BS,)`` bool, requires expert_scales and pruning_threshold; tokens of False are dropped.
        local_rank_id, world_size: this rank, 0..world_size-1, and the number of ranks; needed with balance_mode 0.
        balance_mode: 0 by rank, copy ``local_rank_id // ceil(world_size / copies)``; 1 by token, copy
            ``t % copies``.

    Returns:
        physical experts, with the shape and dtype of expert_ids; bool ``(BS, K)``, True for choices not dropped: all
        without pruning_threshold (on the NPU not written then).

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_moe_update_expert``, which is called for NPU tensors.
    """
    need_dims("expert_ids", expert_ids, 2, dtypes=(torch.int32, torch.int64))
    need_dims("eplb_table", eplb_table, 2, dtypes=(torch.int32,))
    need(eplb_table.shape[1] >= 2, "eplb_table", "is {}; a row consists of count and copies", eplb_table.shape)
    need_only("balance_mode", balance_mode, BY_RANK, BY_TOKEN)
    if balance_mode == BY_RANK:
        need(world_size >= 1, "world_size", "is {}; with balance_mode 0 it must be at least 1", world_size)
        rule = "is {}; with balance_mode 0 it must be in 0..{}"
        need(0 <= local_rank_id < world_size, "local_rank_id", rule, local_rank_id, world_size - 1)
    experts, table = eplb_table.shape[0], eplb_table.to(torch.int64)
    inside = bool(((expert_ids >= -1) & (expert_ids < experts)).all())
    need(inside, "expert_ids", "must be in 0..{}, the rows of eplb_table, or -1", experts - 1)
    counts = table[:, 0]
    rule = "must have 1..{} copies in column 0 of every row, as many as it lists"
    need(bool(((counts >= 1) & (counts < table.shape[1])).all()), "eplb_table", rule, table.shape[1] - 1)
    logical = expert_ids.to(torch.int64)
    routed = logical >= 0
    logical = logical.masked_fill(~routed, 0)
    copies = counts[logical] if experts else logical
    if balance_mode == BY_RANK:
        column = 1 + local_rank_id // ((world_size + copies - 1) // copies.clamp(min=1))
    else:
        column = 1 + torch.arange(expert_ids.shape[0], device=expert_ids.device).unsqueeze(1) % copies.clamp(min=1)
    physical = table[logical, column] if experts else logical
    physical = physical.masked_fill(~routed, -1).to(expert_ids.dtype)
    return physical, _kept(expert_ids, expert_scales, pruning_threshold, active_mask)


def _kept(
    expert_ids: torch.Tensor,
    scales: torch.Tensor | None,
    threshold: torch.Tensor | None,
    active_mask: torch.Tensor | None,
) -> torch.Tensor:
    batch, topk = expert_ids.shape
    if scales is None or threshold is None:
        need(scales is None, "expert_scales", "requires pruning_threshold")
        need(threshold is None, "pruning_threshold", "requires expert_scales")
        need(active_mask is None, "active_mask", "requires expert_scales and pruning_threshold")
        return expert_ids.new_ones((batch, topk), dtype=torch.bool)
    need_shape("expert_scales", scales, (batch, topk), dtypes=(torch.float32, torch.float16, torch.bfloat16))
    need_shape("pruning_threshold", threshold, (topk,), (1, topk), dtypes=(torch.float32,))
    weights = scales.float()
    total = weights.new_zeros(batch)
    for k in range(topk):
        total = total + weights[:, k]
    kept = weights >= threshold.reshape(1, topk) * total.unsqueeze(1)
    if active_mask is not None:
        need_shape("active_mask", active_mask, (batch,), dtypes=(torch.bool,))
        kept = kept & active_mask.unsqueeze(1)
    return kept
