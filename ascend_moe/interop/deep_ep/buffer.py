"""DeepEP's Buffer over the V2 ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ascend_moe.errors import need, need_one_of, with_typed_errors
from ascend_moe.interop.deep_ep import events, layout
from ascend_moe.interop.deep_ep.ascend import AscendBuffer
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.low_latency import _LowLatencyMode
from ascend_moe.interop.deep_ep.normal import _NormalMode
from ascend_moe.interop.deep_ep.place import Group


class _ByFlavour(type):
    """Makes an AscendBuffer of a call ``Buffer(group, ..., flavour="ascend")``."""

    def __call__(cls, *args: Any, flavour: str = "deepep", **kwargs: Any) -> Any:
        need_one_of("flavour", flavour, ("deepep", AscendBuffer.flavour))
        if cls is Buffer and flavour == AscendBuffer.flavour:
            return AscendBuffer(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class Buffer(_NormalMode, _LowLatencyMode, metaclass=_ByFlavour):
    """Dispatch and combine with DeepEP's names, arguments, results and handles.

    Args:
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl: as of `BufferBase`, which has the limits too.
        explicitly_destroy: ``destroy`` may be called.
        enable_shrink: low-latency calls can go on without a rank, one machine's processes or a LocalCluster: when one
            is lost, the call raises PeerLost on every rank that is left, the mask has it from then on, and the next
            calls are theirs alone, with the ranks' old numbers. On NPUs each of these calls waits for the device.
            comm: must be None.
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

    def destroy(self) -> None:
        """Ends the use of this object; a call that has only sent receives. The windows belong to the group."""
        super().destroy()
        self._on_the_way.settle()

    @with_typed_errors
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts how many tokens go where.

        Args:
            topk_idx: ``(T, K)`` int64 (or int32); -1: not routed.
            num_experts: E, a multiple of W.
            previous_event: waited for first. async_finish: the event returned has the stream's work.
            allocate_on_comm_stream: ignored.

        Returns:
            tokens for each rank ``(W,)`` int32; for each server, None where there is one; (token, k) pairs of each
            expert ``(E,)`` int32; whether a token goes to a rank ``(T, W)`` bool; the event.

        Raises:
            ArgumentError: a rule above is broken.
        """
        events.begin(previous_event)
        found = layout.dispatch_layout(self._place, topk_idx, num_experts)
        return (*found, events.finished(async_finish, topk_idx))
