"""Low-latency mode: packed rows by the window ops, or blocks of equal size by torch.distributed's all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.errors import need, need_dims, need_one_of, need_shape, with_signature_of, with_typed_errors
from ascend_moe.interop.deep_ep import events
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.place import Group, need_whole
from ascend_moe.interop.deep_ep.rows import places_of
from ascend_moe.interop.deep_ep.runtime import FP8_ROWS, QUANT_MODES
from ascend_moe.interop.deep_ep.strategies.base import LowLatencyEPCommStrategy, register_low_latency_strategy
from ascend_moe.interop.deep_ep.strategies.normal import entries
from ascend_moe.ops.pairs import SentIds


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """The handle of a low-latency dispatch by all-to-all: the seven values, and what combine needs."""

    dispatched: Any
    dispatcher: AllToAllDispatcher
    ids: SentIds


@register_low_latency_strategy("default")
class DefaultLowLatencyCommStrategy(LowLatencyEPCommStrategy):
    """By the window ops; quant_mode None: bf16. Source: sgl-kernel-npu ``DefaultLowLatencyCommStrategy``."""

    modes: tuple[str, ...] = (*QUANT_MODES, FP8_ROWS)

    def get_name(self) -> str:
        """Its name, "default"."""
        return "default"

    @with_signature_of(LowLatencyEPCommStrategy.low_latency_dispatch)
    @with_typed_errors
    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None,
        quant_mode: str | None,
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]:
        quant = quant_mode or "none"
        need_one_of("quant_mode", quant, self.modes)
        tokens = num_max_dispatch_tokens_per_rank
        values, scales, nums, triples, ranges, event, hook = self.runtime.low_latency_dispatch(
            x, topk_idx, cumulative_local_expert_recv_stats, tokens, num_experts, quant_mode=quant
        )
        handle = (triples, ranges, tokens, x.shape[1], num_experts, nums, None)
        shown = (values, scales) if quant == FP8_ROWS or QUANT_MODES[quant] else values
        return shown, nums, handle, EventOverlap(event), hook

    @with_signature_of(LowLatencyEPCommStrategy.low_latency_combine)
    @with_typed_errors
    @torch.no_grad()
    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...]
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        triples, ranges, tokens, _, experts, nums = entries(handle, 7, 10)[:6]
        total, event, hook = self.runtime.low_latency_combine(
            x, topk_idx, topk_weights, triples, ranges, tokens, experts, nums
        )
        return total, EventOverlap(event), hook


@register_low_latency_strategy("ops")
class OpsLowLatencyCommStrategy(DefaultLowLatencyCommStrategy):
    """The same, with handles of ten. Source: sgl-kernel-npu ``OpsLowLatencyCommStrategy``.

    Behind the seven values: the mask of tokens, their ids as int32 and weights.

    Args:
        comm_alg: one of theirs. No effect: the ops take hierarchy where the ranks are on several servers.
    """

    modes = tuple(QUANT_MODES)

    def __init__(self, runtime: Any = None, group: Group | None = None, comm_alg: str = "hierarchy") -> None:
        super().__init__(runtime, group)
        need_one_of("comm_alg", comm_alg, ("hierarchy", "fullmesh_v1", "fullmesh_v2", "ccu", ""))
        self.comm_alg = comm_alg

    def get_name(self) -> str:
        """Its name, "ops"."""
        return "ops"

    @with_signature_of(LowLatencyEPCommStrategy.low_latency_dispatch)
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, **others: Any
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]:
        shown, nums, handle, event, hook = super().low_latency_dispatch(x, topk_idx, **others)
        mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        return shown, nums, (*handle, mask, narrow("topk_idx", topk_idx), topk_weights), event, hook


@register_low_latency_strategy("alltoall")
class AllToAllLowLatencyCommStrategy(LowLatencyEPCommStrategy):
    """By torch.distributed's all-to-all. Source: sgl-kernel-npu ``AllToAllLowLatencyCommStrategy``.

    Every local expert has ``max`` rows of each source rank, those that arrived first and zeros behind them:
    ``(L * W * max, H)``, by expert, then source rank. Counts are therefore ``W * max`` for each expert. Without
    quant_mode use_fp8 asks for int8 rows.
    """

    def get_name(self) -> str:
        """Its name, "alltoall"."""
        return "alltoall"

    @with_signature_of(LowLatencyEPCommStrategy.low_latency_dispatch)
    @with_typed_errors
    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool,
        quant_mode: str | None,
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:
        quant = quant_mode or ("int8" if use_fp8 else "none")
        need_one_of("quant_mode", quant, QUANT_MODES)
        need_dims("topk_idx", topk_idx, 2)
        most = num_max_dispatch_tokens_per_rank
        need_whole("num_max_dispatch_tokens_per_rank", most, max(x.shape[0], 1))
        dispatcher, ids = self.alltoall(num_experts), narrow("topk_idx", topk_idx)
        with wide_ids_named(topk_idx, self.rank):
            bound = self.group_size * most
            sent = dispatcher.dispatch(x, ids, quant_mode=QUANT_MODES[quant], global_bs=bound)
        ends, local = sent.ep_recv_counts, num_experts // self.group_size
        rule = f"num_max_dispatch_tokens_per_rank {most}"
        places = places_of(ends, sent.expand_x.shape[0], most, f"a source rank for an expert of rank {self.rank}", rule)
        nums = torch.full((local,), most * self.group_size, dtype=torch.int64, device=x.device)
        size = local * most * self.group_size
        handle = LowLatencyHandle((places, most, x.shape[1], x.shape[0], local, self.group_size, nums))
        handle.dispatched, handle.dispatcher, handle.ids = sent, dispatcher, SentIds(ids)
        shown: Any = _spread(sent.expand_x, places, size)
        if QUANT_MODES[quant]:
            shown = (shown, _spread(sent.dynamic_scales[: len(places)], places, size))
        return shown, nums, handle, EventOverlap(), events.nothing

    @with_signature_of(LowLatencyEPCommStrategy.low_latency_combine)
    @with_typed_errors
    @torch.no_grad()
    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...]
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        rule = "is a {}; pass what low_latency_dispatch by all-to-all returned"
        need(isinstance(handle, LowLatencyHandle), "handle", rule, type(handle).__name__)
        assert isinstance(handle, LowLatencyHandle)
        places, most, hidden, _, local, world, _ = handle
        need_shape("x", x, (local * world * most, hidden))
        handle.ids.checked("topk_idx", narrow("topk_idx", topk_idx))
        rows = x.index_select(0, places.clamp(max=max(x.shape[0] - 1, 0)))
        return handle.dispatcher.combine(rows, handle.dispatched, topk_weights.float()), EventOverlap(), events.nothing


def _spread(rows: Tensor, places: Tensor, size: int) -> Tensor:
    """``size`` rows with these at their places, and zeros; what has place ``size`` is left out."""
    return rows.new_zeros(size + 1, *rows.shape[1:]).index_copy_(0, places.long(), rows)[:-1]
