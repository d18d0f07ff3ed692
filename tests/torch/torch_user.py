"""A user's script on the public API: run by a test, and checked by mypy --strict."""

from __future__ import annotations

import torch

import ascend_moe


def layer(rank: int, group_ep: str) -> torch.Tensor:
    torch.manual_seed(rank)
    x = torch.randn(4, 32)
    ids = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1]], dtype=torch.int32)
    weights = torch.full((4, 2), 0.5)
    expand_x, _, expand_idx, _, counts, _, _ = ascend_moe.npu_moe_distribute_dispatch(
        x, ids, group_ep, 2, rank, moe_expert_num=4
    )
    y: torch.Tensor = ascend_moe.npu_moe_distribute_combine(
        expand_x,
        ids,
        expand_idx,
        counts,
        weights,
        group_ep=group_ep,
        ep_world_size=2,
        ep_rank_id=rank,
        moe_expert_num=4,
    )
    return y - x


def main() -> float:
    with ascend_moe.LocalCluster(2) as cluster:
        differences: list[torch.Tensor] = cluster.run(layer)
    return max(float(difference.abs().max()) for difference in differences)


if __name__ == "__main__":
    print(main())
