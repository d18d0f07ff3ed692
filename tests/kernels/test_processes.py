"""The ops between real processes: gloo groups of spawned processes, and torchrun."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import op_runs
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_processes
from op_runs import RankRun

import ascend_moe
from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, legal

SPECS = [
    Case(seed=1),
    Case(
        local=5,
        topk=4,
        units=5,
        batch=9,
        dtype="fp16",
        quant="int8",
        batches="zero rank",
        seed=2,
        nums_type=0,
    ),
    Case(local=3, topk=3, units=3, dtype="fp32", quant="smooth", contract=2, mask="pair", seed=3, tp=1),
    Case(local=2, topk=3, ids="overflow", batch=3, seed=4),
    Case(local=4, topk=2, batch=8, ids="hot", mask="token", seed=5),
    Case(local=3, topk=2, batch=3, ids="bad", contract=2, seed=6),
    Case(
        local=2,
        topk=4,
        batch=7,
        contract=2,
        ids="minus",
        shared=2,
        batches="unequal",
        odd=True,
        seed=7,
    ),
    Case(local=32, topk=8, batch=24, units=64, tail=True, seed=8),
    Case(local=8, topk=8, batch=16, units=224, quant="int8", contract=2, seed=9),
]
# Seeds of the cases run with 1, 7 and 8 cores.
CORES = (1, 7, 8)


def cases(world: int) -> list[Case]:
    specs = [replace(spec, world=world, cores=CORES[spec.seed % 3]) for spec in SPECS]
    return [legal(spec) for spec in specs]


def body(rank: int, world: int) -> list[dict[str, Any]]:
    """All cases on one rank of the default group, twice: the second time in windows that have been used."""
    assert dist.get_world_size() == world and dist.get_rank() == rank
    group_ep = ascend_moe.comm_name()
    found = []
    for case in cases(world) * 2:
        with op_runs.cores(case.cores):
            one = op_runs.run_rank(case, rank, group_ep)
        if isinstance(one, AscendMoeError):
            found.append({"error": type(one).__name__, "text": str(one), "details": one.details})
        else:
            found.append(dict(vars(one)))
    ascend_moe.close(group_ep)
    return found


def check(world: int, results: list[list[dict[str, Any]]]) -> None:
    """``results`` by rank and case."""
    assert len(results) == world
    by_case = list(zip(*results, strict=True))
    assert len(by_case) == 2 * len(SPECS)
    for case, ranks in zip(cases(world) * 2, by_case, strict=True):
        op_runs.check(case, [restored(one) for one in ranks])
    kinds = {one["error"] for one in results[0] if "error" in one}
    assert kinds == {"InvalidExpertId", "RoutingOverflow"}


def restored(one: dict[str, Any]) -> RankRun | AscendMoeError:
    if "error" in one:
        error: AscendMoeError = getattr(ascend_moe.errors, one["error"])(one["text"], **one["details"])
        return error
    return RankRun(**one)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_gloo_processes(world: int, tmp_path: Path) -> None:
    check(world, run_processes(world, functools.partial(body, world=world), tmp_path))


def test_torchrun(tmp_path: Path) -> None:
    """This file is also the script that torchrun starts."""
    world = 2
    here = Path(__file__).parent
    environment = dict(os.environ)
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, str(here / Path(__file__).name), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(world, [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)])


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save(body(rank, world), out / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
