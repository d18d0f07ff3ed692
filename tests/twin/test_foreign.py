"""Kernels as an Ascend engineer writes them, run unmodified, against numpy and the reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from foreign_runs import HALF, Case, Dispatch, kernels, modes, tiling


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@modes
@pytest.mark.parametrize("length,cores", [(2048, 8), (1003, 5), (7, 3), (40, 48)])
def test_add(mode: str, length: int, cores: int) -> None:
    x, y = (rng(length + i).standard_normal(length).astype(np.float16) for i in range(2))
    z = np.full(length, 9, np.float16)
    add = kernels("add_custom", HALF)
    add.launch("add_custom", [x, y, z], tiling(length, 128), cores, 1, workspace_bytes=0, mode=mode)
    assert np.array_equal(z, x + y)


@modes
def test_add_of_torch_tensors_in_place(mode: str) -> None:
    x = torch.randn(96, generator=torch.Generator().manual_seed(3)).half()
    want, sizes = x + x, torch.tensor([96, 32], dtype=torch.int32)
    kernels("add_custom", HALF).launch("add_custom", [x, x, x, None], sizes, 2, 1, mode=mode)
    assert torch.equal(x, want)


@modes
@pytest.mark.parametrize("cores", [1, 6])
def test_prefix_sum_over_soft_sync_all_and_atomic_add(mode: str, cores: int) -> None:
    x = rng(9).integers(-50, 50, cores * 24).astype(np.int32)
    args = [x, np.zeros_like(x), np.zeros(8, np.int32)]
    kernels("prefix_sum").launch("prefix_sum", args, tiling(24), cores, workspace_bytes=cores * 64, mode=mode)
    assert np.array_equal(args[1], np.cumsum(x)) and (args[2] == x.sum()).all()


# ---- dispatch in the manner of fused operators ----

CASES = {
    "2 ranks, 2 experts each": Case(2, 2, (5, 3), 3, 32, 3),
    "4 ranks, a rank without tokens": Case(4, 2, (3, 0, 2, 3), 4, 32, 5),
    "duplicate ids": Case(2, 2, (6, 6), 3, 32, 4, duplicates=True, max_bs=18),
    "48 cores": Case(4, 2, (16, 16, 16, 16), 4, 256, 48, max_bs=16),
}


BF16 = Case(2, 2, (4, 4), 2, 64, 4, dtype=torch.bfloat16)


@modes
@pytest.mark.parametrize("name", [*CASES, pytest.param("bf16", marks=pytest.mark.nightly)])
def test_dispatch(name: str, mode: str) -> None:
    """Again and again over the same windows, whose halves take turns."""
    case = CASES.get(name, BF16)
    windows = case.windows()
    for step in range(4 if name != "48 cores" else 2):
        one = Dispatch(case, step)
        one.launch(windows, mode=mode)
        one.check()


@modes
def test_tiling_key_that_the_kernel_does_not_have(mode: str) -> None:
    one = Dispatch(Case(2, 1, (2, 2), 1, 32, 2))
    one.launch(one.case.windows(), key=1002, mode=mode)
    assert all((out["counts"] == -1).all() for out in one.outputs)


@modes
def test_ranks_launched_by_threads_of_the_caller(mode: str) -> None:
    case = CASES["2 ranks, 2 experts each"]
    windows, one, dispatch = case.windows(), Dispatch(case), kernels("moe_dispatch_mc2", HALF)

    def launch(rank: int) -> None:
        call = (one.args[rank], case.tiling(rank), case.cores, 1000, windows)
        dispatch.launch("moe_dispatch_mc2", *call, rank=rank, mode=mode, timeout_s=20)

    with ThreadPoolExecutor(case.world) as pool:
        list(pool.map(launch, range(case.world)))
    one.check()
