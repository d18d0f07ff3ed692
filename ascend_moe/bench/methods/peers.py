"""The peers: all-to-all over gloo or MPI, plain and tuned, and all-gather with reduce-scatter over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.bench.cases import Inputs
from ascend_moe.bench.methods.base import Arrived, Method, Place
from ascend_moe.bench.methods.limit import pointers, weighted_sum
from ascend_moe.dispatchers import rows as row_ops

Counts = Sequence[int]


class Gloo:
    """all_to_all_single of the default group."""

    def __init__(self, place: Place) -> None:
        pass

    def counts(self, out: Tensor, given: Tensor) -> None:
        """(W * L,) int32 in, the same number out: L for each rank."""
        dist.all_to_all_single(out, given)

    def rows(self, out: Tensor, given: Tensor, received: Counts, sent: Counts) -> None:
        """(n, words) int32 rows: ``sent[d]`` of them to rank d, ``received[s]`` from rank s."""
        dist.all_to_all_single(out, given, list(received), list(sent))


class Mpi:
    """Alltoall and Alltoallv, straight from and into the tensors' memory."""

    def __init__(self, place: Place) -> None:
        from mpi4py import MPI

        self._world, self._comm, self._int = place.world, place.mpi, MPI.INT32_T

    def counts(self, out: Tensor, given: Tensor) -> None:
        part = given.numel() // self._world
        self._comm.Alltoall([given.numpy(), part, self._int], [out.numpy(), part, self._int])

    def rows(self, out: Tensor, given: Tensor, received: Counts, sent: Counts) -> None:
        words = given.size(1)
        self._comm.Alltoallv(self._part(given, sent, words), self._part(out, received, words))

    def _part(self, rows: Tensor, counts: Counts, words: int) -> list[Any]:
        sizes = [count * words for count in counts]
        starts = [sum(sizes[:rank]) for rank in range(self._world)]
        return [rows.numpy(), (sizes, starts), self._int]


