"""sgl-kernel-npu's Buffer: `Runtime`, its compiled module over the V2 ops, and `AscendBuffer`, which adds strategies.

One row per (token, expert), by local expert. The state of a call is in the returned tensors. sgl-kernel-npu's own
Python package runs over `Runtime` too.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from enum import IntEnum
from functools import partialmethod
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.dispatchers import Dispatched
from ascend_moe.dispatchers.rows import unpack
from ascend_moe.errors import (
    need,
    need_dims,
    need_one_of,
    need_shape,
    typed_methods,
    with_signature_like,
    with_signature_of,
    with_typed_errors,
)
from ascend_moe.experts.quant import cast_fp8_rows
from ascend_moe.interop.deep_ep import base, strategies
from ascend_moe.interop.deep_ep.base import BufferBase, BufferPlace, EventHandle, Group, WaitStats, refused
from ascend_moe.interop.deep_ep.buffer import FLAVOURS, Buffer
from ascend_moe.interop.deep_ep.rows import FP8_ROWS, QUANT_MODES, numbers_of, pack
from ascend_moe.interop.deep_ep.strategies import LowLatencyEPCommStrategy, NormalEPCommStrategy
from ascend_moe.layer_ops import calls, dispatch_ffn_combine
from ascend_moe.layer_ops.arguments import Tokens, experts_of
from ascend_moe.ops.sent_ids import SentIdStore
from ascend_moe.permute import segment_of_rows

P = ParamSpec("P")
R = TypeVar("R")

_ROWS = (torch.bfloat16, torch.float16)
# Variables of sgl-kernel-npu that select a feature which is not supported, and the value that does not.
_FEATURES = (
    ("MOE_SHARED_EXPERT_RANK_NUM", "0", "ranks of shared experts are"),
    ("DEEPEP_NORMAL_LONG_SEQ_ROUND", "1", "rounds of a long sequence are"),
)


class FuseMode(IntEnum):
    """Values of fuse_mode in `AscendBuffer.fused_deep_moe`, named after sgl-kernel-npu's two operators."""

    FUSED_DEEP_MOE = 1
    DISPATCH_FFN_COMBINE = 2


# ---- the compiled module


