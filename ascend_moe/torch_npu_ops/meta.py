"""Outputs of torch_npu's other MoE operators on Meta and Fake tensors: shapes and dtypes, no values.

Shapes and dtypes are those allocated by torch_npu's C++ for Ascend 910. ``call`` has the operator's arguments as
attributes. A function has the name of its operator, and raises ArgumentError for the rules on which sizes and dtypes
depend; all others are checked when the operator runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.errors import need, need_dims, need_only
from ascend_moe.native.torch_npu import resolve_dtype

# ---- routing and the operators that wait for other ranks

Tensors = tuple[torch.Tensor, ...]
I8, I32, I64, F32 = torch.int8, torch.int32, torch.int64, torch.float32
_INT4_CODES = 13  # quant_mode of npu_moe_init_routing_v2


def _need_dims(call: Any, **dims: int) -> None:
    """Raise ArgumentError unless the tensors of these names, if passed, have this many dimensions."""
    for name, count in dims.items():
        if getattr(call, name) is not None:
            need_dims(name, getattr(call, name), count)


def _min(first: Any, second: Any) -> Any:
    # min() would compare two symbolic sizes and specialize a graph on the result.
    return torch.sym_min(first, second)  # type: ignore[no-untyped-call]


def npu_moe_gating_top_k(call: Any) -> Tensors:
    """Return empty weights of x's dtype and int32 ids ``(T, k)``, and float32 scores ``(T, E)``, for a ``call``."""
    _need_dims(call, x=2)
    x, size = call.x, (call.x.shape[0], call.k)
    return x.new_empty(size), x.new_empty(size, dtype=I32), x.new_empty(x.shape, dtype=F32)


def npu_moe_gating_top_k_softmax(call: Any) -> Tensors:
    """Return empty weights of x's dtype, int32 ids and int32 row indices, all ``(..., k)``, for a ``call``."""
    x = call.x
    need_dims("x", x, 2, 3)
    size = (*x.shape[:-1], call.k)
    return x.new_empty(size), x.new_empty(size, dtype=I32), x.new_empty(size, dtype=I32)


def npu_moe_gating_top_k_softmax_v2(call: Any) -> Tensors:
    """Return empty weights, int32 ids ``(..., k)``, float32 softmax of x's shape or ``(0,)`` for a ``call``."""
    weights, ids, _ = npu_moe_gating_top_k_softmax(call)
    size = call.x.shape if call.output_softmax and not call.renorm else (0,)
    return weights, ids, call.x.new_empty(size, dtype=F32)


def npu_moe_init_routing(call: Any) -> Tensors:
    """Return empty rows ``(min(T, active_num) * K, H)``, int32 row indices and experts ``(T*K,)`` for a ``call``."""
    _need_dims(call, x=2, row_idx=2)
    need(call.active_num >= 0, "active_num", "is {}; it must be at least 0", call.active_num)
    tokens, topk = call.x.shape[0], call.row_idx.shape[1]
    pairs = call.row_idx.new_empty((tokens * topk,))
    rows = call.x.new_empty((_min(tokens, call.active_num) * topk, call.x.shape[1]))
    return rows, pairs, pairs.new_empty(pairs.shape)


