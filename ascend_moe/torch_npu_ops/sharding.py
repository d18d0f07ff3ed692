"""Operators on rows that are DTensors: replicated, or sharded along H, where each rank computes its part.

The rules are torch_npu 2.14's for ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``, with gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ascend_moe.errors import need, need_dims

P = ParamSpec("P")
R = TypeVar("R")
Bind = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


def over_shards(call: Callable[..., Any], bind: Bind) -> Callable[..., Any]:
    """Decorator: support DTensors in ``call``. Its first argument is ``(rows, H)``; other tensors do not depend on H.

    Args:
        call: computes each column of its ``(rows, H)`` results from that column alone; its other results do not depend
            on H.
        bind: returns a call's arguments by name, in order.
    """

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(
            isinstance(each, torch.Tensor) and hasattr(each, "device_mesh") for each in (*args, *kwargs.values())
        ):
            return call(*args, **kwargs)
        import torch.distributed.tensor as dtensors  # takes seconds, so only where there is a DTensor

        return _on_parts(call, bind(args, kwargs), dtensors)

    return run


def takes_shards(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `over_shards`, with ``bind`` from the function's signature."""
    signature = inspect.signature(function)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(signature.bind(*args, **kwargs).arguments)

    return over_shards(function, bind)


def _on_parts(call: Callable[..., Any], given: dict[str, Any], dtensors: Any) -> Any:
    rows: Any
    first, rows = next(iter(given.items()))
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            fits = isinstance(value, dtensors.DTensor) and isinstance(rows, dtensors.DTensor)
            rule = "must be a DTensor on the mesh of the other tensors: use distribute_tensor"
            need(fits and value.device_mesh == rows.device_mesh, name, rule)  # type: ignore[attr-defined]
    need_dims(first, rows, 2)
    whole = [dtensors.Replicate()] * rows.device_mesh.ndim
    columns = [each if each.is_replicate() else dtensors.Shard(1) for each in rows.placements]
    # For replicated tensors each rank computes the part of the gradient from its columns.
    partial = [each if each.is_replicate() else dtensors.Partial() for each in columns]

    def part_of(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        at, gradient = (columns, columns) if name == first else (whole, partial)
        sharded: Any = value
        return sharded.redistribute(placements=at).to_local(grad_placements=gradient)

    def joined(part: torch.Tensor) -> Any:
        has_columns = part.dim() == 2
        shape = torch.Size([len(part), rows.shape[1]]) if has_columns else part.shape
        return dtensors.DTensor.from_local(
            part,
            rows.device_mesh,
            columns if has_columns else whole,
            run_check=False,
            shape=shape,
            stride=(rows.shape[1], 1) if has_columns else part.stride(),
        )

    made = call(**{name: part_of(name, value) for name, value in given.items()})
    return tuple(map(joined, made)) if isinstance(made, tuple) else joined(made)
