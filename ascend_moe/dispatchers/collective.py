"""Dispatchers over torch.distributed, which differ only in the collectives that transport the rows.

Before any row is sent, ranks exchange headers with their configuration and invalid ids, so that either all of them
raise or none does.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ascend_moe._tensors import id_text
from ascend_moe.call import CallOptions, SpecialExperts
from ascend_moe.comm import group_of, process_group, size_and_rank
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import rows as row_ops
from ascend_moe.dispatchers.base import (
    ROW_DTYPES,
    CombineTensors,
    Dispatched,
    Dispatcher,
    DispatchTensors,
    SpecialTensors,
    check_combine,
    check_dispatch,
)
from ascend_moe.dispatchers.rows import Routing, active_pairs, first_invalid, route
from ascend_moe.errors import ConfigMismatch, InvalidExpertId, RoutingOverflow, need, with_typed_errors
from ascend_moe.ops import autograd
from ascend_moe.ops.collectives import by_expert, exchange, gather

if TYPE_CHECKING:
    from ascend_moe.ops.collectives import Group

#: int32 words of a header: ten fields of the configuration, scales given, error code and three details.
HEADER_WORDS = 16
_FIELDS = ("H", "K", "E", "maxBS", "dtype", "quant_mode", "expert_scales", *SpecialExperts._fields)
_SMOOTH, _CODE = 10, 11
#: Options of a call that collectives support; the others are specific to the ops.
_TAKEN = ("quant_mode", "global_bs", "expert_token_nums_type", *SpecialExperts._fields)
_BAD_ID, _OVERFLOW = 1, 2  # 0: no error


class Config(NamedTuple):
    """The first words of a header, which must be equal on all ranks, except ``smooth`` (scales were passed)."""

    hidden: int
    topk: int
    experts: int
    max_bs: int
    dtype: int  # index into ROW_DTYPES
    quant_mode: int
    weighted: bool  # expert_scales were passed
    zero: int
    copy: int
    const: int
    smooth: bool


def plan(expert_ids: Tensor, mask: Tensor | None, config: Config, world: int) -> tuple[Routing, tuple[int, ...]]:
    """Return this rank's routing (no rows with an invalid id), and its error as words of the header, () without one."""
    active = active_pairs(expert_ids, mask)
    bad = first_invalid(expert_ids, active, config.experts + config.zero + config.copy + config.const)
    if bad is not None:
        token, k = divmod(bad, config.topk)
        nothing = route(expert_ids, torch.zeros_like(active), config.experts)
        return nothing, (_BAD_ID, token, k, int(expert_ids[token, k]))
    routing = route(expert_ids, active, config.experts)
    local = config.experts // world
    rows = routing.counts.view(world, local).sum(1)
    capacity = config.max_bs * min(config.topk, local)
    over = (rows > capacity).nonzero()
    if over.numel():
        owner = int(over[0])
        return routing, (_OVERFLOW, owner, int(rows[owner]), capacity)
    return routing, ()


def raise_if_any(headers: list[list[int]], rank: int) -> None:
    """Raise the error in the ranks' headers, if any: a ConfigMismatch with this ``rank``, else the lowest rank's."""
    _raise_mismatch(headers, rank)
    for source, words in enumerate(headers):
        code, *details = words[_CODE:]
        if code == _BAD_ID:
            token, k, expert_id = details[:3]
            ids = words[_FIELDS.index("E")] + sum(words[_FIELDS.index(name)] for name in SpecialExperts._fields)
            text = f"rank {source}: expert_ids[{token}, {k}] is {id_text(expert_id)}; need -1 or 0..{ids - 1}"
            found = {"rank": source, "token": token, "k": k, "expert_id": expert_id}
            raise InvalidExpertId(text, argument="expert_ids", **found)
        if code == _OVERFLOW:
            owner, rows, capacity = details[:3]
            text = f"rank {source} routes {rows} rows to rank {owner}, more than its capacity of {capacity} "
            text += "= maxBS * min(K, L); remove duplicate ids or raise global_bs"
            raise RoutingOverflow(text, rank=source, owner=owner, rows=rows, capacity=capacity)


