"""Low-latency mode: rows by local expert, ``(L, max * W, H)``, and sending and receiving apart."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ascend_moe
from ascend_moe.errors import ArgumentError, RoutingOverflow, need, need_dims, need_shape
from ascend_moe.interop.deep_ep import events
from ascend_moe.interop.deep_ep.place import Place
from ascend_moe.interop.deep_ep.rows import FP8, GROUP, cast_fp8, pack, unpack

MOST_ALIVE = 2  # results, as in DeepEP, whose windows hold two


@dataclass(eq=False)
class Received:
    """The results of one dispatch; their values come with ``receive``."""

    place: Place
    local: int  # L
    tokens: int  # most tokens of a rank
    hidden: int
    experts: int
    fp8: bool
    stats: Tensor | None
    count: Tensor  # (L,) int32
    source: Tensor  # (L * M + 1,) int32, the token of each row: M = tokens * W; the last is nobody's
    range: Tensor  # (L, W) int64: rows of each source rank, and from bit 32 on where they begin
    values: list[Tensor]  # until received: (L * M + 1, H), with fp8 scales ((L + 1), H / 128, M)
    shown: weakref.ref[Tensor] | None = None  # what the caller holds
    finish: Callable[[], Any] | None = None  # None: received
    combined: bool = False
    failed: bool = False
    places: Tensor | None = None  # of the op's rows among the L * M ones
    triples: Tensor | None = None
    counts: Tensor | None = None
    next_rows: Tensor | None = None  # of zero_copy

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
        table = counts.diff(prepend=counts.new_zeros(1)).view(self.local, -1).long()
        begins = table.cumsum(1) - table
        self.range.copy_(table | begins << 32)
        self.count.copy_(table.sum(1))
        if self.stats is not None:
            self.stats += self.count
        self._place(sent.assist_info_for_combine, counts, rows)
        self._fill(sent.expand_x[:rows])
        self.values = []

    def _place(self, triples: Tensor, counts: Tensor, rows: int) -> None:
        """Row i of the op stands at ``places[i]`` of the results; a row that is none, at the last one."""
        width = self.tokens * self.place.world
        ends = counts.view(self.local, -1)[:, -1].contiguous()
        each = torch.arange(rows, dtype=counts.dtype, device=counts.device)
        expert = torch.searchsorted(ends, each, right=True).clamp(max=self.local - 1)
        at = each - (ends - self.count)[expert]
        if counts.device.type == "cpu" and rows and int(at.max()) >= width:
            number = int(self.count.max())
            raise RoutingOverflow(
                f"low_latency_dispatch: a local expert of rank {self.place.rank} has {number} rows, the result has "
                f"{width}: num_max_dispatch_tokens_per_rank {self.tokens} times {self.place.world} ranks. A token has "
                "the same expert more than once: make the ids of a token differ"
            )
        places = torch.where(each < counts[-1], expert * width + at, self.local * width)
        self.source.index_copy_(0, places, triples[1 : 3 * rows : 3])
        self.places, self.triples, self.counts = places, triples, counts

    def _fill(self, rows: Tensor) -> None:
        assert self.places is not None
        if not self.fp8:
            self.values[0].index_copy_(0, self.places, rows)
            return
        codes, scales = unpack(rows, [(self.hidden, torch.uint8), (self.hidden // GROUP, torch.float32)])
        self.values[0].view(torch.uint8).index_copy_(0, self.places, codes)
        width = self.tokens * self.place.world
        self.values[1].transpose(1, 2)[self.places // width, self.places % width] = scales


class Handle(tuple):  # type: ignore[type-arg]
    """DeepEP's five: packed_recv_src_info ``(L, max * W)`` int32, packed_recv_layout_range ``(L, W)`` int64,
    num_max_dispatch_tokens_per_rank, hidden, num_experts. All state of the call is in here.
    """

    received: Received


def received_by(handle: object) -> Received:
    """The call that made a handle."""
    if isinstance(handle, Handle):
        return handle.received
    rule = f"is a {type(handle).__name__}; pass what low_latency_dispatch returned, as it is"
    raise ArgumentError(f"handle {rule}", argument="handle")


@dataclass
class LowLatency:
    """The calls of one Buffer: which of them is open, and which results are alive."""

    place: Place
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
        fp8: bool,
        round_scale: bool,
        return_recv_hook: bool,
    ) -> tuple[Any, Tensor, Handle, Callable[[], None]]:
        """Results, rows of each expert, the handle, and the hook that receives."""
        local = self.place.of_experts(experts)
        _check(x, topk_idx, tokens, stats, local)
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
        rows = pack(*cast_fp8(x, round_scale)) if fp8 else x.contiguous()
        self.settle()
        op = ascend_moe.begin_dispatch if return_recv_hook else ascend_moe.npu_moe_distribute_dispatch_v2
        opened: Any = op(rows, topk_idx.int(), **self.place.of_op(experts, tokens))
        result = _results(self.place, local, tokens, x, experts, fp8, stats)
        result.finish = opened.finish if return_recv_hook else lambda: opened
        self._results.append(result)
        width = tokens * self.place.world
        shown: Any = result.values[0][:-1].view(local, width, -1)
        result.shown = weakref.ref(shown)
        handle = Handle((result.source[:-1].view(local, width), result.range, tokens, x.shape[1], experts))
        handle.received = result
        shown = (shown, result.values[1][:-1].transpose(1, 2)) if fp8 else shown
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
    ) -> tuple[Tensor, Callable[[], None]]:
        """Results and the hook that receives."""
        result = received_by(handle)
        shape = (result.local, result.tokens * self.place.world, result.hidden)
        need(
            result.finish is None, "handle", "is of a dispatch whose hook was not called, or has raised: call it first"
        )
        if zero_copy:
            need(result.next_rows is not None, "zero_copy", "needs get_next_low_latency_combine_buffer(handle) before")
            x = result.next_rows  # type: ignore[assignment]
        need_shape("x", x, shape, dtypes=(torch.bfloat16,))
        need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
        need_shape("topk_weights", topk_weights, tuple(topk_idx.shape), dtypes=(torch.float32,))
        wanted = (topk_idx.shape[0], result.hidden)
        if out is not None:
            need_shape("out", out, wanted, dtypes=(torch.bfloat16,))
        assert result.places is not None and result.triples is not None and result.counts is not None
        rows = x.reshape(-1, result.hidden)
        rows = rows.index_select(0, result.places.clamp(max=rows.shape[0] - 1))
        self.settle()
        op = ascend_moe.begin_combine if return_recv_hook else ascend_moe.npu_moe_distribute_combine_v2
        opened: Any = op(
            rows,
            topk_idx.int(),
            result.triples,
            result.counts,
            topk_weights,
            **self.place.of_op(result.experts, result.tokens),
        )
        result.combined, result.next_rows = True, None
        if not return_recv_hook and out is None:
            return opened, events.nothing
        to = rows.new_zeros(wanted) if out is None else out
        return to, self._hook(
            _Once(lambda: to.copy_(opened.finish() if return_recv_hook else opened)), return_recv_hook
        )

    def next_combine_rows(self, handle: object) -> Tensor:
        """``(L, max * W, H)`` bf16 for the rows of the next combine of this handle with zero_copy."""
        result = received_by(handle)
        if result.next_rows is None:
            shape = (result.local, result.tokens * self.place.world, result.hidden)
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


@dataclass
class _Once:
    """A call that only its first time does something."""

    action: Callable[[], Any] | None

    def __call__(self) -> None:
        if self.action is not None:
            self.action()
            self.action = None


def _check(x: Tensor, topk_idx: Tensor, tokens: int, stats: Tensor | None, local: int) -> None:
    need_dims("x", x, 2, dtypes=(torch.bfloat16,))
    need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
    need(topk_idx.shape[0] == x.shape[0], "topk_idx", "has {} tokens; x has {}", topk_idx.shape[0], x.shape[0])
    rule = "is {}; x has {} tokens, and it must be equal on all ranks"
    need(tokens >= max(x.shape[0], 1), "num_max_dispatch_tokens_per_rank", rule, tokens, x.shape[0])
    if stats is not None:
        need_shape("cumulative_local_expert_recv_stats", stats, (local,), dtypes=(torch.int32,))


def _results(
    place: Place, local: int, tokens: int, x: Tensor, experts: int, fp8: bool, stats: Tensor | None
) -> Received:
    """Without values. Zeros on the CPU, where they cost nothing until they are touched."""
    make = torch.zeros if x.device.type == "cpu" else torch.empty
    width, hidden = tokens * place.world, x.shape[1]
    values = [make(local * width + 1, hidden, dtype=FP8 if fp8 else x.dtype, device=x.device)]
    if fp8:  # a column of scales is contiguous, as DeepEP has them
        values.append(make(local + 1, hidden // GROUP, width, dtype=torch.float32, device=x.device))
    return Received(
        place,
        local,
        tokens,
        hidden,
        experts,
        fp8,
        stats,
        count=make(local, dtype=torch.int32, device=x.device),
        source=make(local * width + 1, dtype=torch.int32, device=x.device),
        range=make(local, place.world, dtype=torch.int64, device=x.device),
        values=values,
    )
