"""The sample kernels in kernels/, built once a session, and runs of the dispatch sample on several ranks."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from twin_oracle import compiler

from ascend_moe import reference, twin
from ascend_moe.reference import RankInput

KERNELS = Path(__file__).resolve().parent / "kernels"
MODES = ["fast", "checked"]
modes = pytest.mark.parametrize("mode", MODES)
HALF = "DTYPE_X=half"


@functools.cache
def kernels(name: str, *defines: str) -> twin.Kernels:
    """kernels/`name`.cpp, opened; skips where there is no compiler."""
    compiler()
    return twin.load(KERNELS / f"{name}.cpp", defines=defines)


def tiling(*numbers: int | float) -> bytes:
    """uint32 and float fields, packed."""
    return b"".join(struct.pack("<f" if isinstance(n, float) else "<I", n) for n in numbers)


class Swap:
    """An all-to-all: `y` of a rank becomes what the ranks' `x` hold for it."""

    def __init__(self, world: int, rows: int, width: int, dtype: type, seed: int = 0) -> None:
        x = np.random.default_rng(seed).integers(1, 255, (world, world, rows, width))
        self.x = x.astype(dtype)
        self.y = np.zeros_like(self.x)
        self.args = [[self.x[rank], self.y[rank]] for rank in range(world)]

    def check(self) -> None:
        assert np.array_equal(self.y, self.x.swapaxes(0, 1)), "rows are missing"


@dataclass(frozen=True)
class Case:
    """W ranks with L local experts each; batches may differ, max_bs is the same."""

    world: int
    local_experts: int
    batches: tuple[int, ...]
    topk: int
    hidden: int
    cores: int
    dtype: torch.dtype = torch.float16
    duplicates: bool = False
    max_bs: int = 6

    @property
    def experts(self) -> int:
        return self.world * self.local_experts

    @property
    def data_bytes(self) -> int:
        return 2 * self.experts * self.max_bs * self.hidden * 2

    def windows(self) -> twin.Windows:
        return twin.Windows(self.world, data_bytes=self.data_bytes)

    def tiling(self, rank: int) -> bytes:
        numbers = [self.world, rank, self.experts, self.max_bs * self.world, self.batches[rank], self.topk]
        info = struct.pack("<10IQ", *numbers, self.hidden, self.cores, 0, 0, self.data_bytes)
        return bytes(64 + 2 * 280) + info

    @property
    def tilings(self) -> list[bytes]:
        return [self.tiling(rank) for rank in range(self.world)]


class Dispatch:
    """Inputs and outputs of one dispatch on every rank."""

    def __init__(self, case: Case, step: int = 0) -> None:
        rng = np.random.default_rng(step)
        self.case = case
        self.inputs: list[RankInput] = []
        self.outputs: list[dict[str, torch.Tensor]] = []
        rows = (
            case.world * case.max_bs * (case.topk if case.duplicates else min(case.topk, case.local_experts))
        )
        for batch in case.batches:
            x = torch.from_numpy(rng.standard_normal((batch, case.hidden)).astype(np.float32)).to(case.dtype)
            ids = rng.random((batch, case.experts)).argsort(1)[:, : case.topk]
            if case.duplicates:
                ids = rng.integers(0, case.experts, (batch, case.topk))
            self.inputs.append(RankInput(x=x, expert_ids=torch.from_numpy(ids.astype(np.int32))))
            self.outputs.append(
                {
                    "expand_x": torch.full((rows, case.hidden), 7, dtype=case.dtype),
                    "expand_idx": torch.full((batch * case.topk,), -1, dtype=torch.int32),
                    "counts": torch.full((case.experts,), -1, dtype=torch.int32),
                }
            )

    @property
    def args(self) -> list[list[Any]]:
        calls = []
        for one, out in zip(self.inputs, self.outputs, strict=True):
            results = [out["expand_x"], None, out["expand_idx"], None, out["counts"]]
            calls.append([one.x, one.expert_ids, *[None] * 3, *results, *[None] * 3])
        return calls

    def launch(
        self, windows: twin.Windows, kernel: twin.Kernels | None = None, key: int = 1000, **options: Any
    ) -> None:
        case = self.case
        name = {torch.float16: "half", torch.bfloat16: "bfloat16_t"}[case.dtype]
        kernel = kernel or kernels("moe_dispatch_mc2", f"DTYPE_X={name}")
        kernel.launch(
            "moe_dispatch_mc2", self.args, case.tilings, case.cores, key, windows, timeout_s=20, **options
        )

    def check(self) -> None:
        """Every output against the reference."""
        wanted = reference.dispatch(
            self.inputs,
            moe_expert_num=self.case.experts,
            global_bs=self.case.max_bs * self.case.world,
        )
        for rank, (want, got) in enumerate(zip(wanted, self.outputs, strict=True)):
            rows = len(want.expand_x)
            assert torch.equal(got["counts"], want.ep_recv_counts), f"ep_recv_counts of rank {rank}"
            assert torch.equal(got["expand_idx"], want.expand_idx), f"expand_idx of rank {rank}"
            assert torch.equal(got["expand_x"][:rows], want.expand_x), f"expand_x of rank {rank}"
            assert (got["expand_x"][rows:] == 7).all(), f"rank {rank} writes behind its rows"