def _raise_mismatch(headers: list[list[int]], rank: int) -> None:
    mine = headers[rank]
    for other in range(len(headers)):  # report the first rank that differs
        for index, name in enumerate(_FIELDS):
            ours: Any = mine[index]
            theirs: Any = headers[other][index]
            if ours == theirs:
                continue
            if name == "dtype":
                ours, theirs = (str(ROW_DTYPES[v]).removeprefix("torch.") for v in (ours, theirs))
            if name == "expert_scales":
                ours, theirs = ("given" if value else "None" for value in (ours, theirs))
            fix = "call with the same value on all ranks"
            if name == "maxBS":
                largest = max(header[index] for header in headers)
                fix = "if batches differ, pass global_bs = ep_world_size * the largest "
                fix += f"batch on every rank, here {len(headers) * largest}, or max_tokens {largest}"
            text = f"{name} is {ours} on rank {rank} but {theirs} on rank {other}; {fix}"
            raise ConfigMismatch(text, field=name, rank=other, ours=ours, theirs=theirs)


# ---- common parts


@dataclass
class _Call:
    """One dispatch of this rank: arguments and routing."""

    x: Tensor
    expert_ids: Tensor  # -1 if not routed
    weights: Tensor | None
    scales: Tensor | None
    config: Config
    routing: Routing

    def payload(self, pairs: Tensor | None) -> Tensor:
        """Return the packed rows of these flat indices, None: of every token."""
        return row_ops.payload(self.x, self.expert_ids, pairs, self.scales, self.config.quant_mode)


@dataclass
class _Handle:
    owner: Dispatcher
    x: Tensor
    expert_ids: Tensor
    routing: Routing
    rows: int  # received
    position: Tensor  # (BS*K,) int64, index among the rows that are sent back
    route: Any  # the dispatcher's data for sending them back
    smooth: bool  # x was multiplied by scales


@dataclass
class _Arrived:
    words: Tensor  # (n, words) int32: this rank's rows, packed, in expand_x order
    weights: Tensor | None  # (n,) fp32 per row, if passed
    counts: Tensor  # (L, W) int64: rows for each local expert from each rank
    position: Tensor  # as in _Handle
    route: Any


def _live(place: Place) -> Group:
    """Return the process group of the place, or the place itself in a LocalCluster."""
    known = size_and_rank(place.group_ep)
    rule = "is {!r}, which names no open group: use ascend_moe.comm_name(process_group)"
    need(known is not None, "group_ep", rule, place.group_ep)
    world, rank = known or (0, 0)
    rule = "{!r} has {} ranks, and this is rank {}; the place is rank {} of {}: pass this rank's place"
    fits = world == place.world and rank in (None, place.rank)
    need(fits, "group_ep", rule, place.group_ep, world, rank, place.rank, place.world)
    return process_group(place.group_ep) or place


