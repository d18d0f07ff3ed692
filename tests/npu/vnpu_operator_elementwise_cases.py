"""Operators that work element by element: every one over several ways to lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional
from vnpu_operator_cases import FLOATS, VIEWS, Case, in_place, name_of, values, viewed, with_number

UNARY = [
    "abs",
    "neg",
    "sign",
    "exp",
    "expm1",
    "exp2",
    "sigmoid",
    "tanh",
    "erf",
    "sin",
    "cos",
    "floor",
    "ceil",
    "round",
    "trunc",
    "reciprocal",
    "relu",
    "square",
    "isfinite",
    "isnan",
    "isinf",
    "logical_not",
    "signbit",
    "clone",
    "zeros_like",
    "ones_like",
]
POSITIVE = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt"]
IN_PLACE = [
    "exp_",
    "sigmoid_",
    "tanh_",
    "relu_",
    "floor_",
    "ceil_",
    "reciprocal_",
    "neg_",
    "abs_",
    "sin_",
    "cos_",
    "zero_",
]


def unary_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        x = values(dtype, 4, 10)
        for view, take in VIEWS.items():
            for name in UNARY:
                run = partial(viewed, getattr(torch, name), take)
                yield Case(f"{name}-{view}-{name_of(dtype)}", run, (x,))
            for name in POSITIVE:
                run = partial(viewed, getattr(torch, name), take)
                yield Case(f"{name}-{view}-{name_of(dtype)}", run, (x.abs() + 0.5,))
            for name in IN_PLACE:
                run = partial(in_place, name, take)
                yield Case(f"{name}-{view}-{name_of(dtype)}", run, (x,))
            yield Case(f"silu-{view}-{name_of(dtype)}", partial(viewed, functional.silu, take), (x,))
            yield Case(f"softplus-{view}-{name_of(dtype)}", partial(viewed, functional.softplus, take), (x,))


BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "remainder",
    "fmod",
    "floor_divide",
    "atan2",
]
WITH_NUMBER = [
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "remainder",
    "fmod",
    "floor_divide",
]


def binary_cases() -> Iterator[Case]:
    for dtype in (*FLOATS, torch.int32, torch.int64):
        x, y = values(dtype, 4, 10), values(dtype, 4, 10, seed=1)
        y[y == 0] = 1
        label = name_of(dtype)
        for view, take in VIEWS.items():
            for name in BINARY:
                if name == "atan2" and not dtype.is_floating_point:
                    continue
                run = partial(viewed, getattr(torch, name), take)
                yield Case(f"{name}-{view}-{label}", run, (x, y))
            for name in WITH_NUMBER:
                for number in (2, 2.5) if dtype.is_floating_point else (2,):
                    run = partial(with_number, getattr(torch, name), take, number)
                    yield Case(f"{name}-{number}-{view}-{label}", run, (x,))
            for name in ("add_", "sub_", "mul_"):
                run = partial(in_place, name, take)
                yield Case(f"{name}-{view}-{label}", run, (x, y))
        yield Case(f"add-broadcast-{label}", lambda a, b: a[:, :1] + b[:1], (x, y))
        yield Case(f"add-alpha-{label}", lambda a, b: torch.add(a, b, alpha=3), (x, y))
        yield Case(f"rsub-{label}", lambda a: 1 - a, (x,))
        yield Case(f"pow-2-{label}", lambda a: a**2, (x,))
        yield Case(f"clamp-{label}", lambda a: a.clamp(-1, 1), (x,))
        yield Case(f"clamp-min-{label}", lambda a: a.clamp(min=0), (x,))
        yield Case(f"clamp-max_-{label}", lambda a: a.clone().clamp_(max=0), (x,))
        yield Case(f"addcmul-{label}", lambda a, b: torch.addcmul(a, a, b, value=2), (x, y))
    x, y = values(torch.float32, 4, 10), values(torch.float32, 4, 10, seed=1)
    for name, run in {
        "div_": lambda a, b: a.clone().div_(b),
        "div-number_": lambda a, b: a.clone().div_(4),
        "div-trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "div-floor-number": lambda a, b: torch.div(a, 2, rounding_mode="floor"),
        "reciprocal-number": lambda a, b: 1 / a,
        "pow-tensor": lambda a, b: a.abs() ** b,
        "pow-number": lambda a, b: 2**a,
        "pow-half_": lambda a, b: a.abs().pow_(0.5),
        "lerp": lambda a, b: torch.lerp(a, b, 0.25),
        "lerp-tensor": lambda a, b: torch.lerp(a, b, a),
        "where": lambda a, b: torch.where(a > b, a, b),
        "where-number": lambda a, b: torch.where(a > 0, a, 0.0),
        "isclose": lambda a, b: torch.isclose(a, a + 1e-9),
        "allclose": lambda a, b: torch.tensor([torch.allclose(a, a + 1e-9), torch.allclose(a, b)]),
        "equal": lambda a, b: torch.tensor([torch.equal(a, b), torch.equal(a, a)]),
        "clamp-tensor": lambda a, b: torch.clamp(a, min=b),
        "nan_to_num": lambda a, b: torch.nan_to_num(a / torch.zeros_like(a)),
        "round-decimals": lambda a, b: torch.round(a, decimals=1),
        "mixed-types": lambda a, b: a.half() * b + a.int(),
        "bool-times-float": lambda a, b: (a > 0) * b,
    }.items():
        yield Case(name, run, (x, y))
