"""The machine's limit: every row copied once, every row summed once, by each rank alone, nothing sent.

A rank copies the BS * K rows that it would send from x to one place, and sums BS * K rows of the experts'
output. Nothing that moves each row once and reduces it once is faster. Quantisation is not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_moe.bench import native
from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import LIMIT, Arrived, Method, Place
from ascend_moe.dispatchers import rows as row_ops


class _Limit(Method):
    kind = LIMIT
    copy: str

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        super().__init__(case, place, most_rows, rows_out)
        pairs = case.batch * case.topk
        item = torch.int8 if case.quant_mode else case.torch_dtype
        self._to = torch.empty(pairs, case.hidden, dtype=item)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._token_of = torch.arange(pairs) // case.topk  # token by token: the source row stays in L1
        self._places = torch.arange(pairs)
        self._ready: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}

    def ready(self, one: Inputs) -> None:
        """Makes the addresses (and codes) of an entry beforehand: no part of the limit."""
        if id(one) in self._ready:
            return
        codes, scales = row_ops.quantise(one.x) if self.case.quant_mode else (one.x, None)
        if scales is not None:
            scales = scales.index_select(0, self._token_of)
        self._ready[id(one)] = (codes, native.pointers(codes, self._token_of), scales)

    def dispatch(self, one: Inputs) -> Arrived:
        _, addresses, scales = self._ready[id(one)]
        native.copy_rows(self._to, addresses, self.copy)
        return Arrived(self._to, scales, torch.empty(0), experts=one.expert_ids.reshape(-1))

    def expert_output(self, arrived: Arrived) -> Tensor:
        return self.rows_out

    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        native.weighted_sum(self._out, native.pointers(rows, self._places), one.expert_scales)
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
