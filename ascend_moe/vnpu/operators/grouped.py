"""Grouped matmul, alone and with SwiGLU and quantisation behind it, done by this package's own functions.

Rows that an operator leaves unspecified on a device are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import npu_grouped_matmul
from ascend_moe.experts.groups import read_groups
from ascend_moe.vendor.fused import npu_grouped_matmul_swiglu_quant, npu_grouped_matmul_swiglu_quant_v2
from ascend_moe.vnpu.operators.registry import effect, write

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
