"""Low-latency mode: rows by local expert, ``(L, max * W, H)``, with separate send and receive, and masks of ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

import ascend_moe
from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.comm import membership
from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.dispatchers.base import InFlight
from ascend_moe.errors import ArgumentError, CommError, PeerLost, need, need_dims, need_dtype, need_shape, typed_methods
from ascend_moe.experts.quant import FP8
from ascend_moe.interop.deep_ep import base
from ascend_moe.interop.deep_ep.base import BufferBase, BufferPlace, EventOverlap, Handle, WaitStats, call_of
from ascend_moe.interop.deep_ep.rows import Format, places_of
from ascend_moe.ops.sent_ids import SentIds

P = ParamSpec("P")
R = TypeVar("R")

MOST_ALIVE = 2  # results, as in DeepEP


class RankMask:
    """Masked ranks of a Buffer's group, and the subgroup of the others, which runs the calls.

    ``first`` is this rank's place in the Buffer's group, ``place`` that in the current subgroup, ``alive`` the ranks of
    the subgroup, by their numbers in the Buffer's group.
    """

    def __init__(self, first: BufferPlace) -> None:
        self._first = self.place = first
        self.world = first.world
        self.alive = list(range(first.world))
        self._to_mask: set[int] = set()
        self._ended: set[int] = set()  # of those that are left out
        self._failed = False  # the others have continued without this rank

    def update(self, rank: int, mask: bool) -> None:
        """Mask a rank from the next call on, or with mask=False cancel that; call it on all other ranks."""
        world = self.world
        need(isinstance(rank, int) and 0 <= rank < world, "rank_to_mask", "is {!r}; it must be 0..{}", rank, world - 1)
        need(rank != self._first.rank or not mask, "rank_to_mask", "is {}, this rank: pass another", rank)
        back = "is {}, which is masked: low_latency_clean_mask_buffer, on all ranks, unmasks it if its "
        back += "process is alive; otherwise restart the job"
        need(mask or rank in self.alive, "rank_to_mask", back, rank)
        (self._to_mask.add if mask else self._to_mask.discard)(rank)

    def clean(self) -> None:
        """Unmask all ranks: the next call opens windows of the whole group. Call it on all ranks; all must be alive."""
        ended = sorted(self._ended)
        rule = "needs live ranks, but ranks {} have ended: restart the job"
        need(not ended, "low_latency_clean_mask_buffer", rule, ended)
        self._to_mask.clear()
        on_npus = membership.npu_group(self._first.group_ep) is not None
        anew = on_npus and len(self.alive) < self.world
        rule = "is on a group of NPUs that has lost ranks: create its process group and the Buffer again, on all ranks"
        need(not anew, "low_latency_clean_mask_buffer", rule)
        if self._failed or len(self.alive) < self.world or _seen(membership.closed, self._first):
            ascend_moe.close(self.place.group_ep)
            self.place, self.alive, self._failed = self._first, list(range(self.world)), False

    def query(self, mask_status: Tensor) -> None:
        """Write into mask_status ``(W,)`` int32 1 for ranks that are masked, or will be in the next call; else 0."""
        need_shape("mask_status", mask_status, (self.world,))
        need_dtype("mask_status", mask_status, torch.int32)
        masked = [int(rank not in self.alive or rank in self._to_mask) for rank in range(self.world)]
        mask_status.copy_(torch.tensor(masked, dtype=torch.int32, device="cpu"))

    def apply(self) -> None:
        """Create the subgroup without the ranks to mask, if there are any. Collective among its ranks."""
        if any(rank in self._to_mask for rank in self.alive):
            self._shrink([place for place, rank in enumerate(self.alive) if rank not in self._to_mask])

    def watched(self, call: Callable[P, R]) -> Callable[P, R]:
        """Return ``call``, wrapped: if it loses a rank, mask that rank and raise PeerLost on all remaining ranks."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                result = call(*args, **kwargs)
                ascend_moe.check(self.place.group_ep)  # waits, on NPUs only
                return result
            except CommError as error:
                before = self.alive
                self._failed = True
                self._shrink(ascend_moe.agree(self.place.group_ep))
                lost = [rank for rank in before if rank not in self.alive]
                text = f"ranks {', '.join(map(str, lost)) or 'none'} are masked from now on: repeat the step"
                raise PeerLost(f"{text}; {error}", rank=lost[0] if lost else None, ranks=lost) from error

        return run

    def _shrink(self, left: list[int]) -> None:
        """Create the subgroup of ``left``, ranks of the current one."""
        ended = set(_seen(membership.ended, self.place))
        while True:
            try:
                place = ascend_moe.shrink(self.place.group_ep, left)
                break
            except PeerLost:  # another one was lost meanwhile
                left = ascend_moe.agree(self.place.group_ep)
                ended |= set(_seen(membership.ended, self.place))
        self._ended |= {self.alive[rank] for rank in ended if rank not in left}
        self.place, self._failed = BufferPlace(place.group_ep, place.world, place.rank), False
        self.alive = [self.alive[rank] for rank in left]
        self._to_mask.clear()

    def table(self, local_experts: int) -> Tensor | None:
        """Return ``(E,)`` int32: each expert's number in the subgroup, -1 on masked ranks; None if none is masked."""
        if len(self.alive) == self.world:
            return None
        made: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
        table = torch.full((self.world, local_experts), -1, **made)
        table[self.alive] = torch.arange(len(self.alive) * local_experts, **made).view(-1, local_experts)
        return table.view(-1)


