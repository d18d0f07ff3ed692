"""Symmetric int8 quantisation: of activations per row or per tensor, of weights per output channel.

``scale = amax / 127`` and ``code = rint(value / scale)`` in float32, rounding half to even; the scale is
what a code is multiplied with to get the value back. An all-zero row has codes 0 and scale 0, as the
formula gives it. A NaN makes its row's scale NaN and its own code 0.
"""

from __future__ import annotations

import torch

from ascend_moe._dtypes import resolve_dtype
from ascend_moe._torch_npu import call_torch_npu, on_npu
from ascend_moe.errors import ArgumentError
from ascend_moe.experts.groups import CUMSUM, read_groups

_INT8_MAX = 127.0


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row: ``(..., H) float32 -> (..., H) int8, (...) float32``."""
    if values.numel() == 0:
        return values.to(torch.int8), values.new_zeros(values.shape[:-1])
    scale = values.abs().amax(dim=-1, keepdim=True) / _INT8_MAX
    return to_int8(values / scale), scale.squeeze(-1)


def to_int8(values: torch.Tensor) -> torch.Tensor:
    """Round half to even and clip to -128..127; NaN (0/0 of an all-zero row) becomes 0."""
    return torch.nan_to_num(values, nan=0.0).round().clamp(-128, 127).to(torch.int8)


def npu_dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: torch.dtype | int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations to int8 with scales computed from the values themselves.

    Args:
        input: ``(..., H)``, at least 2-D; bf16, fp16 or fp32.
        smooth_scales: multiplied in first: ``(H,)``, or ``(E, H)`` with group_index.
        group_index: ``(E,)`` running sums of rows: group e uses smooth_scales[e]. Rows behind the last
            group are quantised unsmoothed. Read on the host.
        dst_type: None or int8.
        quant_mode: "pertoken" (a scale a row) or "pertensor" (one scale).
        dst_type_max: 0.

    Returns:
        int8 codes shaped as input, and float32 scales ``input.shape[:-1]`` or ``(1,)``; see the module
        docstring for formulas, zero rows and NaN.

    Raises:
        ArgumentError: a rule above is broken (int4, fp8 and "perchannel" exist on NPUs only).

    Source: torch_npu ``npu_dynamic_quant``; NPU tensors go there.
    """
    if on_npu(input):
        codes, scale = call_torch_npu(
            "npu_dynamic_quant",
            input,
            smooth_scales=smooth_scales,
            group_index=group_index,
            dst_type=dst_type,
            # Older versions know neither: pass them on only when they say something.
            quant_mode=None if quant_mode == "pertoken" else quant_mode,
            dst_type_max=dst_type_max or None,
        )
        return codes, scale
    if input.dim() < 2 or not input.is_floating_point():
        raise ArgumentError(
            f"input is {tuple(input.shape)} {input.dtype}; it must be at least 2-D and float",
            argument="input",
        )
    check_int8(dst_type)
    if quant_mode not in ("pertoken", "pertensor"):
        raise ArgumentError(
            f"quant_mode is {quant_mode!r}; it must be 'pertoken' or 'pertensor'", argument="quant_mode"
        )
    if dst_type_max != 0:
        raise ArgumentError(f"dst_type_max is {dst_type_max}; int8 takes 0", argument="dst_type_max")
    values = _smooth(input.float(), smooth_scales, group_index)
    if quant_mode == "pertoken":
        return quantize_rows(values)
    codes, scale = quantize_rows(values.reshape(1, -1))
    return codes.reshape(input.shape), scale


def check_int8(dst_type: torch.dtype | int | None) -> None:
    """Raise unless ``dst_type`` is None or int8."""
    dtype = resolve_dtype(dst_type, "dst_type")
    if dtype not in (None, torch.int8):
        raise ArgumentError(f"dst_type is {dtype}; off the NPU only int8 is supported", argument="dst_type")


def _smooth(
    values: torch.Tensor, smooth_scales: torch.Tensor | None, group_index: torch.Tensor | None
) -> torch.Tensor:
    width = values.shape[-1]
    if smooth_scales is None:
        if group_index is not None:
            raise ArgumentError("group_index needs smooth_scales (E, H) beside it", argument="group_index")
        return values
    shape = (width,) if group_index is None else (group_index.numel(), width)
    if tuple(smooth_scales.shape) != shape:
        raise ArgumentError(
            f"smooth_scales is {tuple(smooth_scales.shape)}; it must be {shape}: "
            f"{'one value a channel' if group_index is None else 'one row a group'}",
            argument="smooth_scales",
        )
    smooth = smooth_scales.float()
    if group_index is None:
        return values * smooth
    rows = values.reshape(-1, width)
    groups = read_groups(group_index, CUMSUM, group_index.numel(), rows.shape[0], "group_index")
    done = groups[-1].stop if groups else 0
    parts = [rows[group.start : group.stop] * smooth[group.expert] for group in groups]
    return torch.cat([*parts, rows[done:]]).reshape(values.shape)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise expert weights per output channel for W8A8 (`ascend_moe.experts.grouped_mlp`).

    Args:
        weight: ``(..., K, N)`` float, N the output channels, e.g. ``(L, H, 2I)``.

    Returns:
        int8 ``(..., K, N)`` (contiguous) and float32 scale ``(..., N)``: ``weight ~ codes * scale``.

    Raises:
        ArgumentError: weight is not a float matrix or a stack of them.
    """
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ArgumentError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; it must be float and (..., K, N)",
            argument="weight",
        )
    codes, scale = quantize_rows(weight.float().transpose(-1, -2))
    return codes.transpose(-1, -2).contiguous(), scale
