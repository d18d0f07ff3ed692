"""Dispatcher over torch.distributed all-to-all.

Two collectives to dispatch (headers with counts; rows), one to combine. Traffic per rank and
direction: its own BS*K rows. Needs uneven splits of the backend (gloo, HCCL, NCCL, MPI have them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ascend_moe.dispatchers import rows as row_ops
from ascend_moe.dispatchers import status
from ascend_moe.dispatchers.base import Dispatched, Dispatcher, check_combine, check_dispatch, foreign
from ascend_moe.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: W * L may not exceed this, as in the windows: counts then have a place of fixed size in the header.
MAX_EXPERTS = 2048


@dataclass
class _Handle:
    owner: AllToAllDispatcher
    x: Tensor
    routing: row_ops.Routing
    to_expert_major: Tensor | None
    sent: list[int]
    received: list[int]


class AllToAllDispatcher(Dispatcher):
    """Sorts rows by expert, sends them with all_to_all_single, and reorders them by local expert.

    Args:
        process_group: None for the default group.
        num_experts: E, a multiple of the group's size, at most 2048.
    """

    def __init__(self, process_group: ProcessGroup | None, num_experts: int) -> None:
        self._group = status.default_group(process_group)
        super().__init__(self._group.rank(), self._group.size(), num_experts)
        if num_experts > MAX_EXPERTS:
            raise ArgumentError(
                f"num_experts is {num_experts}; need at most {MAX_EXPERTS}", argument="num_experts"
            )
        # A place of fixed size, so that ranks that disagree on E still exchange whole headers.
        self._count_words = -(-MAX_EXPERTS // self.world_size)

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        *,
        scales: Tensor | None = None,
        x_active_mask: Tensor | None = None,
        quant_mode: int = 0,
        global_bs: int = 0,
        expert_token_nums_type: int = 1,
    ) -> Dispatched:
        max_bs = check_dispatch(
            x, expert_ids, scales, x_active_mask, quant_mode, global_bs, expert_token_nums_type,
            world=self.world_size, experts=self.num_experts,
        )  # fmt: skip
        topk = expert_ids.size(1)
        config = status.Config(
            x.size(1), topk, self.num_experts, max_bs, x.dtype, quant_mode, scales is not None
        )
        routing, problem = status.plan(expert_ids, x_active_mask, config, self.world_size)
        table = self._exchange_counts(config, x, routing, problem)

        payload = row_ops.payload(x, expert_ids, routing.order, scales, quant_mode)
        sent = routing.counts.view(self.world_size, self.local_experts).sum(1).tolist()
        received = table.sum(1).tolist()
        words = status.exchange(payload, sent, received, self._group)

        reorder = self._expert_major(table)
        if reorder is not None:
            words = words.index_select(0, reorder)
        expand_x, dynamic_scales = row_ops.open_rows(words, x.size(1), x.dtype, quant_mode)
        counts = table.t().reshape(-1).cumsum(0)
        nums = table.sum(0) if expert_token_nums_type == 1 else table.sum(0).cumsum(0)
        handle = _Handle(self, x, routing, reorder, sent, received)
        return Dispatched(expand_x, dynamic_scales, nums, counts.to(torch.int32), routing.expand_idx, handle)

    def combine(
        self,
        expert_out: Tensor,
        dispatched: Dispatched,
        expert_scales: Tensor,
        *,
        shared_expert_x: Tensor | None = None,
    ) -> Tensor:
        handle = dispatched.handle
        if not isinstance(handle, _Handle) or handle.owner is not self:
            raise foreign(self)
        total, hidden = sum(handle.received), handle.x.size(1)
        topk = handle.routing.routed.size(1)
        check_combine(expert_out, total, handle.x, expert_scales, topk, shared_expert_x)
        back = expert_out[:total]
        if handle.to_expert_major is not None:
            back = torch.empty_like(back).index_copy_(0, handle.to_expert_major, back)
        words = status.exchange(row_ops.pack(back), handle.received, handle.sent, self._group)
        (mine,) = row_ops.unpack(words, (hidden, expert_out.dtype))
        return row_ops.weighted_sum(
            mine, handle.routing.position, handle.routing, expert_scales, shared_expert_x
        )

    def _exchange_counts(
        self, config: status.Config, x: Tensor, routing: row_ops.Routing, problem: tuple[int, ...]
    ) -> Tensor:
        """(W, L) int64 on x's device: rows that rank s sends to local expert l. Collective."""
        world, local = self.world_size, self.local_experts
        block = torch.zeros(world, status.HEADER_WORDS + self._count_words, dtype=torch.int32)
        block[:, : status.HEADER_WORDS] = status.header(config, problem)
        block = block.to(x.device)
        block[:, status.HEADER_WORDS : status.HEADER_WORDS + local] = routing.counts.view(world, local)
        blocks = status.exchange(block, [1] * world, [1] * world, self._group)
        status.raise_if_any(blocks[:, : status.HEADER_WORDS].tolist(), self.rank)
        return blocks[:, status.HEADER_WORDS : status.HEADER_WORDS + local].to(torch.int64)

    def _expert_major(self, table: Tensor) -> Tensor | None:
        """Received order (source, expert) -> (expert, source); None when that changes nothing."""
        if self.local_experts == 1 or self.world_size == 1:
            return None
        arrival = table.reshape(-1)
        starts = (arrival.cumsum(0) - arrival).view_as(table)
        return row_ops.segments(table.t().reshape(-1), starts.t().reshape(-1))
