"""Makes the calls of deep_ep that SGLang 0.5.23 makes on an NPU, keyword for keyword."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from deep_ep import Buffer
from sglang.srt.layers.moe.utils import DeepEPMode

MAX_TOKENS = 128  # SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK


class DeepEPNormalDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]


class DeepEPLLDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor


class DeepEPNormalCombineInput(NamedTuple):
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class DeepEPLLCombineInput(DeepEPNormalCombineInput):
    pass


class DeepEPDispatcher:
    """One layer's dispatcher, in one mode, with bf16 rows."""

    def __init__(self, group: Any, router_topk: int, deepep_mode: DeepEPMode, **given: Any) -> None:
        self.given, self.low_latency = given, deepep_mode == DeepEPMode.LOW_LATENCY
        experts, hidden = given["num_experts"], given["hidden_size"]
        nvl, rdma = 0, 0
        if self.low_latency:
            rdma = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, hidden, group.size(), experts)
            queues = experts // group.size()
        else:
            for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
                nvl = max(config.get_nvl_buffer_size_hint(hidden * 2, group.size()), nvl)
                rdma = max(config.get_rdma_buffer_size_hint(hidden * 2, group.size()), rdma)
            queues = Buffer.num_sms
        self.buffer = Buffer(
            group, nvl, rdma, low_latency_mode=self.low_latency, num_qps_per_rank=queues, allow_mnnvl=False
        )

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        ids, weights = topk_output.topk_ids.to(torch.int64), topk_output.topk_weights
        return (self._low_latency if self.low_latency else self._normal)(hidden_states, ids, weights)

    def _normal(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DeepEPNormalDispatchOutput:
        later = self.given["async_finish"]
        before = Buffer.capture() if later else None
        per_rank, per_rdma_rank, per_expert, in_rank, before = self.buffer.get_dispatch_layout(
            ids,
            self.given["num_experts"],
            previous_event=before,
            async_finish=later,
            allocate_on_comm_stream=before is not None,
        )
        assert "quant_mode" in inspect.signature(self.buffer.dispatch).parameters  # SGLang asks so
        rows, ids, weights, numbers, self.handle, event = self.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=before,
            async_finish=later,
            allocate_on_comm_stream=before is not None and later,
            expert_alignment=1,
            config=None,
            quant_mode="bf16",
        )
        if later:
            event.current_stream_wait()
        return DeepEPNormalDispatchOutput(rows, None, ids, weights, numbers)

    def _low_latency(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DeepEPLLDispatchOutput:
        hook_wanted = self.given["return_recv_hook"]
        self.buffer.clean_low_latency_buffer(MAX_TOKENS, self.given["hidden_size"], self.given["num_experts"])
        rows, numbers, self.handle, event, hook = self.buffer.low_latency_dispatch(
            x,
            ids,
            MAX_TOKENS,
            self.given["num_experts"],
            use_fp8=False,
            use_mxfp4=False,
            topk_weights=weights,
            async_finish=not hook_wanted,
            return_recv_hook=hook_wanted,
        )
        hook() if hook_wanted else event.current_stream_wait()
        return DeepEPLLDispatchOutput(rows, None, ids, weights, numbers)

    def combine(self, combine_input: Any) -> torch.Tensor:
        rows, ids, weights = combine_input
        if not self.low_latency:
            later = self.given["async_finish"]
            before = Buffer.capture() if later else None
            y, _, event = self.buffer.combine(
                rows,
                self.handle,
                async_finish=later,
                previous_event=before,
                allocate_on_comm_stream=before is not None,
                config=None,
            )
            if later:
                event.current_stream_wait()
            return y
        hook_wanted = self.given["return_recv_hook"]
        y, event, hook = self.buffer.low_latency_combine(
            x=rows,
            topk_idx=ids,
            topk_weights=weights,
            handle=self.handle,
            async_finish=not hook_wanted,
            return_recv_hook=hook_wanted,
        )
        hook() if hook_wanted else event.current_stream_wait()
        return y