def _seen(ranks: Callable[[str], list[int]], place: BufferPlace) -> list[int]:
    """Return these ranks of a group; none if its windows are not open yet, or not any more."""
    with contextlib.suppress(ArgumentError):
        return ranks(place.group_ep)
    return []


def mapped(ids: Tensor, table: Tensor | None) -> Tensor:
    """Return ``table[ids]``; negative ids are not changed, ids after the table stay invalid. None: ids unchanged."""
    if table is None:
        return ids
    known = (ids >= 0) & (ids < table.numel())
    moved = table.to(ids.device)[ids.clamp(0, table.numel() - 1).long()].to(ids.dtype)
    return torch.where(known, moved, torch.where(ids < 0, ids, torch.iinfo(torch.int32).max).to(ids.dtype))


class Received:
    """Result tensors of one low-latency dispatch, which `receive` fills, and the state for its combine.

    Args:
        dispatcher: that of the subgroup of unmasked ranks, which ``mask`` describes.
        tokens: most tokens of a rank. x, ids: this rank's rows, and their ids as sent. format: of the rows.
        stats: ``(L,)`` counts to which the received rows are added, or None. finish: waits for the op's result.
    """

    def __init__(
        self,
        dispatcher: MC2Dispatcher,
        tokens: int,
        x: Tensor,
        format: Format,
        ids: Tensor,
        stats: Tensor | None,
        mask: RankMask,
        finish: Callable[[], Dispatched],
    ) -> None:
        # Zeros on the CPU, which cost nothing until they are read or written.
        make = torch.zeros if x.device.type == "cpu" else torch.empty
        local, width, hidden = self.shape = dispatcher.local_experts, tokens * mask.world, x.shape[1]
        self.dispatcher, self.tokens, self.format, self.stats = dispatcher, tokens, format, stats
        self.ids, self.ranks, self.table = SentIds(ids), mask.alive, mask.table(local)
        self.count = make(local, dtype=torch.int32, device=x.device)
        # The last row is unused.
        self.values = [make(local * width + 1, hidden, dtype=FP8 if format.fp8 else x.dtype, device=x.device)]
        if format.fp8:  # a column of scales is contiguous, as in DeepEP
            self.values.append(make(local + 1, format.columns(hidden), width, dtype=format.scales, device=x.device))
        self.source = make(local * width + 1, dtype=torch.int32, device=x.device)  # the token of each row
        # Rows of each source rank, and from bit 32 on their first row.
        self.range = torch.zeros(local, mask.world, dtype=torch.int64, device=x.device)
        self.finish: Callable[[], Dispatched] | None = finish  # None: received
        self.shown: weakref.ref[Tensor] | None = None  # the caller's tensor
        self.combined = self.failed = False
        self.places: Tensor | None = None  # position of each of the op's rows in the results
        self.sent: Dispatched | None = None
        self.next_rows: Tensor | None = None  # of zero_copy

    def alive(self) -> bool:
        """Return whether the result is in use: not received yet, or neither combined nor dropped. False if failed."""
        if self.failed:
            return False
        return self.finish is not None or not (self.combined or self.shown is None or self.shown() is None)

    def receive(self) -> None:
        """Wait for the rows and write them into the result tensors; idempotent."""
        if self.finish is None:
            return
        try:
            sent = self.finish()
        except BaseException:
            self.failed = True
            raise
        self.finish, self.sent = None, sent
        counts, local = sent.ep_recv_counts, self.dispatcher.local_experts
        rows = int(counts[-1]) if counts.device.type == "cpu" else sent.expand_x.shape[0]
        table = counts.diff(prepend=counts.new_zeros(1)).view(local, -1).long()
        self.range[:, self.ranks] = table | (table.cumsum(1) - table) << 32
        self.count.copy_(table.sum(1))
        if self.stats is not None:
            self.stats += self.count
        # Row i of the op is row places[i] of the results; unused ones are the last row.
        rule = f"num_max_dispatch_tokens_per_rank {self.tokens} times {self.dispatcher.world_size} ranks"
        block, width = f"a local expert of rank {self.dispatcher.rank}", self.shape[1]
        self.places = places_of(counts.view(local, -1)[:, -1].contiguous(), rows, width, block, rule)
        self.source.index_copy_(0, self.places, sent.expand_idx[1 : 3 * rows : 3])
        if self.format.fp8:
            codes, scales = self.format.unpack(sent.expand_x[:rows], self.shape[2])
            self.values[0].view(torch.uint8).index_copy_(0, self.places, codes)
            self.values[1].transpose(1, 2)[self.places // width, self.places % width] = scales
        else:
            self.values[0].index_copy_(0, self.places, sent.expand_x[:rows])
        self.values = []


@typed_methods
class _LowLatencyMode(BufferBase):
    """Calls of low-latency mode, and the list of results in use."""

    _results: tuple[Received, ...] = ()
    enable_shrink: bool = False

    @cached_property
    def _mask(self) -> RankMask:
        return RankMask(self._place)

    def _shrinkable(self, name: str) -> RankMask:
        need(self.enable_shrink, name, "needs Buffer(enable_shrink=True)")
        return self._mask

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank from the next low-latency call on: no row is sent to its experts or received from it.

        Call it on all other ranks with the same rank_to_mask. mask=False cancels a request before that call. Raises
        ArgumentError without enable_shrink, for this rank, or if mask=False comes too late.
        """
        self._shrinkable("low_latency_update_mask_buffer").update(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write into mask_status ``(W,)`` int32 1 for each masked rank (lost, or masked by request), else 0."""
        self._shrinkable("low_latency_query_mask_buffer").query(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks; the next call opens new windows. Call it on all ranks.

        Raises ArgumentError if a rank has ended, or on NPUs if one was lost or masked.
        """
        self._shrinkable("low_latency_clean_mask_buffer").clean()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Return an empty tensor ``(0,)`` of dtype on the CPU, for callers that zero the whole buffer after a fault.

        Zeroing is not needed: values of earlier calls are never read. Raises ArgumentError unless size is None,
        offset 0 and use_rdma_buffer True, in a Buffer with enable_shrink.
        """
        if not (self.enable_shrink and use_rdma_buffer and size is None and offset == 0):
            self._no_local_buffer()
        return torch.empty(0, dtype=dtype, device="cpu")

    def _started(
        self, ops: tuple[Callable[..., R], Callable[..., InFlight[R]]], waits: WaitStats, split: bool, *given: Any,
        ranks: list[int], **options: Any,
    ) -> Callable[[], R]:  # fmt: skip
        """Run the first of ``ops``, or with ``split`` only send by the second; return what waits for the result."""
        watched: Any = self._mask.watched if self.enable_shrink else lambda call: call
        options |= waits.given(ranks)
        if split:
            started: InFlight[R] = watched(ops[1])(*given, **options)
            return watched(waits.after(started.finish))  # type: ignore[no-any-return]
        result: R = watched(waits.after(ops[0]))(*given, **options)
        return lambda: result

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]:
        """Send each (token, expert) row to the expert's rank.

        Args:
            x: ``(T, H)`` bf16, H a multiple of 16, with use_fp8 of 128.
            topk_idx: ``(T, K)`` int64 (or int32); the ids of a token must differ; -1: not routed.
            num_max_dispatch_tokens_per_rank: max, at least the T of every rank, equal on all ranks.
            num_experts: E, a multiple of W; L = E / W.
            cumulative_local_expert_recv_stats: ``(L,)`` int32, to which the rows per local expert are added, or None.
            dispatch_wait_recv_cost_stats: ``(W,)`` int64 on x's device, to which this call's µs of waiting for each
                source rank are added; or ``(W, W)``: to this rank's row; or None.
            use_fp8: send e4m3 with a scale per 128 values; round_scale: powers of two; use_ue8m0, with round_scale:
                their exponents, four per int32, H a multiple of 512.
            async_finish: return an event after this call's work on the stream; False: one whose ``event`` is None.
            return_recv_hook: only send. The results are undefined until the hook, or another call of this object, has
                received. False: send and receive; the hook does nothing.

        Returns:
            rows ``(L, max * W, H)`` bf16, or fp8 and scales ``(L, max * W, H / 128)`` float32, or with use_ue8m0
            ``(L, max * W, H / 512)`` int32, whose columns are contiguous; an expert's rows come first, by source rank,
            then in the source's order; rows per local expert ``(L,)`` int32; the handle; the event; the hook. At most
            two results may be in use, that is neither combined nor dropped.

        Collective. Raises ArgumentError if an argument breaks one of these rules or two results are in use,
        InvalidExpertId on every rank for an invalid id, or another error of the ops.
        """
        format, tokens = Format(use_fp8, round_scale, use_ue8m0), num_max_dispatch_tokens_per_rank
        self._place.need_one_server("low latency", "weights rows before they return, but weights belong to combine")
        local = self._place.local_experts(num_experts)
        _check(x, topk_idx, tokens, cumulative_local_expert_recv_stats, local)
        waits = WaitStats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, x, self._place)
        format.check(x.shape[1])
        self._need_room()
        self._pending.wait()
        self._mask.apply()
        rows, ids = format.pack(x), mapped(narrow("topk_idx", topk_idx), self._mask.table(local))
        place = self._mask.place
        named, dispatcher = wide_ids_named(topk_idx, place.rank), place.dispatcher(local * place.world)
        given: dict[str, Any] = {"ranks": self._mask.alive, "max_tokens": tokens}
        ops = dispatcher.dispatch, dispatcher.begin_dispatch
        finish = named(named(self._started)(ops, waits, return_recv_hook, rows, ids, **given))
        stats = cumulative_local_expert_recv_stats
        result = Received(dispatcher, tokens, x, format, ids, stats, self._mask, finish)
        self._results = (*self._results, result)
        shown: Any = result.values[0][:-1].view(result.shape)
        result.shown = weakref.ref(shown)
        # packed_recv_src_info (L, max * W) int32, packed_recv_layout_range (L, W) int64, max, hidden, num_experts
        source = result.source[:-1].view(result.shape[:2])
        handle = Handle.of(result, source, result.range, tokens, x.shape[1], num_experts)
        shown = (shown, _columns(result.values[1][:-1])) if format.fp8 else shown
        hook = self._pending.sent(result.receive) if return_recv_hook else base.nothing
        if not return_recv_hook:
            result.receive()
        return shown, result.count, handle, base.finished(async_finish, x, topk_idx), hook

    def _need_room(self) -> None:
        """Raise if two results are in use."""
        self._results = tuple(result for result in self._results if result.alive())
        if len(self._results) >= MOST_ALIVE:
            waiting = sum(result.finish is not None for result in self._results)
            hooks = f", {waiting} of them with a hook that was not called" if waiting else ""
            first = "the hook, then " if waiting else ""
            raise ArgumentError(
                f"low_latency_dispatch: {MOST_ALIVE} results are in use{hooks}: call {first}low_latency_combine "
                "with the handle, or drop the result",
                argument="handle",
            )

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Combine: return each token's weighted sum of its rows.

        Args:
            x: ``(L, max * W, H)`` bf16. Not read with zero_copy: the rows are those of
                ``get_next_low_latency_combine_buffer(handle)``.
            topk_idx: that of dispatch. topk_weights: ``(T, K)`` float32.
            handle: that of a dispatch whose rows have been received: its hook was called, if it has one.
            use_logfmt: must be False: combine's kernel sums bf16 rows, so LogFMT's codes would not be sent.
            async_finish, combine_wait_recv_cost_stats: as async_finish and dispatch_wait_recv_cost_stats of dispatch.
            return_recv_hook: only send; the result is undefined until the hook is called. False: send and receive.
            out: ``(T, H)`` bf16, to write to and return; None: a new tensor.

        Returns ``(T, H)`` bf16: fp32 sums, k ascending, one rounding; the event; the hook. Collective. Raises
        ArgumentError if an argument breaks one of these rules, or another error of the ops.
        """
        rule = "is True, but combine's kernel sums bf16 rows and does not decode LogFMT: pass False"
        need(not use_logfmt, "use_logfmt", rule)
        result, finished = call_of(handle, Received, "low_latency_dispatch"), (x, topk_idx, topk_weights)
        need(result.finish is None, "handle", "is of a dispatch whose hook was not called, or raised: call the hook")
        if zero_copy:
            rule = "needs get_next_low_latency_combine_buffer(handle) before: call it, and write the rows there"
            need(result.next_rows is not None, "zero_copy", rule)
            x = result.next_rows  # type: ignore[assignment]
        need_shape("x", x, result.shape, dtypes=(torch.bfloat16,))
        need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
        need_shape("topk_weights", topk_weights, tuple(topk_idx.shape), dtypes=(torch.float32,))
        wanted = (topk_idx.shape[0], result.shape[2])
        waits = WaitStats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, x, self._place)
        if out is not None:
            need_shape("out", out, wanted, dtypes=(torch.bfloat16,))
        assert result.places is not None and result.sent is not None
        rows = x.reshape(-1, result.shape[2])
        rows = rows.index_select(0, result.places.clamp(max=rows.shape[0] - 1))
        ids = result.ids.checked("topk_idx", mapped(narrow("topk_idx", topk_idx), result.table))
        dispatcher, sent = result.dispatcher, result.sent
        sent = dispatcher.resume(ids, sent.expand_idx, sent.ep_recv_counts, max_tokens=result.tokens)
        self._pending.wait()
        ops, given = (dispatcher.combine, dispatcher.begin_combine), (rows, sent, topk_weights)
        finish = self._started(ops, waits, return_recv_hook, *given, ranks=result.ranks)
        hook = base.nothing
        if return_recv_hook:
            total = rows.new_zeros(wanted) if out is None else out
            hook = self._pending.sent(lambda: _copy(total, finish()))
        else:
            total = finish() if out is None else out.copy_(finish())
        result.combined, result.next_rows = True, None
        return total, base.finished(async_finish, *finished), hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Return ``(L, max * W, H)`` bf16: write the rows there for the combine of ``handle`` with zero_copy=True."""
        result = call_of(handle, Received, "low_latency_dispatch")
        if result.next_rows is None:
            result.next_rows = torch.zeros(result.shape, dtype=torch.bfloat16, device=result.count.device)
        return result.next_rows


def _copy(to: Tensor, values: Tensor) -> None:
    to.copy_(values)


def _check(x: Tensor, topk_idx: Tensor, tokens: int, stats: Tensor | None, local: int) -> None:
    need_dims("x", x, 2, dtypes=(torch.bfloat16,))
    need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
    rule = "has {} tokens; x has {}: pass x's ids"
    need(topk_idx.shape[0] == x.shape[0], "topk_idx", rule, topk_idx.shape[0], x.shape[0])
    base.need_whole("num_max_dispatch_tokens_per_rank", tokens, 1)
    rule = "is {}; x has {} tokens: pass the largest number of all ranks"
    need(tokens >= x.shape[0], "num_max_dispatch_tokens_per_rank", rule, tokens, x.shape[0])
    if stats is not None:
        need_shape("cumulative_local_expert_recv_stats", stats, (local,), dtypes=(torch.int32,))


def _columns(scales: Tensor) -> Tensor:
    """Return ``(L, M, columns)`` of ``(L, columns, M)``; a single column has stride 1, to allow byte views."""
    local, columns, width = scales.shape
    return scales.view(local, width, 1) if columns == 1 else scales.transpose(1, 2)
