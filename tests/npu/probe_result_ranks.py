"""A rank on the virtual NPU: which algorithm its default is, by what a bring-up has left for this kind of machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from npu_rank import GLOO, NPU, RANK, WORLD, end, everyone, sound
from npu_runs import run_checks

import ascend_moe
from ascend_moe import comm, settings
from ascend_moe.native import probe_results
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace

probe_results.cache_directory = lambda: Path(os.environ["STORE"]).parent  # type: ignore[attr-defined]
KIND = probe_results.machine(torch.npu.get_device_name(), probe_results.ONE_SERVER)


def ran(here: DevicePlace, **more: Any) -> str:
    """The algorithm of a dispatch."""
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=NPU)
    ids = torch.tensor([[0, WORLD]] * 3, dtype=torch.int32, device=NPU)
    ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, here.group_ep, WORLD, RANK, 2 * WORLD, **more)
    ascend_moe.check()
    return comm.algorithm_of(here.group_ep)


def check_the_default_is_window_until_there_are_results() -> None:
    here = everyone()
    sound(here, *(Case("unproven", WORLD, contract=contract, ids="distinct", seed=contract) for contract in (1, 2)))
    assert comm.algorithm_of(here.group_ep) == "window"
    assert [ran(here), ran(here, comm_alg="auto"), ran(here, comm_alg="fullmesh_v1")] == ["window"] * 3
    assert ran(here, comm_alg="direct") == "direct"  # whoever asks for it by name gets it
    for name in ("auto", "direct"):
        os.environ[settings.COMM_ALG.name] = name
        assert ran(here) == ("direct" if name == "direct" else "window")
    del os.environ[settings.COMM_ALG.name]
    dist.barrier(GLOO)


def check_results_make_it_direct() -> None:
    probes = dict.fromkeys(settings.PROVABLE, "PASS")
    for change, algorithm in (({}, "direct"), ({"pull": "FAIL"}, "window"), ({}, "direct")):
        dist.barrier(GLOO)
        if RANK == 0:
            probe_results.write(KIND, WORLD, {**probes, **change})
        dist.barrier(GLOO)
        here = everyone()
        assert [ran(here), ran(here, comm_alg="auto"), ran(here, comm_alg="window")] == [algorithm] * 2 + ["window"]
        sound(here, Case("proven", WORLD, contract=2, ids="distinct", seed=3))
    dist.barrier(GLOO)


if __name__ == "__main__":
    run_checks()
    end()
