"""Routers: they choose the experts of every token, and the weights of the experts' rows.

`gating` contains torch_npu's operators and the routers of Hugging Face models, `topk` Megatron-LM's, `losses` the
losses that balance the experts' load. `replay` makes all of them record their ids or use given ones.
"""

from ascend_moe.routers.gating import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
    sigmoid_of_topk,
    softmax_topk,
    sparsemixer,
)
from ascend_moe.routers.losses import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from ascend_moe.routers.replay import RouteCapture, RouterReplay, RouterReplayAction
from ascend_moe.routers.topk import (
    apply_router_token_dropping,
    get_capacity,
    group_limited_topk,
    sinkhorn,
    sinkhorn_routing,
    topk_routing_with_score_function,
)

__all__ = [
    "MoEAuxLossAutoScaler",
    "RouteCapture",
    "RouterReplay",
    "RouterReplayAction",
    "apply_router_token_dropping",
    "compute_routing_scores_for_aux_loss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "get_capacity",
    "get_tokens_per_expert_and_token_count",
    "get_updated_expert_bias",
    "group_limited_topk",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k_softmax_v2",
    "sigmoid_of_topk",
    "sinkhorn",
    "sinkhorn_routing",
    "softmax_topk",
    "sparsemixer",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "z_loss_func",
]
