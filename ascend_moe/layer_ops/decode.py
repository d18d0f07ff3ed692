"""vllm-ascend's ``dispatch_gmm_combine_decode``, another call for a layer in its releases up to 0.23."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_moe.comm.place import Place
from ascend_moe.dispatchers.mc2 import MC2Dispatcher
from ascend_moe.errors import need, with_typed_errors
from ascend_moe.layer_ops.arguments import TensorList, Tokens, check_tokens, experts_of, need_int
from ascend_moe.layer_ops.calls import dispatch, finish


@with_typed_errors
def dispatch_gmm_combine_decode(
    x: Tensor,
    expert_ids: Tensor,
    gmm1_permuted_weight: TensorList,
    gmm1_permuted_weight_scale: TensorList,
    gmm2_weight: TensorList,
    gmm2_weight_scale: TensorList,
    expert_scales: Tensor,
    expert_smooth_scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    group_ep: str = "",
    ep_rank_size: int = 0,
    ep_rank_id: int = 0,
    moe_expert_num: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
) -> tuple[Tensor, Tensor]:
    """Route tokens to their experts, run the experts, and return the weighted sums of their rows.

    As `ascend_moe.layer_ops.dispatch_ffn_combine`, without limits. The arguments are those of vllm-ascend; its kernel's
    arithmetic is not published, so the results are those of dispatch, `grouped_mlp` and combine.

    Args:
        x: (T, H). expert_ids: (T, K) int32. expert_scales: (T, K) fp32, the weight of each expert's row.
        gmm1_permuted_weight, gmm2_weight: as weight1 and weight2 of that call, but not int4. Gate left and up right:
            vllm-ascend does not permute them.
        gmm1_permuted_weight_scale, gmm2_weight_scale: as scale1 and scale2 of that call.
        expert_smooth_scales: None, as vllm-ascend passes; other values are not documented.
        x_active_mask: (T,) or (T, K), bool or int8.
        group_ep, ep_rank_size, ep_rank_id: the EP group, and this rank's place in it.
        moe_expert_num: experts of all ranks.
        shared_expert_num: 0 or 1; no effect, because no rank is dedicated to shared experts.
        shared_expert_rank_num: 0. quant_mode: 0; the weights' dtype decides whether int8 rows are sent.
        global_bs: 0 if all ranks have the same T, else W times the largest T.

    Returns:
        (T, H) of x's dtype; (L,) int64, the rows of each local expert.

    Collective.

    Raises:
        ArgumentError: this rank's arguments; nothing was sent.
        Other errors: `ascend_moe.npu_moe_distribute_dispatch_v2`'s and ``_combine_v2``'s.

    Source: vllm-ascend ``torch.ops._C_ascend.dispatch_gmm_combine_decode``.
    """
    given: dict[str, TensorList | None] = {
        "gmm1_permuted_weight": gmm1_permuted_weight, "gmm2_weight": gmm2_weight,
        "gmm1_permuted_weight_scale": gmm1_permuted_weight_scale, "gmm2_weight_scale": gmm2_weight_scale,
    }  # fmt: skip
    experts = experts_of(x, given)
    ids, weights = ("expert_ids", expert_ids), ("expert_scales", expert_scales)
    mask = check_tokens(x, ids, weights, x_active_mask, experts.hidden)
    absent = expert_smooth_scales is None
    need(absent, "expert_smooth_scales", "is given; vllm-ascend passes None, and nothing else is supported")
    need(shared_expert_num in (0, 1), "shared_expert_num", "is {}; it must be 0 or 1", shared_expert_num)
    for name, value in (("shared_expert_rank_num", shared_expert_rank_num), ("quant_mode", quant_mode)):
        need(value == 0, name, "is {}; only 0, vllm-ascend's value, is supported", value)
    need_int("global_bs", global_bs)
    if x.is_meta:
        return torch.empty_like(x), x.new_empty(experts.count, dtype=torch.int64)
    place = Place.of(group_ep, "group_ep")
    need(ep_rank_size == place.world, "ep_rank_size", "is {}; pass {}, the group's size", ep_rank_size, place.world)
    need(ep_rank_id == place.rank, "ep_rank_id", "is {}; pass {}, this rank of the group", ep_rank_id, place.rank)
    total = experts.count * place.world
    rule = "is {}; it must be {}: {} experts on each of {} ranks"
    need(moe_expert_num == total, "moe_expert_num", rule, moe_expert_num, total, experts.count, place.world)
    dispatcher, tokens = MC2Dispatcher.from_group(place, total), Tokens(x, expert_ids, expert_scales, mask)
    sent = dispatch(dispatcher, tokens, experts, global_bs)
    return finish(dispatcher, sent, tokens, experts), sent.expert_token_nums
