"""sgl-kernel-npu's Buffer: what its Python package makes of its compiled module, with its handles."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from ascend_moe.errors import need, with_signature_of, with_typed_errors
from ascend_moe.interop.deep_ep import strategies
from ascend_moe.interop.deep_ep.base import BufferBase
from ascend_moe.interop.deep_ep.events import EventOverlap
from ascend_moe.interop.deep_ep.fused import FuseMode
from ascend_moe.interop.deep_ep.place import Group, refused
from ascend_moe.interop.deep_ep.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")


def _of_strategy(strategy: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Makes the method of a Buffer that calls its strategy's, with all arguments by name."""

    @with_signature_of(method)
    def call(self: Any, **given: Any) -> Any:
        return getattr(getattr(self, strategy), method.__name__)(**given)

    call.__name__, call.__qualname__ = method.__name__, f"AscendBuffer.{method.__name__}"
    return call


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
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl: as of `BufferBase`, which has the limits too.

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
        normal_strategy: str = strategies.NormalStrategy.DEFAULT,
        low_latency_strategy: str = strategies.LowLatencyStrategy.DEFAULT,
    ) -> None:
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        mode = os.environ.get("DEEP_USE_MODE", "").strip()
        if mode:
            normal_strategy, low_latency_strategy = strategies.StrategyMap.get_strategy(mode)
        self.runtime = Runtime(
            self.rank, self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, self._place.group_ep
        )
        given: dict[str, Any] = {"runtime": self.runtime, "group": group}
        self.normal_strategy = strategies.get_normal_strategy(normal_strategy)(**given)
        self.low_latency_strategy = strategies.get_low_latency_strategy(low_latency_strategy)(**given)

    @with_signature_of(strategies.NormalEPCommStrategy.get_dispatch_layout)
    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None) -> Any:
        """Counts as ``Buffer`` does: topk_idx ``(T, K)``, num_experts, previous_event; a token's ranks are int32."""
        return self.normal_strategy.get_dispatch_layout(topk_idx, num_experts, previous_event)

    dispatch = _of_strategy("normal_strategy", strategies.NormalEPCommStrategy.dispatch)
    combine = _of_strategy("normal_strategy", strategies.NormalEPCommStrategy.combine)

    @with_signature_of(strategies.LowLatencyEPCommStrategy.low_latency_dispatch)
    @with_typed_errors
    def low_latency_dispatch(
        self, use_fp8: bool, use_ue8m0: bool, use_mxfp4: bool, quant_mode: str | None, **others: Any
    ) -> Any:
        """Sends rows by the strategy, as `LowLatencyEPCommStrategy.low_latency_dispatch`, whose results these are.

        Args:
            use_fp8: without quant_mode: int8 rows. use_ue8m0, use_mxfp4: must be False.
            quant_mode: "int8", or what else the strategy knows; None: by use_fp8.
            others: as there.

        Raises:
            ArgumentError: use_ue8m0 or use_mxfp4 is True. Others: as there.
        """
        need(not use_ue8m0, "use_ue8m0", "is True; MX formats are of the 950 series: pass False")
        need(not use_mxfp4, "use_mxfp4", "is True; MX formats are of the 950 series: pass False")
        others |= {"use_fp8": use_fp8, "use_ue8m0": use_ue8m0, "use_mxfp4": use_mxfp4}
        quant_mode = quant_mode or ("int8" if use_fp8 else None)
        return self.low_latency_strategy.low_latency_dispatch(**others, quant_mode=quant_mode)

    low_latency_combine = _of_strategy("low_latency_strategy", strategies.LowLatencyEPCommStrategy.low_latency_combine)

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
        """Runs the layer in one call: ``Runtime.fused_deep_moe``, with fuse_mode 2 ``Runtime.dispatch_ffn_combine``.

        Args:
            x: (T, H). topk_idx, topk_weights: (T, K), fp32 weights.
            gmm1_permuted_weight, gmm1_permuted_weight_scale: not permuted; as there gmm1_weight and its scale.
            gmm2_weight, gmm2_weight_scale, num_experts, quant_mode: as there.
            num_max_dispatch_tokens_per_rank: at least any rank's T; fuse_mode 2: max_output_size.
            fuse_mode: 1 or 2. profile_enable: ignored.

        Raises:
            ArgumentError: a rule above is broken.
        """
        need(fuse_mode in (1, 2), "fuse_mode", "is {}; it must be 1 or 2", fuse_mode)
        whole = fuse_mode == FuseMode.FUSED_DEEP_MOE
        fused = self.runtime.fused_deep_moe if whole else self.runtime.dispatch_ffn_combine
        weights = (gmm1_permuted_weight, gmm1_permuted_weight_scale, gmm2_weight, gmm2_weight_scale)
        return fused(x, topk_idx, *weights, topk_weights, num_max_dispatch_tokens_per_rank, num_experts, quant_mode)
