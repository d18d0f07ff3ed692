"""What is seldom called: in-place forms, backward passes, unusual arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from vnpu_operator_cases import Case, Tensor, values

Two = Callable[[Tensor, Tensor], Any]


def rare_cases() -> Iterator[Case]:
    x, y = values(torch.float32, 4, 10), values(torch.float32, 4, 10, seed=1)
    y[y == 0] = 1
    for name in ("exp2_", "expm1_", "erf_", "logical_not_"):
        yield Case(f"rare-{name}", _method(name), (x,))
    for name in ("log_", "log2_", "log10_", "log1p_", "sqrt_", "rsqrt_"):
        yield Case(f"rare-{name}", _method(name), (x.abs() + 0.5,))
    for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "floor_divide_", "remainder_"):
        yield Case(f"rare-{name}", _method(name), (x, y))
        yield Case(f"rare-number-{name}", _method(name, 2), (x,))
    for name in ("div_", "mul_", "sub_"):
        yield Case(f"rare-number-{name}", _method(name, 2.5), (x,))
    for name in ("atan2_", "logical_and_", "logical_or_", "clamp_min_", "clamp_max_"):
        yield Case(f"rare-{name}", _method(name), (x, y))
    for name, run in {**_ELEMENTWISE, **_PLACED, **_REDUCED, **_BACKWARD}.items():
        yield Case(f"rare-{name}", run, (x, y))
    integers = values(torch.int32, 4, 10), values(torch.int32, 4, 10, seed=1)
    for name, run in _BITS.items():
        yield Case(f"rare-{name}", run, integers)


def _method(name: str, *numbers: float) -> Callable[..., Tensor]:
    def run(tensor: Tensor, *others: Tensor) -> Tensor:
        changed = tensor.clone()
        getattr(changed, name)(*others, *numbers)
        return changed

    return run


_ELEMENTWISE: dict[str, Two] = {
    "gelu": lambda x, y: functional.gelu(x),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "remainder-number-left": lambda x, y: torch.remainder(7.5, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "addcdiv_": lambda x, y: x.clone().addcdiv_(x, y),
    "addcmul_": lambda x, y: x.clone().addcmul_(x, y, value=2),
    "lerp_": lambda x, y: x.clone().lerp_(y, 0.25),
    "lerp-tensor_": lambda x, y: x.clone().lerp_(y, y),
    "div-trunc_": lambda x, y: x.clone().div_(y, rounding_mode="trunc"),
    "div-floor-number_": lambda x, y: x.clone().div_(3, rounding_mode="floor"),
    "pow-tensor_": lambda x, y: x.abs().pow_(y),
    "clamp_min": lambda x, y: torch.clamp_min(x, 0.5),
    "clamp_max": lambda x, y: torch.clamp_max(x, 0.5),
    "clamp_max_-number": lambda x, y: x.clone().clamp_max_(0.5),
    "clamp_min-tensor": lambda x, y: torch.clamp_min(x, y),
    "clamp_max-tensor": lambda x, y: torch.clamp_max(x, y),
    "nan_to_num_": lambda x, y: (x / torch.zeros_like(x)).nan_to_num_(1.0, 2.0, 3.0),
    "round-decimals_": lambda x, y: x.clone().round_(decimals=1),
    "isposinf": lambda x, y: torch.isposinf(x / torch.zeros_like(x)),
    "isneginf": lambda x, y: torch.isneginf(x / torch.zeros_like(x)),
}

_PLACED: dict[str, Two] = {
    "triu": lambda x, y: torch.triu(x, 1),
    "tril_": lambda x, y: x.clone().tril_(-1),
    "fill_diagonal_": lambda x, y: x.clone().fill_diagonal_(3.0),
    "fill-tensor_": lambda x, y: x.clone().fill_(y[0, 0]),
    "masked_fill-tensor_": lambda x, y: x.clone().masked_fill_(x > 0, y[0, 0]),
    "scatter_": lambda x, y: x.clone().scatter_(0, torch.zeros_like(x, dtype=torch.int64)[:1], y),
    "scatter-value": lambda x, y: x.scatter(0, torch.zeros_like(x, dtype=torch.int64)[:1], 2.0),
    "index_fill_": lambda x, y: x.clone().index_fill_(0, torch.tensor([1, 3], device=x.device), 2.0),
    "take": lambda x, y: torch.take(x, torch.tensor([0, 13, 39], device=x.device)),
    "repeat_interleave-flat": lambda x, y: x.repeat_interleave(3),
    "repeat_interleave-flat-counts": lambda x, y: x[0].repeat_interleave(torch.arange(10, device=x.device)),
    "repeat_interleave-indices": lambda x, y: torch.repeat_interleave(
        torch.tensor([2, 0, 3], device=x.device)
    ),
    "index_add": lambda x, y: x.index_add(1, torch.tensor([0, 0], device=x.device), y[:, :2], alpha=2),
    "range": lambda x, y: torch.range(1, 4, device=x.device),
}

_REDUCED: dict[str, Two] = {
    "cumprod": lambda x, y: x.cumprod(-1),
    "prod": lambda x, y: (x * 0.5).prod(),
    "std": lambda x, y: x.std(0, correction=0),
    "var_mean": lambda x, y: torch.var_mean(x, 1),
    "norm-1": lambda x, y: torch.norm(x, 1, dim=1),
    "median": lambda x, y: x.median(),
    "median-dim": lambda x, y: x.median(1),
    "kthvalue": lambda x, y: x.kthvalue(2),
    "aminmax-dim": lambda x, y: torch.aminmax(x, dim=1),
    "addmv": lambda x, y: torch.addmv(x[:, 0], x, y[0], beta=0.5, alpha=2),
    "addmm_": lambda x, y: x[:, :4].clone().addmm_(x, y.t(), beta=2),
}


def _gradient(function: Callable[[Tensor], Tensor]) -> Two:
    def run(x: Tensor, slope: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, slope)[0]

    return run


_BACKWARD: dict[str, Two] = {
    "sigmoid-backward": _gradient(torch.sigmoid),
    "tanh-backward": _gradient(torch.tanh),
    "relu-backward": _gradient(torch.relu),
    "silu-backward": _gradient(functional.silu),
    "gelu-backward": _gradient(functional.gelu),
    "softmax-backward": _gradient(lambda x: x.softmax(-1)),
    "log_softmax-backward": _gradient(lambda x: x.log_softmax(-1)),
    "embedding-backward": _gradient(
        lambda x: functional.embedding(torch.tensor([1, 1, 0, 3], device=x.device), x)
    ),
}

_BITS: dict[str, Two] = {
    "or-number": lambda x, y: x | 5,
    "xor-number": lambda x, y: x ^ 5,
    "and-number_": lambda x, y: x.clone().bitwise_and_(5),
    "xor-number_": lambda x, y: x.clone().bitwise_xor_(5),
    "xor_": lambda x, y: x.clone().bitwise_xor_(y),
    "shift-left": lambda x, y: x.__lshift__(y & 3),
    "shift-right": lambda x, y: x.abs().__rshift__(1),
}
