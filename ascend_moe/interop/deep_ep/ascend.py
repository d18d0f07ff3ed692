"""sgl-kernel-npu's Buffer: what its Python package makes of its compiled module, with its handles."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.errors import ArgumentError, need, need_one_of, with_typed_errors
from ascend_moe.interop.deep_ep import events
from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.layout import Config
from ascend_moe.interop.deep_ep.place import not_supported
from ascend_moe.interop.deep_ep.runtime import QUANT_MODES, Runtime

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NormalStrategy:
    """Names of ``normal_strategy``: the window ops, or torch.distributed's all-to-all."""

    DEFAULT, ALLTOALL = "default", "alltoall"


class LowLatencyStrategy:
    """Names of ``low_latency_strategy``: default and ops are the window ops."""

    DEFAULT, OPS, ALLTOALL = "default", "ops", "alltoall"


# DEEP_USE_MODE: normal and low-latency strategy.
MODES = {"default": ("default", "default"), "ops": ("default", "ops"), "alltoall": ("alltoall", "alltoall")}


class FuseMode(IntEnum):
    """The two of ``fused_deep_moe``."""

    FUSED_DEEP_MOE = 1
    DISPATCH_FFN_COMBINE = 2


class AllToAllHandle(dict):  # type: ignore[type-arg]
    """The handle of a normal dispatch by all-to-all: its topk_weights; all state of the call is in here."""

    dispatched: Any
    dispatcher: AllToAllDispatcher


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """The handle of a low-latency dispatch by all-to-all: the seven values, and what combine needs."""

    dispatched: Any
    dispatcher: AllToAllDispatcher


