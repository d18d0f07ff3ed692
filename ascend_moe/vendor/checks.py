"""Argument checks shared by the vendor operators that run as plain torch."""

from __future__ import annotations

import torch

from ascend_moe.errors import ArgumentError


def need(kept: bool, argument: str, rule: str) -> None:
    """Raise ``ArgumentError`` about ``argument`` unless the rule is kept; ``rule`` continues its name."""
    if not kept:
        raise ArgumentError(f"{argument} {rule}", argument=argument)


def need_unset(**arguments: object) -> None:
    """Raise for the first argument that is set: it selects a mode that only NPUs have."""
    for name, value in arguments.items():
        empty = value is None or (isinstance(value, (list, tuple)) and len(value) == 0)
        need(empty, name, "is not supported off the NPU; leave it out")


def need_only(argument: str, value: int | None, *allowed: int | None) -> None:
    """Raise unless ``value`` is one of ``allowed``, the modes that run off the NPU."""
    listed = ", ".join(str(mode) for mode in allowed)
    need(value in allowed, argument, f"is {value}; off the NPU it must be {listed}")


def need_shape(argument: str, tensor: torch.Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` has one of the shapes."""
    listed = " or ".join(str(shape) for shape in shapes)
    need(tuple(tensor.shape) in shapes, argument, f"is {tuple(tensor.shape)}; it must be {listed}")


def need_dtype(argument: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise unless ``tensor`` has one of the dtypes."""
    listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    need(tensor.dtype in dtypes, argument, f"is {tensor.dtype}; it must be {listed}")


def need_dims(argument: str, tensor: torch.Tensor, *dims: int) -> None:
    """Raise unless ``tensor`` has one of the numbers of dimensions."""
    listed = " or ".join(f"{count}-D" for count in dims)
    need(tensor.dim() in dims, argument, f"is {tuple(tensor.shape)}; it must be {listed}")
