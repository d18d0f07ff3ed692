"""e4m3 codes and their float32 scales: of groups of 128 values, of rows, and by scales that are given."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_moe.errors import need

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128  # values that share a scale
_LEAST = 1e-4  # a group counts at least this much: zeros have a scale


def cast_fp8(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """``(n, H)`` rows as e4m3 codes and float32 scales ``(n, H / 128)``: value = code * scale.

    ``scale = max(max |x|, 1e-4) / 448`` of 128 values; round_scale: the next power of two from there up.

    Source: DeepEP ``per_token_cast_to_fp8``.
    """
    need(x.shape[1] % GROUP == 0, "x", "has rows of {}; with use_fp8 they must be a multiple of {}", x.shape[1], GROUP)
    groups = x.float().view(x.shape[0], x.shape[1] // GROUP, GROUP)
    top = groups.abs().amax(2).clamp(min=_LEAST)
    factor, scale = torch.full_like(top, FP8_MAX) / top, top / FP8_MAX
    if round_scale:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        factor = 1.0 / scale
    return (groups * factor.unsqueeze(2)).to(FP8).view(x.shape), scale


def ue8m0(scales: Tensor) -> Tensor:
    """The exponents of float32 powers of two, a byte each: uint8 of the same shape. 2**e is e + 127."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def cast_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(n, H)`` rows as e4m3 codes and float32 scales ``(n, 1)``: value = code * scale.

    As the ops make int8 rows: ``s = 448 / max |x|`` of the row, ``scale = 1 / s``; a row of zeros has scale 1. NaN
    stays NaN, and does not count for the maximum.

    Source: sgl-kernel-npu's quant_mode "pertoken_fp8_e4m3".
    """
    value = x.float()
    top = value.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(1, keepdim=True)
    factor = torch.where(top == 0, 1.0, torch.full_like(top, FP8_MAX) / top)
    return (value * factor).to(FP8), torch.ones_like(factor) / factor


def scaled(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rows * (1 / scale)`` in float32, rounded to dtype; fp8 ends at +-448."""
    value = rows.float() if scale is None else rows.float() * (1.0 / scale)[:, None]
    return value.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else value.to(dtype)
