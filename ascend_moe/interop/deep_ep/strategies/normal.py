"""Normal mode: the window ops by way of ``Runtime``, or torch.distributed's all-to-all."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ascend_moe._tensors import narrow
from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.errors import ArgumentError, need, need_dims, need_one_of, with_signature_of, with_typed_errors
from ascend_moe.interop.deep_ep import events
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.layout import most_tokens_of
from ascend_moe.interop.deep_ep.runtime import FP8_ROWS, QUANT_MODES
from ascend_moe.interop.deep_ep.strategies.base import NormalEPCommStrategy, register_normal_strategy


class AllToAllHandle(dict):  # type: ignore[type-arg]
    """The handle of a normal dispatch by all-to-all: its topk_weights; all state of the call is in here."""

    dispatched: Any
    dispatcher: AllToAllDispatcher


class _Windows(NormalEPCommStrategy):
    """Serves both: layouts, and what a dispatch asks for."""

    @with_signature_of(NormalEPCommStrategy.get_dispatch_layout)
    @with_typed_errors
    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None) -> Any:
        events.begin(previous_event)
        *found, event = self.runtime.get_dispatch_layout(topk_idx, num_experts)
        return (*found, EventOverlap(event))

    def _asked(
        self, x: Any, handle: Any, quant_mode: str | None, topk_idx: Tensor, per_expert: Tensor, *modes: str
    ) -> tuple[Tensor, str]:
        """Rows and their quantization."""
        need(handle is None, "handle", "of an earlier dispatch is not taken by flavour 'ascend'; pass topk_idx")
        given = quant_mode if quant_mode is not None else _quant_of(x)
        need_one_of("quant_mode", given, modes)
        for name, tensor in (("num_tokens_per_expert", per_expert), ("topk_idx", topk_idx)):
            need(tensor is not None, name, "is missing; get_dispatch_layout returns the counts")
        return x if isinstance(x, Tensor) else x[0], given

    def _begin_combine(self, bias: Any, previous_event: EventOverlap | None) -> None:
        events.begin(previous_event)
        need(bias is None, "bias", "is given; flavour 'ascend' takes none, add it to the result")


@register_normal_strategy("default")
class DefaultNormalCommStrategy(_Windows):
    """By the window ops. Source: sgl-kernel-npu ``DefaultNormalCommStrategy``."""

    def get_name(self) -> str:
        """Its name, "default"."""
        return "default"

    @with_signature_of(NormalEPCommStrategy.dispatch)
    @with_typed_errors
    @torch.no_grad()
    def dispatch(
        self,
        x: Any,
        handle: Any,
        num_tokens_per_rank: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        previous_event: EventOverlap | None,
        dispatch_wait_recv_cost_stats: Tensor | None,
        quant_mode: str | None,
    ) -> Any:
        events.begin(previous_event)
        modes = ("bf16", "int8", FP8_ROWS)
        rows, given = self._asked(x, handle, quant_mode, topk_idx, num_tokens_per_expert, *modes)
        counts = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        out = self.runtime.intranode_dispatch(
            rows,
            None,
            topk_idx,
            topk_weights,
            *counts,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            use_quant=given != "bf16",
            quant_type=given,
        )
        values, scales, ids, weights, numbers, prefix, channels, received, triples, head, event = out
        own = (prefix, channels, received, triples, is_token_in_rank, head, topk_idx, topk_weights)
        return (values, scales) if given != "bf16" else values, ids, weights, numbers, own, EventOverlap(event)

    @with_signature_of(NormalEPCommStrategy.combine)
    @with_typed_errors
    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: Any,
        bias: Any,
        previous_event: EventOverlap | None,
        combine_send_cost_stats: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._begin_combine(bias, previous_event)
        _, _, _, triples, _, head, ids, weights = entries(handle, 8)
        total, weights, event = self.runtime.intranode_combine(x, ids, weights, triples, head, combine_send_cost_stats)
        return total, weights, EventOverlap(event)


@register_normal_strategy("alltoall")
class AlltoAllNormalCommStrategy(_Windows):
    """By torch.distributed's all-to-all. Source: sgl-kernel-npu ``AlltoAllNormalCommStrategy``.

    dispatch returns no ids and weights of rows, and its counts are not aligned.
    """

    def get_name(self) -> str:
        """Its name, "alltoall"."""
        return "alltoall"

    @with_signature_of(NormalEPCommStrategy.dispatch)
    @with_typed_errors
    @torch.no_grad()
    def dispatch(
        self,
        x: Any,
        handle: Any,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        previous_event: EventOverlap | None,
        quant_mode: str | None,
    ) -> Any:
        events.begin(previous_event)
        rows, given = self._asked(x, handle, quant_mode, topk_idx, num_tokens_per_expert, "bf16", "int8")
        need_dims("topk_idx", topk_idx, 2)
        experts, ids = num_tokens_per_expert.numel(), narrow("topk_idx", topk_idx)
        dispatcher = self.alltoall(experts)
        bound = self.group_size * max(most_tokens_of(self.place, rows.shape[0], topk_idx, experts), 1)
        sent = dispatcher.dispatch(rows, ids, quant_mode=QUANT_MODES[given], global_bs=bound)
        own = AllToAllHandle(topk_weights=topk_weights, topk_idx=topk_idx)
        own.dispatched, own.dispatcher = sent, dispatcher
        values = (sent.expand_x, sent.dynamic_scales) if given == "int8" else sent.expand_x
        return values, None, None, sent.expert_token_nums.tolist(), own, EventOverlap()

    @with_signature_of(NormalEPCommStrategy.combine)
    @with_typed_errors
    @torch.no_grad()
    def combine(
        self, x: Tensor, handle: Any, bias: Any, previous_event: EventOverlap | None
    ) -> tuple[Tensor, None, EventOverlap]:
        self._begin_combine(bias, previous_event)
        rule = "is a {}; pass what dispatch by all-to-all returned"
        need(isinstance(handle, AllToAllHandle), "handle", rule, type(handle).__name__)
        weights = handle["topk_weights"]
        if weights is None:
            weights = torch.ones(handle["topk_idx"].shape, dtype=torch.float32, device=x.device)
        return handle.dispatcher.combine(x, handle.dispatched, weights.float()), None, EventOverlap()


def _quant_of(x: Any) -> str:
    """The mode of a call that names none."""
    if isinstance(x, tuple):
        rule = "is a tuple; only one with an int8 tensor asks for int8 rows"
        need(len(x) == 2 and x[1].dtype == torch.int8, "x", rule)
        return "int8"
    return "int8" if os.environ.get("DEEP_NORMAL_MODE_USE_INT8_QUANT", "").strip() == "1" else "bf16"


def entries(handle: Any, *sizes: int) -> tuple[Any, ...]:
    """The entries of a handle. Raises ArgumentError where it is no tuple of one of these sizes."""
    if isinstance(handle, tuple) and len(handle) in sizes:
        return handle
    listed = " or ".join(map(str, sizes))
    raise ArgumentError(f"handle is no tuple of {listed} entries; pass what dispatch returned", argument="handle")
