"""Sums, extremes, scans, softmax, sorting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_moe.vnpu.operators.registry import DTYPES, effect, resized, returns

Pair = tuple[torch.Tensor, torch.Tensor]


def _dims(self: torch.Tensor, dims: list[int] | None) -> list[int]:
    """The dimensions to reduce; none given are all."""
    return dims or list(range(self.dim()))


@returns("aclnnReduceSum")
def _sum(self: torch.Tensor, dims: list[int] | None, keep: int, dtype: int) -> torch.Tensor:
    return torch.sum(self, _dims(self, dims), bool(keep), dtype=DTYPES[dtype])


@returns("aclnnMean")
def _mean(self: torch.Tensor, dims: list[int] | None, keep: int, dtype: int) -> torch.Tensor:
    return torch.mean(self, _dims(self, dims), bool(keep), dtype=DTYPES[dtype])


@returns("aclnnProd")
def _prod(self: torch.Tensor, dtype: int) -> torch.Tensor:
    return torch.prod(self, dtype=DTYPES[dtype])


@returns("aclnnProdDim")
def _prod_dim(self: torch.Tensor, dim: int, keep: int, dtype: int) -> torch.Tensor:
    return torch.prod(self, dim, bool(keep), dtype=DTYPES[dtype])


returns("aclnnMax")(torch.max)
returns("aclnnMin")(torch.min)
returns("aclnnMedian")(torch.median)


@returns("aclnnMaxDim", outputs=2)
def _max_dim(self: torch.Tensor, dim: int, keep: int) -> Pair:
    values, indices = torch.max(self, dim, bool(keep))
    return values, indices


@returns("aclnnMinDim", outputs=2)
def _min_dim(self: torch.Tensor, dim: int, keep: int) -> Pair:
    values, indices = torch.min(self, dim, bool(keep))
    return values, indices


@returns("aclnnAmax")
def _amax(self: torch.Tensor, dims: list[int] | None, keep: int) -> torch.Tensor:
    return torch.amax(self, _dims(self, dims), bool(keep))


@returns("aclnnAmin")
def _amin(self: torch.Tensor, dims: list[int] | None, keep: int) -> torch.Tensor:
    return torch.amin(self, _dims(self, dims), bool(keep))


@returns("aclnnArgMax")
def _argmax(self: torch.Tensor, dim: int, keep: int) -> torch.Tensor:
    return torch.argmax(self, dim, bool(keep))


@returns("aclnnArgMin")
def _argmin(self: torch.Tensor, dim: int, keep: int) -> torch.Tensor:
    return torch.argmin(self, dim, bool(keep))


@returns("aclnnAminmax", outputs=2)
def _aminmax_dims(self: torch.Tensor, dims: list[int] | None, keep: int) -> Pair:
    return _amin(self, dims, keep), _amax(self, dims, keep)


def _truth(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(self: torch.Tensor, dims: list[int] | None, keep: int) -> torch.Tensor:
        if self.dim() == 0:
            return self != 0
        return reduce(self, tuple(_dims(self, dims)), bool(keep))

    return run


returns("aclnnAll")(_truth(torch.all))
returns("aclnnAny")(_truth(torch.any))


@returns("aclnnStd")
def _std(self: torch.Tensor, dims: list[int] | None, correction: int, keep: int) -> torch.Tensor:
    return torch.std(self, _dims(self, dims), correction=correction, keepdim=bool(keep))


@returns("aclnnVarCorrection")
def _var(self: torch.Tensor, dims: list[int] | None, correction: int, keep: int) -> torch.Tensor:
    return torch.var(self, _dims(self, dims), correction=correction, keepdim=bool(keep))


@returns("aclnnVarMean", outputs=2)
def _var_mean(self: torch.Tensor, dims: list[int] | None, correction: int, keep: int) -> Pair:
    var, mean = torch.var_mean(self, _dims(self, dims), correction=correction, keepdim=bool(keep))
    return var, mean


@returns("aclnnLinalgVectorNorm")
def _norm(self: torch.Tensor, order: float, dims: list[int] | None, keep: int, dtype: int) -> torch.Tensor:
    wanted = DTYPES.get(dtype)  # none: the type of self
    norm: torch.Tensor = torch.linalg.vector_norm(self, order, _dims(self, dims), bool(keep), dtype=wanted)
    return norm


@returns("aclnnLogSumExp")
def _logsumexp(self: torch.Tensor, dims: list[int] | None, keep: int) -> torch.Tensor:
    return torch.logsumexp(self, _dims(self, dims), bool(keep))


@returns("aclnnCumsum")
def _cumsum(self: torch.Tensor, dim: int, dtype: int) -> torch.Tensor:
    return torch.cumsum(self, dim, dtype=DTYPES[dtype])


@returns("aclnnCumprod")
def _cumprod(self: torch.Tensor, dim: int, dtype: int) -> torch.Tensor:
    return torch.cumprod(self, dim, dtype=DTYPES[dtype])


@effect("aclnnSoftmax")
def _softmax(self: torch.Tensor, dim: int, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(self, dim, dtype=out.dtype))


@effect("aclnnLogSoftmax")
def _log_softmax(self: torch.Tensor, dim: int, out: torch.Tensor) -> None:
    out.copy_(torch.log_softmax(self, dim, dtype=out.dtype))


@returns("aclnnSoftmaxBackward")
def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._softmax_backward_data(grad, output, dim, grad.dtype)
    return result


@returns("aclnnLogSoftmaxBackward")
def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._log_softmax_backward_data(grad, output, dim, grad.dtype)
    return result


@returns("aclnnTopk", outputs=2)
def _topk(self: torch.Tensor, k: int, dim: int, largest: int, ordered: int) -> Pair:
    values, indices = torch.topk(self, k, dim, bool(largest), bool(ordered))
    return values, indices


@returns("aclnnSort", outputs=2)
def _sort(self: torch.Tensor, stable: int, dim: int, descending: int) -> Pair:
    values, indices = torch.sort(self, stable=bool(stable), dim=dim, descending=bool(descending))
    return values, indices


@returns("aclnnKthvalue", outputs=2)
def _kthvalue(self: torch.Tensor, k: int, dim: int, keep: int) -> Pair:
    values, indices = torch.kthvalue(self, k, dim, bool(keep))
    return values, indices


@returns("aclnnMedianDim", outputs=2)
def _median_dim(self: torch.Tensor, dim: int, keep: int) -> Pair:
    values, indices = torch.median(self, dim, bool(keep))
    return values, indices


@resized("aclnnUnique2", outputs=3)
def _unique(
    self: torch.Tensor, ordered: int, inverse: int, counts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, places, numbers = torch.unique(self, sorted=True, return_inverse=True, return_counts=True)
    return values, places, numbers


@returns("aclnnSearchSorted")
def _search_sorted(
    sequence: torch.Tensor, self: torch.Tensor, narrow: int, right: int, sorter: torch.Tensor | None
) -> torch.Tensor:
    return torch.searchsorted(sequence, self, right=bool(right), sorter=sorter)
