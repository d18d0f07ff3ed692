"""What the aclnn functions of the virtual NPU do: one Python function an operator, by name.

A function is registered by how its result reaches the caller's memory:

    @returns("aclnnAdd")        gets the inputs, returns what is written to the last argument
    @in_place("aclnnInplaceX")  gets all arguments, returns what is written to the first
    @effect("aclnnXxx")         gets all arguments, writes itself
    @resized("aclnnXxx")        as returns, but the caller learns the result's sizes from it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ascend_moe.vnpu.operators.memory import Arguments, write_sizes

F = TypeVar("F", bound=Callable[..., Any])

OPERATORS: dict[str, Callable[[Arguments], None]] = {}


def returns(*names: str, outputs: int = 1) -> Callable[[F], F]:
    """Register a function that returns the last ``outputs`` tensors: a tensor, or a tuple of them."""

    def register(function: F) -> F:
        def run(arguments: Arguments) -> None:
            results = function(*arguments.values[:-outputs])
            for out, result in zip(arguments.values[-outputs:], _as_tuple(results), strict=True):
                write(out, result)

        _add(names, run)
        return function

    return register


def in_place(*names: str) -> Callable[[F], F]:
    """Register a function whose result replaces the first argument's values."""

    def register(function: F) -> F:
        def run(arguments: Arguments) -> None:
            write(arguments.values[0], function(*arguments.values))

        _add(names, run)
        return function

    return register


def effect(*names: str) -> Callable[[F], F]:
    """Register a function that writes into its arguments itself."""

    def register(function: F) -> F:
        def run(arguments: Arguments) -> None:
            function(*arguments.values)

        _add(names, run)
        return function

    return register


def resized(*names: str, outputs: int = 1) -> Callable[[F], F]:
    """As ``returns``, for results whose sizes depend on the data: the memory given is for the worst case.

    The result is written without gaps, and the sizes of the caller's tensor become the result's.
    """

    def register(function: F) -> F:
        def run(arguments: Arguments) -> None:
            results = _as_tuple(function(*arguments.values[:-outputs]))
            places = zip(arguments.values[-outputs:], arguments.sizes_at[-outputs:], results, strict=True)
            for out, sizes_at, result in places:
                if out is None or (out.numel() == 0 and result.numel() > 0):
                    continue
                if result.numel() > out.numel() or result.dim() != out.dim():
                    raise ValueError(
                        f"the result is {tuple(result.shape)}, too much for the output {tuple(out.shape)}"
                    )
                out.reshape(-1)[: result.numel()].copy_(result.reshape(-1))
                write_sizes(sizes_at, tuple(result.shape))

        _add(names, run)
        return function

    return register


def write(out: torch.Tensor | None, result: torch.Tensor) -> None:
    """Put a result where the caller wants it, in the caller's data type. None: it is not wanted.

    Raises:
        ValueError: the sizes differ.
    """
    if out is None:
        return
    if out.shape != result.shape:
        raise ValueError(f"the result is {tuple(result.shape)}, but the output given is {tuple(out.shape)}")
    out.copy_(result)


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _add(names: tuple[str, ...], run: Callable[[Arguments], None]) -> None:
    for name in names:
        if name in OPERATORS:
            raise ValueError(f"{name} is registered twice")
        OPERATORS[name] = run
