"""Dispatcher of padded rows: each expert receives C rows from every rank, independent of the routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe.call import CallOptions
from ascend_moe.dispatchers.base import Dispatched, Dispatcher, DispatchTensors
from ascend_moe.permute import padded_places


@dataclass
class _Part:
    """One call: places ``first`` to ``first + count - 1`` of every shard."""

    first: int
    count: int
    sent: Dispatched


@dataclass
class _Handle:
    owner: PaddedDispatcher
    parts: list[_Part]


class PaddedDispatcher(Dispatcher):
    """Dispatcher of x (E * C, H), C rows for each expert in expert order, over another ``dispatcher``.

    expert_ids is (E * C, 1): the row's expert, or -1 for padding, which is not sent. The result has L * W * C rows by
    (local expert, source rank, index in 0..C-1), with zeros and weight 0 for padding. Batches that exceed one call are
    split. dispatch needs expert_scales and ignores other tensors and options; combine returns unweighted rows.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher.place, dispatcher.num_experts, dispatcher.options)
        self._dispatcher = dispatcher

    def _dispatch(self, x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions) -> Dispatched:
        assert tensors.expert_scales is not None  # Megatron-LM's padded rows have weights
        shards, capacity = self.num_experts, x.shape[0] // self.num_experts
        parts = []
        for first, count in self._ranges(capacity):
            rows, ids, weights = (_cut(each, shards, first, count) for each in (x, expert_ids, tensors.expert_scales))
            parts.append(_Part(first, count, self._dispatcher.dispatch(rows, ids, expert_scales=weights.contiguous())))
        segments = self.local_experts * self.world_size
        rows = _joined([_spread(part.sent.expand_x, part) for part in parts], segments)
        weights = _joined([_spread(part.sent.expand_scales, part) for part in parts], segments)
        ends = (torch.arange(segments, dtype=torch.int32, device=x.device) + 1) * capacity
        counts = torch.full((self.local_experts,), self.world_size * capacity, device=x.device)
        first_part = parts[0].sent
        return Dispatched(
            rows, first_part.dynamic_scales, counts, ends, first_part.expand_idx, weights, _Handle(self, parts)
        )

    def _combine(self, expert_out: Tensor, dispatched: Dispatched, *_: Any) -> Tensor:
        home = []
        for part in dispatched.handle.parts:
            own = _cut(expert_out, len(dispatched.ep_recv_counts), part.first, part.count)
            places = padded_places(part.sent.ep_recv_counts.long(), part.sent.expand_x.shape[0], part.count)
            home.append(self._dispatcher.combine(_taken(own, places), part.sent))
        return _joined(home, self.num_experts)

    def _ranges(self, capacity: int) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of the calls, equal on all ranks; range() would compile a graph per capacity."""
        step = max((self._dispatcher.max_batch or 1 << 31) // self.num_experts, 1)
        first = 0
        while capacity - first > step:
            yield first, step
            first += step
        yield first, capacity - first


def segments_and_places(segments: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the segment of each of segments * length rows, and its index in the segment, as two 1-D tensors."""
    row = torch.arange(segments * length, device=device)
    return row // length, row % length


def _cut(values: Tensor, segments: int, first: int, count: int) -> Tensor:
    """Return places first to first + count - 1 of each segment; segments have equal length."""
    length = values.shape[0] // segments
    if count == length:
        return values
    segment, place = segments_and_places(segments, count, values.device)
    return values.index_select(0, segment * length + first + place)


def _joined(parts: list[Tensor], segments: int) -> Tensor:
    """Undo `_cut` of all parts."""
    if len(parts) == 1:
        return parts[0]
    shaped = [part.view(segments, part.shape[0] // segments, *part.shape[1:]) for part in parts]
    return torch.cat(shaped, 1).flatten(0, 1)


def _spread(values: Tensor, part: _Part) -> Tensor:
    """Move received rows to their places, ``count`` per segment."""
    ends = part.sent.ep_recv_counts.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    segment, place = segments_and_places(len(ends), part.count, ends.device)
    return _taken(values, torch.where(place < counts[segment], (ends - counts)[segment] + place, -1))


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    """Return rows[places], with zeros for -1 and len(rows). An empty result stays in the autograd graph."""
    padded_rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded_rows[torch.where(places >= 0, places, rows.shape[0])]
