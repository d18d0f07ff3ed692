"""Ways in which rows reach their experts and come home, one handle for each: what PrepareAndFinalize is made of.

A handle knows ranks and experts and keeps nothing of a call: `Sent` is the call, and its caller holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ascend_moe
from ascend_moe import comm
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher
from ascend_moe.dispatchers.collective import Carrier, gather
from ascend_moe.errors import ArgumentError, need, need_one_of, with_typed_errors
from ascend_moe.torch_npu_ops.alltoallv import exchange

#: Tokens a rank that the window operators of CANN take at most; ours take 4096.
DEFAULT_MAX_TOKENS = 512
MAX_TOKENS = 4096
_ANY_NUMBER = 1 << 20  # of tokens a rank, where a dispatcher allocates nothing for it


@dataclass
class Sent:
    """One call: what was sent, and what combine needs to bring the experts' rows home.

    Attributes:
        rows: ``(A, H)`` by local expert, source rank, flat (token, k); those behind the last are undefined.
        scales: ``(A,)`` float32 of int8 rows, else None.
        counts: ``(L,)`` int64, rows of each local expert.
        expert_ids: ``(T, K)`` int32, of this rank's tokens.
        way: the handle's own.
    """

    rows: Tensor
    scales: Tensor | None
    counts: Tensor
    expert_ids: Tensor
    way: Any


class All2AllHandle(ABC):
    """A way of the rows between ``world`` ranks with ``num_experts / world`` experts each.

    Attributes:
        rank, world, num_experts, local_experts: numbers of the group.
        max_tokens: most tokens a rank of a call; None: any number.
        sends_first: whether ``begin_dispatch`` and ``begin_combine`` send before their results are asked for.
    """

    sends_first = False

    def __init__(self, group_name: str, rank: int, world: int, num_experts: int, max_tokens: int | None) -> None:
        need(0 <= rank < world, "rank", "is {}; need 0..{} of {} ranks", rank, world - 1, world)
        fits = num_experts >= 1 and num_experts % world == 0
        need(fits, "num_experts", "is {}; need a multiple of the {} ranks", num_experts, world)
        self.group_name, self.rank, self.world = comm.name_of("group_name", group_name), rank, world
        self.num_experts, self.local_experts = num_experts, num_experts // world
        self.max_tokens = max_tokens

    @abstractmethod
    def begin_dispatch(self, x: Tensor, expert_ids: Tensor, quantize: bool) -> Callable[[], Sent]:
        """Sends every row to its experts' ranks; the result, called, gives what came here.

        Args:
            x: ``(T, H)``; T may differ between ranks. expert_ids: ``(T, K)`` int32, -1 is not routed.
            quantize: int8 rows, one scale each.
        """

    @abstractmethod
    def begin_combine(self, rows: Tensor, sent: Sent, weights: Tensor) -> Callable[[], Tensor]:
        """Sends the experts' rows home; the result, called, gives the weighted sums of this rank's tokens.

        Args:
            rows: as sent.rows, in x's type. weights: ``(T, K)`` float32.
        """


class WindowHandle(All2AllHandle):
    """The operators ``npu_moe_distribute_dispatch_v2`` and ``_combine_v2`` of ``ops``.

    A rank's T may be anything up to max_tokens: expand_x has the rows of W full batches, of which those that arrived
    are used.
    """

    def __init__(self, ops: Any, group_name: str, rank: int, world: int, num_experts: int, max_tokens: int) -> None:
        need(1 <= max_tokens <= MAX_TOKENS, "max_num_tokens", "is {}; need 1..{}", max_tokens, MAX_TOKENS)
        super().__init__(group_name, rank, world, num_experts, max_tokens)
        group_name = self.group_name
        ops = ascend_moe if ops is None else ops
        for name in ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"):
            need(hasattr(ops, name), "ops", "has no {}; give ascend_moe, ascend_moe.npu or a patched torch_npu", name)
        self._dispatch, self._combine = ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_combine_v2
        ours = self._dispatch is ascend_moe.npu_moe_distribute_dispatch_v2
        source = ascend_moe if ours and self._combine is ascend_moe.npu_moe_distribute_combine_v2 else ops
        self._begin_dispatch = getattr(source, "begin_dispatch", None)
        self._begin_combine = getattr(source, "begin_combine", None)
        self.sends_first = self._begin_dispatch is not None and self._begin_combine is not None
        self._group = {"group_ep": group_name, "ep_world_size": world, "ep_rank_id": rank}
        self._group |= {"moe_expert_num": num_experts, "global_bs": world * max_tokens}

    def begin_dispatch(self, x: Tensor, expert_ids: Tensor, quantize: bool) -> Callable[[], Sent]:
        given: dict[str, Any] = {"x": x, "expert_ids": expert_ids, "quant_mode": 2 if quantize else 0}
        given |= {"expert_token_nums_type": 1, **self._group}
        finish = self._start(self._dispatch, self._begin_dispatch, given)

        def receive() -> Sent:
            rows, scales, triples, counts, recv_counts, tp_counts, expand_scales = finish()
            way = {"assist_info_for_combine": triples, "ep_send_counts": recv_counts}
            way |= {"tp_send_counts": tp_counts, "expand_scales": expand_scales}
            return Sent(rows, scales if quantize else None, counts, expert_ids, way)

        return receive

    def begin_combine(self, rows: Tensor, sent: Sent, weights: Tensor) -> Callable[[], Tensor]:
        given = {"expand_x": rows, "expert_ids": sent.expert_ids, "expert_scales": weights}
        return self._start(self._combine, self._begin_combine, given | sent.way | self._group)

    def _start(self, op: Any, begin: Any, given: dict[str, Any]) -> Callable[[], Any]:
        if self.sends_first:
            finish: Callable[[], Any] = begin(**given).finish
            return finish
        return lambda: op(**given)


class _ClusterCarrier(Carrier):
    """Rows between the threads of a LocalCluster, which has no process group: our dispatch carries them."""

    def __init__(self, group_name: str, rank: int, world: int) -> None:
        self._name, self._rank, self._world = group_name, rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return exchange(rows, send, receive, self._name)


class CollectiveHandle(All2AllHandle):
    """The all-to-all or the all-gather dispatcher, over the process group of this name, or a LocalCluster.

    Reads counts on the host; the rows are exactly those that arrived. Both operations run when their results are
    asked for.
    """

    def __init__(self, kind: str, group_name: str, rank: int, world: int, num_experts: int) -> None:
        super().__init__(group_name, rank, world, num_experts, None)
        group_name = self.group_name
        known = comm.place(group_name)
        if known is None:
            text = f"group_name {group_name!r} names no live group: use ascend_moe.comm_name(process_group)"
            raise ArgumentError(text, argument="group_name")
        rule = "is {}, rank {}; group {!r} has {} ranks, and this is rank {}"
        need(known[0] == world and known[1] in (None, rank), "world", rule, world, rank, group_name, known[0], known[1])
        group = comm.process_group(group_name)
        self._group = _ClusterCarrier(group_name, rank, world) if group is None else group
        made = AllToAllDispatcher if kind == "alltoall" else AllGatherDispatcher
        self._dispatcher = made(self._group, num_experts)
        self._pads = kind == "allgather"

    def begin_dispatch(self, x: Tensor, expert_ids: Tensor, quantize: bool) -> Callable[[], Sent]:
        def run() -> Sent:
            most = _ANY_NUMBER
            if self._pads:  # every rank's batch is gathered with the length of the longest
                most = int(gather(torch.tensor([x.shape[0]], dtype=torch.int32, device=x.device), self._group).max())
            mode = 2 if quantize else 0
            came = self._dispatcher.dispatch(x, expert_ids, quant_mode=mode, global_bs=self.world * most)
            scales = came.dynamic_scales if quantize else None
            return Sent(came.expand_x, scales, came.expert_token_nums, expert_ids, came)

        return run

    def begin_combine(self, rows: Tensor, sent: Sent, weights: Tensor) -> Callable[[], Tensor]:
        return lambda: self._dispatcher.combine(rows, sent.way, weights)


#: kind of PrepareAndFinalize -> way of the rows
WAYS = {"mc2": "windows", "alltoall": "all-to-all", "allgather": "all-gather", "batched": "windows"}


class All2AllManager:
    """Makes the handles of one group, one for each configuration; layers of equal numbers share a handle.

    Args:
        group_name: ``ascend_moe.comm_name(process_group)``, a c10d group name, or a LocalCluster's; or the group
            itself, as `comm.group_of`.
        rank, world: this rank, and ranks of the group.
        ops: namespace with the V2 operators; None: ascend_moe.
    """

    def __init__(self, group_name: str, rank: int, world: int, ops: Any = None) -> None:
        self.group_name, self.rank, self.world, self.ops = comm.name_of("group_name", group_name), rank, world, ops
        self._handles: dict[tuple[Any, ...], All2AllHandle] = {}

    @with_typed_errors
    def get_handle(self, kwargs: dict[str, Any]) -> All2AllHandle:
        """The handle of a configuration, the same object for equal ones.

        Args:
            kwargs: num_experts; kind, "mc2" by default, or "batched", "alltoall", "allgather"; max_num_tokens, 512 by
                default, up to 4096, of the first two kinds.

        Raises:
            ArgumentError: a rule above is broken.

        Source: vLLM ``All2AllManagerBase.get_handle``.
        """
        known = {"kind": "mc2", "max_num_tokens": DEFAULT_MAX_TOKENS, "num_experts": None}
        for name in kwargs:
            need_one_of("kwargs", name, known)
        chosen = {**known, **kwargs}
        kind, most, experts = chosen["kind"], chosen["max_num_tokens"], chosen["num_experts"]
        need_one_of("kind", kind, WAYS)
        need(isinstance(experts, int), "num_experts", "is {!r}; it must be an int", experts)
        windows = WAYS[kind] == "windows"
        key = ("windows", experts, most) if windows else (kind, experts)
        if key not in self._handles:
            at = (self.group_name, self.rank, self.world, experts)
            made = WindowHandle(self.ops, *at, most) if windows else CollectiveHandle(kind, *at)
            self._handles[key] = made
        return self._handles[key]

    def destroy(self) -> None:
        """Forgets all handles. The group stays open: ``ascend_moe.close`` closes it."""
        self._handles.clear()
