"""Matrix products and norms. Half types are summed in float32 and rounded once, as a cube unit does."""

from __future__ import annotations

import torch

from ascend_moe._torch_npu import compute_dtype
from ascend_moe.experts.grouped_matmul import float_matmul
from ascend_moe.vnpu.operators.registry import effect, returns

Number = int | float


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return float_matmul(left, right, None) if left.is_floating_point() else torch.matmul(left, right)


@returns("aclnnDot")
def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _multiply(left, right)


@effect("aclnnMatmul", "aclnnMm", "aclnnBatchMatMul", "aclnnMv")
def _matmul(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, cube_math: int) -> None:
    out.copy_(_multiply(left, right))


def _scaled_sum(
    self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: Number, alpha: Number
) -> torch.Tensor:
    """``beta * self + alpha * left @ right``; with beta 0 self is not looked at, as in torch."""
    wide = compute_dtype(left.dtype) if left.is_floating_point() else left.dtype
    given = self.to(wide), left.to(wide), right.to(wide)
    if right.dim() == 3:
        return torch.baddbmm(*given, beta=beta, alpha=alpha)
    if right.dim() == 2:
        return torch.addmm(*given, beta=beta, alpha=alpha)
    return torch.addmv(*given, beta=beta, alpha=alpha)


@effect("aclnnAddmm", "aclnnBaddbmm")
def _addmm(
    self: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    beta: Number,
    alpha: Number,
    out: torch.Tensor,
    cube_math: int,
) -> None:
    out.copy_(_scaled_sum(self, left, right, beta, alpha))


@effect("aclnnInplaceAddmm")
def _addmm_(
    self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: Number, alpha: Number, cube_math: int
) -> None:
    self.copy_(_scaled_sum(self, left, right, beta, alpha))


@effect("aclnnAddmv")
def _addmv(
    self: torch.Tensor,
    matrix: torch.Tensor,
    vector: torch.Tensor,
    alpha: Number,
    beta: Number,
    out: torch.Tensor,
    cube_math: int,
) -> None:
    out.copy_(_scaled_sum(self, matrix, vector, beta, alpha))


@effect("aclnnRmsNorm")
def _rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float, y: torch.Tensor, rstd: torch.Tensor
) -> None:
    wide = x.float()
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    factor = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    y.copy_(wide * factor * gamma.float())
    rstd.copy_(factor.reshape(rstd.shape))


@effect("aclnnAddRmsNorm")
def _add_rms_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    y: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
) -> None:
    total = x1.float() + x2.float()
    x.copy_(total)
    _rms_norm(total, gamma, epsilon, y, rstd)


@effect("aclnnLayerNorm")
def _layer_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
) -> None:
    value, centre, factor = torch.native_layer_norm(x, shape, weight, bias, epsilon)
    y.copy_(value)
    for out, statistic in ((mean, centre), (rstd, factor)):
        if out is not None:
            out.copy_(statistic.reshape(out.shape))
