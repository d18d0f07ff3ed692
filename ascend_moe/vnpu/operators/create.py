"""Filling, copying, ranges, triangles."""

from __future__ import annotations

import torch

from ascend_moe.vnpu.operators.registry import effect, in_place, returns

Number = int | float


@effect("aclnnInplaceCopy", "aclnnInplaceFillTensor")
def _copy(self: torch.Tensor, source: torch.Tensor) -> None:
    self.copy_(source)


@returns("aclnnCast")
def _cast(self: torch.Tensor, dtype: int) -> torch.Tensor:
    return self  # writing the result converts it


@effect("aclnnInplaceZero")
def _zero(self: torch.Tensor) -> None:
    self.zero_()


@effect("aclnnInplaceOne")
def _one(self: torch.Tensor) -> None:
    self.fill_(1)


@effect("aclnnInplaceFillScalar")
def _fill(self: torch.Tensor, value: Number) -> None:
    self.fill_(value)


@effect("aclnnInplaceFillDiagonal")
def _fill_diagonal(self: torch.Tensor, value: Number, wrap: int) -> None:
    self.fill_diagonal_(value, bool(wrap))


@effect("aclnnArange")
def _arange(start: Number, end: Number, step: Number, out: torch.Tensor) -> None:
    values = torch.arange(start, end, step, dtype=out.dtype)
    if values.shape != out.shape:
        raise ValueError(f"arange has {len(values)} values, but the output given is {tuple(out.shape)}")
    out.copy_(values)


@effect("aclnnRange")
def _range(start: Number, end: Number, step: Number, out: torch.Tensor) -> None:
    # end is included, and already in out's size
    out.copy_(start + step * torch.arange(out.numel(), dtype=out.dtype))


@effect("aclnnLinspace")
def _linspace(start: Number, end: Number, steps: int, out: torch.Tensor) -> None:
    out.copy_(torch.linspace(start, end, steps, dtype=out.dtype))


@effect("aclnnEye")
def _eye(rows: int, columns: int, out: torch.Tensor) -> None:
    out.copy_(torch.eye(rows, columns, dtype=out.dtype))


@returns("aclnnTril")
@in_place("aclnnInplaceTril")
def _tril(self: torch.Tensor, diagonal: int) -> torch.Tensor:
    return torch.tril(self, diagonal)


@returns("aclnnTriu")
@in_place("aclnnInplaceTriu")
def _triu(self: torch.Tensor, diagonal: int) -> torch.Tensor:
    return torch.triu(self, diagonal)
