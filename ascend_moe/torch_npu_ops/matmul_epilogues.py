"""Grouped matmul fused with the next step: SwiGLU and quantization, or summing rows into their tokens.

Results equal those of the corresponding chain of `ascend_moe.experts` operators bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ascend_moe.errors import ArgumentError, need, need_dims, need_dtype, need_only, need_shape, need_unset
from ascend_moe.experts.grouped_matmul import npu_grouped_matmul
from ascend_moe.experts.groups import COUNTS, CUMSUM, as_counts, read_groups
from ascend_moe.experts.quant import DYNAMIC, npu_dequant_swiglu_quant
from ascend_moe.native.torch_npu import npu_operator, resolve_dtype

_INT8, _FLOAT32 = 1, 6  # torch's ScalarType numbers


@npu_operator
def npu_grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run W8A8 or W4A8 gate/up product, dequantization, ``silu(left) * right`` and int8 quantization per row.

    Args:
        x: ``(M, K)`` int8.
        weight: ``(E, K, N)`` int8 (on the NPU in FRACTAL_NZ), or int4: int32 ``(E, K, N / 8)``.
        group_list: ``(E,)`` int64 running sums, up to M.
        weight_scale: ``(E, N)`` float; int4: as scale of `ascend_moe.experts.npu_grouped_matmul`. x_scale: ``(M,)``
            fp32.
        bias: required for int4 weights: ``(E, N)`` fp32, ``8 * sum(weight * scale)`` over K; else None.
        offset: must be None.

    Returns:
        int8 ``(M, N/2)``; fp32 scales ``(M,)``, formulas in `ascend_moe.experts.quant`; an fp32 scalar
        without meaning. Rows after the last group are zero off the NPU, undefined on it.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_grouped_matmul_swiglu_quant``, which is called for NPU tensors.
    """
    need_unset(offset=offset)
    codes, scale = grouped_matmul_swiglu_quant(
        x, [weight], [weight_scale], x_scale, group_list, assist=[] if bias is None else [bias], assist_name="bias"
    )
    return codes, scale, scale.new_zeros(())