class CollectiveDispatcher(Dispatcher):
    """A dispatcher over the collectives of a process group.

    Args:
        group: as in `comm.group_of`, None for the default group; or a `Place` or name of a LocalCluster, whose threads
            have no process group: there its windows transport the rows.
        num_experts: E, a multiple of the group's size.
        options: quant_mode, global_bs, expert_token_nums_type and the special experts' numbers, as in `CallOptions`.

    Raises:
        ArgumentError: another option differs from its default, ``group`` is no group, or as `Dispatcher`.
    """

    kind: str  # of `make_dispatcher`

    @with_typed_errors
    def __init__(self, group: object, num_experts: int, **options: Any) -> None:
        self.group: Group
        if isinstance(group, (Place, str, tuple)):
            place = Place.of(group, "process_group")
            self.group = _live(place)
        else:
            self.group = found = group_of("process_group", group)
            place = Place(str(getattr(found, "group_name", "")), found.size(), found.rank())
        super().__init__(place, num_experts, CallOptions.given_to(type(self), options))
        self._need_taken(self.options)

    def _need_taken(self, options: CallOptions) -> None:
        for name, value in options.options.items():
            need(name in _TAKEN, name, "is {!r}, not supported by kind {!r}; leave it out", value, self.kind)

    def _need_no_times(self, performance_info: Tensor | None) -> None:
        rule = "is {}; kind {!r} does not measure waits: use 'mc2'"
        need(performance_info is None, "performance_info", rule, performance_info, self.kind)

    def _dispatch(self, x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions) -> Dispatched:
        self._need_taken(options)
        self._need_no_times(tensors.performance_info)
        max_bs = check_dispatch(x, expert_ids, tensors, options, world=self.world_size, experts=self.num_experts)
        weights, scales, quant_mode = tensors.expert_scales, tensors.scales, options.quant_mode
        size = (x.size(1), expert_ids.size(1), self.num_experts, max_bs, ROW_DTYPES.index(x.dtype), quant_mode)
        config = Config(*size, weights is not None, *self.special, scales is not None)
        routing, problem = plan(expert_ids, tensors.x_active_mask, config, self.world_size)
        words = [*config, *problem]
        header = torch.tensor(words + [0] * (HEADER_WORDS - len(words)), dtype=torch.int32, device=x.device)
        ids = torch.where(routing.routed, expert_ids, -1)
        arrived = self._send(_Call(x, ids, weights, scales, config, routing), header)
        expand_x, dynamic_scales = row_ops.open_rows(arrived.words, x.size(1), x.dtype, quant_mode)
        stored = (x.detach(), expert_ids, routing, expand_x.size(0))
        handle = _Handle(self, *stored, arrived.position, arrived.route, scales is not None)
        expand_scales = dynamic_scales.new_empty(0) if arrived.weights is None else arrived.weights
        if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in (x, weights)):
            expand_x, dynamic_scales, expand_scales = _Sent.apply(  # type: ignore[no-untyped-call]
                self, handle, x, weights, expand_x, dynamic_scales, expand_scales
            )
        nums, ends = arrived.counts.sum(1), arrived.counts.reshape(-1).cumsum(0).to(torch.int32)
        nums = nums if options.expert_token_nums_type == 1 else nums.cumsum(0)
        return Dispatched(expand_x, dynamic_scales, nums, ends, routing.expand_idx, expand_scales, handle)

    def _combine(self, expert_out: Tensor, dispatched: Dispatched, tensors: CombineTensors) -> Tensor:
        handle: _Handle = dispatched.handle
        expert_scales, shared, special, times = tensors
        self._need_no_times(times)
        check_combine(expert_out, handle.rows, handle.x, expert_scales, handle.routing.routed.size(1), shared)
        special.check(self.special, handle.x)
        rows = expert_out[: handle.rows]
        if expert_scales is None:
            expert_scales = torch.ones(handle.routing.routed.shape, dtype=torch.float32, device=rows.device)
        result: Tensor = _Summed.apply(  # type: ignore[no-untyped-call]
            self, handle, rows, expert_scales, shared, *special
        )
        return result

    @abstractmethod
    def _send(self, call: _Call, header: Tensor) -> _Arrived:
        """Exchange headers, raise their errors, and exchange rows."""

    @abstractmethod
    def _send_again(self, pairs: Tensor, handle: _Handle) -> Tensor:
        """Send a packed row per (token, k), (BS*K, words), to dispatch's destinations; return (n, words)."""

    @abstractmethod
    def _send_back(self, rows: Tensor, route: Any) -> Tensor:
        """Send (n, H) rows in expand_x order back; return those of this rank, packed."""

    def _add_rows(
        self,
        rows: Tensor,
        handle: _Handle,
        weights: Tensor,
        shared: Tensor | None,
        special: SpecialTensors | None = None,
    ) -> Tensor:
        """Return (BS, H): every token's weighted sum, including the rows of copy and const experts if passed."""
        words = self._send_back(rows, handle.route)
        (home,) = row_ops.unpack(words, (rows.size(1), rows.dtype))
        own, (zeros, copies, _) = None, self.special
        if special is not None and self.special.need_rows:
            pairs = (handle.expert_ids, handle.routing.special)
            own = row_ops.special_rows(*pairs, self.num_experts + zeros, copies, special)
        return row_ops.weighted_sum(home, handle.position, handle.routing, weights, shared, own)

    def _values_of_pairs(self, values: Tensor, handle: _Handle) -> Tensor:
        """Return (BS, K) fp32: the value (n,) of each row at its (token, k), 0 if not routed."""
        routed = handle.routing.routed
        (home,) = row_ops.unpack(self._send_back(values[:, None], handle.route), (1, torch.float32))
        home = torch.cat([home, home.new_zeros(1, 1)])[:, 0]  # index 0 must exist on ranks without rows
        return torch.where(routed, home[handle.position].view(routed.shape), 0.0)


