"""All-to-all as frameworks write it in plain torch: sort, permute, exchange, reorder, and the same way back.

Fresh tensors everywhere, chunks reordered by split and cat, the sum by index_add in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import Arrived, Method, Place
from ascend_moe.bench.methods.transports import Gloo, Mpi
from ascend_moe.dispatchers import rows as row_ops


class _AllToAll(Method):
    transport: type[Gloo] | type[Mpi]

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        super().__init__(case, place, most_rows, rows_out)
        self._link = self.transport(place)

    def dispatch(self, one: Inputs) -> Arrived:
        case, world = self.case, self.place.world
        order = torch.argsort(one.expert_ids.reshape(-1), stable=True)
        permuted = row_ops.payload(one.x, one.expert_ids, order, None, case.quant_mode)
        given = torch.bincount(one.expert_ids.reshape(-1), minlength=case.experts).to(torch.int32)
        table = torch.empty_like(given)
        self._link.counts(table, given)
        sent = given.view(world, -1).sum(1).tolist()
        table = table.view(world, case.local_experts)
        received = table.sum(1).tolist()
        arrived = permuted.new_empty(sum(received), permuted.size(1))
        self._link.rows(arrived, permuted, received, sent)
        chunks = torch.split(arrived, table.reshape(-1).tolist())
        by_expert = [
            chunks[source * case.local_experts + expert]
            for expert in range(case.local_experts)
            for source in range(world)
        ]
        words = torch.cat(by_expert)
        rows, scales = row_ops.open_rows(words, case.hidden, case.torch_dtype, case.quant_mode)
        handle = (order, table, sent, received)
        return Arrived(rows, scales if case.quant_mode else None, table.sum(0), handle)

    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        order, table, sent, received = arrived.handle
        world, local = table.shape
        chunks = torch.split(rows[: sum(received)], table.t().reshape(-1).tolist())
        by_source = torch.cat(
            [chunks[expert * world + source] for source in range(world) for expert in range(local)]
        )
        words = row_ops.pack(by_source)
        back = words.new_empty(sum(sent), words.size(1))
        self._link.rows(back, words, sent, received)
        (mine,) = row_ops.unpack(back, (self.case.hidden, rows.dtype))
        weighted = mine.float() * one.expert_scales.reshape(-1)[order][:, None]
        total = torch.zeros(self.case.batch, self.case.hidden)
        total.index_add_(0, order // self.case.topk, weighted)
        return total.to(rows.dtype)


class GlooAllToAll(_AllToAll):
    name = "gloo-a2a"
    transport = Gloo


class MpiAllToAll(_AllToAll):
    name = "mpi-a2a"
    transport = Mpi

    @classmethod
    def missing(cls, place: Place) -> str:
        return "" if place.mpi is not None else "the ranks run without MPI"
