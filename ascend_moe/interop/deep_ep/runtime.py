"""sgl-kernel-npu's compiled module ``deep_ep_cpp`` over the V2 ops: one row for each (token, expert), by local expert.

Its own Python package, unbuilt, runs over this. The state of a call is in the tensors that it returns.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.dispatchers import Dispatched
from ascend_moe.dispatchers.rows import unpack
from ascend_moe.errors import need, need_dims, need_one_of, need_shape, typed_methods
from ascend_moe.interop.deep_ep import events, layout
from ascend_moe.interop.deep_ep.events import Costs, EventHandle
from ascend_moe.interop.deep_ep.fused import FusedCalls
from ascend_moe.interop.deep_ep.layout import most_tokens_of
from ascend_moe.interop.deep_ep.place import BufferPlace, need_whole, not_supported, refused
from ascend_moe.interop.deep_ep.rows import cast_fp8_rows, pack
from ascend_moe.ops.pairs import Pairs
from ascend_moe.permute import segment_of_rows

QUANT_MODES = {"none": 0, "bf16": 0, "int8": 2}  # of the ops
FP8_ROWS = "pertoken_fp8_e4m3"  # rows are cast before the op; the MX formats are of the 950 series


def dispatch_rows(
    place: BufferPlace,
    x: Tensor,
    ids: Tensor,
    experts: int,
    tokens: int,
    quant: str,
    weights: Tensor | None = None,
    costs: Costs | None = None,
) -> Dispatched:
    """One dispatch. ``tokens``: most of a rank."""
    need_one_of("quant_mode", quant, (*QUANT_MODES, FP8_ROWS))
    place.need_one_server("AscendBuffer", "keeps more of a dispatch than its handles hold")
    dispatch = wide_ids_named(ids, place.rank)(place.dispatcher(experts).dispatch)
    sent = (costs.of(dispatch) if costs else dispatch)(
        pack(*cast_fp8_rows(x)) if quant == FP8_ROWS else x.contiguous(),
        narrow("topk_idx", ids),
        expert_scales=weights,
        quant_mode=QUANT_MODES.get(quant, 0),
        max_tokens=max(tokens, 1),
    )
    if quant != FP8_ROWS:
        return sent
    rows, scales = unpack(sent.expand_x, (x.shape[1], torch.float8_e4m3fn), (1, torch.float32))
    return dataclasses.replace(sent, expand_x=rows, dynamic_scales=scales.squeeze(1))


def combine_rows(
    place: BufferPlace, x: Tensor, ids: Tensor, triples: Tensor, counts: Tensor, weights: Tensor | None, tokens: int
) -> Tensor:
    """One combine, weighted where weights are given. ``ids``: int32."""
    way = place.dispatcher(counts.numel())
    sent = way.resume(ids, triples, counts, max_tokens=max(tokens, 1))
    return way.combine(x.contiguous(), sent, None if weights is None else weights.float())


def check_environment() -> None:
    """Refuses variables that ask sgl-kernel-npu for something that is not here."""
    for name, harmless, what in (
        ("MOE_SHARED_EXPERT_RANK_NUM", "0", "ranks of shared experts are"),
        ("DEEPEP_NORMAL_LONG_SEQ_ROUND", "1", "rounds of a long sequence are"),
    ):
        given = os.environ.get(name, "").strip() or harmless
        need(given == harmless, name, "is {}; {} not supported: unset it", given, what)


@typed_methods
class Runtime(FusedCalls):
    """``deep_ep_cpp.Buffer``: a rank's calls.

    Args:
        rank, group_size: of the group.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode: no effect; windows are as large as HCCL_BUFFSIZE says.
        group_name: group_ep.
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
        check_environment()
        self.place = BufferPlace(group_name, group_size, rank)
        self._pairs = Pairs()

    def get_num_rdma_ranks(self) -> int:
        """Servers."""
        here = self.place.ranks_per_server
        return self.place.world // here if here else 1

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventHandle | None = None, *_: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventHandle]:
        """DeepEP's, with is_token_in_rank ``(T, W)`` as int32."""
        _wait(previous_event)
        per_rank, servers, per_expert, in_rank = layout.dispatch_layout(self.place, topk_idx, num_experts)
        return per_rank, servers, per_expert, in_rank.int(), EventHandle()

    @torch.no_grad()
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
        """Rows of each local expert, as int8 or e4m3 with use_quant: quant_type "int8" or "pertoken_fp8_e4m3".

        Returns:
            rows ``(n, H)``; their scales ``(n,)`` float32; ids ``(n, K)`` int64, the local expert at its k and -1
            elsewhere; weights ``(n, K)`` likewise; a list of rows of each local expert; three empty matrices;
            triples ``(3n,)`` int32: source rank, token, k; int32 running sums over [local expert][source rank], and
            behind them the most tokens of a rank; the event.
        """
        _wait(previous_event)
        need(cached_rank_prefix_matrix is None, "handle", "of an earlier dispatch is not taken; pass topk_idx")
        need(x_scales is None, "x_scales", "is given; rows are quantized here: pass bf16 rows")
        need(num_worst_tokens == 0, "num_worst_tokens", "is {}; it must be 0: counts are read here", num_worst_tokens)
        costs = Costs("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, self.place)
        need_whole("expert_alignment", expert_alignment, 1)
        need_dims("x", x, 2, dtypes=(torch.bfloat16, torch.float16))
        need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
        need_dims("num_tokens_per_expert", num_tokens_per_expert, 1)
        place, experts = self.place, num_tokens_per_expert.numel()
        place.local_experts(experts)
        most = most_tokens_of(place, x.shape[0], topk_idx, experts)
        quant = quant_type if use_quant else "none"
        rows = dispatch_rows(place, x, topk_idx, experts, most, quant, topk_weights, costs)
        number = int(rows.ep_recv_counts[-1])
        triples = rows.expand_idx[: 3 * number].clone()
        self._pairs.sent(triples, narrow("topk_idx", topk_idx))
        ids, weights = self._topk(rows, triples, topk_idx.shape[1], topk_weights is not None)
        aligned = (rows.expert_token_nums + expert_alignment - 1) // expert_alignment * expert_alignment
        if os.environ.get("MOE_EXPERT_TOKEN_NUMS_TYPE", "1").strip() == "0":
            aligned = aligned.cumsum(0)
        numbers = [int(count) for count in aligned.tolist()]
        counts = rows.ep_recv_counts
        none, head = counts.new_empty(0), torch.cat([counts, counts.new_tensor([most])])
        received = (rows.expand_x[:number], rows.dynamic_scales[:number])
        return (*received, ids, weights, numbers, none, none, none, triples, head, EventHandle())

    def _topk(self, rows: Dispatched, triples: Tensor, topk: int, weighted: bool) -> tuple[Tensor, Tensor | None]:
        number = triples.numel() // 3
        row, slot = torch.arange(number, device=triples.device), triples[2::3].long()
        ids = torch.full((number, topk), -1, dtype=torch.int64, device=triples.device)
        ids[row, slot] = segment_of_rows(rows.expert_token_nums.cumsum(0), number)
        if not weighted:
            return ids, None
        weights = torch.zeros(number, topk, dtype=torch.float32, device=triples.device)
        weights[row, slot] = rows.expand_scales[:number]
        return ids, weights

    @torch.no_grad()
    def intranode_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        src_idx: Tensor,
        send_head: Tensor,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventHandle]:
        """``(T, H)``: for each token the weighted sum of its rows; the weights as given; the event."""
        if combine_send_cost_stats is not None:
            raise not_supported("combine_send_cost_stats", "pass None; ascend_moe.trace shows who waits for whom")
        counts, most = send_head[:-1], int(send_head[-1])
        rows = src_idx.numel() // 3
        need(x.shape[0] >= rows, "x", "has {} rows; dispatch returned {}", x.shape[0], rows)
        ids = self._pairs.checked("topk_idx", src_idx, narrow("topk_idx", topk_idx))
        total = combine_rows(self.place, x, ids, src_idx, counts, topk_weights, most)
        return total, topk_weights, EventHandle()

    internode_dispatch = refused("internode_dispatch", "between servers use deep_ep.Buffer's dispatch and combine")
    internode_combine = refused("internode_combine", "between servers use deep_ep.Buffer's dispatch and combine")
    # They show the insides of another implementation.
    notify_verify = refused("notify_verify", "get_dispatch_layout and dispatch return all counts")
    get_notify_send_data = refused("get_notify_send_data", "get_dispatch_layout and dispatch return all counts")
    begin_profile = refused("begin_profile", "ascend_moe.trace records what the ops do")
    end_profile = refused("end_profile", "ascend_moe.trace records what the ops do")

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing: the ops may follow each other in any order."""

    @torch.no_grad()
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
        """Packed rows, received when it returns. quant_mode decides, the other flags have no effect.

        Returns:
            rows ``(max * W * min(K, L), H)`` bf16, int8 or e4m3; their scales, float32, one a row; rows of each local
            expert ``(L,)`` int64; triples; int32 running sums over [local expert][source rank]; the event; a hook
            that does nothing.
        """
        need_dims("x", x, 2, dtypes=(torch.bfloat16, torch.float16))
        need_dims("topk_idx", topk_ids, 2)
        tokens = num_max_dispatch_tokens_per_rank
        need_whole("num_max_dispatch_tokens_per_rank", tokens, 0)
        rule = "is {}; x has {} tokens"
        need(tokens >= x.shape[0], "num_max_dispatch_tokens_per_rank", rule, tokens, x.shape[0])
        rows = dispatch_rows(self.place, x, topk_ids, num_experts, tokens, quant_mode)
        triples = rows.expand_idx
        self._pairs.sent(triples, narrow("topk_idx", topk_ids))
        received = (rows.expand_x, rows.dynamic_scales, rows.expert_token_nums, triples, rows.ep_recv_counts)
        return (*received, EventHandle(), events.nothing)

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        src_info: Tensor,
        layout_range: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        packed_recv_count: Tensor,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventHandle, Callable[[], None]]:
        """``(T, H)``, weighted; the event; a hook that does nothing. zero_copy and out have no effect."""
        need_shape("layout_range", layout_range, (num_experts,))
        tokens = num_max_dispatch_tokens_per_rank
        ids = self._pairs.checked("topk_idx", src_info, narrow("topk_idx", topk_ids))
        total = combine_rows(self.place, x, ids, src_info, layout_range, topk_weights, tokens)
        return total, EventHandle(), events.nothing


def _wait(event: EventHandle | None) -> None:
    if event is not None:
        event.current_stream_wait()
