"""Dispatcher over torch.distributed all-gather: every rank sees every token and keeps what its experts need.

Three collectives: headers, tokens, and expert rows on the way back. A rank receives W * maxBS token
rows to dispatch (with smoothing scales, W * maxBS * K quantised rows, as a row then depends on its
expert) and W * (largest number of rows on any rank) expert rows to combine. The way back carries
expert rows as they are, not partial sums: sums of partial sums would round differently from the
other dispatchers. Cheap only for few ranks or few tokens; no uneven splits are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ascend_moe.dispatchers import rows as row_ops
from ascend_moe.dispatchers import status
from ascend_moe.dispatchers.base import Dispatched, Dispatcher, check_combine, check_dispatch, foreign

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class _Handle:
    owner: AllGatherDispatcher
    x: Tensor
    routing: row_ops.Routing
    position: Tensor  # (BS*K,) int64, row of a pair among the gathered expert rows
    total: int  # rows of this rank's experts
    most: int  # the same, on the rank that has most


class AllGatherDispatcher(Dispatcher):
    """Gathers tokens and ids from all ranks, selects this rank's rows, and gathers results back.

    Args:
        process_group: None for the default group.
        num_experts: E, a multiple of the group's size.
    """

    def __init__(self, process_group: ProcessGroup | None, num_experts: int) -> None:
        self._group = status.default_group(process_group)
        super().__init__(self._group.rank(), self._group.size(), num_experts)

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
        header = status.header(config, problem).to(x.device)
        headers = status.gather(header, self._group).tolist()
        status.raise_if_any(headers, self.rank)

        # One rank's smoothing scales make rows differ by expert; all ranks must gather the same shape.
        by_pair = status.any_smooth(headers)
        ids = torch.where(routing.routed, expert_ids, -1)
        tokens = self._gather_tokens(x, ids, scales, quant_mode, max_bs, by_pair)
        all_ids = tokens[:, -topk:].reshape(-1)
        pairs, table = self._select(all_ids, max_bs * topk)
        words = _pick(tokens[:, :-topk], pairs, topk, by_pair)
        expand_x, dynamic_scales = row_ops.open_rows(words, x.size(1), x.dtype, quant_mode)

        local = table[self.rank * self.local_experts :][: self.local_experts]
        nums = local.sum(1)
        handle = self._handle(x, routing, ids, table)
        return Dispatched(
            expand_x,
            dynamic_scales,
            nums if expert_token_nums_type == 1 else nums.cumsum(0),
            local.reshape(-1).cumsum(0).to(torch.int32),
            routing.expand_idx,
            handle,
        )

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
        hidden, topk = handle.x.size(1), handle.routing.routed.size(1)
        check_combine(expert_out, handle.total, handle.x, expert_scales, topk, shared_expert_x)
        words = row_ops.pack(expert_out[: handle.total])
        padded = words.new_zeros(handle.most, words.size(1))
        padded[: handle.total] = words
        gathered = status.gather(padded, self._group).flatten(0, 1)
        (rows,) = row_ops.unpack(gathered, (hidden, expert_out.dtype))
        return row_ops.weighted_sum(rows, handle.position, handle.routing, expert_scales, shared_expert_x)

    def _gather_tokens(
        self, x: Tensor, ids: Tensor, scales: Tensor | None, quant_mode: int, max_bs: int, by_pair: bool
    ) -> Tensor:
        """(W * maxBS, words) int32: every token's payload, then its K ids; absent tokens have ids -1."""
        bs, topk = ids.shape
        pairs = torch.arange(bs * topk, device=x.device) if by_pair else None
        payload = row_ops.payload(x, ids, pairs, scales, quant_mode)
        mine = payload.new_full((max_bs, payload.size(1) * (topk if by_pair else 1) + topk), -1)
        mine[:bs, :-topk] = payload.view(bs, -1) if bs else payload.new_empty(0, mine.size(1) - topk)
        mine[:bs, -topk:] = ids
        return status.gather(mine, self._group).flatten(0, 1)

    def _select(self, all_ids: Tensor, per_rank: int) -> tuple[Tensor, Tensor]:
        """Flat indices of this rank's pairs in expand_x order, and the (E, W) table of all counts."""
        experts, world, local = self.num_experts, self.world_size, self.local_experts
        source = torch.arange(all_ids.numel(), device=all_ids.device) // max(per_rank, 1)
        cell = torch.where(all_ids >= 0, all_ids * world + source, experts * world)
        table = torch.bincount(cell, minlength=experts * world + 1)[: experts * world].view(experts, world)
        first = self.rank * local
        mine = (all_ids >= first) & (all_ids < first + local)
        key = torch.where(mine, all_ids, experts)
        return torch.argsort(key, stable=True)[: int(mine.sum())], table

    def _handle(self, x: Tensor, routing: row_ops.Routing, ids: Tensor, table: Tensor) -> _Handle:
        by_owner = table.view(self.world_size, -1)
        start = (by_owner.cumsum(1) - by_owner).view_as(table)[:, self.rank]
        totals = by_owner.sum(1).tolist()
        most = max(totals)
        expert = ids.reshape(-1).clamp(min=0).long()
        row = (expert // self.local_experts) * most + start[expert] + routing.expand_idx
        position = torch.where(routing.routed.reshape(-1), row, 0)
        return _Handle(self, x, routing, position, totals[self.rank], most)


def _pick(payload: Tensor, pairs: Tensor, topk: int, by_pair: bool) -> Tensor:
    """(n, words): the payload of each pair, from a payload a token or a payload a pair."""
    if not by_pair:
        return payload.index_select(0, pairs // topk)
    rows: Tensor = payload.view(payload.size(0), topk, payload.size(1) // topk)[pairs // topk, pairs % topk]
    return rows
