"""Operators that make, move, select, reduce or multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from vnpu_operator_cases import FLOATS, INTEGERS, VIEWS, Case, Tensor, name_of, values, viewed


def shape_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        x, y = values(dtype, 4, 10), values(dtype, 4, 10, seed=1)
        for view, take in VIEWS.items():
            for name, run in _reductions(view, dtype).items():
                yield Case(f"{name}-{view}-{name_of(dtype)}", partial(viewed, run, take), (x,))
        for name, run in _PLACED.items():
            yield Case(f"{name}-{name_of(dtype)}", run, (x, y, torch.tensor([2, 0, 1, 1])))
        # Half sums are accumulated in another order than the CPU's own kernel does.
        for name, run in _PRODUCTS.items():
            yield Case(f"{name}-{name_of(dtype)}", run, (x, y), exact=dtype == torch.float32)


def _reductions(view: str, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Any]]:
    anywhere: dict[str, Callable[[Tensor], Any]] = {
        "sum": lambda a: a.sum(),
        "mean": lambda a: a.mean(),
        "mean-last": lambda a: a.mean(-1, keepdim=True),
        "sum-last": lambda a: a.sum(-1),
        "any": lambda a: (a > 0).any(),
        "all": lambda a: (a > 0).all(),
        "softmax": lambda a: a.softmax(-1),
        "softmax-float": lambda a: torch.softmax(a, -1, dtype=torch.float32),
        "log_softmax": lambda a: a.log_softmax(-1),
        "cumsum": lambda a: a.cumsum(-1),
        "to-int": lambda a: a.to(torch.int32),
        "to-bool": lambda a: a.bool(),
        "to-bf16": lambda a: a.to(torch.bfloat16),
        "to-fp32": lambda a: a.float(),
        "contiguous": lambda a: a.contiguous(),
        "nonzero": lambda a: (a > 0).nonzero(),
        "masked_fill": lambda a: a.masked_fill(a > 0, -1.0),
        "masked_select": lambda a: a.masked_select(a > 0),
        "full_like": lambda a: torch.full_like(a, 3),
        "fill_": lambda a: a.clone().fill_(2),
    }
    if view in ("empty", "scalar"):
        return anywhere
    return anywhere | {
        "max": torch.max,
        "min": torch.min,
        "max-dim": lambda a: a.max(1),
        "min-dim": lambda a: a.min(0),
        "amax": lambda a: a.amax(-1, keepdim=True),
        "amin": lambda a: a.amin((0, 1)),
        "aminmax": lambda a: torch.aminmax(a),
        "argmax": lambda a: a.argmax(-1),
        "argmin": lambda a: a.argmin(),
        "var": lambda a: a.var(-1),
        "norm": lambda a: a.norm(),
        "logsumexp": lambda a: a.logsumexp(-1),
        "prod": lambda a: a.prod(-1),
        "topk": lambda a: a.topk(2),
        "topk-smallest": lambda a: a.topk(2, dim=0, largest=False),
        "sort": lambda a: a.sort(stable=True),
        "sort-descending": lambda a: a.sort(dim=0, descending=True, stable=True),
        "argsort": lambda a: a.argsort(stable=True),
        "unique": lambda a: torch.unique(a),
        "count_nonzero": lambda a: (a > 0).count_nonzero(),
        "mask-index": lambda a: a[a > 0],
        "layer_norm": lambda a: functional.layer_norm(a, a.shape[-1:]),
    }


def _set(t: Tensor, where: Any, value: Any) -> Tensor:
    t = t.clone()
    t[where] = value
    return t


def _columns(i: Tensor) -> Tensor:
    return torch.stack([i, i + 1], 1)


_PLACED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "index-rows": lambda x, y, i: x[i],
    "index-pairs": lambda x, y, i: x[i, i + 1],
    "index-columns": lambda x, y, i: x[:, i],
    "index-int32": lambda x, y, i: x[i.int()],
    "index-none": lambda x, y, i: x[i[:0]],
    "index_select": lambda x, y, i: x.index_select(0, i),
    "index-put": lambda x, y, i: _set(x, i[:2], 1.5),
    "index-put-mask": lambda x, y, i: _set(x, x > 0, 9.0),
    "index-put-slice": lambda x, y, i: _set(x, (slice(1, 3), slice(2, 6)), 7.0),
    "index-put-add": lambda x, y, i: x.clone().index_put_((i,), y, accumulate=True),
    "index-copy": lambda x, y, i: x.clone().index_copy_(0, i[:3], y[:3]),
    "index-add": lambda x, y, i: x.clone().index_add_(0, i, y),
    "index-fill": lambda x, y, i: x.index_fill(0, i, 3.0),
    "gather": lambda x, y, i: x.gather(1, _columns(i)),
    "scatter": lambda x, y, i: x.scatter(1, _columns(i), y[:, :2]),
    "scatter-value_": lambda x, y, i: x.clone().scatter_(1, _columns(i), 2.0),
    "scatter-add": lambda x, y, i: x.clone().scatter_add_(1, _columns(i), y[:, :2]),
    "embedding": lambda x, y, i: functional.embedding(i, x),
    "cat": lambda x, y, i: torch.cat([x, y.t().contiguous().t(), x[:0]]),
    "cat-columns": lambda x, y, i: torch.cat([x, y[:, ::2], x[:, :0]], 1),
    "stack": lambda x, y, i: torch.stack([x, y], 1),
    "flip": lambda x, y, i: x.flip(0),
    "roll": lambda x, y, i: x.roll(1, 0),
    "repeat": lambda x, y, i: x.repeat(2, 3),
    "repeat_interleave": lambda x, y, i: x.repeat_interleave(2, 0),
    "repeat_interleave-counts": lambda x, y, i: x.repeat_interleave(i, 0),
    "tril": lambda x, y, i: torch.tril(x),
    "triu_": lambda x, y, i: x.clone().triu_(1),
    "expand": lambda x, y, i: x[:1].expand(4, 10).contiguous(),
    "permute": lambda x, y, i: x.reshape(2, 2, 10).permute(2, 0, 1).contiguous(),
    "split": lambda x, y, i: x.split(5, 1)[1] * 2,
    "copy-broadcast": lambda x, y, i: torch.zeros_like(x).copy_(y[0]),
    "copy-cast": lambda x, y, i: torch.zeros_like(x, dtype=torch.float32).copy_(y),
    "searchsorted": lambda x, y, i: torch.searchsorted(x.sort(-1).values, y),
    "histc": lambda x, y, i: torch.histc(x.float(), 5, -2, 2),
}

_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "matmul": lambda x, y: x @ y.t(),
    "mm": lambda x, y: torch.mm(x.t(), y),
    "bmm": lambda x, y: torch.bmm(x.reshape(2, 2, 10), y.reshape(2, 10, 2)),
    "matmul-3d": lambda x, y: torch.matmul(x.reshape(2, 2, 10), y.t()),
    "linear": lambda x, y: functional.linear(x, y),
    "linear-bias": lambda x, y: functional.linear(x, y, x[:, 0]),
    "addmm": lambda x, y: torch.addmm(x[:, :4], x, y.t(), beta=0.5, alpha=2),
    "baddbmm": lambda x, y: torch.baddbmm(
        x[:, :4].reshape(2, 2, 4), x.reshape(2, 2, 10), y.t().expand(2, 10, 4)
    ),
    "mv": lambda x, y: torch.mv(x, y[0]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "einsum": lambda x, y: torch.einsum("th,eh->te", x, y),
    "matmul-empty": lambda x, y: x[:0] @ y.t(),
    "matmul-no-columns": lambda x, y: x[:, :0] @ y[:, :0].t(),
    "rms_norm": lambda x, y: functional.rms_norm(x, (10,), y[0]),
}


def made_cases() -> Iterator[Case]:
    for name, run in {
        "arange": lambda x: torch.arange(7, device=x.device),
        "arange-step": lambda x: torch.arange(1, 9, 2, dtype=torch.int32, device=x.device),
        "arange-float": lambda x: torch.arange(0, 1, 0.25, device=x.device),
        "linspace": lambda x: torch.linspace(0, 1, 5, device=x.device),
        "eye": lambda x: torch.eye(4, device=x.device),
        "zeros-int8": lambda x: torch.zeros(3, dtype=torch.int8, device=x.device),
        "ones-bool": lambda x: torch.ones(3, dtype=torch.bool, device=x.device),
        "full-int64": lambda x: torch.full((3,), -1, dtype=torch.int64, device=x.device),
        "full-bf16": lambda x: torch.full((2, 3), 1.5, dtype=torch.bfloat16, device=x.device),
        "tensor": lambda x: torch.tensor([[1, 2], [3, 4]], device=x.device),
        "new_zeros": lambda x: x.new_zeros(0, 3),
    }.items():
        yield Case(name, run, (values(torch.float32, 2, 2),))


def integer_cases() -> Iterator[Case]:
    for dtype in (*INTEGERS, torch.bool):
        x, y = values(dtype, 4, 10), values(dtype, 4, 10, seed=1)
        for name, run in _LOGIC.items():
            yield Case(f"{name}-{name_of(dtype)}", run, (x, y))
        if dtype == torch.bool:
            continue
        for name, run in _COUNTED.items():
            yield Case(f"{name}-{name_of(dtype)}", run, (x, y))


_LOGIC: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "bitwise_not": lambda x, y: ~x,
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_and-one": lambda x, y: x & 1,
    "bitwise_and_": lambda x, y: x.clone().__iand__(y),
    "bitwise_or_": lambda x, y: x.clone().__ior__(y),
    "logical_not": lambda x, y: torch.logical_not(x),
    "logical_and": lambda x, y: torch.logical_and(x, y),
    "logical_or": lambda x, y: torch.logical_or(x, y),
    "logical_xor": lambda x, y: torch.logical_xor(x, y),
    "integer-any": lambda x, y: x.any(1),
    "integer-all": lambda x, y: x.all(),
    "integer-sum": lambda x, y: x.sum(),
    "integer-sum-rows": lambda x, y: x.sum(0),
    "integer-cumsum": lambda x, y: x.cumsum(0),
    "integer-eq": lambda x, y: x == y,
    "integer-where": lambda x, y: torch.where(x > 0, x, y),
    "integer-cat": lambda x, y: torch.cat([x, y[:, ::2]], 1),
    "integer-index": lambda x, y: x[[0, 2]],
    "integer-contiguous": lambda x, y: x.t().contiguous(),
    "integer-to-half": lambda x, y: x.half(),
    "integer-nonzero": lambda x, y: x.nonzero(),
}

_COUNTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "integer-mul": lambda x, y: x * y,
    "integer-add-float": lambda x, y: x + 0.5,
    "integer-floordiv": lambda x, y: x // 3,
    "integer-mod": lambda x, y: x % 3,
    "integer-truediv": lambda x, y: x / 2,
    "integer-max": lambda x, y: x.max(),
    "integer-amax": lambda x, y: x.amax(1),
    "integer-sort": lambda x, y: x.sort(stable=True),
    "integer-clamp": lambda x, y: x.clamp(0, 3),
    "integer-shift": lambda x, y: x.abs() << 1,
    "one_hot": lambda x, y: functional.one_hot(x.abs().long() % 7, 7),
    "bincount": lambda x, y: torch.bincount(x.abs().reshape(-1).long(), minlength=12),
    "bincount-weights": lambda x, y: torch.bincount(x.abs().reshape(-1).long(), y.reshape(-1).float()),
}
