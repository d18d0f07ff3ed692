"""SwiGLU and quantisation, done by this package's own functions of the same names."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_dynamic_quant, npu_swiglu
from ascend_moe.experts.quant import to_int8
from ascend_moe.vnpu.operators.memory import DTYPES
from ascend_moe.vnpu.operators.registry import effect, returns, write

Tensor = torch.Tensor

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
