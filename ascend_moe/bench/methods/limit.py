"""The machine's limit: every row copied once, every row summed once, by each rank alone, nothing sent.

A rank copies the BS * K rows that it would send from x to one place, and sums BS * K rows of the experts'
output. No method that moves each row once and reduces it once is faster. Quantisation is not counted, and
whatever can be made beforehand is made beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_moe.bench.cases import Inputs
from ascend_moe.bench.methods.base import LIMIT, Arrived, Method
from ascend_moe.dispatchers import rows as row_ops
from ascend_moe.errors import ArgumentError
from ascend_moe.native import library

_LANES = 16  # of the weighted sum


def pointers(rows: Tensor, index: Tensor) -> Tensor:
    """(n,) int64 addresses of the rows ``index`` (int64) of a contiguous (m, H) tensor."""
    return torch.mul(index, rows.size(1) * rows.element_size()).add_(rows.data_ptr())


def row_copy(to: Tensor, addresses: Tensor, way: int) -> Callable[[], None]:
    """Copies the rows at ``addresses`` (n,) to the first n rows of ``to``; ``way``: of am_bench_copy_rows."""
    size = to.size(1) * to.element_size()
    arguments = (to.data_ptr(), addresses.data_ptr(), addresses.numel(), size, way)
    return functools.partial(_call, library.lib().am_bench_copy_rows, arguments, (to, addresses))


def weighted_sum(out: Tensor, addresses: Tensor, weights: Tensor) -> Callable[[], None]:
    """out (BS, H): fp32 sums over ascending k of the rows at ``addresses`` (BS * K) times weights (BS, K)."""
    if out.size(1) % _LANES:
        raise ArgumentError(f"hidden is {out.size(1)}; need a multiple of {_LANES}", argument="hidden")
    places = (out.data_ptr(), addresses.data_ptr(), weights.data_ptr())
    type_code = library.lib().am_type_code(str(out.dtype).removeprefix("torch.").encode())
    arguments = (*places, *weights.shape, out.size(1), type_code)
    return functools.partial(_call, library.lib().am_bench_weighted_sum, arguments, (out, addresses, weights))


def _call(function: Callable[..., int], arguments: tuple[int, ...], alive: tuple[Tensor, ...]) -> None:
    """``alive``: the tensors that the arguments point to."""
    if function(*arguments):
        raise ArgumentError("the benchmark's copy or sum refused its arguments", argument="methods")


class _Limit(Method):
    kind = LIMIT
    way: int

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        case, pairs = self.case, self.case.batch * self.case.topk
        self._to = torch.empty(pairs, case.hidden, dtype=torch.int8 if case.quant_mode else case.torch_dtype)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._token_of = torch.arange(pairs) // case.topk  # token by token: the source row stays in L1
        #: by inputs: the copy, the sum, what dispatch returns, and the rows, whose memory the copy reads
        self._ready: dict[int, tuple[Callable[[], None], Callable[[], None], Arrived, Tensor]] = {}

    def ready(self, inputs: Inputs) -> None:
        if id(inputs) in self._ready:
            return
        source, scales = row_ops.quantise(inputs.x) if self.case.quant_mode else (inputs.x, None)
        if scales is not None:
            scales = scales.index_select(0, self._token_of)
        rows = pointers(self.rows_out, torch.arange(self._token_of.numel()))
        self._ready[id(inputs)] = (
            row_copy(self._to, pointers(source, self._token_of), self.way),
            weighted_sum(self._out, rows, inputs.expert_scales),
            Arrived(self._to, scales, torch.empty(0), experts=inputs.expert_ids.reshape(-1)),
            source,
        )

    def dispatch(self, inputs: Inputs) -> Arrived:
        copy, _, arrived, _ = self._ready[id(inputs)]
        copy()
        return arrived

    def combine(self, rows: Tensor, inputs: Inputs, arrived: Arrived) -> Tensor:
        self._ready[id(inputs)][1]()
        return self._out


class LimitMemcpy(_Limit):
    name, way = "limit-memcpy", 0


class LimitStream(_Limit):
    name, way = "limit-nontemporal", 1


class LimitThroughUb(_Limit):
    name, way = "limit-ub", 2
