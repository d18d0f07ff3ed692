"""Dispatch and combine on four ranks, which are threads of this process: python examples/quickstart.py"""

import torch

from ascend_moe import LocalCluster
from ascend_moe.dispatchers import MC2Dispatcher

W, E, K, H = 4, 16, 2, 64  # ranks, experts, experts per token (top-k), hidden size


def rank_main(rank: int, group_ep: str) -> str:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(5, H, generator=g).bfloat16()
    expert_ids = torch.rand(5, E, generator=g).topk(K).indices.int()
    dispatcher = MC2Dispatcher(group_ep, W, rank, num_experts=E)
    sent = dispatcher.dispatch(x, expert_ids)  # each row goes to the rank of its expert
    expert_out = sent.expand_x * 2  # here the experts would compute
    y = dispatcher.combine(expert_out, sent, torch.full((5, K), 1 / K))  # rows come back and are summed
    rows = sent.expert_token_nums.tolist()
    return f"rank {rank}: rows per local expert {rows}, combine returns 2x: {torch.equal(y, 2 * x)}"


with LocalCluster(W) as cluster:
    print("\n".join(cluster.run(rank_main)))

# Output:
# rank 0: rows per local expert [2, 4, 3, 1], combine returns 2x: True
# rank 1: rows per local expert [4, 1, 1, 1], combine returns 2x: True
# rank 2: rows per local expert [1, 3, 5, 1], combine returns 2x: True
# rank 3: rows per local expert [4, 3, 4, 2], combine returns 2x: True
