"""Which PrepareAndFinalize of vLLM's modular kernel go with which experts: each pair joined, run and compared.

python examples/vllm_pairs.py
"""

from __future__ import annotations

import torch

from ascend_moe import LocalCluster, MoEConfig, MoELayer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.interop import vllm

W, TOKENS = 2, 5
CONFIG = MoEConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8, top_k=3)


def rank_main(rank: int, group: str) -> list[str]:
    layer = MoELayer(CONFIG, MC2Dispatcher(group, W, rank, CONFIG.num_experts)).init_weights()
    x = torch.randn(TOKENS, CONFIG.hidden_size).bfloat16()
    (weights, ids), wanted = layer.route(x), layer(x)
    w1, w2 = layer.w_gate_up.transpose(1, 2), layer.w_down.transpose(1, 2)  # (L, 2F, H), (L, H, F)
    lines = []
    for kind in ("mc2", "alltoall", "allgather", "batched"):
        for experts in ("standard", "batched"):
            config = vllm.MoEKernelConfig(group, rank, W, CONFIG.num_experts, TOKENS, kind, experts)
            try:
                result = "equal" if torch.equal(vllm.select(config)(x, w1, w2, weights, ids), wanted) else "WRONG"
            except ArgumentError:  # it names the two formats
                result = "do not fit"
            lines.append(f"{kind} with {experts} experts: {result}")
    return lines


with torch.no_grad(), LocalCluster(W) as cluster:
    first, second = cluster.run(rank_main)
assert first == second, (first, second)
print("\n".join(first))

# Output:
# mc2 with standard experts: equal
# mc2 with batched experts: do not fit
# alltoall with standard experts: equal
# alltoall with batched experts: do not fit
# allgather with standard experts: equal
# allgather with batched experts: do not fit
# batched with standard experts: do not fit
# batched with batched experts: equal