class _Sent(torch.autograd.Function):
    """Dispatch's rows and weights as functions of x and expert_scales; their gradients are sent back like rows.

    For int8 rows the scales stand in for the rows in the graph.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, dispatcher: CollectiveDispatcher, handle: _Handle, x: Tensor, _: Tensor | None, *outputs: Tensor
    ):
        ctx.dispatcher, ctx.handle, ctx.row_gradients = dispatcher, handle, []
        rows, scales, weights = (output.view_as(output) for output in outputs)
        ctx.quantized, ctx.dtype = rows.dtype == torch.int8, x.dtype
        ctx.set_materialize_grads(False)
        fixed = [rows if ctx.quantized else scales]
        fixed += [] if ctx.needs_input_grad[2] else [rows, scales]
        ctx.mark_non_differentiable(*fixed, *([] if ctx.needs_input_grad[3] else [weights]))
        return rows, scales, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, scales: Tensor | None, weights: Tensor | None) -> Any:
        dispatcher, handle = ctx.dispatcher, ctx.handle
        gx = gw = None
        if ctx.needs_input_grad[2]:
            gx = _Sent._of_rows(ctx, grad, scales)
        if ctx.needs_input_grad[3]:
            weights = (
                torch.zeros(handle.rows, dtype=torch.float32, device=handle.x.device) if weights is None else weights
            )
            gw = dispatcher._values_of_pairs(weights, handle)
        return None, None, gx, gw, None, None, None

    @staticmethod
    def _of_rows(ctx: Any, grad: Tensor | None, scales: Tensor | None) -> Tensor:
        handle = ctx.handle
        if ctx.quantized:
            grad = autograd.straight_through(ctx, scales, "dispatch")
            need(not handle.smooth, "scales", 'have no gradient: call dispatch without them for "straight_through"')
        if grad is None:
            grad = torch.zeros(handle.rows, handle.x.size(1), dtype=torch.float32, device=handle.x.device)
        ones = torch.ones(handle.routing.routed.shape, dtype=torch.float32, device=grad.device)
        added: Tensor = ctx.dispatcher._add_rows(grad.to(ctx.dtype), handle, ones, None)
        return added


class _Summed(torch.autograd.Function):
    """Combine. Its backward sends the gradients of the sums, and the weights, to dispatch's destinations."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        dispatcher: CollectiveDispatcher,
        handle: _Handle,
        rows: Tensor,
        weights: Tensor,
        shared: Tensor,
        *special: Tensor | None,
    ):
        ctx.dispatcher, ctx.handle = dispatcher, handle
        ctx.save_for_backward(weights, rows if ctx.needs_input_grad[3] else None, *special)
        ctx.shared_shape = None if shared is None else shared.shape
        return dispatcher._add_rows(rows, handle, weights, shared, SpecialTensors(*special))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> Any:
        weights, rows, *special = ctx.saved_tensors
        dispatcher, handle, routing = ctx.dispatcher, ctx.handle, ctx.handle.routing
        gz = gw = shared = None
        if ctx.needs_input_grad[4]:
            shared = gy.masked_fill(~routing.active[:, None], 0.0).reshape(ctx.shared_shape)
        if any(ctx.needs_input_grad[2:4]):
            topk = weights.size(1)
            pairs = row_ops.pack(gy.repeat_interleave(topk, 0), weights.reshape(-1, 1))
            words = dispatcher._send_again(pairs, handle)
            sent, factors = row_ops.unpack(words, (gy.size(1), gy.dtype), (1, torch.float32))
            gz = (sent * factors).to(gy.dtype)
        if rows is not None:
            gw = dispatcher._values_of_pairs((sent.float() * rows.float()).sum(1), handle)
        own: list[Tensor | None] = [None] * len(special)
        if dispatcher.special.need_rows:
            experts = dispatcher.num_experts, dispatcher.special
            found = autograd.special_back(*experts, gy.float(), handle.expert_ids, routing.special, weights, *special)
            gw = None if gw is None else gw + found["expert_scales"]
            for at, (name, tensor) in enumerate(zip(SpecialTensors._fields, special, strict=True)):
                if ctx.needs_input_grad[5 + at] and name in found:
                    own[at] = found[name].to(tensor.dtype)
        return None, None, gz, gw, shared, *own


