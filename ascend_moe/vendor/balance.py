"""npu_moe_update_expert: replaces logical experts by their physical copies, and drops weak choices."""

from __future__ import annotations

import torch

from ascend_moe._torch_npu import npu_operator
from ascend_moe.errors import need, need_dims, need_dtype, need_only, need_shape

BY_RANK, BY_TOKEN = 0, 1


@npu_operator
def npu_moe_update_expert(
    expert_ids: torch.Tensor,
    eplb_table: torch.Tensor,
    *,
    expert_scales: torch.Tensor | None = None,
    pruning_threshold: torch.Tensor | None = None,
    active_mask: torch.Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = BY_RANK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spread the tokens of experts that have several copies over the copies; drop pairs of small weight.

    Args:
        expert_ids: ``(BS, K)`` int32 or int64 logical experts 0..E-1; -1 (not routed) stays -1.
        eplb_table: ``(E, F)`` int32: row e is the number of copies of e, 1..F-1, then their physical ids.
        expert_scales: ``(BS, K)`` float routing weights; goes with pruning_threshold.
        pruning_threshold: ``(K,)`` or ``(1, K)`` fp32: pair (t, k) stays if its weight is at least
            ``pruning_threshold[k]`` times the sum of token t's weights (fp32, k ascending).
        active_mask: ``(BS,)`` bool, needs both: tokens of False lose all pairs.
        local_rank_id, world_size: this rank in 0..world_size-1; needed with balance_mode 0.
        balance_mode: 0 by rank, copy ``local_rank_id // ceil(world_size / copies)``; 1 by token, copy
            ``t % copies``.

    Returns:
        physical experts, shaped and typed as expert_ids; bool ``(BS, K)``: the pairs that stay, all True
        without pruning_threshold (not written then on the NPU).

    Raises:
        ArgumentError: a rule above is broken.

    Source: torch_npu ``npu_moe_update_expert``; NPU tensors go there.
    """
    need_dims("expert_ids", expert_ids, 2)
    need_dtype("expert_ids", expert_ids, torch.int32, torch.int64)
    need_dims("eplb_table", eplb_table, 2)
    need_dtype("eplb_table", eplb_table, torch.int32)
    need(eplb_table.shape[1] >= 2, "eplb_table", f"is {tuple(eplb_table.shape)}; a row is count and copies")
    need_only("balance_mode", balance_mode, BY_RANK, BY_TOKEN)
    if balance_mode == BY_RANK:
        need(world_size >= 1, "world_size", f"is {world_size}; with balance_mode 0 it must be at least 1")
        rule = f"is {local_rank_id}; with balance_mode 0 it must be in 0..{world_size - 1}"
        need(0 <= local_rank_id < world_size, "local_rank_id", rule)
    experts, table = eplb_table.shape[0], eplb_table.to(torch.int64)
    inside = bool(((expert_ids >= -1) & (expert_ids < experts)).all())
    need(inside, "expert_ids", f"must be in 0..{experts - 1}, the rows of eplb_table, or -1")
    counts = table[:, 0]
    rule = f"must have 1..{table.shape[1] - 1} copies in column 0 of every row, as many as it lists"
    need(bool(((counts >= 1) & (counts < table.shape[1])).all()), "eplb_table", rule)
    logical = expert_ids.to(torch.int64)
    routed = logical >= 0
    logical = logical.masked_fill(~routed, 0)
    copies = counts[logical] if experts else logical
    if balance_mode == BY_RANK:
        column = 1 + local_rank_id // ((world_size + copies - 1) // copies.clamp(min=1))
    else:
        column = 1 + torch.arange(expert_ids.shape[0]).unsqueeze(1) % copies.clamp(min=1)
    physical = table[logical, column] if experts else logical
    physical = physical.masked_fill(~routed, -1).to(expert_ids.dtype)
    return physical, _kept(expert_ids, expert_scales, pruning_threshold, active_mask)


def _kept(
    expert_ids: torch.Tensor,
    scales: torch.Tensor | None,
    threshold: torch.Tensor | None,
    active_mask: torch.Tensor | None,
) -> torch.Tensor:
    batch, topk = expert_ids.shape
    if scales is None or threshold is None:
        need(scales is None, "expert_scales", "needs pruning_threshold beside it")
        need(threshold is None, "pruning_threshold", "needs expert_scales beside it")
        need(active_mask is None, "active_mask", "needs expert_scales and pruning_threshold beside it")
        return torch.ones(batch, topk, dtype=torch.bool)
    need_shape("expert_scales", scales, (batch, topk))
    need_dtype("expert_scales", scales, torch.float32, torch.float16, torch.bfloat16)
    need_shape("pruning_threshold", threshold, (topk,), (1, topk))
    need_dtype("pruning_threshold", threshold, torch.float32)
    weights = scales.float()
    total = torch.zeros(batch)
    for k in range(topk):
        total = total + weights[:, k]
    kept = weights >= threshold.reshape(1, topk) * total.unsqueeze(1)
    if active_mask is not None:
        need_shape("active_mask", active_mask, (batch,))
        need_dtype("active_mask", active_mask, torch.bool)
        kept = kept & active_mask.unsqueeze(1)
    return kept
