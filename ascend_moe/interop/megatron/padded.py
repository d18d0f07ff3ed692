"""Rows padded up to a capacity: an expert has C rows from every rank, whatever the routing is, as Megatron-LM has it.

Padding is rows of tokens that the map has for an expert with probability 0. They travel too: a probability of 0 has a
gradient, the row's result times the gradient of the token's sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe.dispatchers import Dispatched, Dispatcher
from ascend_moe.experts.groups import CUMSUM, as_counts
from ascend_moe.interop.megatron.routes import Routes
from ascend_moe.permute import padded_places, permute


@dataclass
class PaddedRoutes(Routes):
    """Routes of rows, one slot each, and ``sources`` (N,) int64: the token of each row; ``tokens``: T."""

    sources: Tensor
    tokens: int

    def bring(self, rows: Tensor, dispatcher: Dispatcher, sent: Dispatched, weighted: bool) -> Tensor:
        """(T, H): for every token the sum of its rows, weighted or not, fp32 by shard number, rounded once."""
        each = dispatcher.combine(rows, sent).float()
        each = each * self.weights if weighted else each
        total = torch.zeros(self.tokens, rows.shape[1], dtype=each.dtype, device=rows.device)
        return total.index_add(0, self.sources, each).to(rows.dtype)


def padded(x: Tensor, routing_map: Tensor, probs: Tensor, capacity: int, local: int, etp: int) -> tuple[Tensor, Routes]:
    """C rows for each of the E * etp shards, by number: (E * etp * C, H), and their routes.

    They are rows of the first C tokens that the map has for the expert; where it has fewer, rows that go nowhere.

    Args:
        x: (T, H). routing_map: (T, E) bool. probs: (T, E) float.
        capacity: C, at most T.
        local, etp: L, and shards of an expert.
    """
    tokens, experts = routing_map.shape
    sources = permute(x, routing_map, num_out_tokens=experts * capacity, drop_and_pad=True)[2]
    number, place = _segments_and_places(experts * etp, capacity, x.device)
    expert = number // (local * etp) * local + number % local
    flat = sources[expert * capacity + place]
    pairs = flat * experts + expert
    taken = routing_map.bool().reshape(-1)[pairs]
    ids = torch.where(taken, number, -1).to(torch.int32).unsqueeze(1)
    weights = torch.where(taken, probs.reshape(-1)[pairs].float(), 0.0).unsqueeze(1)
    return x.index_select(0, flat), PaddedRoutes(ids, weights, flat, tokens)


def _segments_and_places(segments: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The segment, and the place in it, of segments * length rows: flat, because torch makes a graph of a size 1."""
    row = torch.arange(segments * length, device=device)
    return row // length, row % length


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
    """Carries the rows of `padded`, one slot each, by another dispatcher.

    What arrives is L * W * C rows by (local expert, source rank, place): zeros and weight 0 where no row came. More
    rows than one call takes go by several calls. Only options that Megatron-LM's padding needs have an effect.
    """

    def __init__(self, way: Dispatcher) -> None:
        super().__init__(way.place, way.num_experts)
        self._way = way

    def _dispatch(self, x: Tensor, expert_ids: Tensor, given: dict[str, Any]) -> Dispatched:
        shards, capacity = self.num_experts, len(x) // self.num_experts
        parts = []
        for first, count in self._ranges(capacity):
            rows, ids, weights = (_cut(each, shards, first, count) for each in (x, expert_ids, given["expert_scales"]))
            parts.append(_Part(first, count, self._way.dispatch(rows, ids, expert_scales=weights.contiguous())))
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
            places = padded_places(part.sent.ep_recv_counts.long(), len(part.sent.expand_x), part.count)
            home.append(self._way.combine(_taken(own, places), part.sent))
        return _joined(home, self.num_experts)

    def _ranges(self, capacity: int) -> Iterator[tuple[int, int]]:
        """(first, count) of the calls, the same on every rank; one at least. A range() would be a graph a capacity."""
        step = max((self._way.max_batch or 1 << 31) // self.num_experts, 1)
        first = 0
        while capacity - first > step:
            yield first, step
            first += step
        yield first, capacity - first


def _cut(values: Tensor, segments: int, first: int, count: int) -> Tensor:
    """Places first to first + count - 1 of each segment of equal length."""
    length = len(values) // segments
    if count == length:
        return values
    segment, place = _segments_and_places(segments, count, values.device)
    return values.index_select(0, segment * length + first + place)


def _joined(parts: list[Tensor], segments: int) -> Tensor:
    """Undoes `_cut` of all parts."""
    if len(parts) == 1:
        return parts[0]
    shaped = [part.view(segments, len(part) // segments, *part.shape[1:]) for part in parts]
    return torch.cat(shaped, 1).flatten(0, 1)


def _spread(values: Tensor, part: _Part) -> Tensor:
    """Rows as they came, at their places of ``count`` a segment."""
    ends = part.sent.ep_recv_counts.long()
    counts = as_counts(ends, CUMSUM)
    segment, place = _segments_and_places(len(ends), part.count, ends.device)
    return _taken(values, torch.where(place < counts[segment], (ends - counts)[segment] + place, -1))


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places], zeros for -1 and len(rows). A result without rows still belongs to the graph."""
    padded_rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded_rows[torch.where(places >= 0, places, len(rows))]
