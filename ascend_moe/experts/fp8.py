"""e4m3 codes with float32 scales: per group of 128 values, per row, or with given scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_moe.errors import need

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128  # values that share a scale
_LEAST = 1e-4  # minimum maximum of a group, so that zeros have a scale


def cast_fp8(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Cast ``(n, H)`` rows to e4m3 codes and float32 scales ``(n, H / 128)``: value = code * scale.

    ``scale = max(max |x|, 1e-4) / 448`` per 128 values; round_scale: rounded up to a power of two.

    Source: DeepEP ``per_token_cast_to_fp8``.
    """
    need(x.shape[1] % GROUP == 0, "x", "has {} columns; with use_fp8 they must be a multiple of {}", x.shape[1], GROUP)
    groups = x.float().view(x.shape[0], x.shape[1] // GROUP, GROUP)
    top = groups.abs().amax(2).clamp(min=_LEAST)
    factor, scale = torch.full_like(top, FP8_MAX) / top, top / FP8_MAX
    if round_scale:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        factor = 1.0 / scale
    return (groups * factor.unsqueeze(2)).to(FP8).view(x.shape), scale


def ue8m0(scales: Tensor) -> Tensor:
    """Return the exponents of float32 powers of two as uint8 of the same shape; 2**e is e + 127."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def cast_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast ``(n, H)`` rows to e4m3 codes and float32 scales ``(n, 1)``: value = code * scale.

    As in the ops' int8 quantization: ``s = 448 / max |x|`` of the row, ``scale = 1 / s``; a row of zeros has scale 1.
    NaN stays NaN and is ignored in the maximum.

    Source: sgl-kernel-npu's quant_mode "pertoken_fp8_e4m3".
    """
    value = x.float()
    top = value.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(1, keepdim=True)
    factor = torch.where(top == 0, 1.0, torch.full_like(top, FP8_MAX) / top)
    return (value * factor).to(FP8), torch.ones_like(factor) / factor


def scaled(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``rows * (1 / scale)`` in float32, rounded to dtype; fp8 saturates at +-448."""
    value = rows.float() if scale is None else rows.float() * (1.0 / scale)[:, None]
    return value.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else value.to(dtype)
