"""All-to-all as well as it can be done over a library: nothing allocated, one index_select each way.

Rows are packed and reordered by index_select(out=) into tensors made beforehand, and the rows that come
back are summed where they lie by the same C++ loop as the limit's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.bench import native
from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import Arrived, Method, Place
from ascend_moe.bench.methods.transports import Gloo, Mpi
from ascend_moe.dispatchers import rows as row_ops


@dataclass
class _Way:
    """``order``: flat pairs in sending order; ``to_expert_major[i]``: where row i of expand_x arrived."""

    order: Tensor
    to_expert_major: Tensor
    sent: list[int]
    received: list[int]


class _Tuned(Method):
    transport: type[Gloo] | type[Mpi]
    tuned_for_table = True

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        super().__init__(case, place, most_rows, rows_out)
        self._link = self.transport(place)
        pairs, item = case.batch * case.topk, case.torch_dtype.itemsize
        quant = bool(case.quant_mode)
        self._row_words = case.hidden // 4 if quant else case.hidden * item // 4
        sent_words = self._row_words + int(quant)  # int8 rows have their scale behind them
        back_words = case.hidden * item // 4

        def words(rows: int, width: int) -> Tensor:
            return torch.empty(rows, width, dtype=torch.int32)

        self._send, self._receive = words(pairs, sent_words), words(most_rows, sent_words)
        self._rows = words(most_rows, self._row_words)
        self._scales = words(most_rows, 1)
        self._give_back, self._got_back = words(most_rows, back_words), words(pairs, back_words)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._table = torch.empty(case.experts, dtype=torch.int32)
        self._places, self._place_of = (
            torch.arange(max(pairs, most_rows)),
            torch.empty(pairs, dtype=torch.int64),
        )

    def dispatch(self, one: Inputs) -> Arrived:
        case, world = self.case, self.place.world
        ids = one.expert_ids.view(-1)
        order = torch.sort(ids, stable=True).indices
        given = torch.bincount(ids, minlength=case.experts)
        self._link.counts(self._table, given.to(torch.int32))
        table = self._table.view(world, case.local_experts).to(torch.int64)
        sent, received = given.view(world, -1).sum(1).tolist(), table.sum(1).tolist()
        count = sum(received)
        words = row_ops.payload(one.x, one.expert_ids, None, None, case.quant_mode)
        torch.index_select(words, 0, order // case.topk, out=self._send)
        self._link.rows(self._receive[:count], self._send, received, sent)
        source = _expert_major(table)
        rows = self._rows[:count]
        torch.index_select(self._receive[:, : self._row_words], 0, source, out=rows)
        scales = None
        if case.quant_mode:
            picked = torch.index_select(
                self._receive[:, self._row_words :], 0, source, out=self._scales[:count]
            )
            scales = picked.view(torch.float32).view(-1)
        expand_x = rows.view(torch.int8 if case.quant_mode else case.torch_dtype)
        return Arrived(expand_x, scales, table.sum(0), _Way(order, source, sent, received))

    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        way: _Way = arrived.handle
        count, pairs = sum(way.received), way.order.numel()
        arrival = torch.empty_like(way.to_expert_major)
        arrival[way.to_expert_major] = self._places[:count]
        torch.index_select(rows.view(torch.int32), 0, arrival, out=self._give_back[:count])
        self._link.rows(self._got_back, self._give_back[:count], way.sent, way.received)
        self._place_of[way.order] = self._places[:pairs]
        rows_of_token = native.pointers(self._got_back, self._place_of)
        native.weighted_sum(self._out, rows_of_token, one.expert_scales)()
        return self._out


def _expert_major(table: Tensor) -> Tensor:
    """Row i of expand_x arrived at this place; ``table`` (W, L) rows from source s for local expert l."""
    arrival = table.reshape(-1)
    starts = (arrival.cumsum(0) - arrival).view_as(table)
    return row_ops.segments(table.t().reshape(-1), starts.t().reshape(-1))


class GlooAllToAllTuned(_Tuned):
    name = "gloo-a2a-tuned"
    transport = Gloo


class MpiAllToAllTuned(_Tuned):
    name = "mpi-a2a-tuned"
    transport = Mpi

    @classmethod
    def missing(cls, place: Place) -> str:
        return "" if place.mpi is not None else "the ranks run without MPI"
