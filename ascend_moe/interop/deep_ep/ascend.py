"""sgl-kernel-npu's Buffer: what its Python package makes of its compiled module, with its handles."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ascend_moe.errors import need, with_typed_errors
from ascend_moe.interop.deep_ep.base import BufferBase
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.fused import FuseMode
from ascend_moe.interop.deep_ep.layout import Config
from ascend_moe.interop.deep_ep.place import not_supported
from ascend_moe.interop.deep_ep.runtime import Runtime
from ascend_moe.interop.deep_ep.strategies import (
    LowLatencyStrategy,
    NormalStrategy,
    StrategyMap,
    get_low_latency_strategy,
    get_normal_strategy,
)

if TYPE_CHECKING:
    from ascend_moe.interop.deep_ep.place import Group


class AscendBuffer(BufferBase):
    """As ``Buffer``, with what sgl-kernel-npu has instead of DeepEP's.

    - Normal mode: a row for each (token, expert), by local expert; combine is weighted, with dispatch's topk_weights.
      The handle has eight entries: three matrices (empty), triples (source rank, token, k), is_token_in_rank, running
      sums over [local expert][source rank] with the most tokens of a rank behind them, topk_idx, topk_weights. It is
      not taken by dispatch. ``bias`` is refused.
    - Low latency: packed rows ``(max * W * min(K, L), H)``, counts int64, the running sums as layout_range; handles of
      seven entries, with strategy "ops" of ten; with "alltoall" blocks of ``max`` rows, see there. Hooks do nothing,
      everything has been received; out, zero_copy and the recv stats have no effect.
    - Ids -1 need no MOE_ENABLE_TOPK_NEG_ONE.
    - quant_mode None, "bf16", "int8", or with the default strategies "pertoken_fp8_e4m3": quantized rows have a float32
      scale each. MX formats are of the 950 series.

    Args:
        normal_strategy: "default" or "alltoall". low_latency_strategy: "default", "ops" or "alltoall". Or a name that
            was registered. The variable DEEP_USE_MODE, default, ops or alltoall, decides where it is set.
        others: as of `BufferBase`, which has the limits too.

    The attributes of these names are strategies, and may be set to others.

    Source: sgl-kernel-npu ``deep_ep.Buffer``.
    """

    flavour = "ascend"

    @with_typed_errors
    def __init__(
        self,
        group: Group,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        normal_strategy: str = NormalStrategy.DEFAULT,
        low_latency_strategy: str = LowLatencyStrategy.DEFAULT,
    ) -> None:
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        mode = os.environ.get("DEEP_USE_MODE", "").strip()
        if mode:
            normal_strategy, low_latency_strategy = StrategyMap.get_strategy(mode)
        self.runtime = Runtime(
            self.rank, self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, self._place.group_ep
        )
        given: dict[str, Any] = {"runtime": self.runtime, "group": group}
        self.normal_strategy = get_normal_strategy(normal_strategy)(**given)
        self.low_latency_strategy = get_low_latency_strategy(low_latency_strategy)(**given)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """As ``Buffer``'s, with whether a token goes to a rank as int32."""
        return self.normal_strategy.get_dispatch_layout(topk_idx, num_experts, previous_event)

    def dispatch(
        self,
        x: Tensor,
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
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> Any:
        """Send each (token, expert) row to the expert's rank.

        Args:
            x: ``(T, H)`` bf16, or a tuple of it and a tensor whose dtype int8 asks for int8 rows.
            quant_mode: "bf16", "int8", "pertoken_fp8_e4m3", or None: by x, else by DEEP_NORMAL_MODE_USE_INT8_QUANT.
            dispatch_wait_recv_cost_stats: ``(W,)`` int32 or int64 on the CPU; the microseconds that this call waited
                for each source rank are added.
            others: as ``Buffer``'s; handle must be None, num_worst_tokens 0.

        Returns:
            rows ``(n, H)``, quantized a tuple of them and their scales; ids and weights ``(n, K)``, -1 and 0 but at
            the row's own k; rows of each local expert as a list; the handle; the event.

        Collective. Raises:
            ArgumentError: a rule above is broken. InvalidExpertId: on every rank; an id is none. Others: as the ops.
        """
        return self.normal_strategy.dispatch(
            x=x,
            handle=handle,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            quant_mode=quant_mode,
        )

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Bring rows home, where those of a token are added with dispatch's topk_weights; topk_weights has no effect.

        Returns:
            ``(T, H)``: fp32 sums, k ascending, one rounding; dispatch's topk_weights; the event.
        """
        return self.normal_strategy.combine(
            x=x,
            handle=handle,
            topk_weights=topk_weights,
            bias=bias,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
            combine_send_cost_stats=combine_send_cost_stats,
        )

    @with_typed_errors
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_mxfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]:
        """Send each (token, expert) row to the expert's rank.

        Args:
            use_fp8: without quant_mode: int8 rows. use_ue8m0, use_mxfp4: must be False.
            topk_weights: for strategy "ops" in its handle. Others: as ``Buffer``'s.

        Returns:
            packed rows, quantized a tuple of them and their scales; rows of each local expert ``(L,)`` int64; the
            handle; the event; a hook that does nothing.

        Collective. Raises:
            ArgumentError: a rule above is broken. InvalidExpertId: on every rank; an id is none. Others: as the ops.
        """
        need(not use_ue8m0, "use_ue8m0", "is True; MX formats are of the 950 series: pass False")
        need(not use_mxfp4, "use_mxfp4", "is True; MX formats are of the 950 series: pass False")
        return self.low_latency_strategy.low_latency_dispatch(
            x=x,
            topk_idx=topk_idx,
            num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            num_experts=num_experts,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            use_mxfp4=use_mxfp4,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            topk_weights=topk_weights,
            quant_mode=quant_mode or ("int8" if use_fp8 else None),
        )

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Bring packed rows home, where those of a token are added with its weights.

        Returns:
            ``(T, H)``: fp32 sums, k ascending, one rounding; the event; a hook that does nothing.
        """
        return self.low_latency_strategy.low_latency_combine(
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            handle=handle,
            zero_copy=zero_copy,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            out=out,
        )

    def notify_verify(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ArgumentError: it shows the insides of another implementation."""
        return self.runtime.notify_verify()

    def get_notify_send_data(self) -> Any:
        """Raises ArgumentError: it shows the insides of another implementation."""
        return self.runtime.get_notify_send_data()

    def begin_profile(self, *args: Any, **kwargs: Any) -> None:
        """Raises ArgumentError: ``ascend_moe.trace`` is what shows times."""
        self.runtime.begin_profile()

    def end_profile(self) -> None:
        """Raises ArgumentError: ``ascend_moe.trace`` is what shows times."""
        self.runtime.end_profile()

    @with_typed_errors
    def get_next_low_latency_combine_buffer(self, handle: Any) -> Tensor:
        """Raises: sgl-kernel-npu has none; combine takes the rows themselves."""
        raise not_supported("get_next_low_latency_combine_buffer", "pass the rows to low_latency_combine")

    def fused_deep_moe(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        gmm1_permuted_weight: Any,
        gmm1_permuted_weight_scale: Any,
        gmm2_weight: Any,
        gmm2_weight_scale: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        fuse_mode: int = FuseMode.FUSED_DEEP_MOE,
        profile_enable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One call for the layer: ``Runtime.fused_deep_moe``, with fuse_mode 2 ``Runtime.dispatch_ffn_combine``.

        Args:
            gmm1_permuted_weight, gmm1_permuted_weight_scale: plain, not permuted; see there.
        """
        need(fuse_mode in (1, 2), "fuse_mode", "is {}; it must be 1 or 2", fuse_mode)
        whole = fuse_mode == FuseMode.FUSED_DEEP_MOE
        fused = self.runtime.fused_deep_moe if whole else self.runtime.dispatch_ffn_combine
        weights = (gmm1_permuted_weight, gmm1_permuted_weight_scale, gmm2_weight, gmm2_weight_scale)
        return fused(x, topk_idx, *weights, topk_weights, num_max_dispatch_tokens_per_rank, num_experts, quant_mode)
