"""Tensors as bits: equality, and how one value is put into words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_INTEGER_VIEW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGITS = {torch.float32: 9, torch.float16: 5, torch.bfloat16: 5}

Bits = npt.NDArray[Any]


def bits(tensor: torch.Tensor) -> Bits:
    """View the elements as signed integers of the same size."""
    plain = tensor.detach().cpu().contiguous()
    return np.asarray(plain.view(_INTEGER_VIEW[plain.element_size()]).numpy())


def differing(got: torch.Tensor, expected: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Where two tensors of one shape and dtype differ in bits; a NaN equals any other NaN."""
    unequal = bits(got) != bits(expected)
    if got.dtype.is_floating_point:
        unequal &= ~(torch.isnan(got) & torch.isnan(expected)).detach().cpu().numpy()
    return np.asarray(unequal, dtype=np.bool_)


def words(value: torch.Tensor) -> str:
    """One element as ``1.5 (0x3fc0)``; integers as they are."""
    if not value.dtype.is_floating_point:
        return str(int(value))
    return f"{float(value):.{_DIGITS[value.dtype]}g} (0x{_unsigned(value):0{2 * value.element_size()}x})"


def gap(got: torch.Tensor, expected: torch.Tensor) -> str:
    """How far two floats are apart, when that tells something: ``, 1 ulp apart`` or nothing."""
    if not got.dtype.is_floating_point or not (math.isfinite(float(got)) and math.isfinite(float(expected))):
        return ""
    if float(got) == float(expected):
        return ", they differ in the sign of zero"
    steps = abs(_ordinal(got) - _ordinal(expected))
    return f", {steps} ulp apart" if steps <= 64 else ""


def _unsigned(value: torch.Tensor) -> int:
    return int(bits(value.reshape(1))[0]) & ((1 << (8 * value.element_size())) - 1)


def _ordinal(value: torch.Tensor) -> int:
    """Consecutive integers for consecutive floats."""
    raw = _unsigned(value)
    sign = 1 << (8 * value.element_size() - 1)
    return sign - raw if raw & sign else raw