@typed_methods
class Runtime:
    """sgl-kernel-npu's compiled class ``deep_ep_cpp.Buffer`` over the V2 ops: one rank's dispatch and combine.

    ``group_name`` is the group's name for the ops, ``group_size`` its number of ranks. num_nvl_bytes, num_rdma_bytes
    and low_latency_mode have no effect; HCCL_BUFFSIZE sets the window size.
    """

    def __init__(
        self,
        rank: int,
        group_size: int,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        group_name: str = "",
    ) -> None:
        for name, harmless, what in _FEATURES:
            given = os.environ.get(name, "").strip() or harmless
            need(given == harmless, name, "is {}; {} not supported: unset the variable", given, what)
        self.place = BufferPlace(group_name, group_size, rank)
        self._sent_ids = SentIdStore()

    @torch.no_grad()
    def _dispatch(
        self, x: Tensor, ids: Tensor, experts: int, tokens: int, quant: str, weights: Tensor | None, waits: WaitStats
    ) -> Dispatched:
        """Dispatch; ``tokens``: most tokens of a rank."""
        need_one_of("quant_mode", quant, (*QUANT_MODES, FP8_ROWS))
        self.place.need_one_server("AscendBuffer", "needs more state of a dispatch than its handles contain")
        dispatch = wide_ids_named(ids, self.place.rank)(self.place.dispatcher(experts).dispatch)
        options: dict[str, Any] = {"quant_mode": QUANT_MODES.get(quant, 0), "max_tokens": max(tokens, 1)}
        rows = pack(*cast_fp8_rows(x)) if quant == FP8_ROWS else x.contiguous()
        options |= {"expert_scales": weights, **waits.given()}
        sent = waits.after(dispatch)(rows, narrow("topk_idx", ids), **options)
        if quant != FP8_ROWS:
            return sent
        rows, scales = unpack(sent.expand_x, (x.shape[1], torch.float8_e4m3fn), (1, torch.float32))
        return dataclasses.replace(sent, expand_x=rows, dynamic_scales=scales.squeeze(1))

    @torch.no_grad()
    def _combine(
        self, x: Tensor, topk_idx: Tensor, index: Tensor, counts: Tensor, weights: Tensor | None, tokens: int
    ) -> Tensor:
        """Combine, weighted if weights are given. ``index``, ``counts``: of the dispatch."""
        ids = self._sent_ids.checked("topk_idx", index, narrow("topk_idx", topk_idx))
        dispatcher = self.place.dispatcher(counts.numel())
        sent = dispatcher.resume(ids, index, counts, max_tokens=max(tokens, 1))
        return dispatcher.combine(x.contiguous(), sent, None if weights is None else weights.float())

    def get_num_rdma_ranks(self) -> int:
        """Return the number of servers."""
        here = self.place.ranks_per_server
        return self.place.world // here if here else 1

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventHandle | None = None, *_: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventHandle]:
        """Return `Buffer.get_dispatch_layout`'s results, is_token_in_rank as int32; further arguments are ignored."""
        return *base.dispatch_layout(self.place, topk_idx, num_experts, previous_event, torch.int32), EventHandle()

    def intranode_dispatch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        num_tokens_per_rank: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        cached_num_recv_tokens: int = 0,
        cached_rank_prefix_matrix: Tensor | None = None,
        cached_channel_prefix_matrix: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        use_quant: bool = False,
        quant_type: str = "bf16",
    ) -> tuple[Any, ...]:
        """Send each (token, expert) row to the expert's rank; with use_quant in format quant_type: "int8" or FP8_ROWS.

        Of num_tokens_per_expert only the size is used. x_scales and cached_rank_prefix_matrix must be None,
        num_worst_tokens 0; config, async_finish and allocate_on_comm_stream have no effect.

        Returns rows, their scales, ids, weights and the list of `NormalEPCommStrategy.dispatch`; three empty tensors;
        the source index ``(3n,)`` int32: source rank, token, k of each row; int32 running sums of rows over [local
        expert][source rank], then the most tokens of a rank; the event.
        """
        base.begin(previous_event)
        need(cached_rank_prefix_matrix is None, "handle", "of an earlier dispatch is not supported; pass topk_idx")
        need(x_scales is None, "x_scales", "is not supported: pass bf16 rows, which are quantized here")
        need(num_worst_tokens == 0, "num_worst_tokens", "is {}; it must be 0: counts are read here", num_worst_tokens)
        base.need_whole("expert_alignment", expert_alignment, 1)
        need_dims("x", x, 2, dtypes=_ROWS)
        waits = WaitStats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, x, self.place)
        need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
        need_dims("num_tokens_per_expert", num_tokens_per_expert, 1)
        experts = num_tokens_per_expert.numel()
        self.place.local_experts(experts)
        most = base.most_tokens_of(self.place, x.shape[0], topk_idx, experts)
        rows = self._dispatch(x, topk_idx, experts, most, quant_type if use_quant else "none", topk_weights, waits)
        counts, number = rows.ep_recv_counts, int(rows.ep_recv_counts[-1])
        index = rows.expand_idx[: 3 * number].clone()
        self._sent_ids.add(index, narrow("topk_idx", topk_idx))
        at = torch.arange(number, device=index.device), index[2::3].long()
        ids = torch.full((number, topk_idx.shape[1]), -1, dtype=torch.int64, device=index.device)
        ids[at] = segment_of_rows(rows.expert_token_nums.cumsum(0), number)
        weights = None
        if topk_weights is not None:
            weights = torch.zeros(ids.shape, dtype=torch.float32, device=index.device)
            weights[at] = rows.expand_scales[:number]
        aligned = (rows.expert_token_nums + expert_alignment - 1) // expert_alignment * expert_alignment
        counted = [int(count) for count in numbers_of(aligned).tolist()]
        none, head = counts.new_empty(0), torch.cat([counts, counts.new_tensor([most])])
        received = (rows.expand_x[:number], rows.dynamic_scales[:number])
        return (*received, ids, weights, counted, none, none, none, index, head, EventHandle())

    def intranode_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        src_idx: Tensor,
        send_head: Tensor,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventHandle]:
        """Return each token's sum of its rows, ``(T, H)``, weighted unless topk_weights is None; these; the event."""
        rule = "is not supported; pass None; ascend_moe.trace shows waits between ranks"
        need(combine_send_cost_stats is None, "combine_send_cost_stats", rule)
        rows = src_idx.numel() // 3
        need(x.shape[0] >= rows, "x", "has {} rows; dispatch returned {}: pass all", x.shape[0], rows)
        total = self._combine(x, topk_idx, src_idx, send_head[:-1], topk_weights, int(send_head[-1]))
        return total, topk_weights, EventHandle()

    internode_dispatch = refused("internode_dispatch", "between servers use deep_ep.Buffer's dispatch and combine")
    internode_combine = refused("internode_combine", "between servers use deep_ep.Buffer's dispatch and combine")
    notify_verify = refused("notify_verify", "get_dispatch_layout and dispatch return all counts")
    get_notify_send_data = refused("get_notify_send_data", "get_dispatch_layout and dispatch return all counts")
    begin_profile = refused("begin_profile", "ascend_moe.trace records the ops")
    end_profile = refused("end_profile", "ascend_moe.trace records the ops")
    clean_low_latency_buffer = BufferBase.clean_low_latency_buffer

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        cumulative_local_expert_recv_stats: Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_mxfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        quant_mode: str = "none",
    ) -> tuple[Any, ...]:
        """Send and receive rows, quantized by quant_mode; the stats and the other flags have no effect.

        Returns rows ``(max * W * min(K, L), H)`` in x's dtype, int8 or e4m3, max: num_max_dispatch_tokens_per_rank;
        their scales, float32, one per row; rows per local expert ``(L,)`` int64; the source index; int32 running sums
        over [local expert][source rank]; the event; a hook that does nothing.
        """
        need_dims("x", x, 2, dtypes=_ROWS)
        need_dims("topk_idx", topk_ids, 2)
        tokens = num_max_dispatch_tokens_per_rank
        base.need_whole("num_max_dispatch_tokens_per_rank", tokens, 0)
        rule = "is {}; x has {} tokens: pass the largest number of all ranks"
        need(tokens >= x.shape[0], "num_max_dispatch_tokens_per_rank", rule, tokens, x.shape[0])
        waits = WaitStats("", None, x, self.place)
        rows = self._dispatch(x, topk_ids, num_experts, tokens, quant_mode, None, waits)
        self._sent_ids.add(rows.expand_idx, narrow("topk_idx", topk_ids))
        received = (rows.expand_x, rows.dynamic_scales, rows.expert_token_nums, rows.expand_idx, rows.ep_recv_counts)
        return (*received, EventHandle(), base.nothing)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        src_info: Tensor,
        layout_range: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *_: Any,
    ) -> tuple[Tensor, EventHandle, Callable[[], None]]:
        """Return the weighted sums ``(T, H)`` of x's rows; the event; a hook that does nothing.

        src_info, layout_range: dispatch's source index and running sums. Further arguments are ignored.
        """
        need_shape("layout_range", layout_range, (num_experts,))
        tokens = num_max_dispatch_tokens_per_rank
        total = self._combine(x, topk_ids, src_info, layout_range, topk_weights, tokens)
        return total, EventHandle(), base.nothing

    @with_typed_errors
    @torch.no_grad()
    def fused(
        self,
        whole: bool,
        x: Tensor,
        topk_ids: Tensor,
        gmm1_weight: Any,
        gmm1_weight_scale: Any,
        gmm2_weight: Any,
        gmm2_weight_scale: Any,
        topk_weights: Tensor,
        most: int,
        num_experts: int,
        quant_mode: int = 1,
        profile_enable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run `AscendBuffer.fused_deep_moe` with fuse_mode 1 if ``whole``, else 2; its arguments with shorter names.

        ``most``: its num_max_dispatch_tokens_per_rank.
        """
        named = wide_ids_named(topk_ids, self.place.rank)
        ids = narrow("topk_idx", topk_ids)
        if not whole:
            need(quant_mode in (0, 1), "quant_mode", "is {}; it must be 0 or 1", quant_mode)
            nums = torch.empty(self.place.local_experts(num_experts), dtype=torch.int32, device=x.device)
            out = torch.empty_like(x)
            with named:
                return dispatch_ffn_combine(
                    x, gmm1_weight, gmm2_weight, ids, gmm1_weight_scale, gmm2_weight_scale, None, None, topk_weights,
                    self.place.group_ep, most, out, nums, swiglu_limit=0.0,
                )  # fmt: skip
        given = {"gmm1_weight": gmm1_weight, "gmm2_weight": gmm2_weight}
        scales = {"gmm1_weight_scale": gmm1_weight_scale, "gmm2_weight_scale": gmm2_weight_scale}
        experts = experts_of(x, given | scales)
        rule = "is {}; it must be 1 for int8 weights and 0 for others"
        need(quant_mode == (experts.quant_mode != 0), "quant_mode", rule, quant_mode)
        base.need_whole("num_max_dispatch_tokens_per_rank", most, 0)
        tokens, dispatcher = Tokens(x, ids, topk_weights, None), self.place.dispatcher(num_experts)
        with named:
            sent = calls.dispatch(dispatcher, tokens, experts, self.place.world * most)
        return calls.finish(dispatcher, sent, tokens, experts), sent.ep_recv_counts

    fused_deep_moe, dispatch_ffn_combine = partialmethod(fused, True), partialmethod(fused, False)


# ---- the Buffer


def _of_strategy(strategy: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a Buffer's method that calls its strategy's, with all arguments by name."""

    @with_signature_of(method)
    def call(self: Any, **given: Any) -> Any:
        return getattr(getattr(self, strategy), method.__name__)(**given)

    call.__name__, call.__qualname__ = method.__name__, f"AscendBuffer.{method.__name__}"
    return call


class AscendBuffer(BufferBase):
    """Dispatch and combine with sgl-kernel-npu's names, rows and handles, which differ from those of DeepEP's `Buffer`.

    - Normal mode: one row per (token, expert), by local expert; combine weights by dispatch's topk_weights. The handle
      has eight entries: three empty tensors, the source index (source rank, token, k), is_token_in_rank, running sums
      over [local expert][source rank] and the most tokens of a rank, topk_idx, topk_weights. dispatch accepts no
      handle, combine no ``bias``.
    - Low latency: rows ``(max * W * min(K, L), H)`` by local expert without gaps, counts int64, running sums as
      layout_range; handles of seven entries, with strategy "ops" of ten; with "alltoall" blocks of ``max`` rows, max:
      num_max_dispatch_tokens_per_rank. Hooks do nothing; out, zero_copy and the recv stats have no effect.
    - Ids -1 are not routed, without MOE_ENABLE_TOPK_NEG_ONE.
    - quant_mode None, "bf16", "int8", or with the default strategies "pertoken_fp8_e4m3": quantized rows have a float32
      scale each. MX formats, which need the 950 series, are refused.

    Args:
        normal_strategy: "default" or "alltoall". low_latency_strategy: "default", "ops" or "alltoall". Or a
            registered name. The environment variable DEEP_USE_MODE (default, ops or alltoall) overrides both.
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl: as for `BufferBase`, which states the limits.

    The attributes normal_strategy and low_latency_strategy are objects, and may be set. Source: its ``deep_ep.Buffer``.
    """

    flavour = "ascend"

    @with_signature_like(
        Buffer.__init__,
        without="explicitly_destroy enable_shrink comm",
        normal_strategy=strategies.NormalStrategy.DEFAULT,
        low_latency_strategy=strategies.LowLatencyStrategy.DEFAULT,
    )
    @with_typed_errors
    def __init__(
        self, group: Group, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool, normal_strategy: str,
        low_latency_strategy: str,
    ) -> None:  # fmt: skip
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        mode = os.environ.get("DEEP_USE_MODE", "").strip()
        if mode:
            normal_strategy, low_latency_strategy = strategies.StrategyMap.get_strategy(mode)
        self.runtime = Runtime(self.rank, self.group_size, group_name=self._place.group_ep)
        given: dict[str, Any] = {"runtime": self.runtime, "group": group}
        self.normal_strategy = strategies.get_normal_strategy(normal_strategy)(**given)
        self.low_latency_strategy = strategies.get_low_latency_strategy(low_latency_strategy)(**given)

    get_dispatch_layout = _of_strategy("normal_strategy", NormalEPCommStrategy.get_dispatch_layout)
    dispatch = _of_strategy("normal_strategy", NormalEPCommStrategy.dispatch)
    combine = _of_strategy("normal_strategy", NormalEPCommStrategy.combine)
    low_latency_combine = _of_strategy("low_latency_strategy", LowLatencyEPCommStrategy.low_latency_combine)

    @with_signature_of(LowLatencyEPCommStrategy.low_latency_dispatch)
    @with_typed_errors
    def low_latency_dispatch(self, quant_mode: str | None, **others: Any) -> Any:
        """Run `LowLatencyEPCommStrategy.low_latency_dispatch` of the strategy; others, results and errors as there.

        quant_mode: a mode of the strategy; None: "int8" if use_fp8 is True (its default), else unquantized.
        Raises ArgumentError if use_mxfp4 is True, or use_ue8m0 with use_fp8; without, use_ue8m0 has no effect.
        """
        fp8 = others["use_fp8"]
        for name, asked in (("use_ue8m0", others["use_ue8m0"] and fp8), ("use_mxfp4", others["use_mxfp4"])):
            need(not asked, name, "is True; MX formats need the 950 series: pass False")
        quant_mode = quant_mode or ("int8" if fp8 else None)
        return self.low_latency_strategy.low_latency_dispatch(**others, quant_mode=quant_mode)

    notify_verify = Runtime.notify_verify
    get_notify_send_data = Runtime.get_notify_send_data
    begin_profile, end_profile = Runtime.begin_profile, Runtime.end_profile
    get_next_low_latency_combine_buffer = refused(
        "get_next_low_latency_combine_buffer", "pass the rows to low_latency_combine"
    )

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
        """Run dispatch, the experts' MLPs (SwiGLU) and combine in one call. Collective.

        Args:
            x: (T, H) bf16, fp16 or fp32. topk_idx, topk_weights: (T, K), int64 or int32, and fp32.
            gmm1_permuted_weight: ``(L, H, 2F)``, gate in the first F columns, not permuted; gmm2_weight ``(L, F, H)``;
                or one tensor per local expert. In x's dtype with quant_mode 0, int8 with 1.
            gmm1_permuted_weight_scale, gmm2_weight_scale: with quant_mode 1 ``(L, 2F)`` and ``(L, H)``, fp32, bf16 or
                int64 with fp32 bits. num_experts: E. quant_mode: 0 or 1; with fuse_mode 2 the weights' dtype decides.
            num_max_dispatch_tokens_per_rank: at least every rank's T, equal on all ranks. With fuse_mode 2: the most
                rows that a rank may receive, else RoutingOverflow on every rank; 0: no limit.
            fuse_mode: 1 or 2. profile_enable: ignored.

        Returns each token's weighted sum ``(T, H)``, and int32 running sums of the received rows over [local
        expert][source rank], with fuse_mode 2 the rows per local expert ``(L,)``. Raises ArgumentError if an argument
        breaks one of these rules, or the errors of dispatch and combine.
        """
        need(fuse_mode in (1, 2), "fuse_mode", "is {}; it must be 1 or 2", fuse_mode)
        weights = (gmm1_permuted_weight, gmm1_permuted_weight_scale, gmm2_weight, gmm2_weight_scale)
        given = (x, topk_idx, *weights, topk_weights, num_max_dispatch_tokens_per_rank, num_experts, quant_mode)
        return self.runtime.fused(fuse_mode == FuseMode.FUSED_DEEP_MOE, *given)


FLAVOURS[AscendBuffer.flavour] = AscendBuffer
