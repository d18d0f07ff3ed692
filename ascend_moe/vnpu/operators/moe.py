"""Choosing experts, moving rows to them and back, done by this package's own functions of the same names.

Outputs that an operator leaves unspecified on a device are left as they are.
"""

from __future__ import annotations

import torch

from ascend_moe.routing import (
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
)
from ascend_moe.vendor.balance import npu_moe_update_expert
from ascend_moe.vendor.permute import (
    npu_moe_finalize_routing,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)
from ascend_moe.vendor.routing import (
    npu_moe_compute_expert_tokens,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
)
from ascend_moe.vnpu.operators.registry import effect, returns, write

Tensor = torch.Tensor


@effect("aclnnMoeGatingTopK")
def _gating_top_k(
    x: Tensor,
    bias: Tensor | None,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: int,
    routed_scaling_factor: float,
    eps: float,
    y: Tensor,
    expert_ids: Tensor,
    scores: Tensor,
) -> None:
    weights, ids, normalised = npu_moe_gating_top_k(
        x,
        k,
        bias=bias,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=bool(out_flag),
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )
    write(y, weights)
    write(expert_ids, ids)
    if out_flag:
        write(scores, normalised)


@returns("aclnnMoeGatingTopKSoftmax", outputs=3)
def _gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return npu_moe_gating_top_k_softmax(x, finished, k)


@effect("aclnnMoeGatingTopKSoftmaxV2")
def _gating_top_k_softmax_v2(
    x: Tensor,
    finished: Tensor | None,
    k: int,
    renorm: int,
    output_softmax: int,
    y: Tensor,
    expert_ids: Tensor,
    softmax: Tensor | None,
) -> None:
    weights, ids, scores = npu_moe_gating_top_k_softmax_v2(
        x, k=k, finished=finished, renorm=renorm, output_softmax=bool(output_softmax)
    )
    write(y, weights)
    write(expert_ids, ids)
    if output_softmax and not renorm:
        write(softmax, scores)


returns("aclnnMoeInitRouting", outputs=3)(npu_moe_init_routing)
returns("aclnnMoeComputeExpertTokens")(npu_moe_compute_expert_tokens)


@effect("aclnnMoeInitRoutingV2")
def _init_routing_v2(
    x: Tensor,
    expert_ids: Tensor,
    active_num: int,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    count_or_cumsum: int,
    before_capacity: int,
    expanded_x: Tensor,
    expanded_row_idx: Tensor,
    expert_tokens: Tensor | None,
    expert_tokens_before: Tensor | None,
) -> None:
    # This older form numbers the kinds of counts otherwise: 0 none, 1 running sums, 2 counts.
    kind = {0: 1, 1: 0, 2: 1}[count_or_cumsum]
    rows, places, tokens, _ = npu_moe_init_routing_v2(
        x,
        expert_ids,
        active_num=active_num,
        expert_capacity=expert_capacity,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=kind,
        expert_tokens_num_flag=count_or_cumsum != 0,
    )
    write(expanded_x, rows)
    write(expanded_row_idx, places)
    if count_or_cumsum != 0:
        write(expert_tokens, tokens)


@effect("aclnnMoeInitRoutingV3")
def _init_routing_v3(
    x: Tensor,
    expert_ids: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: int,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
    expanded_x: Tensor,
    expanded_row_idx: Tensor,
    expert_tokens: Tensor | None,
    expanded_scale: Tensor | None,
) -> None:
    rows, places, tokens, scales = npu_moe_init_routing_v2(
        x,
        expert_ids,
        scale=scale,
        offset=offset,
        active_num=active_num,
        expert_capacity=expert_capacity,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=expert_tokens_num_type,
        expert_tokens_num_flag=bool(expert_tokens_num_flag),
        quant_mode=quant_mode,
        active_expert_range=active_expert_range,
        row_idx_type=row_idx_type,
    )
    write(expanded_x, rows)
    write(expanded_row_idx, places)
    if expert_tokens_num_flag:
        write(expert_tokens, tokens)
    if quant_mode == 1 or (quant_mode == -1 and scale is not None):
        write(expanded_scale, scales)


@returns("aclnnMoeTokenPermute", outputs=2)
def _token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int, padded_mode: int
) -> tuple[Tensor, Tensor]:
    rows, places = npu_moe_token_permute(tokens, indices, padded_mode=bool(padded_mode))
    return rows[:num_out_tokens], places


@returns("aclnnMoeTokenUnpermute")
def _token_unpermute(
    tokens: Tensor, places: Tensor, probs: Tensor | None, padded_mode: int, restore_shape: list[int] | None
) -> Tensor:
    # torch_npu passes a restore_shape always; only padded_mode looks at it.
    return npu_moe_token_unpermute(tokens, places, probs, bool(padded_mode))


@returns("aclnnMoeFinalizeRoutingV2")
def _finalize_routing(
    rows: Tensor,
    places: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expert_ids: Tensor | None,
    drop_pad_mode: int,
) -> Tensor:
    return npu_moe_finalize_routing(rows, skip1, skip2, bias, scales, places, expert_ids, drop_pad_mode)


@returns("aclnnMoeReRouting", outputs=4)
def _re_routing(
    tokens: Tensor, counts: Tensor, scales: Tensor | None, count_type: int, idx_type: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return npu_moe_re_routing(
        tokens, counts, per_token_scales=scales, expert_token_num_type=count_type, idx_type=idx_type
    )


@effect("aclnnMoeUpdateExpert")
def _update_expert(
    expert_ids: Tensor,
    eplb_table: Tensor,
    expert_scales: Tensor | None,
    pruning_threshold: Tensor | None,
    active_mask: Tensor | None,
    local_rank_id: int,
    world_size: int,
    balance_mode: int,
    balanced_ids: Tensor,
    balanced_mask: Tensor,
) -> None:
    ids, mask = npu_moe_update_expert(
        expert_ids,
        eplb_table,
        expert_scales=expert_scales,
        pruning_threshold=pruning_threshold,
        active_mask=active_mask,
        local_rank_id=local_rank_id,
        world_size=world_size,
        balance_mode=balance_mode,
    )
    write(balanced_ids, ids)
    if pruning_threshold is not None:
        write(balanced_mask, mask)


# ---- backward passes: autograd of the forward ones, run again ----


@effect("aclnnMoeTokenPermuteGrad")
def _token_permute_grad(grad: Tensor, places: Tensor, topk: int, padded_mode: int, out: Tensor) -> None:
    # A token's gradient is the sum over its copies' rows: the way back with weights 1.
    ones = torch.ones(places.numel() // topk, topk)
    write(out, npu_moe_token_unpermute(grad, places, ones, bool(padded_mode)))


@effect("aclnnMoeTokenUnpermuteGrad")
def _token_unpermute_grad(
    tokens: Tensor | None,
    grad: Tensor,
    places: Tensor,
    probs: Tensor | None,
    padded_mode: int,
    restore_shape: list[int] | None,
    tokens_grad: Tensor,
    probs_grad: Tensor | None,
) -> None:
    rows = torch.zeros(tokens_grad.shape) if tokens is None else tokens.detach().float()
    weights = None if probs is None else probs.detach().float()
    with torch.enable_grad():
        wanted = [tensor.requires_grad_() for tensor in (rows, weights) if tensor is not None]
        total = npu_moe_token_unpermute(rows, places, weights, bool(padded_mode))
        gradients = torch.autograd.grad(total, wanted, grad.float())
    write(tokens_grad, gradients[0])
    if weights is not None:
        write(probs_grad, gradients[1])
