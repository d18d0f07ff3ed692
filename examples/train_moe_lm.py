"""Trains a byte-level MoE language model on four ranks: experts over 4 ranks, over 2 with 2 replicas, and by FSDP2.

python examples/train_moe_lm.py [--steps 200] [--recompute] [--plot loss.svg]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ascend_moe
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.layer import MoEConfig, MoELayer

RANKS = 4
SEQUENCES, LENGTH = 16, 32  # of a step, on all ranks together
HIDDEN, HEADS, LAYERS = 64, 4, 2
MOE = MoEConfig(HIDDEN, 64, num_experts=8, top_k=2)
TEXT = (Path(ascend_moe.__file__).parent / "data" / "alice.txt").read_bytes()


class Block(nn.Module):
    """Causal attention, then a mixture of experts whose experts lie on the ranks of a group."""

    def __init__(self, experts: MC2Dispatcher, seed: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(MOE, experts, dtype=torch.float32, trainable=True).init_weights(seed)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, experts: MC2Dispatcher, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)  # all replicas begin alike
        self.recompute = recompute
        self.bytes, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(experts, seed) for seed in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def batch(step: int, rank: int, world: int) -> Tensor:
    """Return this rank's share of a step's sequences, each with the byte after it."""
    begin = torch.randint(len(TEXT) - LENGTH, (SEQUENCES,), generator=torch.Generator().manual_seed(step))
    mine = begin.chunk(world)[rank]
    return torch.stack([torch.tensor(list(TEXT[at : at + LENGTH + 1])) for at in mine.tolist()])


def sum_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Make every gradient the sum over the ranks of a group."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, grad in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = grad.view_as(parameter)


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Shard the weights by FSDP2: dense ones over all ranks, those of experts over the ranks with the same experts."""
    experts = set(ascend_moe.exclude_experts(model))
    layers = [block.moe for block in model.blocks]
    fully_shard(model, mesh=init_device_mesh("cpu", (mesh.size(),)), ignored_params=experts)
    for layer in layers:  # after the model, which then has the layers' dense weights
        fully_shard(layer, mesh=mesh["replicas"], ignored_params=set(layer.parameters()) - experts)
    for module in (model, *layers):
        module.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens already
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides


def train(ep: int, steps: int, recompute: bool = False, sharded: bool = False) -> list[float]:
    """Train with all experts divided among every ``ep`` ranks; return the loss of every step, in nats per byte."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("replicas", "experts"))
    dispatcher = MC2Dispatcher.from_group(mesh["experts"].get_group(), MOE.num_experts)
    model = Model(dispatcher, recompute)
    if sharded:
        shard(model, mesh)
    # The tokens of all ranks of an expert group come to its experts: their gradients are summed over replicas only.
    experts = [] if sharded else ascend_moe.exclude_experts(model)
    dense = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in experts)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-6)
    losses = []
    for step in range(steps):
        text = batch(step, rank, world)
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        loss = loss / (SEQUENCES * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        if not sharded:
            sum_gradients(dense, None)
            sum_gradients(experts, mesh["replicas"].get_group())
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def unigram_entropy() -> float:
    """Return the nats per byte of a model that knows how often each byte occurs, and nothing else."""
    shares = [count / len(TEXT) for count in Counter(TEXT).values()]
    return -sum(share * math.log(share) for share in shares)


def picture(curves: dict[str, list[float]], entropy: float) -> str:
    """Return an SVG picture of the losses by step, and of the entropy."""
    width, height, colours = 640, 360, ("#3b6fb6", "#c77b30", "#4a9a5b")
    steps, top = max(map(len, curves.values())), max(max(losses) for losses in curves.values())

    def y(loss: float) -> float:
        return height - 30 - loss / top * (height - 60)

    line = f"<path d='M40,{y(entropy):.1f} H{width - 10}' stroke='#d64545' stroke-dasharray='4'/>"
    parts = [line, f"<text x='{width - 160}' y='{y(entropy) - 5:.1f}'>unigram entropy {entropy:.2f}</text>"]
    for index, (name, losses) in enumerate(curves.items()):
        points = " ".join(f"{40 + at * (width - 50) / steps:.1f},{y(loss):.1f}" for at, loss in enumerate(losses))
        dashes = f" stroke-dasharray='{8 * index}'" if index else ""  # the curves lie on each other
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colours[index]}' stroke-width='2'{dashes}/>")
        parts.append(f"<text x='50' y='{height - 60 + 18 * index}' fill='{colours[index]}'>{name}</text>")
    parts.append(f"<text x='40' y='{height - 8}'>0</text><text x='{width - 60}' y='{height - 8}'>step {steps}</text>")
    parts.append(f"<text x='4' y='{y(top) + 4:.1f}'>{top:.1f}</text><text x='4' y='{y(0):.1f}'>0</text>")
    frame = f"<rect width='{width}' height='{height}' fill='white'/>"
    size = f"width='{width}' height='{height}' font-family='sans-serif' font-size='12'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{frame}{''.join(parts)}</svg>"


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """Run one rank, in a process of its own."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    entropy, curves = unigram_entropy(), {}
    for ep, sharded in ((4, False), (2, False), (2, True)):
        name = f"EP {ep}" + (f" x {'FSDP' if sharded else 'DP'} {RANKS // ep}" if ep < RANKS else "")
        losses = curves[name] = train(ep, options.steps, options.recompute, sharded)
        if rank == 0:
            shown = [*range(0, options.steps, max(1, options.steps // 5)), options.steps - 1]
            print(f"{name}: loss", " ".join(f"{step}: {losses[step]:.3f}" for step in shown), flush=True)
    if rank == 0:
        Path(options.plot).write_text(picture(curves, entropy))
        last = max(losses[-1] for losses in curves.values())
        outcome = "below" if last < entropy else "NOT below"
        print(f"loss {last:.3f} is {outcome} the text's unigram entropy, {entropy:.3f}; curves in {options.plot}")
        options.ok.value = last < entropy
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recompute", action="store_true", help="recompute the blocks' activations in the backward")
    parser.add_argument("--plot", default="train_moe_lm.svg")
    options = parser.parse_args()
    options.ok = mp.get_context("spawn").Value("b", False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(work, (store.port, options), RANKS)
    sys.exit(not options.ok.value)


if __name__ == "__main__":
    main()
