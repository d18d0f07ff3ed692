"""What of DeepEP's Buffer sends no rows: hints, events, and the calls that we have not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import need
from ascend_moe.interop.deep_ep import layout
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.layout import Config
from ascend_moe.interop.deep_ep.place import not_supported

_LEAVING_OUT = "a rank cannot be left out of a group yet: make a new group of those that live"


class WithoutRows:
    """Base of ``Buffer``."""

    num_sms: int = 20

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: fp8 and low latency are there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept as ``Buffer.num_sms``; it has no effect. Must be even."""
        need(new_num_sms % 2 == 0, "new_num_sms", "is {}; it must be even", new_num_sms)
        WithoutRows.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of all that the current stream has to do now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of window a rank; see ``layout.get_low_latency_rdma_size_hint``."""
        return layout.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """For any number of ranks the same: it has no effect."""
        return Config(WithoutRows.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """For any number of ranks the same: it has no effect."""
        return Config(WithoutRows.num_sms)

    def get_comm_stream(self) -> Any:
        """The current stream: calls run there."""
        npu = getattr(torch, "npu", None)
        return torch.cpu.current_stream() if npu is None else npu.current_stream()

    def get_local_buffer_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raises: the bytes of windows are nobody's to read."""
        raise not_supported("get_local_buffer_tensor", "ascend_moe.window_empty gives tensors in a window")

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing: the ops may follow each other in any order."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raises ArgumentError."""
        raise not_supported("low_latency_update_mask_buffer", _LEAVING_OUT)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Raises ArgumentError."""
        raise not_supported("low_latency_query_mask_buffer", _LEAVING_OUT)

    def low_latency_clean_mask_buffer(self) -> None:
        """Raises ArgumentError."""
        raise not_supported("low_latency_clean_mask_buffer", _LEAVING_OUT)