@npu_operator
def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = _FLOAT32,
    quant_mode: int | None = 0,
    quant_dtype: int | None = _INT8,
    group_list_type: int | None = CUMSUM,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `npu_grouped_matmul_swiglu_quant` with lists of one weight, smoothing, and optionally counts as group list.

    Args:
        x, x_scale, group_list: as for `npu_grouped_matmul_swiglu_quant`.
        weight, weight_scale: ``[(E, K, N)]`` int8 and ``[(E, N)]`` float; int4 as for that function, in lists of one.
        weight_assist_matrix: ``[(E, N)]`` fp32, required with int4 weights: that function's bias.
        smooth_scale: ``(E, N/2)`` or ``(E,)`` fp32, by which rows are multiplied before they are quantized.
        group_list_type: 0 running sums, 1 counts.
        dequant_mode, quant_mode: must be 0 or None: one scale per row of x, column of weight, and row of the result.
        dequant_dtype, quant_dtype: must be float32 (6) and int8 (1), or None.
        tuning_config: a hint for the NPU, ignored here.
        bias, x_dtype, weight_dtype, weight_scale_dtype, x_scale_dtype: must be None.

    Returns:
        int8 ``(M, N/2)`` and fp32 scales ``(M,)``, as from `npu_grouped_matmul_swiglu_quant`.

    Raises:
        ArgumentError: an argument breaks one of these rules; int4 rows, fp8, fp4 and MX modes exist on NPUs only.

    Source: torch_npu ``npu_grouped_matmul_swiglu_quant_v2``, which is called for NPU tensors.
    """
    need_unset(
        bias=bias, x_dtype=x_dtype, weight_dtype=weight_dtype, weight_scale_dtype=weight_scale_dtype,
        x_scale_dtype=x_scale_dtype,
    )  # fmt: skip
    need_rows_in_int8(dequant_mode, quant_mode, dequant_dtype, quant_dtype)
    for name, tensors in (("weight", weight), ("weight_scale", weight_scale)):
        need(len(tensors) == 1, name, "has {} tensors; it must have one for all experts", len(tensors))
    list_type = group_list_type or 0
    need_only("group_list_type", list_type, CUMSUM, COUNTS)
    return grouped_matmul_swiglu_quant(
        x, weight, weight_scale, x_scale, group_list, group_list_type=list_type, smooth_scale=smooth_scale,
        assist=weight_assist_matrix,
    )  # fmt: skip


def need_rows_in_int8(
    dequant_mode: int | None, quant_mode: int | None, dequant_dtype: int | None, quant_dtype: int | None
) -> None:
    """Raise ArgumentError unless the modes are 0 or None, dequant_dtype float32 or None, quant_dtype int8 or None."""
    for name, mode in (("dequant_mode", dequant_mode), ("quant_mode", quant_mode)):
        need(not mode, name, "is {}; it must be 0: scales per row of x, column of weight, row of the result", mode)
    kinds = (("dequant_dtype", dequant_dtype, torch.float32), ("quant_dtype", quant_dtype, torch.int8))
    for name, value, only in kinds:
        dtype = resolve_dtype(value, name)
        need(dtype in (None, only), name, "is {}; off the NPU it must be {}", dtype, only)


def grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    group_list_type: int = CUMSUM,
    smooth_scale: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    assist: Sequence[torch.Tensor] | None = None,
    assist_name: str = "weight_assist_matrix",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `npu_grouped_matmul_swiglu_quant_v2`, also with one weight per expert and a limit of the activation's inputs.

    Args:
        x, x_scale, group_list, group_list_type, smooth_scale: as for `npu_grouped_matmul_swiglu_quant_v2`.
        weight, weight_scale: ``[(E, K, N)]`` int8 and ``[(E, N)]`` float, or E tensors ``(K, N)`` and ``(N,)``; int4:
            int32 ``(…, K, N / 8)``, and scale as `npu_grouped_matmul`'s.
        swiglu_limit: above 0: limit the left half from above and the right half on both sides before the activation.
            0: no limit.
        assist: `npu_grouped_matmul`'s bias, required for int4 weights; with int8 weights it must be empty or None.
        assist_name: the name of ``assist`` in errors.

    Returns:
        int8 ``(M, N/2)`` and fp32 scales ``(M,)``.

    Raises:
        ArgumentError: an argument breaks one of these rules.
    """
    for name, tensors in (("weight", weight), ("weight_scale", weight_scale)):
        need(len(tensors) > 0, name, "has no tensors; it must have one for all experts, or one per expert")
    need(swiglu_limit >= 0, "swiglu_limit", "is {}; it must be at least 0 (0: no limit)", swiglu_limit)
    need_shape("x_scale", x_scale, (x.shape[0],), (x.shape[0], 1))
    form: dict[str, Any] = {"group_list": group_list, "group_list_type": group_list_type, "group_type": 0}
    if weight[0].dtype == torch.int32:
        experts, width, rows = _int4_rows(x, weight, weight_scale, x_scale, (assist_name, assist), form)
        dequantization: dict[str, Any] = {}
    else:
        need(not assist, assist_name, "is given with {} weights; it belongs to int4 weights (int32)", weight[0].dtype)
        scales = _scales_of_int8(x, weight, weight_scale)
        experts, width = scales.shape
        form |= {"split_item": 3, "output_dtype": torch.int32}
        rows = npu_grouped_matmul([x], list(weight), **form)[0]
        dequantization = {"weight_scale": scales, "activation_scale": x_scale}
    need(width % 2 == 0, "weight", "has N = {} columns; SwiGLU needs an even number", width)
    if smooth_scale is not None:
        need_shape("smooth_scale", smooth_scale, (experts, width // 2), (experts,))
        smooth_scale = smooth_scale.reshape(experts, -1).expand(experts, width // 2)
    # Variant 2 with these two numbers is silu(left) * right with clamped inputs.
    limited: dict[str, Any] = {"swiglu_mode": 2, "clamp_limit": swiglu_limit, "glu_alpha": 1.0, "glu_bias": 0.0}
    return npu_dequant_swiglu_quant(
        rows, quant_scale=smooth_scale, group_index=as_counts(group_list, group_list_type), activate_left=True,
        quant_mode=DYNAMIC, **dequantization, **(limited if swiglu_limit > 0 else {}),
    )  # fmt: skip


def _int4_rows(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    named: tuple[str, Sequence[torch.Tensor] | None],
    form: dict[str, Any],
) -> tuple[int, int, torch.Tensor]:
    """Return the number of experts, N, and the fp32 rows ``(M, N)`` of the product with int4 weights."""
    name, assist = named
    need_dims("x", x, 2, dtypes=(torch.int8,))
    need(bool(assist), name, "is missing; int4 weights need 8 * sum(weight * scale) over K")
    assert assist is not None
    single = len(weight) == 1 and weight[0].dim() == 3
    rows = npu_grouped_matmul(
        [x], list(weight), scale=list(weight_scale), bias=list(assist), per_token_scale=[x_scale.reshape(-1)],
        split_item=3, output_dtype=torch.float32, **form,
    )[0]  # fmt: skip
    return (weight[0].shape[0] if single else len(weight)), rows.shape[1], rows


def _scales_of_int8(
    x: torch.Tensor, weight: Sequence[torch.Tensor], weight_scale: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Check int8 weights and their scales, in one tensor or one per expert; return the scales ``(E, N)``."""
    if len(weight) > 1 or weight[0].dim() != 3:
        return _stacked_scales(x, weight, weight_scale)
    need(len(weight_scale) == 1, "weight_scale", "has {} tensors for one weight of all experts", len(weight_scale))
    _check_product(x, weight[0], weight_scale[0], "weight", "weight_scale")
    return weight_scale[0]


def _stacked_scales(
    x: torch.Tensor, weight: Sequence[torch.Tensor], weight_scale: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the scales ``(E, N)`` of one weight per expert."""
    need_dims("x", x, 2, dtypes=(torch.int8,))
    shape = (x.shape[1], *weight[0].shape[1:])
    for matrix in weight:
        need_int8_weight("weight", matrix)
        need_dims("weight", matrix, 2)
        need_shape("weight", matrix, shape)
    if len(weight_scale) == 1 and weight_scale[0].dim() == 2:
        weight_scale = weight_scale[0].unbind(0)
    rule = "has {} tensors for {} weights; it must have one per weight"
    need(len(weight_scale) == len(weight), "weight_scale", rule, len(weight_scale), len(weight))
    for scale in weight_scale:
        need_shape("weight_scale", scale, (shape[1],), (1, shape[1]))
        need(scale.is_floating_point(), "weight_scale", "is {}; it must be float", scale.dtype)
    return torch.stack([scale.reshape(-1) for scale in weight_scale])


def need_int8_weight(name: str, weight: torch.Tensor) -> None:
    """Raise ArgumentError about argument ``name`` unless the weight is int8."""
    if weight.dtype in (torch.int32, torch.uint8, torch.quint4x2):
        rule = f"is {weight.dtype}, which may contain int4: this call supports int8 weights (W8A8)"
        raise ArgumentError(f"{name} {rule}", argument=name)
    need_dtype(name, weight, torch.int8)


def _check_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, weight_name: str, scale_name: str
) -> None:
    need_dims("x", x, 2, dtypes=(torch.int8,))
    need_int8_weight(weight_name, weight)
    need_dims(weight_name, weight, 3)
    fits = weight.shape[1] == x.shape[1]
    rule = "is {} for x of {}; it must be (E, K, N)"
    need(fits, weight_name, rule, weight.shape, x.shape)
    need_shape(scale_name, scale, (weight.shape[0], weight.shape[2]))
    need(scale.is_floating_point(), scale_name, "is {}; off the NPU it must be float", scale.dtype)


@npu_operator
def npu_grouped_matmul_finalize_routing(
    x: torch.Tensor,
    w: torch.Tensor,
    group_list: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    shared_input: torch.Tensor | None = None,
    logit: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    dtype: torch.dtype | int | None = None,
    shared_input_weight: float | None = 1.0,
    shared_input_offset: int | None = 0,
    output_bs: int | None = 0,
    group_list_type: int | None = COUNTS,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    w_dtype: int | None = None,
    scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
) -> torch.Tensor:
    """Run the W8A8 down product and add each of its rows, times logit, to the row of its token in the result.

    The result starts as zeros, with ``shared_input_weight * shared_input`` from row shared_input_offset on. Then rows
    of ``(x @ w) * scale * pertoken_scale * logit`` are added in their order (on the NPU in any order), all in fp32.

    Args:
        x: ``(M, K)`` int8. w: ``(E, K, N)`` int8 (on the NPU in FRACTAL_NZ).
        group_list: ``(E,)`` int64; group_list_type 1 counts, 0 running sums; may cover fewer than M rows.
        scale: ``(E, N)`` or ``(E, 1, N)`` float, needed. pertoken_scale: ``(M,)`` fp32 or None: 1.
        shared_input: ``(S, N)`` float, for the rows from shared_input_offset on, or None. shared_input_weight: None: 1.
        logit: ``(M,)`` fp32 or None: 1.
        row_index: ``(M,)`` int32 or int64, needed: row of the result, 0..output_bs-1.
        dtype: None or float32. output_bs: rows of the result; 0: M.
        tuning_config: a hint for the NPU, ignored here.
        bias, offset, x_dtype, w_dtype, scale_dtype, pertoken_scale_dtype: must be None.

    Returns:
        ``(output_bs, N)`` fp32.

    Raises:
        ArgumentError: an argument breaks one of these rules; int4, fp8 and MX modes exist on NPUs only.

    Source: torch_npu ``npu_grouped_matmul_finalize_routing``, which is called for NPU tensors.
    """
    need_unset(
        bias=bias, offset=offset, x_dtype=x_dtype, w_dtype=w_dtype, scale_dtype=scale_dtype,
        pertoken_scale_dtype=pertoken_scale_dtype,
    )  # fmt: skip
    out_dtype = resolve_dtype(dtype, "dtype")
    need(out_dtype in (None, torch.float32), "dtype", "is {}; it must be float32", out_dtype)
    list_type = COUNTS if group_list_type is None else group_list_type
    need_only("group_list_type", list_type, CUMSUM, COUNTS)
    if scale is None or row_index is None:
        name = "scale" if scale is None else "row_index"
        raise ArgumentError(f"{name} is None; off the NPU it must be a tensor", argument=name)
    scale = scale.squeeze(1) if scale.dim() == 3 and scale.shape[1] == 1 else scale
    _check_product(x, w, scale, "w", "scale")
    rows = x.shape[0]
    total = torch.zeros(output_bs or rows, w.shape[2], dtype=torch.float32, device=x.device)
    _add_shared(total, shared_input, shared_input_weight, shared_input_offset or 0)
    for name, factor in (("pertoken_scale", pertoken_scale), ("logit", logit)):
        if factor is not None:
            need_shape(name, factor, (rows,), (rows, 1))
    used = read_groups(group_list, list_type, w.shape[0], rows)[-1].stop if len(w) else 0
    sums = npu_grouped_matmul(
        [x], [w], group_list=group_list, group_list_type=list_type, group_type=0, split_item=3,
        output_dtype=torch.float32, scale=[scale],
        per_token_scale=None if pertoken_scale is None else [pertoken_scale.reshape(-1)],
    )[0]  # fmt: skip
    if logit is not None:
        sums = sums * logit.float().reshape(rows, 1)
    need_shape("row_index", row_index, (rows,), dtypes=(torch.int32, torch.int64))
    index = row_index[:used].to(torch.int64)
    inside = bool(((index >= 0) & (index < len(total))).all())
    need(inside, "row_index", "must contain rows 0..{} of the result (output_bs)", len(total) - 1)
    return total.index_add_(0, index, sums[:used])


def _add_shared(total: torch.Tensor, shared: torch.Tensor | None, weight: float | None, first: int) -> None:
    if shared is None:
        return
    need_dims("shared_input", shared, 2)
    rule = "is {}; the result has {} columns"
    need(shared.shape[1] == total.shape[1], "shared_input", rule, shared.shape, total.shape[1])
    stop = first + shared.shape[0]
    rule = "is {}; {} rows from there must fit into the {} of the result"
    need(first >= 0 and stop <= len(total), "shared_input_offset", rule, first, shared.shape[0], len(total))
    total[first:stop] = shared.float() * (1.0 if weight is None else weight)
