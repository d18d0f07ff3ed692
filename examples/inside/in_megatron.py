"""Megatron-LM's own flex dispatcher, backend "deepep", over this package.

pip install --no-deps megatron-core
torchrun --nproc-per-node 2 examples/inside/in_megatron.py
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from ascend_moe.interop import deep_ep
from ascend_moe.interop.megatron import MC2Manager, topk_routing_with_score_function

deep_ep.install()  # before Megatron-LM imports deep_ep

from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

E, K, H, T = 8, 2, 64, 6  # experts of all ranks, experts of a token, elements of a token, tokens of a rank
OFF = ("moe_permute_fusion", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
CONFIG = SimpleNamespace(
    moe_flex_dispatcher_backend="deepep",
    moe_deepep_num_sms=20,
    num_moe_experts=E,
    moe_router_topk=K,
    moe_router_dtype="fp32",
    moe_expert_capacity_factor=None,
    **dict.fromkeys(OFF, False),
)


def step(alone: dist.ProcessGroup) -> tuple[list[int], list[torch.Tensor]]:
    """Run forward and backward with experts that double rows; return rows per expert, and result and two gradients."""
    rank, local = dist.get_rank(), E // dist.get_world_size()
    groups = SimpleNamespace(ep=dist.group.WORLD, tp_ep=dist.group.WORLD, expt_tp=alone)
    mine = list(range(rank * local, (rank + 1) * local))
    dispatcher = token_dispatcher.MoEFlexTokenDispatcher(local, mine, CONFIG, groups)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(T, 1, H, generator=g).bfloat16().requires_grad_()
    logits = torch.randn(T, E, generator=g).requires_grad_()
    probs, chosen = topk_routing_with_score_function(logits, K)
    tokens, slots = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(tokens, slots))
    out = (2 * rows * row_probs[:, None]).bfloat16()
    y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(out)))
    (y.float() * torch.arange(H)).sum().backward()
    return counts.tolist(), [y.detach(), x.grad, logits.grad]


def main() -> None:
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]  # no tensor parallelism
    rows, by_deep_ep = step(alone)
    token_dispatcher._DeepepManager = MC2Manager  # the other way in: no deep_ep, one row an expert
    _, by_manager = step(alone)
    equal = all(torch.allclose(a.float(), b.float(), rtol=2**-7) for a, b in zip(by_deep_ep, by_manager, strict=True))
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            print(f"rank {turn}: rows of its experts {rows}, both ways and gradients equal: {equal}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# Output:
# rank 0: rows of its experts [2, 5, 4, 4], both ways and gradients equal: True
# rank 1: rows of its experts [2, 2, 3, 2], both ways and gradients equal: True
