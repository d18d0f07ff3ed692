"""The base of both Buffers: their group, hints and events, and the calls that are refused."""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.dispatchers.base import OnTheWay
from ascend_moe.errors import need
from ascend_moe.interop.deep_ep import layout
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.layout import Config
from ascend_moe.interop.deep_ep.place import BufferPlace, Group, refused

_LEAVING_OUT = "Buffer(enable_shrink=True) has it; or ascend_moe.agree and ascend_moe.shrink, and a new one"


class BufferBase:
    """Keeps what a Buffer was made with, and has what sends no rows.

    Args:
        group: a process group (gloo: CPU tensors, hccl: NPU tensors), a DeviceMesh of one dimension, the name of one, a
            ``LocalCluster``'s name in the thread of a rank; or group_ep, W and rank as a tuple. Collective on a group's
            first use.
        num_nvl_bytes, num_rdma_bytes: kept as attributes; windows are as large as HCCL_BUFFSIZE says.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: no effect.

    W is at most 384; a rank has at most 4096 tokens a call; K is at most 32. No gradients: the calls are each other's
    backward, as in DeepEP. ``config``, ``allocate_on_comm_stream`` have no effect; calls run on the current stream.
    Between servers normal mode runs comm_alg "hierarchy": a row goes once to a server, whose sum comes back rounded.
    Low latency is refused there: hierarchy weighs rows before they come back, and its weights come with combine.
    """

    num_sms: int = 20
    explicitly_destroy = False

    def __init__(
        self, group: Group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False
    ) -> None:
        self._place = BufferPlace.of_group(group)
        self.group, self.group_size, self.rank = group, self._place.world, self._place.rank
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self._on_the_way = OnTheWay()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: fp8 and low latency are there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept as ``Buffer.num_sms``; it has no effect. Must be even."""
        need(new_num_sms % 2 == 0, "new_num_sms", "is {}; it must be even", new_num_sms)
        BufferBase.num_sms = new_num_sms

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
        return Config(BufferBase.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """For any number of ranks the same: it has no effect."""
        return Config(BufferBase.num_sms)

    def destroy(self) -> None:
        """Ends the use of this object. The windows belong to the group."""
        need(self.explicitly_destroy, "explicitly_destroy", "is False; without it there is nothing to destroy")

    def get_comm_stream(self) -> Any:
        """The current stream: calls run there."""
        npu = getattr(torch, "npu", None)
        return torch.cpu.current_stream() if npu is None else npu.current_stream()

    get_local_buffer_tensor = _no_local_buffer = refused(
        "get_local_buffer_tensor", "ascend_moe.window_empty gives tensors in a window"
    )

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Sends rows: each Buffer has its own."""
        raise NotImplementedError

    combine = dispatch

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """``dispatch``, which callers should call. DeepEP's has no num_worst_tokens, its tenth argument is config."""
        return self.dispatch(*args[:9], *((0, *args[9:]) if len(args) > 9 else ()), **kwargs)

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        """``combine``, which callers should call."""
        return self.combine(*args, **kwargs)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing: the ops may follow each other in any order."""

    low_latency_update_mask_buffer = refused("low_latency_update_mask_buffer", _LEAVING_OUT)
    low_latency_query_mask_buffer = refused("low_latency_query_mask_buffer", _LEAVING_OUT)
    low_latency_clean_mask_buffer = refused("low_latency_clean_mask_buffer", _LEAVING_OUT)
