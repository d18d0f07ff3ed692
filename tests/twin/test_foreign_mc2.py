"""Dispatch and combine kernels in the manner of fused operators, run unmodified over several ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from mc2_runs import Case, check_dispatch, combine_args, dispatch_args, dispatch_outputs
from twin_kernels import MODES, kernels

from ascend_moe import reference

modes = pytest.mark.parametrize("mode", MODES)
NAMES = {torch.float16: "half", torch.bfloat16: "bfloat16_t"}

CASES = {
    "2 ranks": Case(2, 1, [4, 4], 2, 64, 8),
    "2 ranks, 2 experts each": Case(2, 2, [5, 3], 3, 32, 3),
    "4 ranks, a rank without tokens": Case(4, 2, [3, 0, 2, 3], 4, 32, 5),
    "duplicate ids": Case(2, 2, [6, 6], 3, 32, 4, duplicates=True, max_bs=18),
    "cumulative token numbers": Case(2, 3, [2, 4], 2, 48, 2, nums_type=0),
    "bf16": Case(2, 2, [4, 4], 2, 64, 4, dtype=torch.bfloat16),
}


def run_layers(case: Case, mode: str, layers: int) -> None:
    """Dispatch and combine, again and again over the same windows."""
    dispatch = kernels("moe_dispatch_mc2", f"DTYPE_X={NAMES[case.dtype]}")
    combine = kernels("moe_combine_mc2", f"DTYPE_X={NAMES[case.dtype]}")
    windows = case.windows()
    for step in range(layers):
        inputs, outputs = case.inputs(step), dispatch_outputs(case)
        dispatch.launch(
            "moe_dispatch_mc2",
            dispatch_args(inputs, outputs),
            case.tilings,
            case.cores,
            1000,
            windows,
            mode=mode,
            timeout_s=20,
        )
        results = check_dispatch(case, inputs, outputs)
        for out in outputs:
            out["expand_x"] *= 2
        given = [out["expand_x"][: len(one.expand_x)] for out, one in zip(outputs, results, strict=True)]
        sums = [torch.full((batch, case.hidden), 5, dtype=case.dtype) for batch in case.batches]
        combine.launch(
            "moe_combine_mc2",
            combine_args(inputs, outputs, sums),
            case.tilings,
            case.cores,
            1000,
            windows,
            mode=mode,
            timeout_s=20,
        )
        wanted = reference.combine(
            inputs, given, results, moe_expert_num=case.experts, global_bs=case.global_bs
        )
        for rank, (want, got) in enumerate(zip(wanted, sums, strict=True)):
            assert torch.equal(got, want), f"x of rank {rank}, layer {step}"


@modes
@pytest.mark.parametrize("name", CASES)
def test_dispatch_and_combine(name: str, mode: str) -> None:
    run_layers(CASES[name], mode, layers=4)


@pytest.mark.parametrize("world", [2, 4])
def test_on_48_cores(world: int) -> None:
    run_layers(Case(world, 2, [16] * world, 4, 256, 48), "fast", layers=3)


@modes
def test_tiling_key_that_the_kernel_does_not_have(mode: str) -> None:
    case = Case(2, 1, [2, 2], 1, 32, 2)
    inputs, outputs = case.inputs(), dispatch_outputs(case)
    kernels("moe_dispatch_mc2", "DTYPE_X=half").launch(
        "moe_dispatch_mc2", dispatch_args(inputs, outputs), case.tilings, 2, 1002, case.windows(), mode=mode
    )
    assert all((out["counts"] == -1).all() for out in outputs)


@modes
def test_ranks_launched_by_threads_of_the_caller(mode: str) -> None:
    case = CASES["2 ranks, 2 experts each"]
    windows, inputs, outputs = case.windows(), case.inputs(), dispatch_outputs(case)
    dispatch, args = kernels("moe_dispatch_mc2", "DTYPE_X=half"), dispatch_args(inputs, outputs)

    def one(rank: int) -> None:
        dispatch.launch(
            "moe_dispatch_mc2",
            args[rank],
            case.tiling(rank),
            case.cores,
            1000,
            windows,
            rank=rank,
            mode=mode,
            timeout_s=20,
        )

    with ThreadPoolExecutor(case.world) as pool:
        list(pool.map(one, range(case.world)))
    check_dispatch(case, inputs, outputs)
