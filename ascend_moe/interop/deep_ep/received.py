"""The results of a low-latency dispatch, whose values may come later than the call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.interop.deep_ep.mask import RankMask
from ascend_moe.interop.deep_ep.rows import FP8, Format, places_of
from ascend_moe.ops.pairs import SentIds


@dataclass(eq=False)
class Received:
    """The results of one dispatch; their values come with ``receive``."""

    way: MC2Dispatcher
    tokens: int  # most tokens of a rank
    hidden: int
    format: Format
    ids: SentIds
    stats: Tensor | None
    count: Tensor  # (L,) int32
    source: Tensor  # (L * M + 1,) int32, the token of each row: M = tokens * W; the last is nobody's
    range: Tensor  # (L, W) int64: rows of each source rank, and from bit 32 on where they begin
    world: int  # W, of the Buffer's group; the op's may be smaller, of these ranks of it
    ranks: list[int]
    table: Tensor | None  # (E,): the op's numbers of the experts, when it is
    values: list[Tensor]  # until received: (L * M + 1, H), with fp8 scales ((L + 1), columns, M)
    shown: weakref.ref[Tensor] | None = None  # what the caller holds
    finish: Callable[[], Dispatched] | None = None  # None: received
    combined: bool = False
    failed: bool = False
    places: Tensor | None = None  # of the op's rows among the L * M ones
    sent: Dispatched | None = None
    next_rows: Tensor | None = None  # of zero_copy

    @property
    def width(self) -> int:
        """M, rows that a local expert has room for."""
        return self.tokens * self.world

    def alive(self) -> bool:
        """Still to be received; or neither combined nor dropped."""
        if self.failed:
            return False
        return self.finish is not None or not (self.combined or self.shown is None or self.shown() is None)

    def receive(self) -> None:
        """The rows arrive in the results. The second time does nothing, or raises the same again."""
        if self.finish is None:
            return
        try:
            sent = self.finish()
        except BaseException:
            self.failed = True
            raise
        self.finish = None
        counts = sent.ep_recv_counts
        rows = int(counts[-1]) if counts.device.type == "cpu" else sent.expand_x.shape[0]
        table = counts.diff(prepend=counts.new_zeros(1)).view(self.way.local_experts, -1).long()
        begins = table.cumsum(1) - table
        self.range[:, self.ranks] = table | begins << 32
        self.count.copy_(table.sum(1))
        if self.stats is not None:
            self.stats += self.count
        self.sent = sent
        self._place(sent.expand_idx, counts, rows)
        self._fill(sent.expand_x[:rows])
        self.values = []

    def _place(self, triples: Tensor, counts: Tensor, rows: int) -> None:
        """Row i of the op stands at ``places[i]`` of the results; a row that is none, at the last one."""
        ends = counts.view(self.way.local_experts, -1)[:, -1].contiguous()
        rule = f"num_max_dispatch_tokens_per_rank {self.tokens} times {self.way.world_size} ranks"
        self.places = places_of(ends, rows, self.width, f"a local expert of rank {self.way.rank}", rule)
        self.source.index_copy_(0, self.places, triples[1 : 3 * rows : 3])

    def _fill(self, rows: Tensor) -> None:
        assert self.places is not None
        if not self.format.fp8:
            self.values[0].index_copy_(0, self.places, rows)
            return
        codes, scales = self.format.unpack(rows, self.hidden)
        self.values[0].view(torch.uint8).index_copy_(0, self.places, codes)
        self.values[1].transpose(1, 2)[self.places // self.width, self.places % self.width] = scales


def results_of(
    way: MC2Dispatcher,
    tokens: int,
    x: Tensor,
    format: Format,
    ids: SentIds,
    stats: Tensor | None,
    mask: RankMask,
    world: int,
) -> Received:
    """Without values. Zeros on the CPU, where they cost nothing until they are touched."""
    make = torch.zeros if x.device.type == "cpu" else torch.empty
    local, width, hidden = way.local_experts, tokens * world, x.shape[1]
    values = [make(local * width + 1, hidden, dtype=FP8 if format.fp8 else x.dtype, device=x.device)]
    if format.fp8:  # a column of scales is contiguous, as DeepEP has them
        values.append(make(local + 1, format.columns(hidden), width, dtype=format.scales, device=x.device))
    return Received(
        way,
        tokens,
        hidden,
        format,
        ids,
        stats,
        count=make(local, dtype=torch.int32, device=x.device),
        source=make(local * width + 1, dtype=torch.int32, device=x.device),
        range=torch.zeros(local, world, dtype=torch.int64, device=x.device),
        world=world,
        ranks=mask.alive,
        table=mask.table(local),
        values=values,
    )
