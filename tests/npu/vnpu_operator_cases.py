"""Cases of torch operators for the virtual NPU: each runs on the CPU and on npu:0 and must give the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALF)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """``run`` of ``inputs``; ``exact``: bit for bit, else within the rounding of the type."""

    name: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    exact: bool = True


# How an input lies in memory. Both sides get the same base tensor and take the same view of it.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "strided": lambda t: t[:, 1::2],
    "transposed": lambda t: t[:3, :3].t(),
    "offset": lambda t: t[1:],
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[0, 0],
}


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, shape, generator=generator).to(dtype)


def difference(expected: list[torch.Tensor], found: list[torch.Tensor], exact: bool = True) -> str:
    """ "" when both are the same, bit for bit if ``exact``; else what differs first."""
    if len(expected) != len(found):
        return f"{len(found)} results for {len(expected)}"
    for number, (want, have) in enumerate(zip(expected, found, strict=True)):
        if want.dtype != have.dtype or want.shape != have.shape:
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (want, have)]
            return f"result {number} is {kinds[1]} for {kinds[0]}"
        tolerance = 0.0 if exact else 2 * torch.finfo(want.dtype).eps
        same = torch.isclose(want.double(), have.double(), tolerance, tolerance, equal_nan=True)
        if not bool(same.all()):
            return f"result {number} is {have.flatten()[:8].tolist()} for {want.flatten()[:8].tolist()}"
    return ""


def viewed(function: Callable[..., Any], take: Callable[[Tensor], Tensor], *tensors: Tensor) -> Any:
    return function(*(take(tensor) for tensor in tensors))


def with_number(
    function: Callable[..., Any], take: Callable[[Tensor], Tensor], number: float, tensor: Tensor
) -> Any:
    return function(take(tensor), number)


def in_place(method: str, take: Callable[[Tensor], Tensor], tensor: Tensor, *others: Tensor) -> Tensor:
    """The whole of the tensor that a method has changed through a view."""
    changed = tensor.clone()
    getattr(take(changed), method)(*(take(other) for other in others))
    return changed


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
