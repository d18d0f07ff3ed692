"""Tokens of 4 ranks visit "experts" that double them, and come home. Run: python examples/quickstart.py"""

import torch

import ascend_moe

W, E, K, H = 4, 16, 2, 64  # ranks, experts on all of them, experts a token, elements of a token


def rank_main(rank: int, group_ep: str) -> str:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(5, H, generator=g).bfloat16()
    ids = torch.rand(5, E, generator=g).topk(K).indices.int()
    rows, _, idx, nums, counts, _, _ = ascend_moe.npu_moe_distribute_dispatch(
        x, ids, group_ep=group_ep, ep_world_size=W, ep_rank_id=rank, moe_expert_num=E
    )
    y = ascend_moe.npu_moe_distribute_combine(
        rows * 2, ids, idx, counts, torch.full((5, K), 1 / K), group_ep, W, rank, E
    )
    return f"rank {rank}: rows a local expert {nums.tolist()}, combine gives 2x: {torch.equal(y, 2 * x)}"


with ascend_moe.LocalCluster(W) as cluster:
    print("\n".join(cluster.run(rank_main)))

# Output:
# rank 0: rows a local expert [2, 4, 3, 1], combine gives 2x: True
# rank 1: rows a local expert [4, 1, 1, 1], combine gives 2x: True
# rank 2: rows a local expert [1, 3, 5, 1], combine gives 2x: True
# rank 3: rows a local expert [4, 3, 4, 2], combine gives 2x: True
