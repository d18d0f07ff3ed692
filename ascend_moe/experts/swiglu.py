"""SwiGLU: the activation between the two products of an expert."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from ascend_moe._dtypes import compute_dtype
from ascend_moe._torch_npu import call_torch_npu, on_npu
from ascend_moe.errors import ArgumentError


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(first half) * second half`` along ``dim``; float32 inside, one rounding, differentiable.

    Args:
        input: float, an even size along ``dim`` (gate and up projections side by side).
        dim: the dimension to halve.

    Returns:
        input's type and shape, ``dim`` halved.

    Raises:
        ArgumentError: the type is not float, dim is out of range or its size odd.

    Source: torch_npu ``npu_swiglu``; NPU tensors go there.
    """
    if on_npu(input):
        result: torch.Tensor = call_torch_npu("npu_swiglu", input, dim=dim)
        return result
    if not input.is_floating_point():
        raise ArgumentError(f"input is {input.dtype}; it must be bf16, fp16 or fp32", argument="input")
    if not -input.dim() <= dim < input.dim() or input.shape[dim] % 2 != 0:
        raise ArgumentError(
            f"dim is {dim} of {tuple(input.shape)}; it must name a dimension of even size", argument="dim"
        )
    gate, up = input.to(compute_dtype(input.dtype)).chunk(2, dim)
    return (silu(gate) * up).to(input.dtype)