# ---- all-to-all

#: Limit of W * L, as in the windows: the header has room for that many counts.
MAX_EXPERTS = 2048


class AllToAllDispatcher(CollectiveDispatcher):
    """Dispatcher that sorts rows by expert, sends them with all_to_all_single, and reorders them by local expert.

    Two collectives per dispatch (headers with counts; rows), one per combine. A rank sends at most BS*K rows, receives
    those for its experts, and combine reverses this. The backend must support uneven splits (gloo, HCCL, NCCL, MPI do).

    Args:
        group: as for `CollectiveDispatcher`.
        num_experts: E, a multiple of the group's size, at most 2048.
        options: as for `CollectiveDispatcher`.

    Raises:
        ArgumentError: num_experts is above 2048, or as `CollectiveDispatcher`.
    """

    kind = "alltoall"

    def __init__(self, group: object, num_experts: int, **options: Any) -> None:
        super().__init__(group, num_experts, **options)
        need(num_experts <= MAX_EXPERTS, "num_experts", "is {}; need at most {}", num_experts, MAX_EXPERTS)
        # A fixed size, so that ranks with different E still exchange whole headers.
        self._count_words = -(-MAX_EXPERTS // self.world_size)

    def _send(self, call: _Call, header: Tensor) -> _Arrived:
        routing = call.routing
        per_rank = routing.counts.view(self.world_size, self.local_experts)
        table = self._exchange_counts(header, per_rank)
        payload = call.payload(routing.order)
        if call.weights is not None:
            payload = row_ops.beside(payload, call.weights.reshape(-1, 1)[routing.order])
        sent, received = per_rank.sum(1).tolist(), table.sum(1).tolist()
        words = exchange(payload, sent, received, self.group)
        order = self._expert_major(table)
        if order is not None:
            words = words.index_select(0, order)
        words, weights = row_ops.apart(words, 1) if call.weights is not None else (words, None)
        own = None if weights is None else weights[:, 0]
        return _Arrived(words, own, table.t(), routing.position, (order, sent, received))

    def _send_again(self, pairs: Tensor, handle: _Handle) -> Tensor:
        order, sent, received = handle.route
        words = exchange(pairs[handle.routing.order], sent, received, self.group)
        return words if order is None else words.index_select(0, order)

    def _send_back(self, rows: Tensor, route: Any) -> Tensor:
        order, sent, received = route
        if order is not None:
            rows = torch.empty_like(rows).index_copy_(0, order, rows)
        return exchange(row_ops.pack(rows), received, sent, self.group)

    def _exchange_counts(self, header: Tensor, counts: Tensor) -> Tensor:
        """Return (W, L) int64: rows that rank s sends to local expert l. Collective."""
        world, last = self.world_size, HEADER_WORDS + self.local_experts
        block = header.new_zeros(world, HEADER_WORDS + self._count_words)
        block[:, :HEADER_WORDS] = header
        block[:, HEADER_WORDS:last] = counts
        blocks = exchange(block, [1] * world, [1] * world, self.group)
        raise_if_any(blocks[:, :HEADER_WORDS].tolist(), self.rank)
        return blocks[:, HEADER_WORDS:last].to(torch.int64)

    def _expert_major(self, table: Tensor) -> Tensor | None:
        """Return the permutation from order (source, expert) to (expert, source), or None if it is the identity."""
        return None if self.local_experts == 1 or self.world_size == 1 else by_expert(table)


# ---- all-gather


class AllGatherDispatcher(CollectiveDispatcher):
    """Dispatcher that gathers tokens and ids from all ranks, selects this rank's rows, and gathers results back.

    Three collectives: headers, tokens, and expert rows for combine. A rank receives W * maxBS token rows per dispatch
    (with smoothing scales W * maxBS * K quantized rows, since a row then depends on its expert) and W * (largest number
    of rows on any rank) expert rows per combine. Combine gathers expert rows, not partial sums, whose sums would round
    differently from the other dispatchers'. Efficient only for few ranks or few tokens; no uneven splits are needed.

    Args:
        group: as for `CollectiveDispatcher`.
        num_experts: E, a multiple of the group's size.
        options: as for `CollectiveDispatcher`.
    """

    kind = "allgather"

    def _send(self, call: _Call, header: Tensor) -> _Arrived:
        routing, topk = call.routing, call.config.topk
        headers = gather(header, self.group).tolist()
        raise_if_any(headers, self.rank)
        # Smoothing scales on one rank make rows differ by expert, but all ranks must gather the same shape.
        by_pair = any(words[_SMOOTH] for words in headers)
        ids = call.expert_ids
        payload, all_ids, all_weights = self._gather_tokens(call, ids, by_pair)
        pairs, table = self._select(all_ids, call.config.max_bs * topk)
        own = None if all_weights is None else all_weights.reshape(-1)[pairs]
        if by_pair:
            words = payload.view(len(payload), topk, payload.size(1) // topk)[pairs // topk, pairs % topk]
        else:
            words = payload.index_select(0, pairs // topk)
        by_owner = table.view(self.world_size, -1)
        start = (by_owner.cumsum(1) - by_owner).view_as(table)[:, self.rank]
        most = int(by_owner.sum(1).max())
        expert = ids.reshape(-1).clamp(min=0).long()
        row = (expert // self.local_experts) * most + start[expert] + routing.expand_idx
        position = torch.where(routing.routed.reshape(-1), row, 0)
        local = table[self.rank * self.local_experts :][: self.local_experts]
        return _Arrived(words, own, local, position, (most, pairs, call.config.max_bs * topk))

    def _send_again(self, pairs: Tensor, handle: _Handle) -> Tensor:
        _, chosen, most = handle.route
        mine = pairs.new_zeros(most, pairs.size(1))
        mine[: len(pairs)] = pairs
        return gather(mine, self.group).flatten(0, 1).index_select(0, chosen)

    def _send_back(self, rows: Tensor, route: Any) -> Tensor:
        words = row_ops.pack(rows)
        padded = words.new_zeros(route[0], words.size(1))
        padded[: len(words)] = words
        return gather(padded, self.group).flatten(0, 1)

    def _gather_tokens(self, call: _Call, ids: Tensor, by_pair: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gather all W * maxBS tokens: packed rows, flat ids (-1 for absent tokens), weights (tokens, K)."""
        bs, topk = ids.shape
        payload = call.payload(torch.arange(bs * topk, device=ids.device) if by_pair else None)
        beside = ids if call.weights is None else torch.cat([call.weights.view(torch.int32), ids], 1)
        width = payload.size(1) * (topk if by_pair else 1)
        mine = payload.new_full((call.config.max_bs, width + beside.size(1)), -1)
        mine[:bs, :width] = payload.reshape(bs, width)
        mine[:bs, width:] = beside
        tokens = gather(mine, self.group).flatten(0, 1)
        weights = None if call.weights is None else tokens[:, width:-topk].contiguous().view(torch.float32)
        return tokens[:, :width], tokens[:, -topk:].reshape(-1), weights

    def _select(self, all_ids: Tensor, per_rank: int) -> tuple[Tensor, Tensor]:
        """Return the flat indices of this rank's rows in expand_x order, and the (E, W) table of all counts."""
        experts, world, local = self.num_experts, self.world_size, self.local_experts
        source = torch.arange(all_ids.numel(), device=all_ids.device) // max(per_rank, 1)
        cell = torch.where(all_ids >= 0, all_ids * world + source, experts * world)
        table = torch.bincount(cell, minlength=experts * world + 1)[: experts * world].view(experts, world)
        first = self.rank * local
        mine = (all_ids >= first) & (all_ids < first + local)
        key = torch.where(mine, all_ids, experts)
        return torch.argsort(key, stable=True)[: int(mine.sum())], table
