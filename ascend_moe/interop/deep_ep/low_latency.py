"""Low-latency mode: rows by local expert, ``(L, max * W, H)``, and sending and receiving apart."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ascend_moe._narrow import narrow, wide_ids_named
from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.errors import ArgumentError, need, need_dims, need_shape
from ascend_moe.interop.deep_ep import events
from ascend_moe.interop.deep_ep.events import Costs
from ascend_moe.interop.deep_ep.place import BufferPlace, Handle, call_of, need_whole
from ascend_moe.interop.deep_ep.rows import FP8, Format, places_of
from ascend_moe.ops.pairs import SentIds

MOST_ALIVE = 2  # results, as in DeepEP, whose windows hold two


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
        return self.tokens * self.way.world_size

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
        self.range.copy_(table | begins << 32)
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


@dataclass
class LowLatency:
    """The calls of one Buffer: which of them is open, and which results are alive."""

    place: BufferPlace
    _open: Callable[[], None] | None = None
    _results: list[Received] = field(default_factory=list)

    def settle(self) -> None:
        """Before any other op of the group: a call that has only sent receives."""
        finish, self._open = self._open, None
        if finish is not None:
            finish()

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        tokens: int,
        experts: int,
        stats: Tensor | None,
        costs: Costs,
        format: Format,
        return_recv_hook: bool,
    ) -> tuple[Any, Tensor, Handle, Callable[[], None]]:
        """Results, rows of each expert, the handle, and the hook that receives."""
        local = self.place.local_experts(experts)
        _check(x, topk_idx, tokens, stats, local)
        format.check(x.shape[1])
        self._results = [result for result in self._results if result.alive()]
        if len(self._results) >= MOST_ALIVE:
            waiting = sum(result.finish is not None for result in self._results)
            hooks = f", {waiting} of them with a hook that was never called" if waiting else ""
            first = "the hook, then " if waiting else ""
            raise ArgumentError(
                f"low_latency_dispatch: {MOST_ALIVE} results are alive already{hooks}: call {first}low_latency_combine "
                "with the handle, or drop the result",
                argument="handle",
            )
        rows, ids = format.pack(x), narrow("topk_idx", topk_idx)
        self.settle()
        named, way = wide_ids_named(topk_idx, self.place.rank), self.place.dispatcher(experts)
        if return_recv_hook:
            finish = costs.of(named(named(way.begin_dispatch)(rows, ids, max_tokens=tokens).finish))
        else:
            arrived = costs.of(named(way.dispatch))(rows, ids, max_tokens=tokens)
            finish = lambda: arrived  # noqa: E731
        result = _results(way, tokens, x, format, SentIds(ids), stats)
        result.finish = finish
        self._results.append(result)
        width = result.width
        shown: Any = result.values[0][:-1].view(local, width, -1)
        result.shown = weakref.ref(shown)
        # packed_recv_src_info (L, max * W) int32, packed_recv_layout_range (L, W) int64, max, hidden, num_experts
        handle = Handle((result.source[:-1].view(local, width), result.range, tokens, x.shape[1], experts))
        handle.call = result
        shown = (shown, _columns(result.values[1][:-1])) if format.fp8 else shown
        return shown, result.count, handle, self._hook(result.receive, return_recv_hook)

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: object,
        zero_copy: bool,
        return_recv_hook: bool,
        out: Tensor | None,
        costs: Costs,
    ) -> tuple[Tensor, Callable[[], None]]:
        """Results and the hook that receives."""
        result = call_of(handle, Received, "low_latency_dispatch")
        shape = (result.way.local_experts, result.width, result.hidden)
        rule = "is of a dispatch whose hook was not called, or has raised: call it first"
        need(result.finish is None, "handle", rule)
        if zero_copy:
            need(result.next_rows is not None, "zero_copy", "needs get_next_low_latency_combine_buffer(handle) before")
            x = result.next_rows  # type: ignore[assignment]
        need_shape("x", x, shape, dtypes=(torch.bfloat16,))
        need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
        need_shape("topk_weights", topk_weights, tuple(topk_idx.shape), dtypes=(torch.float32,))
        wanted = (topk_idx.shape[0], result.hidden)
        if out is not None:
            need_shape("out", out, wanted, dtypes=(torch.bfloat16,))
        assert result.places is not None and result.sent is not None
        rows = x.reshape(-1, result.hidden)
        rows = rows.index_select(0, result.places.clamp(max=rows.shape[0] - 1))
        ids = result.ids.checked("topk_idx", narrow("topk_idx", topk_idx))
        sent = result.way.resume(ids, result.sent.expand_idx, result.sent.ep_recv_counts, max_tokens=result.tokens)
        self.settle()
        given = (rows, sent, topk_weights)
        if return_recv_hook:
            finish = costs.of(result.way.begin_combine(*given).finish)
        else:
            total = costs.of(result.way.combine)(*given)
        result.combined, result.next_rows = True, None
        if return_recv_hook:
            to = rows.new_zeros(wanted) if out is None else out
            return to, self._hook(functools.cache(lambda: to.copy_(finish())), return_recv_hook)
        return total if out is None else out.copy_(total), events.nothing

    def next_combine_rows(self, handle: object) -> Tensor:
        """``(L, max * W, H)`` bf16 for the rows of the next combine of this handle with zero_copy."""
        result = call_of(handle, Received, "low_latency_dispatch")
        if result.next_rows is None:
            shape = (result.way.local_experts, result.width, result.hidden)
            result.next_rows = torch.zeros(shape, dtype=torch.bfloat16, device=result.count.device)
        return result.next_rows

    def _hook(self, receive: Callable[[], Any], later: bool) -> Callable[[], None]:
        if not later:
            receive()
            return events.nothing

        def hook() -> None:
            if self._open is hook:
                self._open = None
            receive()

        self._open = hook
        return hook


def _check(x: Tensor, topk_idx: Tensor, tokens: int, stats: Tensor | None, local: int) -> None:
    need_dims("x", x, 2, dtypes=(torch.bfloat16,))
    need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
    need(topk_idx.shape[0] == x.shape[0], "topk_idx", "has {} tokens; x has {}", topk_idx.shape[0], x.shape[0])
    need_whole("num_max_dispatch_tokens_per_rank", tokens, 1)
    rule = "is {}; x has {} tokens, and it must be equal on all ranks"
    need(tokens >= x.shape[0], "num_max_dispatch_tokens_per_rank", rule, tokens, x.shape[0])
    if stats is not None:
        need_shape("cumulative_local_expert_recv_stats", stats, (local,), dtypes=(torch.int32,))


def _columns(scales: Tensor) -> Tensor:
    """``(L, M, columns)`` of ``(L, columns, M)``. A single one has stride 1, so that its bytes can be viewed."""
    local, columns, width = scales.shape
    return scales.view(local, width, 1) if columns == 1 else scales.transpose(1, 2)


def _results(
    way: MC2Dispatcher, tokens: int, x: Tensor, format: Format, ids: SentIds, stats: Tensor | None
) -> Received:
    """Without values. Zeros on the CPU, where they cost nothing until they are touched."""
    make = torch.zeros if x.device.type == "cpu" else torch.empty
    local, width, hidden = way.local_experts, tokens * way.world_size, x.shape[1]
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
        range=make(local, way.world_size, dtype=torch.int64, device=x.device),
        values=values,
    )
