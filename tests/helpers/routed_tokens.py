"""Expert ids of tokens for the interfaces of other systems, and the cases that each of them takes."""

from __future__ import annotations

import torch

KINDS = ["random", "one expert", "an expert without tokens", "-1"]
#: Cases of T and of the ids.
ROUTED = [*((13, kind) for kind in KINDS), (0, "random"), (1, "random")]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Int8 codes, -127 to 127."""
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def routed(tokens: int, experts: int, topk: int, kind: str = "random") -> torch.Tensor:
    """Ids (T, K) int32: distinct; or all of expert 1; or none of expert 0; or with -1."""
    ids = randn(tokens, experts, seed=5).argsort(1)[:, :topk].int()
    if kind == "one expert":
        ids.fill_(1)
    if kind == "an expert without tokens":
        ids[ids == 0] = experts - 1
    if kind == "-1":
        ids[::2, 0] = -1
    return ids


def aligned(
    ids: torch.Tensor, block: int, experts: int, expert_map: torch.Tensor | None = None, ignore: bool = False
) -> tuple[list[list[int]], list[int]]:
    """The blocks of `moe_align_block_size`, each a list of flat indices, and their experts, by definition."""
    flat = ids.flatten().tolist()
    numbers = range(experts)
    if expert_map is not None and ignore:
        flat = [int(expert_map[i]) if 0 <= i < experts else -1 for i in flat]
    blocks, owners = [], []
    for expert in numbers:
        pairs = [pair for pair, i in enumerate(flat) if i == expert]
        for start in range(0, len(pairs), block):
            rows = pairs[start : start + block]
            blocks.append(rows + [len(flat)] * (block - len(rows)))
            mapped = expert_map is not None and not ignore
            owners.append(int(expert_map[expert]) if mapped and expert_map is not None else expert)
    return blocks, owners
