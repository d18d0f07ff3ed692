"""Grouped matmul, SwiGLU and quantisation, alone and fused, computed by this package's own functions.

Rows that an operator leaves unspecified on a device are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_dynamic_quant, npu_grouped_matmul, npu_swiglu
from ascend_moe.experts.groups import read_groups
from ascend_moe.experts.quant import to_int8
from ascend_moe.vendor.fused import npu_grouped_matmul_swiglu_quant, npu_grouped_matmul_swiglu_quant_v2
from ascend_moe.vnpu.operators.registry import DTYPES, effect, returns, write

Tensor = torch.Tensor
Tensors = list[torch.Tensor]


@effect("aclnnGroupedMatmulV4")
def _grouped_matmul_v4(*arguments: Any) -> None:
    newer = [*arguments[:16], None, *arguments[16:]]  # tuning_config
    _grouped_matmul_v5(*newer)


@effect("aclnnGroupedMatmulV5")
def _grouped_matmul_v5(
    x: Tensors,
    weight: Tensors,
    bias: Tensors,
    scale: Tensors,
    offset: Tensors,
    antiquant_scale: Tensors,
    antiquant_offset: Tensors,
    per_token_scale: Tensors,
    group_list: Tensor | None,
    activation_input: Tensors,
    activation_quant_scale: Tensors,
    activation_quant_offset: Tensors,
    split_item: int,
    group_type: int,
    group_list_type: int,
    act_type: int,
    tuning_config: list[int] | None,
    out: Tensors,
    activation_feature_out: Tensors,
    dynamic_quant_scale_out: Tensors,
) -> None:
    if act_type != 0:
        raise ArgumentError(f"act_type is {act_type}; the virtual NPU has only 0", argument="act_type")
    used = x[0].shape[0]
    if len(x) == 1 and group_list is not None and group_type == 0:
        experts = weight[0].shape[0] if weight[0].dim() == 3 else len(weight)
        groups = read_groups(group_list, group_list_type, experts, used)
        used = groups[-1].stop if groups else 0
        x = [x[0][:used]]
        per_token_scale = [scales.reshape(-1)[:used] for scales in per_token_scale or []]
    results = npu_grouped_matmul(
        x,
        weight,
        bias=bias or None,
        scale=scale or None,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale or None,
        group_list=group_list,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        split_item=split_item,
        group_type=group_type,
        group_list_type=group_list_type,
        output_dtype=out[0].dtype,
    )
    for place, result in zip(out, results, strict=True):
        write(place[: result.shape[0]], result)


@effect("aclnnGroupedMatmul")
def _grouped_matmul(
    x: Tensors,
    weight: Tensors,
    bias: Tensors,
    scale: Tensors,
    offset: Tensors,
    antiquant_scale: Tensors,
    antiquant_offset: Tensors,
    group_list: list[int] | None,
    split_item: int,
    out: Tensors,
) -> None:
    results = npu_grouped_matmul(
        x,
        weight,
        bias=bias or None,
        scale=scale or None,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        group_list=group_list or None,
        split_item=split_item,
        output_dtype=out[0].dtype,
    )
    for place, result in zip(out, results, strict=True):
        write(place, result)


@effect("aclnnGroupedMatmulSwigluQuantWeightNZ")
def _swiglu_quant(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offset: Tensor | None,
    weight_scale: Tensor,
    x_scale: Tensor,
    group_list: Tensor,
    out: Tensor,
    out_scale: Tensor,
    out_offset: Tensor | None,
) -> None:
    codes, scale, _ = npu_grouped_matmul_swiglu_quant(
        x, weight, group_list, weight_scale, x_scale, bias=bias, offset=offset
    )
    used = int(group_list[-1])
    write(out[:used], codes[:used])
    write(out_scale[:used], scale[:used])


@effect("aclnnGroupedMatmulSwigluQuantV2")
def _swiglu_quant_v2(
    x: Tensor,
    weight: Tensors,
    weight_scale: Tensors,
    assist: Tensors,
    bias: Tensor | None,
    x_scale: Tensor,
    smooth_scale: Tensor | None,
    group_list: Tensor,
    dequant_mode: int,
    dequant_dtype: int,
    quant_mode: int,
    group_list_type: int,
    tuning_config: list[int] | None,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    codes, scale = npu_grouped_matmul_swiglu_quant_v2(
        x,
        weight,
        weight_scale,
        x_scale,
        group_list,
        smooth_scale=smooth_scale,
        weight_assist_matrix=assist,
        bias=bias,
        dequant_mode=dequant_mode,
        quant_mode=quant_mode,
        group_list_type=group_list_type,
    )
    used = int(group_list[-1] if group_list_type == 0 else group_list.sum())
    write(out[:used], codes[:used])
    write(out_scale[:used], scale[:used])


returns("aclnnSwiGlu")(npu_swiglu)


@returns("aclnnSwiGluGrad")
def _swiglu_grad(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    left, right = x.float().chunk(2, dim)
    gate = torch.sigmoid(left)
    wide = grad.float()
    slope = gate * (1 + left * (1 - gate))
    return torch.cat([wide * right * slope, wide * silu(left)], dim)


@effect("aclnnDynamicQuantV2")
def _dynamic_quant_v2(
    x: Tensor,
    smooth_scales: Tensor | None,
    group_index: Tensor | None,
    dst_type: int,
    y: Tensor,
    scale: Tensor,
    offset: Tensor | None,
) -> None:
    _dynamic_quant_v3(x, smooth_scales, group_index, dst_type, 1, "pertoken", y, scale, offset)


@effect("aclnnDynamicQuantV3")
def _dynamic_quant_v3(
    x: Tensor,
    smooth_scales: Tensor | None,
    group_index: Tensor | None,
    dst_type: int,
    symmetrical: int,
    mode: str,
    y: Tensor,
    scale: Tensor,
    offset: Tensor | None,
) -> None:
    if not symmetrical or offset is not None:
        raise ArgumentError("asymmetric quantisation is not on the virtual NPU", argument="offset")
    codes, scales = npu_dynamic_quant(
        x,
        smooth_scales=smooth_scales,
        group_index=group_index,
        dst_type=_dtype(dst_type, "dst_type"),
        quant_mode=mode,
    )
    write(y, codes)
    write(scale, scales)


@effect("aclnnDequantSwigluQuantV2")
def _dequant_swiglu_quant_v2(
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    group_index: Tensor | None,
    activate_left: int,
    mode: str,
    dst_type: int,
    round_mode: str,
    activate_dim: int,
    swiglu_mode: int,
    clamp_limit: float,
    glu_alpha: float,
    glu_bias: float,
    y: Tensor,
    scale: Tensor | None,
) -> None:
    if round_mode != "rint":
        raise ArgumentError(f"round_mode is {round_mode}; the virtual NPU has rint", argument="round_mode")
    codes, scales = npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=activation_scale,
        bias=bias,
        quant_scale=quant_scale,
        quant_offset=quant_offset,
        group_index=group_index,
        activate_left=bool(activate_left),
        quant_mode=("static", "dynamic").index(mode),
        dst_type=_dtype(dst_type, "dst_type"),
        activate_dim=activate_dim,
        swiglu_mode=swiglu_mode,
        clamp_limit=clamp_limit,
        glu_alpha=glu_alpha,
        glu_bias=glu_bias,
    )
    rows = codes.shape[0]
    if group_index is not None and codes.dim() == 2:
        rows = int(group_index.sum())
    write(y[:rows], codes[:rows])
    if scale is not None and mode == "dynamic":
        write(scale[:rows], scales[:rows])


@effect("aclnnQuantize")
def _quantize(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, out: Tensor
) -> None:
    shape = [1] * x.dim()
    shape[axis] = -1
    values = torch.round(x.float() / scales.float().reshape(shape))
    if zero_points is not None:
        values = values + zero_points.float().reshape(shape)
    limits = torch.iinfo(out.dtype)
    write(out, values.clamp(limits.min, limits.max).to(out.dtype))


@effect("aclnnAscendQuantV3")
def _ascend_quant(
    x: Tensor,
    scales: Tensor,
    offset: Tensor | None,
    sqrt_mode: int,
    round_mode: str,
    dst_type: int,
    axis: int,
    out: Tensor,
) -> None:
    if out.dtype != torch.int8 or sqrt_mode:
        raise ArgumentError(f"the output is {out.dtype}; the virtual NPU quantises to int8", argument="dtype")
    values = x.float() * scales.float()
    write(out, to_int8(values if offset is None else values + offset.float()))


def _dtype(number: int, argument: str) -> torch.dtype:
    if number not in DTYPES:
        raise ArgumentError(f"{argument} is aclDataType {number}, not on the virtual NPU", argument=argument)
    return DTYPES[number]
