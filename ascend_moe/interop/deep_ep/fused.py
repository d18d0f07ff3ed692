"""sgl-kernel-npu's two calls for a whole layer: dispatch, the experts' MLP, combine."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.errors import need, typed_methods
from ascend_moe.fused import calls, dispatch_ffn_combine
from ascend_moe.fused.arguments import Tokens, experts_of
from ascend_moe.interop.deep_ep.place import BufferPlace, need_whole


class FuseMode(IntEnum):
    """The two of ``fused_deep_moe``."""

    FUSED_DEEP_MOE = 1
    DISPATCH_FFN_COMBINE = 2


@typed_methods
class FusedCalls:
    """Has the two calls for the ranks of ``place``."""

    place: BufferPlace

    @torch.no_grad()
    def fused_deep_moe(
        self,
        x: Tensor,
        topk_ids: Tensor,
        gmm1_weight: Any,
        gmm1_weight_scale: Any,
        gmm2_weight: Any,
        gmm2_weight_scale: Any,
        topk_weights: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        profile_enable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Dispatch, the experts' MLP, combine.

        Args:
            gmm1_weight: ``(L, H, 2F)``, gate in the first F columns, not permuted; gmm2_weight ``(L, F, H)``; or a
                tensor for each local expert. bf16, with quant_mode 1 int8 with scales ``(L, 2F)`` and ``(L, H)``,
                fp32 or int64 that carries fp32 bits.

        Returns:
            ``(T, H)``; int32 running sums over [local expert][source rank].
        """
        given = {"gmm1_weight": gmm1_weight, "gmm2_weight": gmm2_weight}
        scales = {"gmm1_weight_scale": gmm1_weight_scale, "gmm2_weight_scale": gmm2_weight_scale}
        experts = experts_of(x, given | scales)
        rule = "is {}; it must be 1 for int8 weights and 0 for others"
        need(quant_mode == (experts.quant_mode != 0), "quant_mode", rule, quant_mode)
        tokens = Tokens(x, narrow("topk_idx", topk_ids), topk_weights, None)
        need_whole("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0)
        dispatcher = self.place.dispatcher(num_experts)
        bound = self.place.world * num_max_dispatch_tokens_per_rank
        with wide_ids_named(topk_ids, self.place.rank):
            sent = calls.dispatch(dispatcher, tokens, experts, bound)
        return calls.finish(dispatcher, sent, tokens, experts), sent.ep_recv_counts

    @torch.no_grad()
    def dispatch_ffn_combine(
        self,
        x: Tensor,
        topk_ids: Tensor,
        gmm1_weight: Any,
        gmm1_weight_scale: Any,
        gmm2_weight: Any,
        gmm2_weight_scale: Any,
        topk_weights: Tensor,
        max_output_size: int,
        num_experts: int,
        quant_mode: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """As ``fused_deep_moe``, with rows of each local expert ``(L,)`` int32 as second result.

        max_output_size: the most rows that a rank may receive; more raise RoutingOverflow on every rank. 0: no limit.
        """
        need(quant_mode in (0, 1), "quant_mode", "is {}; it must be 0 or 1", quant_mode)
        nums = torch.empty(self.place.local_experts(num_experts), dtype=torch.int32, device=x.device)
        experts = (gmm1_weight, gmm2_weight, narrow("topk_idx", topk_ids), gmm1_weight_scale, gmm2_weight_scale)
        with wide_ids_named(topk_ids, self.place.rank):
            return dispatch_ffn_combine(
                x, *experts, None, None, topk_weights, self.place.group_ep, max_output_size, torch.empty_like(x), nums,
                swiglu_limit=0.0,
            )  # fmt: skip
