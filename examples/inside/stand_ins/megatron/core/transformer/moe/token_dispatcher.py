"""Makes the calls of deep_ep that Megatron-LM 0.16's flex dispatcher makes, keyword for keyword."""

from __future__ import annotations

from typing import Any

import torch
from deep_ep import Buffer
from deep_ep.utils import EventHandle, EventOverlap
from torch import Tensor

from ascend_moe.interop.megatron import permute, unpermute

_buffer: Any = None


def get_buffer(group: Any, hidden_bytes: int) -> Any:
    global _buffer
    ranks, nvl, rdma = group.size(), 0, 0
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, ranks), rdma)
    kept = _buffer
    if kept is None or kept.group != group or kept.num_nvl_bytes < nvl or kept.num_rdma_bytes < rdma:
        _buffer = Buffer(group, nvl, rdma)
    return _buffer


def buffer_for(group: Any, rows: Tensor) -> Any:
    return get_buffer(group, rows.size(1) * max(rows.element_size(), 2))


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, probs: Tensor, experts: int, group: Any, later: bool) -> Any:
        ctx.group, ctx.later = group, {"async_finish": later, "allocate_on_comm_stream": later}
        buffer = buffer_for(group, x)
        before = EventOverlap(EventHandle()) if later else None
        per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids, experts, previous_event=before, **ctx.later
        )
        rows, row_ids, row_probs, numbers, ctx.handle, event = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **ctx.later,
        )
        if later:
            event.current_stream_wait()
        return rows, row_ids, row_probs, torch.tensor(numbers), ctx.handle

    @staticmethod
    def backward(ctx: Any, g_rows: Tensor, _ids: Any, g_probs: Tensor, *_: Any) -> Any:
        before = EventOverlap(EventHandle()) if ctx.later["async_finish"] else None
        gx, gp, event = buffer_for(ctx.group, g_rows).combine(
            g_rows.contiguous(), ctx.handle, topk_weights=g_probs.float(), previous_event=before, **ctx.later
        )
        if ctx.later["async_finish"]:
            event.current_stream_wait()
        return gx, None, gp, None, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, handle: Any, later: bool) -> Tensor:
        ctx.group, ctx.handle, ctx.later = group, handle, {"async_finish": later, "allocate_on_comm_stream": later}
        before = EventOverlap(EventHandle()) if later else None
        y, _, event = buffer_for(group, x).combine(x, handle=handle, previous_event=before, **ctx.later)
        if later:
            event.current_stream_wait()
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        before = EventOverlap(EventHandle()) if ctx.later["async_finish"] else None
        gx, _, _, _, _, event = buffer_for(ctx.group, gy).dispatch(
            gy.contiguous(), handle=ctx.handle, previous_event=before, **ctx.later
        )
        if ctx.later["async_finish"]:
            event.current_stream_wait()
        return gx, None, None, None


class _DeepepManager:
    """Rows by rank arrive through deep_ep, and are permuted to rows by expert."""

    def __init__(self, group: Any, num_local_experts: int, router_topk: int, num_experts: int, config: Any) -> None:
        self.group, self.local, self.topk, self.experts = group, num_local_experts, router_topk, num_experts
        Buffer.set_num_sms(config.moe_deepep_num_sms)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        self.token_probs, self.token_indices = torch.topk(probs.reshape(len(probs), self.experts), self.topk, dim=-1)

    def dispatch(self, x: Tensor, async_finish: bool, allocate_on_comm_stream: bool) -> Tensor:
        assert async_finish == allocate_on_comm_stream
        rows, self.ids, self.dispatched_probs, self.numbers, self.handle = FusedDispatch.apply(
            x.contiguous(), self.token_indices, self.token_probs, self.experts, self.group, async_finish
        )
        return rows

    def get_permuted_hidden_states_by_experts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        there = self.ids != -1
        at = there.nonzero()[:, 0], self.ids[there]
        self.map = torch.zeros(len(rows), self.local, dtype=torch.bool).index_put(at, torch.tensor(True))
        probs = torch.zeros(len(rows), self.local).index_put(at, self.dispatched_probs[there])
        self.shape = rows.shape
        rows, probs, self.order = permute(rows, self.map, probs=probs, num_out_tokens=int(self.numbers.sum()))[:3]
        return rows, probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        return self.numbers

    def get_restored_hidden_states_by_experts(self, rows: Tensor) -> Tensor:
        return unpermute(rows, self.order, restore_shape=self.shape, routing_map=self.map)

    def combine(self, rows: Tensor, async_finish: bool, allocate_on_comm_stream: bool) -> Tensor:
        return FusedCombine.apply(rows, self.group, self.handle, async_finish)


class MoEFlexTokenDispatcher:
    """The six phases, without tensor parallelism."""

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any
    ) -> None:
        self._comm_manager = _DeepepManager(
            group=pg_collection.tp_ep,
            num_local_experts=num_local_experts,
            router_topk=config.moe_router_topk,
            num_experts=config.num_moe_experts,
            config=config,
        )

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.shape = hidden_states.shape
        self._comm_manager.setup_metadata(routing_map[:, None], probs[:, None])
        return hidden_states.view(-1, self.shape[-1]), self._comm_manager.token_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._comm_manager.dispatch(hidden_states, True, True), self._comm_manager.dispatched_probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, probs = self._comm_manager.get_permuted_hidden_states_by_experts(hidden_states)
        return rows, self._comm_manager.get_number_of_tokens_per_expert(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._comm_manager.get_restored_hidden_states_by_experts(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return self._comm_manager.combine(hidden_states, True, True)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self.shape)
