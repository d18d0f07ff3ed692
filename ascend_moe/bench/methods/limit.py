"""The machine's limit: every row copied once, every row summed once, by each rank alone, nothing sent.

A rank copies the BS * K rows that it would send from x to one place, and sums BS * K rows of the experts'
output. Nothing that moves each row once and reduces it once is faster. Quantisation is not counted, and
everything that can be made beforehand is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.bench import native
from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import LIMIT, Arrived, Method, Place
from ascend_moe.dispatchers import rows as row_ops


@dataclass
class _Ready:
    """Of one entry: the two calls, and what ``dispatch`` returns. ``source`` keeps the rows' memory alive."""

    copy: Callable[[], None]
    sum: Callable[[], None]
    arrived: Arrived
    source: Tensor


class _Limit(Method):
    kind = LIMIT
    copy: str

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        super().__init__(case, place, most_rows, rows_out)
        pairs = case.batch * case.topk
        self._to = torch.empty(pairs, case.hidden, dtype=torch.int8 if case.quant_mode else case.torch_dtype)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._token_of = torch.arange(pairs) // case.topk  # token by token: the source row stays in L1
        self._ready: dict[int, _Ready] = {}

    def ready(self, one: Inputs) -> None:
        if id(one) in self._ready:
            return
        source, scales = row_ops.quantise(one.x) if self.case.quant_mode else (one.x, None)
        if scales is not None:
            scales = scales.index_select(0, self._token_of)
        rows = native.pointers(self.rows_out, torch.arange(self._token_of.numel()))
        arrived = Arrived(self._to, scales, torch.empty(0), experts=one.expert_ids.reshape(-1))
        self._ready[id(one)] = _Ready(
            native.row_copy(self._to, native.pointers(source, self._token_of), self.copy),
            native.weighted_sum(self._out, rows, one.expert_scales),
            arrived,
            source,
        )

    def dispatch(self, one: Inputs) -> Arrived:
        ready = self._ready[id(one)]
        ready.copy()
        return ready.arrived

    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        self._ready[id(one)].sum()
        return self._out


class LimitMemcpy(_Limit):
    name = "limit-memcpy"
    copy = "memcpy"


class LimitStream(_Limit):
    name = "limit-nontemporal"
    copy = "stream"


class LimitThroughUb(_Limit):
    name = "limit-ub"
    copy = "through UB"