def npu_moe_init_routing_v2(call: Any) -> Tensors:
    """Return empty expanded_x, int32 expanded_row_idx, int64 expert tokens, float32 expanded_scale for a ``call``."""
    x, ids = call.x, call.expert_idx
    _need_dims(call, x=2, expert_idx=2)
    modes = (-1, 0, 1, _INT4_CODES)
    need(call.quant_mode in modes, "quant_mode", "is {}; on Ascend 910 it is one of {}", call.quant_mode, modes)
    pairs = x.shape[0] * ids.shape[1]
    rows = pairs if call.active_num <= 0 else _min(call.active_num, pairs)
    size: tuple[Any, ...] = (rows, x.shape[1])
    dtype = x.dtype if call.quant_mode == -1 else I8
    if call.drop_pad_mode == 1:
        size = (call.expert_num, call.expert_capacity, x.shape[1])
        rows = call.expert_num * call.expert_capacity
    if call.quant_mode == _INT4_CODES:
        size, dtype = (rows, x.shape[1] // 2), torch.uint8
    return (
        x.new_empty(size, dtype=dtype),
        x.new_empty((pairs,), dtype=I32),
        x.new_empty(_token_counts(call), dtype=I64),
        x.new_empty((rows,), dtype=F32),
    )


def _token_counts(call: Any) -> tuple[int, ...]:
    experts, given = call.expert_num, call.active_expert_range
    if len(given) > 0:
        need(len(given) == 2, "active_expert_range", "is {}; it must be [start, stop]", list(given))
        experts = given[1] - given[0]
    # The same with expert_tokens_num_flag and without.
    pairs = call.expert_tokens_num_type == 2
    count = call.expert_num if pairs else experts
    need(count >= 1, "expert_num", "is {}; without active_expert_range it must be at least 1", call.expert_num)
    return (count, 2) if pairs else (count,)


def npu_moe_compute_expert_tokens(call: Any) -> Any:
    """Return empty int32 running sums ``(num_expert,)`` for the arguments in ``call``."""
    return call.sorted_expert_for_source_row.new_empty((call.num_expert,), dtype=I32)


def npu_moe_token_permute(call: Any) -> Tensors:
    """Return empty rows ``(num_out, H)`` and int32 row indices ``(T*K,)`` for the arguments in ``call``."""
    tokens, pairs, wanted = call.tokens, call.indices.numel(), call.num_out_tokens or 0
    need_dims("tokens", tokens, 2)
    need_dims("indices", call.indices, 1, 2)
    rows = _min(wanted, pairs) if wanted > 0 else pairs + wanted
    return tokens.new_empty((rows, tokens.shape[1])), tokens.new_empty((pairs,), dtype=I32)


def npu_moe_token_unpermute(call: Any) -> Any:
    """Return empty rows ``(T, H)`` of the given rows' dtype for the arguments in ``call``."""
    _need_dims(call, permuted_tokens=2, sorted_indices=1, probs=2)
    rows, topk = call.permuted_tokens, 1 if call.probs is None else call.probs.shape[1]
    return rows.new_empty((call.sorted_indices.shape[0] // topk, rows.shape[1]))


def npu_moe_finalize_routing(call: Any) -> Any:
    """Return empty rows ``(T, H)`` of the given rows' dtype for the arguments in ``call``."""
    rows, tokens = call.expanded_permuted_rows, call.expanded_src_to_dst_row.shape[0]
    need_dims("expanded_permuted_rows", rows, 3 if call.drop_pad_mode in (1, 3) else 2)
    if call.scales is not None:
        tokens = call.scales.shape[0]
    elif call.k is not None and call.k > 0:
        tokens = tokens // call.k
    return rows.new_empty((tokens, rows.shape[-1]))


def npu_moe_re_routing(call: Any) -> Tensors:
    """Return empty rows and scales like the ``call``'s, int32 row indices ``(A,)``, and counts by expert ``(E,)``."""
    tokens, counts, scales = call.tokens, call.expert_token_num_per_rank, call.per_token_scales
    need_dims("expert_token_num_per_rank", counts, 2)
    dtype = resolve_dtype(call.tokens_dtype, "tokens_dtype") or tokens.dtype
    moved = tokens.new_empty((tokens.shape[0],), dtype=F32)
    return (
        tokens.new_empty(tokens.shape, dtype=dtype),
        moved if scales is None else scales.new_empty(scales.shape),
        tokens.new_empty((tokens.shape[0],), dtype=I32),
        counts.new_empty((counts.shape[1],)),
    )


def npu_moe_update_expert(call: Any) -> Tensors:
    """Return empty physical ids ``(BS, K)`` of the ids' dtype, and a bool mask ``(BS, K)``, for a ``call``."""
    ids = call.expert_ids
    need_dims("expert_ids", ids, 2)
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape, dtype=torch.bool)


def _npu_distribute_barrier(call: Any) -> Any:
    """Return an empty tensor of x_ref's shape and dtype for the arguments in ``call``."""
    return call.x_ref.new_empty(call.x_ref.shape)


def npu_moe_distribute_combine_add_rms_norm(call: Any) -> Tensors:
    """Return empty y ``(BS, 1, H)``, float32 rstd ``(BS, 1, 1)`` and x ``(BS, 1, H)`` for the arguments in ``call``."""
    _need_dims(call, expand_x=2, expert_ids=2)
    batch, hidden = call.expert_ids.shape[0], call.expand_x.shape[1]
    rows = call.expand_x.new_empty((batch, 1, hidden))
    return rows, rows.new_empty((batch, 1, 1), dtype=F32), rows.new_empty(rows.shape)


# ---- experts

_INT4_IN_INT32 = 8
_QUINT4X2 = 16  # torch's ScalarType number, which torch_npu takes for int4
_K_GROUPED = 2


def npu_gmm_alltoallv(call: Any) -> Any:
    """Return empty rows ``(sum(recv_counts), N)`` of gmm_x's dtype, and product of mm_x or None, for a ``call``."""
    _need_dims(call, gmm_x=2, gmm_weight=3, mm_x=2, mm_weight=2)
    width = call.gmm_weight.shape[1 if call.trans_gmm_weight else 2]
    shared = None
    if call.mm_x is not None:
        shared = call.mm_x.new_empty(len(call.mm_x), call.mm_weight.shape[0 if call.trans_mm_weight else 1])
    return call.gmm_x.new_empty(sum(call.recv_counts), width), shared


def npu_alltoallv_gmm(call: Any) -> Any:
    """Return for a ``call`` what `npu_gmm_alltoallv` does, and received rows ``(sum(recv_counts), H)`` or None."""
    rows = call.gmm_x.new_empty(sum(call.recv_counts), call.gmm_x.shape[1]) if call.permute_out_flag else None
    return *npu_gmm_alltoallv(call), rows


def _need_dtype(call: Any, name: str, only: torch.dtype) -> None:
    dtype = resolve_dtype(getattr(call, name), name)
    need(dtype in (None, only), name, "is {}; on Ascend 910 it must be {}", dtype, str(only)[6:])


def _columns(weight: torch.Tensor) -> Any:
    """Return logical N of a weight whose int4 elements may be packed by eight."""
    return weight.shape[-1] * (_INT4_IN_INT32 if weight.dtype == I32 else 1)


def _merged_columns(weight: torch.Tensor, rows: torch.Tensor) -> Any:
    # With one output tensor, float32 may contain int4 too, and a transposed weight is packed along K, not N.
    carrier = weight.dtype == I32 or (weight.dtype == F32 and rows.dtype != F32)
    transposed = weight.stride()[-2] == 1 and weight.stride()[-1] == weight.shape[-2]
    return weight.shape[-1] * (_INT4_IN_INT32 if carrier and not transposed else 1)


def npu_grouped_matmul(call: Any) -> list[torch.Tensor]:
    """Return for a ``call`` one empty tensor with split_item 2 or 3, else one per tensor of x or per group."""
    x, weight, groups = call.x, call.weight, call.group_list
    need(len(x) > 0, "x", "has no tensors; pass at least one")
    need(len(weight) > 0, "weight", "has no tensors; pass at least one")
    listed = isinstance(groups, (list, tuple))
    split_item = call.split_item or 0
    need_only("split_item", split_item, 0, 1, 2, 3)
    dtype = resolve_dtype(call.output_dtype, "output_dtype") or x[0].dtype
    if split_item in (2, 3):
        rows = sum(tensor.shape[0] for tensor in x)
        size = (rows, _merged_columns(weight[0], x[0]))
        count = (len(groups) if listed else groups.shape[0],) if call.group_type == _K_GROUPED else ()
        return [x[0].new_empty((*count, *size), dtype=dtype)]
    single = len(weight) == 1 and weight[0].dim() == 3
    weights = list(weight) * weight[0].shape[0] if single else list(weight)
    if call.group_type == _K_GROUPED:
        return [x[0].new_empty((x[0].shape[0], _columns(w)), dtype=dtype) for w in weights]
    if groups is None or (len(x) > 1 and not listed):
        need(len(x) == len(weights), "x", "has {} tensors for {} weights; pass one each", len(x), len(weights))
        pairs = zip(x, weights, strict=True)
        return [rows.new_empty((*rows.shape[:-1], _columns(w)), dtype=dtype) for rows, w in pairs]
    rule = "is {} with a group_list tensor: sizes would depend on its values; use 2 or 3"
    need(listed, "split_item", rule, split_item)
    rule = "has {} entries for {} weights; pass one each"
    need(len(groups) == len(weights), "group_list", rule, len(groups), len(weights))
    counts = groups
    if not call.group_list_type:
        counts = [end - start for start, end in zip([0, *groups], groups, strict=False)]
    pairs = zip(counts, weights, strict=True)
    return [x[0].new_empty((count, _columns(w)), dtype=dtype) for count, w in pairs]


def npu_swiglu(call: Any) -> Any:
    """Return an empty tensor for the arguments in ``call``, of input's shape with dimension ``dim`` halved."""
    return _halved(call, call.input)


def npu_clipped_swiglu(call: Any) -> Any:
    """Return an empty tensor for the arguments in ``call``, of x's shape with dimension ``dim`` halved."""
    return _halved(call, call.x)


def _halved(call: Any, source: torch.Tensor) -> torch.Tensor:
    rule = "is {}, which is no dimension of a tensor with {}"
    need(-source.dim() <= call.dim < source.dim(), "dim", rule, call.dim, source.dim())
    size = list(source.shape)
    size[call.dim] = size[call.dim] // 2
    return source.new_empty(size)


def npu_dequant_swiglu_quant(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for a ``call`` empty int8 rows, of x's shape with its last dimension halved, and float32 row scales."""
    x = call.x
    _need_dtype(call, "dst_type", I8)
    size = (*x.shape[:-1], x.shape[-1] // 2)
    return x.new_empty(size, dtype=I8), x.new_empty(x.shape[:-1], dtype=F32)


def npu_grouped_matmul_swiglu_quant(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty int8 rows ``(M, N/2)``, float32 scales ``(M,)`` and a scalar for a ``call``; N is weight_scale's."""
    codes, scale = _quantized_rows(call.x, call.weight_scale)
    return codes, scale, scale.new_empty(())


def npu_grouped_matmul_swiglu_quant_v2(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty int8 rows ``(M, N/2)`` and float32 scales ``(M,)`` for ``call``'s arguments; N is weight_scale's."""
    count = len(call.weight_scale)
    need(count == 1, "weight_scale", "has {} tensors; it must have one for all experts", count)
    _need_dtype(call, "quant_dtype", I8)
    return _quantized_rows(call.x, call.weight_scale[0])


def _quantized_rows(x: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = (x.shape[0], weight_scale.shape[-1] // 2)
    return x.new_empty(size, dtype=I8), x.new_empty(size[:1], dtype=F32)


def npu_grouped_matmul_finalize_routing(call: Any) -> Any:
    """Return empty float32 rows ``(output_bs or M, N)`` for the arguments in ``call``."""
    _need_dims(call, x=2, w=3)
    _need_dtype(call, "dtype", F32)
    return call.x.new_empty((call.output_bs or call.x.shape[0], _columns(call.w)), dtype=F32)


def npu_dynamic_quant(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for a ``call`` empty int8 codes (int4: 8 per int32), and float32 scales of rows, columns, or one."""
    source = call.input
    need(source.dim() >= 2, "input", "is {}; it must be at least 2-D", source.shape)
    modes = ("pertoken", "pertensor", "perchannel")
    need(call.quant_mode in modes, "quant_mode", "is {!r}; it must be one of {}", call.quant_mode, modes)
    size: tuple[Any, ...] = tuple(source.shape[:-1])
    if call.quant_mode == "perchannel":
        size = (*source.shape[:-2], source.shape[-1])
    packed = call.dst_type == _QUINT4X2
    if packed:
        rule = "is {} (int4), for which rows need a multiple of {} elements; they have {}"
        fits = source.shape[-1] % _INT4_IN_INT32 == 0
        need(fits, "dst_type", rule, _QUINT4X2, _INT4_IN_INT32, source.shape[-1])
        codes = source.new_empty((*size, source.shape[-1] // _INT4_IN_INT32), dtype=I32)
    else:
        _need_dtype(call, "dst_type", I8)
        codes = source.new_empty(source.shape, dtype=I8)
    size = (1,) if call.quant_mode == "pertensor" else size
    return codes, source.new_empty(size, dtype=F32)
