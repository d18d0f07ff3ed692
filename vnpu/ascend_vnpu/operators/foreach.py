"""Operators on lists of tensors, which optimizers use: torch's functions of the same names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .registry import effect, write

_UNARY = """
    Abs Acos Asin Atan Cos Cosh Erf Erfc Exp Expm1 Log Log10 Log1p Log2 Neg Reciprocal Sigmoid Sign Sin Sinh Sqrt Tan
    Tanh
"""
_BINARY = "Add Sub Mul Div Maximum Minimum Pow"


def _write_all(outputs: list[Tensor], results: Any) -> None:
    for out, result in zip(outputs, results, strict=True):
        write(out, result)


def _run(function: Callable[..., Any], *given: Any) -> None:
    """Lists, then perhaps a number, then the outputs."""
    *inputs, outputs = given
    _write_all(outputs, function(*inputs))


def _scaled(function: Callable[..., Any], left: Any, right: Any, alpha: Any, outputs: list[Tensor]) -> None:
    _write_all(outputs, function(left, right, alpha=alpha))


def _power(base: Any, exponents: list[Tensor], outputs: list[Tensor]) -> None:
    _write_all(outputs, torch._foreach_pow(base, exponents))


def _zero(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


@effect("aclnnAmpUpdateScale")
def _update_scale(scale: Tensor, tracker: Tensor, found: Tensor, *rest: Any) -> None:
    *numbers, scale_out, tracker_out = rest
    write(scale_out, scale)
    write(tracker_out, tracker)
    torch._amp_update_scale_(scale_out, tracker_out, found, *numbers)


def _torch(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch, f"_foreach_{name.lower()}")
    return function


def _register(name: str, run: Callable[..., None]) -> None:
    effect(f"aclnnForeach{name}")(run)


for _name in _UNARY.split():
    _register(_name, functools.partial(_run, _torch(_name)))
for _name in _BINARY.split():
    for _form in ("ScalarList",) if _name == "Minimum" else ("ScalarV2", "ScalarList"):
        _register(_name + _form, functools.partial(_run, _torch(_name)))
    if _name in ("Add", "Sub"):
        _register(f"{_name}ListV2", functools.partial(_scaled, _torch(_name)))
    else:
        _register(f"{_name}List", functools.partial(_run, _torch(_name)))
for _name in ("Addcdiv", "Addcmul"):
    _register(f"{_name}ScalarV2", functools.partial(_run, _torch(_name)))
for _name in ("LerpList", "LerpScalar"):
    _register(_name, functools.partial(_run, torch._foreach_lerp))
_register("Copy", lambda tensors, outputs: _write_all(outputs, tensors))
_register("PowScalarAndTensor", _power)
_register("ZeroInplace", _zero)
_register("NonFiniteCheckAndUnscale", torch._amp_foreach_non_finite_check_and_unscale_)
