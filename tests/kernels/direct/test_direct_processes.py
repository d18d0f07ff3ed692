"""Between real processes direct and zero-copy give the bits of window and of the reference, by turns."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import op_runs
import test_zero_copy
import torch.distributed as dist
from gloo_ranks import run_processes
from op_runs import RankRun

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe import comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, legal

WORLDS = (2, 3)
ALGORITHMS = ("direct", "window", "zero-copy")
CORES = (1, 3, 8)


def cases(world: int) -> list[Case]:
    """bf16 and int8 rows, both contracts, ranks with fewer tokens and with none."""
    kinds = itertools.product(("none", "int8"), (1, 2), ("unequal", "zero rank"))
    specs = [
        Case(
            world=world,
            local=3 + seed % 2,
            topk=3,
            units=6,
            batch=7,
            quant=quant,
            contract=contract,
            batches=batches,
            ids=("any", "minus", "hot")[seed % 3],
            cores=CORES[seed % 3],
            seed=100 * world + seed,
        )
        for seed, (quant, contract, batches) in enumerate(kinds)
    ]
    return [legal(spec) for spec in specs]


def plan(world: int) -> list[tuple[str, int]]:
    """Algorithms and numbers of cases: every case with every algorithm, others before and between."""
    numbers = range(len(cases(world)))
    return [(ALGORITHMS[(number + number // 3 + i) % 3], number) for i in range(3) for number in numbers]


def body(rank: int) -> dict[int, list[dict[str, Any]]]:
    """All calls of one rank: those of all processes first, then those of the first two."""
    two = dist.new_group([0, 1])
    found = {3: calls(3, rank, ascend_moe.comm_name())}
    if rank < 2:
        found[2] = calls(2, rank, ascend_moe.comm_name(two))
    return found


def calls(world: int, rank: int, group_ep: str) -> list[dict[str, Any]]:
    done, drawn = [], cases(world)
    for algorithm, number in plan(world):
        case = drawn[number]
        os.environ["ASCEND_MOE_COMM_ALG"] = "window" if algorithm == "window" else "direct"
        with op_runs.cores(case.cores):
            one = test_zero_copy.run_rank(case, rank, group_ep, [algorithm == "zero-copy"] * world)
        if isinstance(one, AscendMoeError):
            raise one
        ran = comm.lookup(group_ep, world, rank).algorithm
        done.append(dict(vars(one)) | {"ran": ran})
    return done


def test_every_algorithm_gives_the_same_bits(tmp_path: Path) -> None:
    results = run_processes(max(WORLDS), body, tmp_path)
    for world in WORLDS:
        drawn, by_call = cases(world), list(zip(*(one[world] for one in results[:world]), strict=True))
        first: dict[int, list[RankRun]] = {}
        for (algorithm, number), ranks in zip(plan(world), by_call, strict=True):
            assert {one.pop("ran") for one in ranks} == {"window" if algorithm == "window" else "direct"}
            runs = [RankRun(**one) for one in ranks]
            check(drawn[number], runs, algorithm)
            for one, other in zip(runs, first.setdefault(number, runs), strict=True):
                assert ref.same_bits(one.result, other.result)
                assert ref.same_bits(one.rows, other.rows)


def check(case: Case, runs: list[RankRun], algorithm: str) -> None:
    """Against the reference, bytes moved included."""
    if algorithm == "window":
        op_runs.check(case, runs)
    else:
        assert test_zero_copy.check(case, runs, [algorithm == "zero-copy"] * case.world)
