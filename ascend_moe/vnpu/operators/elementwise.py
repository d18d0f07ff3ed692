"""Operators that work element by element. torch's own functions of the same meaning do the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ascend_moe.vnpu.operators.registry import in_place, returns

Number = int | float

# One tensor in, one out. A star: there is an in-place form too.
_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "Abs": torch.abs,
    "Neg": torch.neg,
    "Sign": torch.sign,
    "Exp*": torch.exp,
    "Exp2*": torch.exp2,
    "Expm1*": torch.expm1,
    "Log*": torch.log,
    "Log2*": torch.log2,
    "Log10*": torch.log10,
    "Log1p*": torch.log1p,
    "Sqrt*": torch.sqrt,
    "Rsqrt*": torch.rsqrt,
    "Reciprocal*": torch.reciprocal,
    "Sigmoid*": torch.sigmoid,
    "Silu": functional.silu,
    "Relu*": torch.relu,
    "Tanh*": torch.tanh,
    "Erf*": torch.erf,
    "Sin*": torch.sin,
    "Cos*": torch.cos,
    "Floor*": torch.floor,
    "Ceil*": torch.ceil,
    "Round": torch.round,
    "Trunc": torch.trunc,
    "Gelu": functional.gelu,
    "IsFinite": torch.isfinite,
    "IsPosInf": torch.isposinf,
    "IsNegInf": torch.isneginf,
    "Signbit": torch.signbit,
    "LogicalNot*": torch.logical_not,
    "BitwiseNot": torch.bitwise_not,
}

# Two in, one out: a tensor or a number on the right, as torch takes them.
_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "Mul*": torch.mul,
    "Muls*": torch.mul,
    "Div*": torch.div,
    "Divs*": torch.div,
    "FloorDivide*": torch.floor_divide,
    "FloorDivides*": torch.floor_divide,
    "RemainderTensorTensor*": torch.remainder,
    "RemainderTensorScalar*": torch.remainder,
    "RemainderScalarTensor": torch.remainder,
    "FmodTensor": torch.fmod,
    "FmodScalar": torch.fmod,
    "PowTensorTensor*": torch.pow,
    "PowTensorScalar*": torch.pow,
    "PowScalarTensor": torch.pow,
    "Atan2*": torch.atan2,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "ClampMin": torch.clamp_min,
    "ClampMax*": torch.clamp_max,
    "ClampMinTensor*": torch.clamp_min,
    "ClampMaxTensor*": torch.clamp_max,
    "EqTensor*": torch.eq,
    "EqScalar*": torch.eq,
    "NeTensor*": torch.ne,
    "NeScalar*": torch.ne,
    "LtTensor*": torch.lt,
    "LtScalar*": torch.lt,
    "LeTensor*": torch.le,
    "LeScalar*": torch.le,
    "GtTensor*": torch.gt,
    "GtScalar*": torch.gt,
    "GeTensor*": torch.ge,
    "GeScalar*": torch.ge,
    "LogicalAnd*": torch.logical_and,
    "LogicalOr*": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "BitwiseAndTensor*": torch.bitwise_and,
    "BitwiseAndScalar*": torch.bitwise_and,
    "BitwiseOrTensor": torch.bitwise_or,
    "BitwiseOrScalar": torch.bitwise_or,
    "BitwiseXorTensor*": torch.bitwise_xor,
    "BitwiseXorScalar*": torch.bitwise_xor,
    "LeftShift": torch.bitwise_left_shift,
    "LeftShifts": torch.bitwise_left_shift,
    "RightShift": torch.bitwise_right_shift,
    # three in
    "Clamp": torch.clamp,
    "ClampTensor": torch.clamp,
    "Lerp*": torch.lerp,
    "Lerps*": torch.lerp,
}

for _name, _function in (_UNARY | _BINARY).items():
    returns(f"aclnn{_name.removesuffix('*')}")(_function)
    if _name.endswith("*"):
        in_place(f"aclnnInplace{_name.removesuffix('*')}")(_function)


def _both(*names: str) -> Callable[[Any], Any]:
    """Register a function as ``aclnnX`` and ``aclnnInplaceX``."""

    def register(function: Any) -> Any:
        returns(*(f"aclnn{name}" for name in names))(function)
        return in_place(*(f"aclnnInplace{name}" for name in names))(function)

    return register


@_both("Add", "Adds")
def _add(self: torch.Tensor, other: Any, alpha: Number) -> torch.Tensor:
    return torch.add(self, other, alpha=alpha)


@_both("Sub", "Subs")
def _sub(self: torch.Tensor, other: Any, alpha: Number) -> torch.Tensor:
    return torch.sub(self, other, alpha=alpha)


@returns("aclnnRsub", "aclnnRsubs")
def _rsub(self: torch.Tensor, other: Any, alpha: Number) -> torch.Tensor:
    return torch.rsub(self, other, alpha=alpha)


@_both("DivMod", "DivMods")
def _div_mod(self: torch.Tensor, other: Any, mode: int) -> torch.Tensor:
    return torch.div(self, other, rounding_mode=(None, "trunc", "floor")[mode])


@_both("Addcmul")
def _addcmul(self: torch.Tensor, one: torch.Tensor, two: torch.Tensor, value: Number) -> torch.Tensor:
    return torch.addcmul(self, one, two, value=value)


@_both("Addcdiv")
def _addcdiv(self: torch.Tensor, one: torch.Tensor, two: torch.Tensor, value: Number) -> torch.Tensor:
    return torch.addcdiv(self, one, two, value=value)


@_both("RoundDecimals")
def _round_decimals(self: torch.Tensor, decimals: int) -> torch.Tensor:
    return torch.round(self, decimals=decimals)


@_both("NanToNum")
def _nan_to_num(self: torch.Tensor, nan: float, posinf: float, neginf: float) -> torch.Tensor:
    return torch.nan_to_num(self, nan, posinf, neginf)


@returns("aclnnSoftplus")
def _softplus(self: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
    return functional.softplus(self, beta, threshold)


@returns("aclnnEqual")
def _equal(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.tensor([torch.equal(self, other)])


@returns("aclnnIsClose")
def _is_close(
    self: torch.Tensor, other: torch.Tensor, rtol: float, atol: float, equal_nan: int
) -> torch.Tensor:
    return torch.isclose(self, other, rtol, atol, bool(equal_nan))


returns("aclnnSigmoidBackward")(torch.ops.aten.sigmoid_backward)
returns("aclnnTanhBackward")(torch.ops.aten.tanh_backward)
returns("aclnnSiluBackward")(torch.ops.aten.silu_backward)
returns("aclnnThresholdBackward")(torch.ops.aten.threshold_backward)
returns("aclnnGeluBackward")(torch.ops.aten.gelu_backward)
