"""DeepEP's Buffer over the V2 ops, with its normal mode: one row for each (token, rank).

Rows are in the order of source ranks, then of their tokens. To the ops a rank is one expert: the ids of a token are its
destination ranks in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe import plan
from ascend_moe._tensors import narrow
from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.dispatchers.rows import unpack
from ascend_moe.errors import need, need_dims, need_equal, need_one_of, need_shape, typed_methods
from ascend_moe.experts.quant import FP8
from ascend_moe.interop.deep_ep import base
from ascend_moe.interop.deep_ep.base import BufferPlace, Config, EventOverlap, Group, Handle, call_of, need_whole
from ascend_moe.interop.deep_ep.low_latency import _LowLatencyMode
from ascend_moe.interop.deep_ep.rows import FLOATS, check_x, pack
from ascend_moe.ops.collectives import gather_rows


@dataclass(frozen=True)
class Sent:
    """State of a normal dispatch: `again` repeats it with other rows, `sum` combines its rows."""

    dispatcher: MC2Dispatcher
    ranks: Tensor  # (T, K') int32, ranks of each token, padded with -1
    tokens: int  # most tokens of a rank, at least 1
    arrived: Dispatched
    rows: int  # rows of the results
    compared: bool  # whether ranks compare the columns of their rows, which is read on the host

    def again(self, x: Tensor | tuple[Tensor, Tensor]) -> Any:
        """Send other rows ``x`` of the same tokens to the same ranks; return the received rows, in x's form."""
        columns = check_x(x)
        need_shape("x", columns[0], (self.ranks.shape[0], columns[0].shape[1]))
        if self.compared:
            place = self.dispatcher.place
            _need_equal(gather_rows(_columns(columns, []), place), place.rank)
        rows, ones = pack(*columns), _ones(self.dispatcher, self.ranks)
        sent = self.dispatcher.dispatch(rows, self.ranks, expert_scales=ones, max_tokens=self.tokens)
        return _x(_received(sent, self.rows, columns))

    def sum(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Combine: return each token's sum of its ``rows`` and its row of ``bias``, rounded once."""
        ones = _ones(self.dispatcher, self.ranks)
        return self.dispatcher.combine(rows.contiguous(), self.arrived, ones, shared_expert_x=bias)


FLAVOURS: dict[str, Any] = {}  # Buffers; the module of each adds its own


class _ByFlavour(type):
    """Metaclass: ``Buffer(group, ..., flavour="ascend")`` makes an AscendBuffer."""

    def __call__(cls, *args: Any, flavour: str = "deepep", **kwargs: Any) -> Any:
        need_one_of("flavour", flavour, FLAVOURS)
        if cls is Buffer and flavour != cls.flavour:
            return FLAVOURS[flavour](*args, **kwargs)
        return super().__call__(*args, **kwargs)


@typed_methods
class Buffer(_LowLatencyMode, metaclass=_ByFlavour):
    """Dispatch and combine with DeepEP's names, arguments, results and handles. Source: DeepEP ``Buffer``.

    Args:
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl: as for `BufferBase`, which states the limits.
        explicitly_destroy: allow ``destroy``; False: it raises ArgumentError.
        enable_shrink: low-latency calls continue after the loss of a rank, among processes of one machine or in a
            LocalCluster: the call raises PeerLost on the remaining ranks and masks the lost one; later calls run among
            the remaining ranks, which keep their numbers. On NPUs each low-latency call then waits for the device.
        comm: must be None.
        flavour: "deepep"; "ascend": return an ``AscendBuffer``, with sgl-kernel-npu's rows, counts and handles.
    """

    flavour = "deepep"

    def __init__(
        self,
        group: Group,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ) -> None:
        need(comm is None, "comm", "is not supported; pass a process group as group")
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self.explicitly_destroy, self.enable_shrink = explicitly_destroy, enable_shrink

    def destroy(self) -> None:
        """Wait for a call in flight; the group's windows stay open. Raises ArgumentError without explicitly_destroy."""
        super().destroy()
        self._pending.wait()

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count the tokens for each rank, server and expert.

        Args:
            topk_idx: ``(T, K)`` int64 (or int32); -1: not routed.
            num_experts: E, a multiple of W.
            previous_event: the stream waits for it first; None: no wait. allocate_on_comm_stream: ignored.
            async_finish: return an event after this call's work on the stream; False: one whose ``event`` is None.

        Returns tokens to send to each rank ``(W,)`` int32; to each server (int32), None for one server; (token, k)
        pairs of each expert ``(E,)`` int32; whether a token is sent to a rank ``(T, W)`` bool; the event. Raises
        ArgumentError if an argument breaks one of these rules.
        """
        found = base.dispatch_layout(self._place, topk_idx, num_experts, previous_event)
        return (*found, base.finished(async_finish, topk_idx))

    @torch.no_grad()
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, EventOverlap]:
        """Send each token once to every rank that has one of its experts.

        Args:
            x: ``(T, H)`` bf16, fp16 or float32, rows of a multiple of 32 bytes; or fp8 (e4m3) rows and their scales
                ``(T, H / 128)`` float32.
            handle: that of an earlier dispatch: send the rows of x to the same ranks; then topk_idx and topk_weights
                must be None. None: a new dispatch.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: get_dispatch_layout's; needed without handle.
            topk_idx, topk_weights: ``(T, K)`` int64 (or int32) and float32, sent with the rows; each on all ranks or
                None on all, topk_weights only with topk_idx. H, K and dtypes are equal on all ranks.
            expert_alignment: round the returned counts per expert up to a multiple of this number.
            num_worst_tokens: 0: return the received rows, whose number is read on the host. Above 0, equal on all
                ranks: return this many rows, at least W times the largest T; nothing is read on the host.
            num_tokens_per_rdma_rank, config: no effect. previous_event, async_finish, allocate_on_comm_stream: as for
                get_dispatch_layout.

        Returns n rows like x, by source rank, then in the source's order; local ids ``(n, K)`` int64, -1 for experts of
        other ranks and unused rows; weights ``(n, K)``, 0 there; a list of (token, k) pairs per local expert, empty
        with num_worst_tokens; the handle; the event. Ids and weights are None if none were passed. With ``handle`` all
        are None except the rows and the event.

        Collective. Raises ArgumentError if an argument breaks one of these rules; on every rank ConfigMismatch, and
        InvalidExpertId for an invalid id of topk_idx, which are not checked with num_worst_tokens; or another error of
        the ops.
        """
        base.begin(previous_event)
        self._pending.wait()
        if handle is not None:
            need(topk_idx is None and topk_weights is None, "topk_idx", "is given with a handle; pass one of them")
            again = call_of(handle, Sent, "dispatch").again(x)
            return again, None, None, None, None, base.finished(async_finish, x)
        place, columns = self._place, check_x(x)
        own, world = columns[0].shape[0], place.world
        layout = _layout(place, own, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        in_rank, local = layout[1].bool(), place.local_experts(layout[2].numel())
        beside = _topk(own, topk_idx, topk_weights)
        need_whole("expert_alignment", expert_alignment, 1)
        need_whole("num_worst_tokens", num_worst_tokens, 0)
        rule = "is {}; with {} ranks and {} tokens on this one it must be at least {}"
        fits = num_worst_tokens == 0 or own <= num_worst_tokens // world
        need(fits, "num_worst_tokens", rule, num_worst_tokens, world, own, world * own)
        at_once = num_worst_tokens > 0  # read nothing on the host
        ranks = _ranks(in_rank, world if topk_idx is None else topk_idx.shape[1], not at_once)
        head = base.agreed_head(own, topk_idx, world * local, columns[0].device)
        pairs = 2**31 - 1 if topk_idx is None else topk_idx.numel()
        per_rank = _counts("num_tokens_per_rank", layout[0], own, not at_once)
        per_expert = _counts("num_tokens_per_expert", layout[2], pairs, not at_once)
        mine = _columns(columns, beside).to(head.device)
        table = gather_rows(torch.cat([head, mine, per_rank, per_expert]), place)
        heads, everyone, table = table.tensor_split([len(head), len(head) + len(mine)], 1)
        if not at_once:
            _need_equal(everyone, place.rank)
        tokens = num_worst_tokens // world if at_once else base.most_tokens(heads, topk_idx, world * local)
        dispatcher, tokens, columns = place.dispatcher(world), max(tokens, 1), [*columns, *beside]
        out = dispatcher.dispatch(pack(*columns), ranks, expert_scales=_ones(dispatcher, ranks), max_tokens=tokens)
        counts = out.ep_recv_counts
        compared = not at_once and counts.device.type == "cpu"
        sent = Sent(dispatcher, ranks, tokens, out, num_worst_tokens or int(counts[-1]), compared)
        received = _received(out, sent.rows, columns)
        arrived = torch.arange(sent.rows, device=counts.device) < counts[-1]
        first = len(columns) - len(beside)
        ids, weights = _local_topk(received[first:], arrived, place.rank * local, local)
        by_expert = table[:, world:].sum(0)[place.rank * local : (place.rank + 1) * local]
        aligned = (by_expert + expert_alignment - 1) // expert_alignment * expert_alignment
        counted = [] if at_once else [int(count) for count in aligned.tolist()]
        made = _handle(sent, table[:, :world], in_rank, arrived)
        return _x(received[:first]), ids, weights, counted, made, base.finished(async_finish, x)

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Combine: return each token's sum of its rows, without weights.

        Args:
            x: ``(n, H)`` bf16, fp16 or float32, rows in the order of dispatch's result; further rows are not read.
            handle: the handle that dispatch returned.
            topk_weights: ``(n, K)`` float32, summed like the rows. On all ranks, or None on all.
            bias: None, or one or two ``(T, H)`` of x's dtype, added after the rows; as many on all ranks.
            config, previous_event, async_finish, allocate_on_comm_stream: as for dispatch.

        Returns ``(T, H)`` of x's dtype: fp32 sums, ranks ascending, then the biases, one rounding; the sums of
        topk_weights ``(T, K)`` float32, or None; the event. Collective. Raises ArgumentError if an argument breaks one
        of these rules, or another error of the ops.
        """
        base.begin(previous_event)
        self._pending.wait()
        sent = call_of(handle, Sent, "dispatch")
        need_dims("x", x, 2, dtypes=FLOATS)
        need(x.shape[0] >= sent.rows, "x", "has {} rows; dispatch returned {}: pass all", x.shape[0], sent.rows)
        biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
        need(len(biases) <= 2, "bias", "has {} tensors; need one or two", len(biases))
        for each in biases:
            need_shape("bias", each, (sent.ranks.shape[0], x.shape[1]), dtypes=(x.dtype,))
        if len(biases) == 2:  # fp32 rows, a part of the columns at a time, no wider than those of x
            parts = zip(*(each.float().chunk(4 // x.element_size(), 1) for each in (x, *biases)), strict=True)
            total = torch.cat([sent.sum(rows, first.contiguous()) + second for rows, first, second in parts], 1)
        else:
            total = sent.sum(x, *biases)
        weights = None
        if topk_weights is not None:
            need_dims("topk_weights", topk_weights, 2, dtypes=(torch.float32,))
            rows, columns = topk_weights.shape
            need(rows >= sent.rows, "topk_weights", "has {} rows; dispatch returned {}: pass all", rows, sent.rows)
            padded = torch.nn.functional.pad(topk_weights, (0, -columns % 8))
            weights = sent.sum(padded)[:, :columns].contiguous()
        return total.to(x.dtype), weights, base.finished(async_finish, x)


def _layout(place: BufferPlace, tokens: int, *layout: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layout: rows per rank, tokens by rank, rows per expert. Raise unless it is complete and fits."""
    names = ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
    for name, each in zip(names, layout, strict=True):
        need(each is not None, name, "is missing; pass get_dispatch_layout's result, or a handle")
    per_rank, in_rank, per_expert = layout
    need_shape(names[0], per_rank, (place.world,))
    need_shape(names[1], in_rank, (tokens, place.world), dtypes=(torch.bool, torch.int32, torch.int64))
    need_dims(names[2], per_expert, 1)
    return per_rank, in_rank, per_expert


def _counts(name: str, given: Tensor, most: int, checked: bool) -> Tensor:
    """Return int32 counts; on the CPU each must be one of 0..most."""
    counts = narrow(name, given)
    if checked and counts.device.type == "cpu" and bool(((counts < 0) | (counts > most)).any()):
        at = int(((counts < 0) | (counts > most)).int().argmax())
        rule = "at {} is {}; it must be one of 0..{}: pass get_dispatch_layout's result"
        need(False, name, rule, at, int(given[at]), most)
    return counts


def _topk(tokens: int, topk_idx: Tensor | None, topk_weights: Tensor | None) -> list[Tensor]:
    """Return the columns of ids and weights to send."""
    if topk_idx is None:
        need(topk_weights is None, "topk_weights", "is given without topk_idx; pass both")
        return []
    need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
    need(topk_idx.shape[0] == tokens, "topk_idx", "has {} tokens; x has {}: pass x's ids", topk_idx.shape[0], tokens)
    if topk_weights is None:
        return [narrow("topk_idx", topk_idx)]
    need_shape("topk_weights", topk_weights, tuple(topk_idx.shape), dtypes=(torch.float32,))
    return [narrow("topk_idx", topk_idx), topk_weights]


_DTYPES = (*FLOATS, FP8)


def _columns(x: list[Tensor], topk: list[Tensor]) -> Tensor:
    """Return ``(4,)`` int32, what must be equal on all ranks: index in _DTYPES, H, K or 0, number of topk tensors."""
    made = [_DTYPES.index(x[0].dtype), x[0].shape[1], topk[0].shape[1] if topk else 0, len(topk)]
    return torch.tensor(made, dtype=torch.int32, device="cpu")


def _need_equal(everyone: Tensor, rank: int) -> None:
    """Raise ConfigMismatch if the ranks' `_columns` ``(W, 4)`` differ; packed rows may fit all the same."""
    names, counts = ("x", "H", "K of topk_idx", "topk_weights"), everyone.tolist()
    shown = [(_DTYPES[dtype], hidden, topk or None, "given" if n == 2 else None) for dtype, hidden, topk, n in counts]
    need_equal([dict(zip(names, each, strict=True)) for each in shown], rank)


def _ranks(in_rank: Tensor, slots: int, checked: bool) -> Tensor:
    """Return ``(T, K')`` int32: the ranks of each token, ascending, padded with -1."""
    world = in_rank.shape[1]
    limit = plan.limits()["topk"]
    most = min(slots, world, limit)
    numbers = torch.arange(world, dtype=torch.int32, device=in_rank.device)
    ranks = torch.where(in_rank, numbers, world).sort(1).values[:, :most]
    if checked and in_rank.shape[0]:
        widest = int(in_rank.sum(1).max())
        bound = "topk_idx has {} columns" if slots < limit else "the ops take at most {}"
        need(widest <= most, "is_token_in_rank", "sends a token to {} ranks; " + bound, widest, most)
    return torch.where(ranks < world, ranks, -1).contiguous()


def _ones(dispatcher: MC2Dispatcher, ranks: Tensor) -> Tensor | None:
    """Return weights of 1 for a dispatcher that weights rows before combine."""
    return ranks.new_ones(ranks.shape, dtype=torch.float32) if dispatcher.weighs_first else None


def _received(sent: Dispatched, number: int, columns: list[Tensor]) -> list[Tensor]:
    """Return the columns of ``number`` received rows, padded with zeros."""
    return unpack(_first(sent.expand_x, number), *((column.shape[1], column.dtype) for column in columns))


def _first(rows: Tensor, number: int) -> Tensor:
    """Return ``number`` rows, padded with zeros."""
    if number > rows.shape[0]:
        return torch.nn.functional.pad(rows, (0, 0, 0, number - rows.shape[0]))
    return rows[:number]


def _x(columns: list[Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    return columns[0] if len(columns) == 1 else (columns[0], columns[1])


def _local_topk(columns: list[Tensor], arrived: Tensor, first: int, local: int) -> tuple[Tensor | None, Tensor | None]:
    """Return local ids and their weights; -1 and 0 for experts of other ranks and unused rows."""
    if not columns:
        return None, None
    ids = columns[0]
    own = (ids >= first) & (ids < first + local) & arrived.unsqueeze(1)
    weights = torch.where(own, columns[1], 0.0) if len(columns) == 2 else None
    return torch.where(own, ids - first, -1).long(), weights


def _handle(sent: Sent, per_rank: Tensor, in_rank: Tensor, arrived: Tensor) -> Handle:
    """Return DeepEP's six tensors, int32 unless noted, with one channel; ``per_rank``: (source, destination)."""
    place, rows = sent.dispatcher.place, sent.rows
    source = sent.arrived.expand_idx[1 : 3 * rows : 3]
    source = _first(source.unsqueeze(1), rows).squeeze(1)
    head = torch.where(in_rank, in_rank.int().cumsum(0, dtype=torch.int32) - 1, -1)
    return Handle.of(
        sent,
        per_rank.cumsum(0, dtype=torch.int32),  # rank_prefix_matrix (W, W)
        per_rank[place.rank].reshape(-1, 1).clone(),  # channel_prefix_matrix (W, 1)
        torch.zeros(place.world, 1, dtype=torch.int32, device=per_rank.device),  # recv_channel_prefix_matrix
        torch.where(arrived, source, -1),  # recv_src_idx (n,)
        in_rank,  # is_token_in_rank (T, W) bool
        head,  # send_head (T, W)
    )


FLAVOURS[Buffer.flavour] = Buffer