class AscendBuffer(Buffer, flavour="ascend"):
    """As ``Buffer``, with what sgl-kernel-npu has instead of DeepEP's.

    - Normal mode: a row for each (token, expert), by local expert; combine is weighted, with dispatch's topk_weights.
      The handle has eight entries: three matrices (empty), triples (source rank, token, k), is_token_in_rank, running
      sums over [local expert][source rank] with the most tokens of a rank behind them, topk_idx, topk_weights. It is
      not taken by dispatch. ``bias`` is refused.
    - Low latency: packed rows ``(max * W * min(K, L), H)``, counts int64, the running sums as layout_range; handles of
      seven entries, with strategy "ops" of ten. Hooks do nothing, everything has been received; out, zero_copy and
      the recv stats have no effect.
    - Ids -1 need no MOE_ENABLE_TOPK_NEG_ONE.
    - quant_mode None, "bf16" or "int8": rows with a float32 scale each. fp8, fp4 and MX are of the 950 series.

    Args:
        normal_strategy: "default" or "alltoall". low_latency_strategy: "default", "ops" or "alltoall". The variable
            DEEP_USE_MODE, default, ops or alltoall, decides where it is set.

    Source: sgl-kernel-npu ``deep_ep.Buffer``.
    """

    def __init__(
        self,
        group: ProcessGroup | tuple[str, int, int],
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        normal_strategy: str = NormalStrategy.DEFAULT,
        low_latency_strategy: str = LowLatencyStrategy.DEFAULT,
        *,
        flavour: str = "ascend",
    ) -> None:
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, flavour="ascend")
        mode = os.environ.get("DEEP_USE_MODE", "").strip().lower()
        if mode:
            need_one_of("DEEP_USE_MODE", mode, MODES)
            normal_strategy, low_latency_strategy = MODES[mode]
        need_one_of("normal_strategy", normal_strategy, ("default", "alltoall"))
        need_one_of("low_latency_strategy", low_latency_strategy, ("default", "ops", "alltoall"))
        self.normal_strategy, self.low_latency_strategy = normal_strategy, low_latency_strategy
        self.runtime = Runtime(
            self.rank, self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, self._place.group_ep
        )

    def _alltoall(self, experts: int) -> AllToAllDispatcher:
        rule = "is a name; all-to-all needs a process group"
        need(not isinstance(self.group, tuple), "group", rule)
        return AllToAllDispatcher(self.group, experts)  # type: ignore[arg-type]

    @with_typed_errors
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """As ``Buffer``'s, with whether a token goes to a rank as int32."""
        events.begin(previous_event)
        *found, event = self.runtime.get_dispatch_layout(topk_idx, num_experts)
        return (*found, EventOverlap(event))  # type: ignore[return-value]

    @with_typed_errors
    @torch.no_grad()
    def dispatch(  # type: ignore[override]
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
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int], Any, EventOverlap]:
        """Send each (token, expert) row to the expert's rank.

        Args:
            x: ``(T, H)`` bf16, or a tuple of it and a tensor whose dtype int8 asks for int8 rows.
            quant_mode: "bf16", "int8", or None: by x, else by DEEP_NORMAL_MODE_USE_INT8_QUANT.
            others: as ``Buffer``'s; handle must be None, num_worst_tokens 0.

        Returns:
            rows ``(n, H)``, with int8 a tuple of them and their scales; ids and weights ``(n, K)``, -1 and 0 but at
            the row's own k; rows of each local expert as a list; the handle; the event.
        """
        events.begin(previous_event)
        need(handle is None, "handle", "of an earlier dispatch is not taken by flavour 'ascend'; pass topk_idx")
        given = quant_mode if quant_mode is not None else _quant_of(x)
        need_one_of("quant_mode", given, ("bf16", "int8"))
        rows = x if isinstance(x, Tensor) else x[0]
        for name, tensor in (("num_tokens_per_expert", num_tokens_per_expert), ("topk_idx", topk_idx)):
            need(tensor is not None, name, "is missing; get_dispatch_layout returns the counts")
        assert num_tokens_per_expert is not None and topk_idx is not None
        if self.normal_strategy == NormalStrategy.ALLTOALL:
            return self._dispatch_alltoall(rows, topk_idx, topk_weights, num_tokens_per_expert, given)
        out = self.runtime.intranode_dispatch(
            rows,
            None,
            topk_idx,
            topk_weights,
            num_tokens_per_rank,  # type: ignore[arg-type]  # not looked at
            is_token_in_rank,  # type: ignore[arg-type]
            num_tokens_per_expert,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            use_quant=given == "int8",
            quant_type=given,
        )
        values, scales, ids, weights, numbers, prefix, channels, received, triples, head, event = out
        own = (prefix, channels, received, triples, is_token_in_rank, head, topk_idx, topk_weights)
        return (values, scales) if given == "int8" else values, ids, weights, numbers, own, EventOverlap(event)

    def _dispatch_alltoall(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, per_expert: Tensor, quant: str
    ) -> tuple[Any, None, None, list[int], AllToAllHandle, EventOverlap]:
        dispatcher = self._alltoall(per_expert.numel())
        bound = self.group_size * max(int(self._place.most(x)), 1)
        sent = dispatcher.dispatch(x, topk_idx.int(), quant_mode=QUANT_MODES[quant], global_bs=bound)
        handle = AllToAllHandle(topk_weights=topk_weights, topk_idx=topk_idx)
        handle.dispatched, handle.dispatcher = sent, dispatcher
        values = (sent.expand_x, sent.dynamic_scales) if quant == "int8" else sent.expand_x
        return values, None, None, sent.expert_token_nums.tolist(), handle, EventOverlap()

    @with_typed_errors
    @torch.no_grad()
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
        events.begin(previous_event)
        need(bias is None, "bias", "is given; flavour 'ascend' takes none, add it to the result")
        if isinstance(handle, AllToAllHandle):
            weights = handle["topk_weights"]
            if weights is None:
                weights = torch.ones(handle["topk_idx"].shape, dtype=torch.float32, device=x.device)
            return handle.dispatcher.combine(x, handle.dispatched, weights.float()), None, EventOverlap()
        _, _, _, triples, _, head, ids, weights = _entries(handle, 8)
        total, weights, event = self.runtime.intranode_combine(x, ids, weights, triples, head, combine_send_cost_stats)
        return total, weights, EventOverlap(event)

    @with_typed_errors
    @torch.no_grad()
    def low_latency_dispatch(  # type: ignore[override]
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
            packed rows, quantised a tuple of them and their scales; rows of each local expert ``(L,)`` int64; the
            handle; the event; a hook that does nothing.
        """
        need(not use_ue8m0, "use_ue8m0", "is True; MX formats are of the 950 series: pass False")
        need(not use_mxfp4, "use_mxfp4", "is True; MX formats are of the 950 series: pass False")
        quant = quant_mode or ("int8" if use_fp8 else "none")
        need_one_of("quant_mode", quant, QUANT_MODES)
        tokens = num_max_dispatch_tokens_per_rank
        if self.low_latency_strategy == LowLatencyStrategy.ALLTOALL:
            return self._low_latency_alltoall(x, topk_idx, tokens, num_experts, quant)
        values, scales, nums, triples, ranges, event, hook = self.runtime.low_latency_dispatch(
            x, topk_idx, cumulative_local_expert_recv_stats, tokens, num_experts, quant_mode=quant
        )
        handle: tuple[Any, ...] = (triples, ranges, tokens, x.shape[1], num_experts, nums, None)
        if self.low_latency_strategy == LowLatencyStrategy.OPS:
            mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
            handle = (*handle, mask, topk_idx.int(), topk_weights)
        shown = values if QUANT_MODES[quant] == 0 else (values, scales)
        return shown, nums, handle, EventOverlap(event), hook

    def _low_latency_alltoall(
        self, x: Tensor, topk_idx: Tensor, tokens: int, experts: int, quant: str
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:
        dispatcher = self._alltoall(experts)
        bound = self.group_size * max(tokens, 1)
        sent = dispatcher.dispatch(x, topk_idx.int(), quant_mode=QUANT_MODES[quant], global_bs=bound)
        nums = sent.expert_token_nums
        handle = LowLatencyHandle((sent.expand_idx, sent.ep_recv_counts, tokens, x.shape[1], experts, nums, None))
        handle.dispatched, handle.dispatcher = sent, dispatcher
        values = sent.expand_x if QUANT_MODES[quant] == 0 else (sent.expand_x, sent.dynamic_scales)
        return values, nums, handle, EventOverlap(), events.nothing

    @with_typed_errors
    @torch.no_grad()
    def low_latency_combine(  # type: ignore[override]
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
        if isinstance(handle, LowLatencyHandle):
            total = handle.dispatcher.combine(x, handle.dispatched, topk_weights.float())
            return total, EventOverlap(), events.nothing
        triples, ranges, tokens, _, experts, nums = _entries(handle, 7, 10)[:6]
        total, event, hook = self.runtime.low_latency_combine(
            x, topk_idx, topk_weights, triples, ranges, tokens, experts, nums
        )
        return total, EventOverlap(event), hook

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
        fused = (
            self.runtime.fused_deep_moe if fuse_mode == FuseMode.FUSED_DEEP_MOE else self.runtime.dispatch_ffn_combine
        )
        return fused(
            x,
            topk_idx,
            gmm1_permuted_weight,
            gmm1_permuted_weight_scale,
            gmm2_weight,
            gmm2_weight_scale,
            topk_weights,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            quant_mode,
        )


def _quant_of(x: Any) -> str:
    """The mode of a call that names none."""
    if isinstance(x, tuple):
        need(
            len(x) == 2 and x[1].dtype == torch.int8, "x", "is a tuple; only one with an int8 tensor asks for int8 rows"
        )
        return "int8"
    return "int8" if os.environ.get("DEEP_NORMAL_MODE_USE_INT8_QUANT", "").strip() == "1" else "bf16"


def _entries(handle: Any, *sizes: int) -> tuple[Any, ...]:
    if isinstance(handle, tuple) and len(handle) in sizes:
        return handle
    listed = " or ".join(map(str, sizes))
    raise ArgumentError(f"handle is no tuple of {listed} entries; pass what dispatch returned", argument="handle")