class GlooAllToAll(Method):
    """As frameworks write it in plain torch: sort, permute, exchange, reorder, and the same way back.

    Fresh tensors everywhere, chunks reordered by split and cat, the sum by index_add in fp32.
    """

    name = "gloo-a2a"
    transport: type[Gloo] | type[Mpi] = Gloo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._link = self.transport(self.place)

    def dispatch(self, inputs: Inputs) -> Arrived:
        case, world = self.case, self.place.world
        ids = inputs.expert_ids.reshape(-1)
        order = torch.argsort(ids, stable=True)
        permuted = row_ops.payload(inputs.x, inputs.expert_ids, order, None, case.quant_mode)
        given = torch.bincount(ids, minlength=case.experts).to(torch.int32)
        table = torch.empty_like(given)
        self._link.counts(table, given)
        sent = given.view(world, -1).sum(1).tolist()
        table = table.view(world, case.local_experts)
        received = table.sum(1).tolist()
        words = permuted.new_empty(sum(received), permuted.size(1))
        self._link.rows(words, permuted, received, sent)
        chunks = torch.split(words, table.reshape(-1).tolist())
        words = torch.cat(
            [chunk for local in range(case.local_experts) for chunk in chunks[local :: case.local_experts]]
        )
        rows, scales = row_ops.open_rows(words, case.hidden, case.torch_dtype, case.quant_mode)
        handle = (order, table, sent, received)
        return Arrived(rows, scales if case.quant_mode else None, table.sum(0), handle)

    def combine(self, rows: Tensor, inputs: Inputs, arrived: Arrived) -> Tensor:
        order, table, sent, received = arrived.handle
        world = self.place.world
        chunks = torch.split(rows[: sum(received)], table.t().reshape(-1).tolist())
        by_source = torch.cat([chunk for source in range(world) for chunk in chunks[source::world]])
        words = row_ops.pack(by_source)
        back = words.new_empty(sum(sent), words.size(1))
        self._link.rows(back, words, sent, received)
        (mine,) = row_ops.unpack(back, (self.case.hidden, rows.dtype))
        weighted = mine.float() * inputs.expert_scales.reshape(-1)[order][:, None]
        total = torch.zeros(self.case.batch, self.case.hidden)
        total.index_add_(0, order // self.case.topk, weighted)
        return total.to(rows.dtype)


class MpiAllToAll(GlooAllToAll):
    name, transport, needs_mpi = "mpi-a2a", Mpi, True


class GlooAllToAllTuned(GlooAllToAll):
    """All-to-all as well as it can be done over a library: nothing allocated, one index_select each way.

    Rows are packed and reordered by index_select(out=) into tensors made beforehand, and the rows that come
    back are summed where they lie by the same C++ loop as the limit's.
    """

    name = "gloo-a2a-tuned"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        case, most_rows = self.case, self.case.most_rows
        pairs, back_words = case.batch * case.topk, case.hidden * case.torch_dtype.itemsize // 4
        self._row_words = case.hidden // 4 if case.quant_mode else back_words
        sent_words = self._row_words + bool(case.quant_mode)  # int8 rows have their scale behind them

        def words(rows: int, width: int) -> Tensor:
            return torch.empty(rows, width, dtype=torch.int32)

        self._send, self._receive = words(pairs, sent_words), words(most_rows, sent_words)
        self._rows, self._scales = words(most_rows, self._row_words), words(most_rows, 1)
        self._give_back, self._got_back = words(most_rows, back_words), words(pairs, back_words)
        self._out = torch.empty(case.batch, case.hidden, dtype=case.torch_dtype)
        self._table = torch.empty(case.experts, dtype=torch.int32)
        self._places = torch.arange(max(pairs, most_rows))
        self._place_of = torch.empty(pairs, dtype=torch.int64)

    def dispatch(self, inputs: Inputs) -> Arrived:
        case, world = self.case, self.place.world
        ids = inputs.expert_ids.view(-1)
        order = torch.sort(ids, stable=True).indices
        given = torch.bincount(ids, minlength=case.experts)
        self._link.counts(self._table, given.to(torch.int32))
        table = self._table.view(world, case.local_experts).to(torch.int64)
        sent, received = given.view(world, -1).sum(1).tolist(), table.sum(1).tolist()
        count = sum(received)
        words = row_ops.payload(inputs.x, inputs.expert_ids, None, None, case.quant_mode)
        torch.index_select(words, 0, order // case.topk, out=self._send)
        self._link.rows(self._receive[:count], self._send, received, sent)
        # Row i of expand_x arrived at place source[i]; table[s, l]: rows from source s for local expert l.
        arrival = table.reshape(-1)
        starts = (arrival.cumsum(0) - arrival).view_as(table)
        source = row_ops.segments(table.t().reshape(-1), starts.t().reshape(-1))
        rows = self._rows[:count]
        torch.index_select(self._receive[:, : self._row_words], 0, source, out=rows)
        scales = None
        if case.quant_mode:
            words, picked = self._receive[:, self._row_words :], self._scales[:count]
            scales = torch.index_select(words, 0, source, out=picked).view(torch.float32).view(-1)
        expand_x = rows.view(torch.int8 if case.quant_mode else case.torch_dtype)
        return Arrived(expand_x, scales, table.sum(0), (order, source, sent, received))

    def combine(self, rows: Tensor, inputs: Inputs, arrived: Arrived) -> Tensor:
        order, source, sent, received = arrived.handle
        count = sum(received)
        arrival = torch.empty_like(source)
        arrival[source] = self._places[:count]
        torch.index_select(rows.view(torch.int32), 0, arrival, out=self._give_back[:count])
        self._link.rows(self._got_back, self._give_back[:count], sent, received)
        self._place_of[order] = self._places[: order.numel()]
        weighted_sum(self._out, pointers(self._got_back, self._place_of), inputs.expert_scales)()
        return self._out


class MpiAllToAllTuned(GlooAllToAllTuned):
    name, transport, needs_mpi = "mpi-a2a-tuned", Mpi, True


class GlooAllGather(Method):
    """All-gather to dispatch, reduce-scatter to combine: no uneven exchange, W times the traffic.

    Every rank sees all tokens, takes the rows of its experts, sums its part of every token in fp32, and the
    parts are summed on the way back.
    """

    name = "gloo-ag-rs"

    def dispatch(self, inputs: Inputs) -> Arrived:
        case = self.case
        words = self._gather(row_ops.payload(inputs.x, inputs.expert_ids, None, None, case.quant_mode))
        ids = self._gather(inputs.expert_ids).reshape(-1)
        weights = self._gather(inputs.expert_scales).reshape(-1)
        local = ids - self.place.rank * case.local_experts
        mine = (local >= 0) & (local < case.local_experts)
        key = torch.where(mine, local, case.local_experts)
        counts = torch.bincount(key, minlength=case.local_experts + 1)[: case.local_experts]
        pairs = torch.argsort(key, stable=True)[: int(counts.sum())]
        tokens = pairs // case.topk
        picked = words.index_select(0, tokens)
        rows, scales = row_ops.open_rows(picked, case.hidden, case.torch_dtype, case.quant_mode)
        return Arrived(rows, scales if case.quant_mode else None, counts, (tokens, weights[pairs]))

    def combine(self, rows: Tensor, inputs: Inputs, arrived: Arrived) -> Tensor:
        tokens, weights = arrived.handle
        part = torch.zeros(self.place.world * self.case.batch, self.case.hidden)
        part.index_add_(0, tokens, rows[: tokens.numel()].float() * weights[:, None])
        total = torch.empty(self.case.batch, self.case.hidden)
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(total, part)
        return total.to(rows.dtype)

    def _gather(self, given: Tensor) -> Tensor:
        out = given.new_empty(self.place.world * given.size(0), given.size(1))
        _collective("all_gather_single", "all_gather_into_tensor")(out, given)
        return out


def _collective(new: str, old: str) -> Any:
    """torch renames its collectives of a single tensor: the new name where it is there."""
    return getattr(dist, new, None) or getattr(dist, old)
