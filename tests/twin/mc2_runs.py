"""Runs the dispatch and combine samples on several ranks, beside the reference."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ascend_moe import reference, twin
from ascend_moe.reference import RankInput


@dataclass
class Case:
    """W ranks with L local experts each; batches may differ, max_bs is the same."""

    world: int
    local_experts: int
    batches: list[int]
    topk: int
    hidden: int
    cores: int
    seed: int = 0
    dtype: torch.dtype = torch.float16
    nums_type: int = 1
    duplicates: bool = False
    max_bs: int = 0  # 0: the largest batch

    def __post_init__(self) -> None:
        self.max_bs = self.max_bs or max(1, *self.batches)

    @property
    def global_bs(self) -> int:
        return self.max_bs * self.world

    @property
    def experts(self) -> int:
        return self.world * self.local_experts

    @property
    def data_bytes(self) -> int:
        return 2 * self.experts * self.max_bs * self.hidden * 2

    def windows(self) -> twin.Windows:
        return twin.Windows(self.world, data_bytes=self.data_bytes)

    def inputs(self, step: int = 0) -> list[RankInput]:
        rng = np.random.default_rng(self.seed * 1000 + step)
        made = []
        for batch in self.batches:
            x = torch.from_numpy(rng.standard_normal((batch, self.hidden)).astype(np.float32)).to(self.dtype)
            if self.duplicates:
                ids = rng.integers(0, self.experts, (batch, self.topk))
            else:
                ids = np.stack(
                    [rng.permutation(self.experts)[: self.topk] for _ in range(batch)]
                    or [np.zeros(self.topk, np.int64)]
                )[:batch]
            scales = torch.from_numpy(rng.random((batch, self.topk)).astype(np.float32))
            ids_tensor = torch.from_numpy(
                np.ascontiguousarray(ids.astype(np.int32)).reshape(batch, self.topk)
            )
            made.append(RankInput(x=x, expert_ids=ids_tensor, expert_scales=scales))
        return made

    def tiling(self, rank: int) -> bytes:
        info = struct.pack(
            "<10IQ",
            self.world,
            rank,
            self.experts,
            self.global_bs,
            self.batches[rank],
            self.topk,
            self.hidden,
            self.cores,
            self.nums_type,
            0,
            self.data_bytes,
        )
        return bytes(64 + 2 * 280) + info

    @property
    def tilings(self) -> list[bytes]:
        return [self.tiling(rank) for rank in range(self.world)]


def dispatch_outputs(case: Case) -> list[dict[str, torch.Tensor]]:
    rows = case.world * case.max_bs * min(case.topk, case.local_experts)
    if case.duplicates:
        rows = case.world * case.max_bs * case.topk
    made = []
    for rank in range(case.world):
        made.append(
            {
                "expand_x": torch.full((rows, case.hidden), 7, dtype=case.dtype),
                "dynamic_scales": torch.zeros(rows),
                "expand_idx": torch.full((case.batches[rank] * case.topk,), -1, dtype=torch.int32),
                "token_nums": torch.full((case.local_experts,), -1, dtype=torch.int64),
                "counts": torch.full((case.experts,), -1, dtype=torch.int32),
            }
        )
    return made


def dispatch_args(inputs: list[RankInput], outputs: list[dict[str, torch.Tensor]]) -> list[list[Any]]:
    made: list[list[Any]] = []
    for one, out in zip(inputs, outputs, strict=True):
        given = [one.x, one.expert_ids, None, None, None]
        written = [out[name] for name in ("expand_x", "dynamic_scales", "expand_idx", "token_nums", "counts")]
        made.append([*given, *written, None, None, None])
    return made


def combine_args(
    inputs: list[RankInput], outputs: list[dict[str, torch.Tensor]], results: list[torch.Tensor]
) -> list[list[Any]]:
    return [
        [out["expand_x"], one.expert_ids, out["expand_idx"], out["counts"], one.expert_scales, None, x, None]
        for one, out, x in zip(inputs, outputs, results, strict=True)
    ]


def check_dispatch(case: Case, inputs: list[RankInput], outputs: list[dict[str, torch.Tensor]]) -> list[Any]:
    """Every output against the reference; its results."""
    wanted = reference.dispatch(
        inputs,
        moe_expert_num=case.experts,
        global_bs=case.global_bs,
        expert_token_nums_type=case.nums_type,
    )
    for rank, (want, got) in enumerate(zip(wanted, outputs, strict=True)):
        rows = len(want.expand_x)
        assert torch.equal(got["counts"], want.ep_recv_counts), f"ep_recv_counts of rank {rank}"
        assert torch.equal(got["token_nums"], want.expert_token_nums), f"expert_token_nums of rank {rank}"
        assert torch.equal(got["expand_idx"], want.expand_idx), f"expand_idx of rank {rank}"
        assert torch.equal(got["expand_x"][:rows], want.expand_x), f"expand_x of rank {rank}"
        assert (got["expand_x"][rows:] == 7).all(), f"rank {rank} writes behind its rows"
    return list(wanted)
