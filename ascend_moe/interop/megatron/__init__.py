"""Megatron-LM's MoE layer by Megatron-LM's names: router, six-phase dispatcher, experts under ETP, shared expert.

`MC2Manager` runs these ops in Megatron-LM's flex dispatcher. The functions of its moe_utils are in
`ascend_moe.routers` and `ascend_moe.permute`, process groups in `ascend_moe.placement`; all are exported here too.
"""

from ascend_moe.interop.megatron.dispatchers import Handle, Splits, TokenDispatcher
from ascend_moe.interop.megatron.layer import GroupedMLP, MoELayer
from ascend_moe.interop.megatron.router import RouterConfig, TopKRouter
from ascend_moe.interop.megatron.shared_experts import SharedExpertCall, SharedExpertMLP
from ascend_moe.interop.megatron.token_dispatchers import (
    MC2Manager,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from ascend_moe.permute import permute, sort_chunks_by_idxs, unpermute
from ascend_moe.placement import RankGenerator, folded_groups, rank_groups
from ascend_moe.routers import (
    MoEAuxLossAutoScaler,
    RouterReplay,
    RouterReplayAction,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_tokens_per_expert_and_token_count,
    get_updated_expert_bias,
    group_limited_topk,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)

__all__ = [
    "GroupedMLP",
    "Handle",
    "MC2Manager",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEAuxLossAutoScaler",
    "MoEFlexTokenDispatcher",
    "MoELayer",
    "MoETokenDispatcher",
    "RankGenerator",
    "RouterConfig",
    "RouterReplay",
    "RouterReplayAction",
    "SharedExpertCall",
    "SharedExpertMLP",
    "Splits",
    "TokenDispatcher",
    "TopKRouter",
    "apply_router_token_dropping",
    "compute_routing_scores_for_aux_loss",
    "folded_groups",
    "get_capacity",
    "get_tokens_per_expert_and_token_count",
    "get_updated_expert_bias",
    "group_limited_topk",
    "permute",
    "rank_groups",
    "sinkhorn",
    "sort_chunks_by_idxs",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "unpermute",
    "z_loss_func",
]
