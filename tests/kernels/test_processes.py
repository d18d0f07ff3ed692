"""The ops between real processes: window, direct and zero copy give the same bits."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import op_runs
import pytest
import torch.distributed as dist
import zero_copy_runs as zero_copy
from gloo_ranks import run_processes
from op_runs import RankRun

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe import comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, draw, legal

Run = RankRun | AscendMoeError
ALGORITHMS = ("direct", "window", "zero-copy")
SOUND = {"ids": ("distinct", "any", "minus", "hot", "mixed"), "batch": (3, 7, 16), "units": (2, 5, 64)}
SPECS = [
    *(draw(seed, comm_quant_mode=(0,), **SOUND) for seed in range(5)),
    Case(local=2, topk=3, ids="overflow", batch=3, seed=4),
    Case(local=3, topk=2, batch=3, ids="bad", contract=2, seed=6),
]
CORES = (1, 7, 8)


def plan(world: int) -> list[tuple[str, Case]]:
    """Every case with every algorithm, others before and between, on windows that have been used."""
    cases = [legal(replace(spec, world=world, cores=CORES[i % 3])) for i, spec in enumerate(SPECS)]
    return [
        (ALGORITHMS[(number + number // 3 + turn) % 3], case) for turn in range(3) for number, case in enumerate(cases)
    ]


def calls(world: int, rank: int, group_ep: str) -> list[Run]:
    """All calls of one rank."""
    found = []
    for algorithm, case in plan(world):
        os.environ["ASCEND_MOE_COMM_ALG"] = ran = "window" if algorithm == "window" else "direct"
        register = zero_copy.registering([True] * world) if algorithm == "zero-copy" else None
        with op_runs.cores(case.cores):
            found.append(op_runs.run_rank(case, rank, group_ep, register))
        assert comm.lookup(group_ep, world, rank).algorithm == ran
    return found


def body(rank: int, world: int) -> dict[int, list[Run]]:
    """The calls of all ranks first, then those of the first two."""
    assert dist.get_world_size() == world and dist.get_rank() == rank
    two = dist.new_group([0, 1])
    found = {world: calls(world, rank, ascend_moe.comm_name())}
    if world > 2 and rank < 2:
        found[2] = calls(2, rank, ascend_moe.comm_name(two))
    return found


def check(world: int, results: list[list[Run]]) -> None:
    """Against the reference, bytes moved included; ``results`` by rank and call."""
    assert len(results) == world
    first: dict[Case, tuple[RankRun, ...]] = {}
    kinds = set()
    for (algorithm, case), runs in zip(plan(world), zip(*results, strict=True), strict=True):
        traffic = zero_copy.check_traffic
        given = None if algorithm == "window" else functools.partial(traffic, [algorithm == "zero-copy"] * world)
        if not op_runs.check(case, runs, given):
            kinds.add(type(runs[0]).__name__)
            continue
        for one, other in zip(runs, first.setdefault(case, runs), strict=True):
            assert ref.same_bits(one.result, other.result) and ref.same_bits(one.rows, other.rows)
    assert kinds == {"InvalidExpertId", "RoutingOverflow"}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_processes_over_gloo_equal_the_reference(world: int, tmp_path: Path) -> None:
    results = run_processes(world, functools.partial(body, world=world), tmp_path)
    for size in {world, 2}:
        check(size, [result[size] for result in results[:size]])
