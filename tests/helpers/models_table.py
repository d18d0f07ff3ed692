"""What the page of models says of each type: layers of tiny random checkpoints against transformers' own blocks."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass

import torch
from gloo_ranks import threads
from hf_models import LAYER, MODELS, MORE_MODELS, RENAMED, first_of, router_of, run_block, saved
from torch import Tensor

from ascend_moe import LocalCluster
from ascend_moe.checkpoint import build_layer, load_layer
from ascend_moe.dispatchers import AllToAllDispatcher, MC2Dispatcher

WORLDS, TOKENS = (1, 2, 4), 2000
MODELS_READ = (*MODELS, *MORE_MODELS, *RENAMED)


@dataclass
class Row:
    """One model type: the largest error of a value by EP, in fp32; shares of tokens routed otherwise, in bf16."""

    errors: dict[int, float]
    elsewhere: dict[torch.dtype, float]


def measured(name: str) -> Row:
    return Row({world: furthest(name, world) for world in WORLDS}, elsewhere(name))


def furthest(name: str, world: int) -> float:
    """The largest |difference| of the layer over ``world`` ranks from the block, over 1 + the block's value."""
    checkpoint = saved(name)
    x = torch.randn(24, checkpoint.hidden, generator=torch.Generator().manual_seed(3))
    expected = run_block(checkpoint.block, x)
    assert 0.1 <= float(expected.square().mean().sqrt()) <= 10

    carrier = functools.partial(MC2Dispatcher, num_experts=checkpoint.experts, **checkpoint.special)

    def body(rank: int, group: str) -> Tensor:
        layer = build_layer(checkpoint.directory, LAYER, carrier(group, world, rank))
        return first_of(layer(x.chunk(world)[rank]))

    with LocalCluster(world) as cluster:
        result = torch.cat(cluster.run(body))
    return float(((result - expected).abs() / (1 + expected.abs())).max())


def elsewhere(name: str) -> dict[torch.dtype, float]:
    """By the router's dtype: the share of tokens whose experts are others than the bf16 model's own."""
    checkpoint = saved(name, dtype=torch.bfloat16)
    gate = copy.deepcopy(router_of(checkpoint.block)).bfloat16()
    gate._forward_pre_hooks.clear()  # of `fp32_routing`
    tokens = torch.randn(TOKENS, checkpoint.hidden, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.no_grad():
        beside = [checkpoint.block.e_score_correction_bias] if name == "minimax_m2" else []
        chosen = chosen_by(gate(tokens, *beside), len(tokens))
    carrier, shares = AllToAllDispatcher(threads(1).groups[0], checkpoint.experts, **checkpoint.special), {}
    for kind in (torch.float32, torch.bfloat16):
        ids = build_layer(checkpoint.directory, LAYER, carrier, router_dtype=kind).route(tokens)[1]
        shares[kind] = float((ids.long().sort().values != chosen.sort().values).any(1).float().mean())
    return shares


def chosen_by(out: tuple[Tensor, ...], tokens: int) -> Tensor:
    """Ids (T, K) of what a router of transformers returned."""
    if len(out) == 2:  # Llama-4's scores of all experts, zero for those that are not chosen, and logits
        return out[0].nonzero()[:, 1:].reshape(tokens, -1)
    return out[-1]


def check_reads(name: str, layout: str, world: int) -> None:
    """Every rank reads its own experts' bytes only: together the experts' tensors once, the others once a rank."""
    checkpoint = saved(name, layout)
    own_bytes = 0
    for rank in range(world):
        loaded = load_layer(checkpoint.directory, LAYER, rank=rank, world=world)
        local = checkpoint.experts // world
        assert loaded.bytes_read == sum(read.bytes for read in loaded.reads)
        for read in loaded.reads:
            match = re.search(r"experts\.(\d+)\.", read.name)
            of_experts = match or read.rows is not None
            assert of_experts or not re.search(r"\.experts\.|_linear\.weight", read.name), read
            if of_experts:
                experts = {int(match[1])} if match else set(range(*read.rows))
                assert experts <= set(range(rank * local, (rank + 1) * local)), read
                own_bytes += read.bytes
    whole = load_layer(checkpoint.directory, LAYER).reads
    assert own_bytes == sum(
        read.bytes for read in whole if read.rows is not None or re.search(r"experts\.\d", read.name)
    )
