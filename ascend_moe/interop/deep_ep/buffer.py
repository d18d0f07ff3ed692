"""DeepEP's Buffer over the V2 ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import need, need_one_of, with_typed_errors
from ascend_moe.interop.deep_ep import events, layout, low_latency, normal
from ascend_moe.interop.deep_ep.ascend import AscendBuffer
from ascend_moe.interop.deep_ep.base import BufferBase
from ascend_moe.interop.deep_ep.events import Costs, EventOverlap
from ascend_moe.interop.deep_ep.layout import Config
from ascend_moe.interop.deep_ep.place import Group
from ascend_moe.interop.deep_ep.rows import Format


class _ByFlavour(type):
    """Makes an AscendBuffer of a call ``Buffer(group, ..., flavour="ascend")``."""

    def __call__(cls, *args: Any, flavour: str = "deepep", **kwargs: Any) -> Any:
        need_one_of("flavour", flavour, ("deepep", AscendBuffer.flavour))
        if cls is Buffer and flavour == AscendBuffer.flavour:
            return AscendBuffer(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class Buffer(BufferBase, metaclass=_ByFlavour):
    """Dispatch and combine with DeepEP's names, arguments, results and handles.

    Args:
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl: as of `BufferBase`, which has the limits too.
        explicitly_destroy: ``destroy`` may be called.
        enable_shrink: no effect. comm: must be None.
        flavour: "deepep", or "ascend": the call makes an ``AscendBuffer``, with sgl-kernel-npu's rows, counts and
            handles, and takes its arguments.

    Source: DeepEP ``Buffer``.
    """

    flavour = "deepep"

    @with_typed_errors
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
        need(comm is None, "comm", "is given; pass a process group as group")
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self.explicitly_destroy, self.enable_shrink = explicitly_destroy, enable_shrink
        self._low_latency = low_latency.LowLatency(self._place)

    def destroy(self) -> None:
        """Ends the use of this object; a call that has only sent receives. The windows belong to the group."""
        super().destroy()
        self._low_latency.settle()

    @with_typed_errors
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """How many tokens go where.

        Args:
            topk_idx: ``(T, K)`` int64 (or int32); -1: not routed.
            num_experts: E, a multiple of W.

        Returns:
            tokens for each rank ``(W,)`` int32; for each server, None where there is one; (token, k) pairs of each
            expert ``(E,)`` int32; whether a token goes to a rank ``(T, W)`` bool; the event.

        Raises:
            ArgumentError: a rule above is broken.
        """
        events.begin(previous_event)
        found = layout.dispatch_layout(self._place, topk_idx, num_experts)
        return (*found, events.finished(async_finish, topk_idx))

    @with_typed_errors
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
            x: ``(T, H)`` bf16 (fp16 and float32 as well, as DeepEP does not), rows of a multiple of 32 bytes; or fp8
                (e4m3) rows and their scales ``(T, H / 128)`` float32.
            handle: of an earlier dispatch: the rows of x go to the same places; no topk_idx, no topk_weights.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of ``get_dispatch_layout``.
            topk_idx, topk_weights: ``(T, K)`` int64 and float32, on all ranks or on none.
            expert_alignment: counts of experts are rounded up to a multiple of it.
            num_worst_tokens: above 0, and equal on all ranks: results have this many rows, at least W times the
                largest T, and nothing is read on the host.

        Returns:
            rows as x, n of them: by source rank, then in the source's order; ids ``(n, K)`` int64, local ones, -1 for
            experts of other ranks and rows that no token filled; weights ``(n, K)``, 0 there; a list of (token, k)
            pairs of each local expert, empty with num_worst_tokens; the handle; the event. With a handle the middle
            four are None.

        Collective. Raises:
            ArgumentError: a rule above is broken, or hierarchy across servers would be needed.
            InvalidExpertId: on every rank; an id of topk_idx is none. Not looked at with num_worst_tokens.
            Others: as the ops.
        """
        events.begin(previous_event)
        self._low_latency.settle()
        if handle is not None:
            need(topk_idx is None and topk_weights is None, "topk_idx", "is given with a handle, which has the places")
            again = normal.dispatch_again(x, handle)
            return again, None, None, None, None, events.finished(async_finish, x)
        sent = normal.dispatch(
            self._place,
            x,
            num_tokens_per_rank,  # type: ignore[arg-type]  # looked at there
            is_token_in_rank,  # type: ignore[arg-type]
            num_tokens_per_expert,  # type: ignore[arg-type]
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
        )
        return (*sent, events.finished(async_finish, x))

    @with_typed_errors
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
        """Bring rows home, where those of a token are added, without weights.

        Args:
            x: ``(n, H)`` bf16 (fp16 and float32 as well), the rows in dispatch's order.
            handle: dispatch's.
            topk_weights: ``(n, K)`` float32; they are added as well. On all ranks or on none.
            bias: one or two ``(T, H)`` of x's type, added after the rows; as many on all ranks.

        Returns:
            ``(T, H)`` of x's type: fp32 sums, ranks ascending, one rounding; ``(T, K)`` float32 or None; the event.

        Collective. Raises:
            ArgumentError: a rule above is broken. Others: as the ops.
        """
        events.begin(previous_event)
        self._low_latency.settle()
        total, weights = normal.combine(x, handle, topk_weights, bias)
        return total, weights, events.finished(async_finish, x)

    @with_typed_errors
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
            topk_idx: ``(T, K)`` int64 (or int32), different ones; -1: not routed.
            num_max_dispatch_tokens_per_rank: max, at least T, equal on all ranks.
            num_experts: E, a multiple of W; L = E / W.
            cumulative_local_expert_recv_stats: ``(L,)`` int32; rows received are added.
            dispatch_wait_recv_cost_stats: ``(W,)`` int64 on the CPU; the microseconds that this call waited for each
                source rank are added. ``(W, W)``: to this rank's row.
            use_fp8: rows travel as e4m3 with a scale for 128 values; round_scale: powers of two; use_ue8m0, with
                round_scale: their exponents, four to an int32, H a multiple of 512.
            return_recv_hook: only send. The results have no values until the hook is called. Another call of this
                object receives as well.

        Returns:
            rows ``(L, max * W, H)`` bf16, or fp8 and scales ``(L, max * W, H / 128)`` float32, or with use_ue8m0
            ``(L, max * W, H / 512)`` int32, whose columns are contiguous; by source rank, then in the source's order;
            rows of each expert ``(L,)`` int32; the handle;
            the event; the hook. At most two results may be alive: not combined, and not dropped.

        Collective. Raises:
            ArgumentError: a rule above is broken, or two results are alive.
            InvalidExpertId: on every rank; an id is none. Others: as the ops.
        """
        rows, count, handle, hook = self._low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            Costs("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, self._place),
            Format(use_fp8, round_scale, use_ue8m0),
            return_recv_hook,
        )
        return rows, count, handle, events.finished(async_finish, x, topk_idx), hook

    @with_typed_errors
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
        """Bring rows home, where those of a token are added with its weights.

        Args:
            x: ``(L, max * W, H)`` bf16. With zero_copy not looked at: the rows are those that were written into
                ``get_next_low_latency_combine_buffer(handle)``.
            topk_idx: as given to dispatch. topk_weights: ``(T, K)`` float32.
            handle: of a dispatch whose rows have been received.
            use_logfmt: must be False: combine's kernel adds up rows of bf16, so LogFMT's codes would not travel.
            combine_wait_recv_cost_stats: as dispatch's.
            return_recv_hook: only send; the result has no values until the hook is called.
            out: ``(T, H)`` bf16, is written and returned.

        Returns:
            ``(T, H)`` bf16: fp32 sums, k ascending, one rounding; the event; the hook.

        Collective. Raises:
            ArgumentError: a rule above is broken. Others: as the ops.
        """
        rule = "is True; combine's kernel adds up bf16 rows and decodes no LogFMT, so it would save nothing: pass False"
        need(not use_logfmt, "use_logfmt", rule)
        costs = Costs("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, self._place)
        total, hook = self._low_latency.combine(
            x, topk_idx, topk_weights, handle, zero_copy, return_recv_hook, out, costs
        )
        return total, events.finished(async_finish, x, topk_idx, topk_weights), hook

    @with_typed_errors
    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """``(L, max * W, H)`` bf16, to be filled for a combine with zero_copy; one copy into the window is left."""
        return self._low_latency.next_combine_rows(handle)
