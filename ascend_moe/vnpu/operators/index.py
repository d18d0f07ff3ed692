"""Selecting, placing, joining, repeating, counting."""

from __future__ import annotations

import torch

from ascend_moe.vnpu.operators.registry import effect, in_place, resized, returns

Number = int | float
Tensors = list[torch.Tensor]
_REDUCE = {1: "add", 2: "multiply"}


returns("aclnnSWhere")(torch.where)
resized("aclnnMaskedSelect")(torch.masked_select)


@resized("aclnnNonzero")
def _nonzero(self: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(self)


@resized("aclnnNonzeroV2")
def _nonzero_by_dim(self: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(self).t()


@effect("aclnnInplaceMaskedFillScalar", "aclnnInplaceMaskedFillTensor")
def _masked_fill(self: torch.Tensor, mask: torch.Tensor, value: Number | torch.Tensor) -> None:
    self.masked_fill_(mask.to(torch.bool), value)


def _indices(tensors: Tensors) -> list[torch.Tensor | None]:
    # torch_npu passes a dimension that is not indexed as an empty tensor.
    return [None if t.numel() == 0 else t if t.dtype == torch.bool else t.long() for t in tensors]


@effect("aclnnIndex")
def _index(self: torch.Tensor, indices: Tensors, out: torch.Tensor) -> None:
    if out.numel() == 0:
        return  # an index may be empty itself
    out.copy_(torch.ops.aten.index(self, _indices(indices)))


@effect("aclnnIndexPutImpl")
def _index_put(
    self: torch.Tensor, indices: Tensors, values: torch.Tensor, accumulate: int, unsafe: int
) -> None:
    given = _indices(indices)
    if any(index is not None for index in given):
        torch.ops.aten.index_put_(self, given, values, bool(accumulate))


@returns("aclnnIndexSelect")
def _index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return torch.index_select(self, dim, index)


@returns("aclnnIndexAdd")
def _index_add(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: Number
) -> torch.Tensor:
    return torch.index_add(self, dim, index, source, alpha=alpha)


@effect("aclnnInplaceIndexCopy")
def _index_copy(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> None:
    self.index_copy_(dim, index.long(), source)


@returns("aclnnIndexFill")
@in_place("aclnnInplaceIndexFill")
def _index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: Number) -> torch.Tensor:
    return self.index_fill(dim, index.long(), value)


@returns("aclnnGather")
def _gather(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return torch.gather(self, dim, index.long())


@returns("aclnnTake")
def _take(self: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.take(self, index.long())


@returns("aclnnScatter", "aclnnScatterValue")
@in_place("aclnnInplaceScatter", "aclnnInplaceScatterValue")
def _scatter(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: Number | torch.Tensor, reduce: int
) -> torch.Tensor:
    if reduce == 0:
        return torch.scatter(self, dim, index.long(), source)
    return torch.scatter(self, dim, index.long(), source, reduce=_REDUCE[reduce])


@returns("aclnnScatterAdd")
def _scatter_add(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.scatter_add(self, dim, index.long(), source)


@returns("aclnnEmbedding")
def _embedding(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(indices.long(), weight)


@returns("aclnnEmbeddingDenseBackward")
def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, padding: int, scale_by_frequency: int
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad, indices.long(), rows, padding, bool(scale_by_frequency)
    )
    return result


returns("aclnnCat")(torch.cat)
returns("aclnnStack")(torch.stack)
returns("aclnnFlip")(torch.flip)
returns("aclnnRoll")(torch.roll)


@returns("aclnnRepeat")
def _repeat(self: torch.Tensor, repeats: list[int]) -> torch.Tensor:
    return self.repeat(repeats)


@returns("aclnnRepeatInterleave", "aclnnRepeatInterleaveInt")
def _repeat_interleave(self: torch.Tensor, repeats: int | torch.Tensor, size: int) -> torch.Tensor:
    return torch.repeat_interleave(self, repeats)


@returns("aclnnRepeatInterleaveWithDim", "aclnnRepeatInterleaveIntWithDim")
def _repeat_interleave_dim(
    self: torch.Tensor, repeats: int | torch.Tensor, dim: int, size: int
) -> torch.Tensor:
    return torch.repeat_interleave(self, repeats, dim)


@returns("aclnnRepeatInterleaveTensor")
def _repeat_interleave_counts(repeats: torch.Tensor, size: int) -> torch.Tensor:
    return torch.repeat_interleave(repeats)


@returns("aclnnOneHot")
def _one_hot(
    self: torch.Tensor, classes: int, on: torch.Tensor, off: torch.Tensor, axis: int
) -> torch.Tensor:
    hot = self.unsqueeze(-1) == torch.arange(classes)
    return torch.where(hot, on, off).movedim(-1, axis)


@returns("aclnnBincount")
def _bincount(self: torch.Tensor, weights: torch.Tensor | None, least: int) -> torch.Tensor:
    return torch.bincount(self, weights, least)


@returns("aclnnHistc")
def _histc(self: torch.Tensor, bins: int, low: Number, high: Number) -> torch.Tensor:
    values = self if self.dtype in (torch.float32, torch.float64) else self.double()
    return torch.histc(values, bins, low, high)
