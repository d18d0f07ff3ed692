"""MindSpeed's fused pair over this package.

torchrun --nproc-per-node 2 examples/inside/in_mindspeed.py

A MindSpeed on PYTHONPATH runs its own mindspeed.ops.grouped_matmul_mc2, unchanged; where there is none, functions that
make its calls (stand_ins/).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ascend_moe.standin import torch_npu as standin

if importlib.util.find_spec("torch_npu") is None:
    standin.install()  # off the NPU: "npu" means CPU, and torch_npu's operators are this package's

sys.path.append(str(Path(__file__).parent / "stand_ins"))  # the last place to look
from mindspeed.ops import grouped_matmul_mc2

E, H, F, T = 4, 32, 16, 8  # experts of all ranks, elements of a token and within an expert, tokens of a rank


def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Rows, sorted by expert, to their experts and back. there: how many of them each of all experts gets."""
    here = torch.empty_like(there)
    dist.all_to_all_single(here, there)
    h = grouped_matmul_mc2.all2all_grouped_matmul(x, w1, dist.group.WORLD, there, here)
    return grouped_matmul_mc2.grouped_matmul_all2all(h.relu(), w2, dist.group.WORLD, here, there)


def gradients(balanced: bool) -> str:
    """Says which results equal those of one process that has all tokens and all experts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(E, H, F, generator=g) / 8, torch.randn(E, F, H, generator=g) / 4
    x, weight = torch.randn(world, T, H, generator=g), torch.randn(world, T, H, generator=g)
    drawn = torch.randint(E, (world, T), generator=g).sort().values
    ids = torch.arange(T).expand(world, T) * E // T if balanced else drawn
    # All tokens in one process, one expert a token.
    whole = [each.clone().requires_grad_() for each in (x, w1, w2)]
    hidden = torch.einsum("rth,rthf->rtf", whole[0], whole[1][ids]).relu()
    expected = torch.einsum("rtf,rtfh->rth", hidden, whole[2][ids])
    (expected * weight).sum().backward()
    # This rank's tokens and experts.
    own = slice(rank * E // world, (rank + 1) * E // world)
    leaves = [each.clone().requires_grad_() for each in (x[rank], w1[own], w2[own])]
    y = layer(*leaves, torch.bincount(ids[rank], minlength=E))
    (y * weight[rank]).sum().backward()
    wanted = [expected[rank], whole[0].grad[rank], whole[1].grad[own], whole[2].grad[own]]
    near = [torch.allclose(a, b, atol=1e-5) for a, b in zip([y, *(leaf.grad for leaf in leaves)], wanted, strict=True)]
    told = ", ".join(f"{name} {right}" for name, right in zip(("y", "gx", "gw1", "gw2"), near, strict=True))
    return f"rank {rank}, {'equal' if balanced else 'unequal'} counts: {told}"


def main() -> None:
    dist.init_process_group("hccl")
    told = [gradients(balanced=True), gradients(balanced=False)]
    if dist.get_rank() == 0:
        stand_in = "stand_ins" in grouped_matmul_mc2.__file__
        print("a stand-in of MindSpeed" if stand_in else "MindSpeed's own functions", flush=True)
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            print(*told, sep="\n", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
