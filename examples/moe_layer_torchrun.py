"""A MoE layer over the ranks of torchrun, and the same layer over torch.distributed's own all-to-all.

torchrun --nproc-per-node 4 examples/moe_layer_torchrun.py
"""

import torch
import torch.distributed as dist

from ascend_moe.dispatchers import AllToAllDispatcher, MC2Dispatcher
from ascend_moe.layer import MoEConfig, MoELayer

CONFIG = MoEConfig(hidden_size=256, moe_intermediate_size=128, num_experts=32, top_k=4, shared_intermediate_size=128)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # Every rank holds its own E / W experts. Ranks may have different numbers of tokens: global_bs says
    # how many the largest has, times W.
    windows = MC2Dispatcher.from_group(None, CONFIG.num_experts)
    layer = MoELayer(CONFIG, windows, global_bs=world * 8).init_weights(seed=0)
    x = torch.randn(max(0, 8 - rank), 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
    y = layer(x)

    other = MoELayer(CONFIG, AllToAllDispatcher(None, CONFIG.num_experts), global_bs=world * 8)
    other.load_state_dict(layer.state_dict())
    same = torch.equal(y, other(x))

    said: list[str | None] = [None] * world
    dist.all_gather_object(said, f"rank {rank}: {tuple(y.shape)} {y.dtype}, all-to-all gives the same bits: {same}")
    if rank == 0:
        print("\n".join(str(line) for line in said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# Output:
# rank 0: (8, 256) torch.bfloat16, all-to-all gives the same bits: True
# rank 1: (7, 256) torch.bfloat16, all-to-all gives the same bits: True
# rank 2: (6, 256) torch.bfloat16, all-to-all gives the same bits: True
# rank 3: (5, 256) torch.bfloat16, all-to-all gives the same bits: True
