"""Outputs of the expert-side vendor operators on Meta and Fake tensors: shapes and dtypes, no values.

As torch_npu's C++ allocates them for Ascend 910; modes that the CPU refuses (int4, K-grouped products) are
inferred all the same, those of the 950 series alone (fp8, fp4, MX) are refused by name. ``call`` has the
operator's arguments as attributes.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe._dtypes import resolve_dtype
from ascend_moe.vendor.checks import need, need_dims, need_only, need_unset

_INT4_IN_INT32 = 8
_QUINT4X2 = 16  # torch's ScalarType number, which torch_npu takes for int4
_K_GROUPED = 2


def _columns(weight: torch.Tensor) -> Any:
    """Logical N of a weight whose int4 elements may be packed by eight."""
    return weight.shape[-1] * (_INT4_IN_INT32 if weight.dtype == torch.int32 else 1)


def _merged_columns(weight: torch.Tensor, rows: torch.Tensor) -> Any:
    # One output: a float32 carrier of int4 too, and a transposed weight is packed along K instead.
    carrier = weight.dtype == torch.int32 or (weight.dtype == torch.float32 and rows.dtype != torch.float32)
    transposed = weight.stride()[-2] == 1 and weight.stride()[-1] == weight.shape[-2]
    return weight.shape[-1] * (_INT4_IN_INT32 if carrier and not transposed else 1)


def grouped_matmul(call: Any) -> list[torch.Tensor]:
    """One tensor (split_item 2 and 3), or one a group or x."""
    x, weight, groups = call.x, call.weight, call.group_list
    need(len(x) > 0, "x", "has no tensors")
    need(len(weight) > 0, "weight", "has no tensors")
    listed = isinstance(groups, (list, tuple))
    need(
        call.group_type in (-1, 0, _K_GROUPED) or (call.group_type is None and (groups is None or listed)),
        "group_type",
        f"is {call.group_type}; with a group_list tensor it must be -1, 0 or 2",
    )
    names = ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
    need_unset(**{name: getattr(call, name, None) for name in names})
    split_item = call.split_item or 0
    need_only("split_item", split_item, 0, 1, 2, 3)
    dtype = resolve_dtype(call.output_dtype, "output_dtype") or x[0].dtype
    if split_item in (2, 3):
        rows = sum(one.shape[0] for one in x)
        size = (rows, _merged_columns(weight[0], x[0]))
        count = (len(groups) if listed else groups.shape[0],) if call.group_type == _K_GROUPED else ()
        return [x[0].new_empty((*count, *size), dtype=dtype)]
    single = len(weight) == 1 and weight[0].dim() == 3
    weights = list(weight) * weight[0].shape[0] if single else list(weight)
    if call.group_type == _K_GROUPED:
        return [x[0].new_empty((x[0].shape[0], _columns(w)), dtype=dtype) for w in weights]
    if groups is None or (len(x) > 1 and not listed):
        need(len(x) == len(weights), "x", f"has {len(x)} tensors for {len(weights)} weights")
        pairs = zip(x, weights, strict=True)
        return [one.new_empty((*one.shape[:-1], _columns(w)), dtype=dtype) for one, w in pairs]
    rule = f"is {split_item} with a group_list tensor: sizes would depend on its values; use 2 or 3"
    need(listed, "split_item", rule)
    need(len(groups) == len(weights), "group_list", f"has {len(groups)} entries for {len(weights)} weights")
    counts = groups
    if not call.group_list_type:
        counts = [end - start for start, end in zip([0, *groups], groups, strict=False)]
    need(all(count >= 0 for count in counts), "group_list", f"is {list(groups)}; no group may be negative")
    pairs = zip(counts, weights, strict=True)
    return [x[0].new_empty((count, _columns(w)), dtype=dtype) for count, w in pairs]


def swiglu(call: Any) -> torch.Tensor:
    """input with ``dim`` halved."""
    source: torch.Tensor = call.input
    rule = f"is {call.dim} of {source.dim()} dimensions"
    need(-source.dim() <= call.dim < source.dim(), "dim", rule)
    size = list(source.shape)
    size[call.dim] = size[call.dim] // 2
    return source.new_empty(size)


def dequant_swiglu_quant(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 x with its last dimension halved, whatever activate_dim is, and float32 without it."""
    x = call.x
    dtype = resolve_dtype(call.dst_type, "dst_type")
    need(dtype in (None, torch.int8), "dst_type", f"is {dtype}; on Ascend 910 it must be int8")
    rows = x.shape[:-1]
    return (
        x.new_empty((*rows, x.shape[-1] // 2), dtype=torch.int8),
        x.new_empty(rows, dtype=torch.float32),
    )


def grouped_matmul_swiglu_quant(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 ``(M, N/2)``, float32 ``(M,)``, and a float32 scalar; N as in weight_scale."""
    codes, scale = _quantised_rows(call.x, call.weight_scale)
    return codes, scale, scale.new_empty(())


def grouped_matmul_swiglu_quant_v2(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``(M, N/2)`` and float32 ``(M,)``."""
    for name in ("weight", "weight_scale"):
        count = len(getattr(call, name))
        need(count == 1, name, f"has {count} tensors; it must have one for all experts")
    names = ("x_dtype", "weight_dtype", "weight_scale_dtype", "x_scale_dtype")
    need_unset(**{name: getattr(call, name) for name in names})
    need_only("dequant_mode", call.dequant_mode, 0, 1, None)
    dtype = resolve_dtype(call.quant_dtype, "quant_dtype")
    need(dtype in (None, torch.int8), "quant_dtype", f"is {dtype}; on Ascend 910 it must be int8")
    return _quantised_rows(call.x, call.weight_scale[0])


def _quantised_rows(x: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = (x.shape[0], weight_scale.shape[-1] // 2)
    return x.new_empty(size, dtype=torch.int8), x.new_empty(size[:1], dtype=torch.float32)


def grouped_matmul_finalize_routing(call: Any) -> torch.Tensor:
    """float32 ``(output_bs or M, N)``."""
    need_dims("x", call.x, 2)
    need_dims("w", call.w, 3)
    names = ("x_dtype", "w_dtype", "scale_dtype", "pertoken_scale_dtype")
    need_unset(**{name: getattr(call, name) for name in names})
    dtype = resolve_dtype(call.dtype, "dtype")
    need(dtype in (None, torch.float32), "dtype", f"is {dtype}; it must be float32")
    made: torch.Tensor = call.x.new_empty(
        (call.output_bs or call.x.shape[0], _columns(call.w)), dtype=torch.float32
    )
    return made


def dynamic_quant(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 like input (int4: int32 by eight), and float32 scales a row, a column or for all."""
    source = call.input
    need(source.dim() >= 2, "input", f"is {tuple(source.shape)}; it must be at least 2-D")
    modes = ("pertoken", "pertensor", "perchannel")
    need(call.quant_mode in modes, "quant_mode", f"is {call.quant_mode!r}; it must be one of {modes}")
    size: tuple[Any, ...] = tuple(source.shape[:-1])
    if call.quant_mode == "perchannel":
        size = (*source.shape[:-2], source.shape[-1])
    packed = call.dst_type == _QUINT4X2
    if packed:
        rule = f"of {_QUINT4X2} (int4) needs rows of a multiple of {_INT4_IN_INT32} elements"
        need(source.shape[-1] % _INT4_IN_INT32 == 0, "dst_type", rule)
        codes = source.new_empty((*size, source.shape[-1] // _INT4_IN_INT32), dtype=torch.int32)
    else:
        dtype = resolve_dtype(call.dst_type, "dst_type")
        need(dtype in (None, torch.int8), "dst_type", f"is {dtype}; on Ascend 910 it must be int8 or int4")
        codes = source.new_empty(source.shape, dtype=torch.int8)
    size = (1,) if call.quant_mode == "pertensor" else size
    return codes, source.new_empty(size, dtype=torch.float32)
