"""What every rank of the scripts here has: its device, its place on HCCL, and cases that must equal the reference.

HOSTS, where it is set, has a letter a rank: the host that the rank takes itself to be on.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  the device

import ascend_moe
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace, run_case

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NPU = torch.device("npu", RANK)

if "HOSTS" in os.environ:
    socket.gethostname = lambda: os.environ["HOSTS"][RANK]
torch.npu.set_device(RANK)
dist.init_process_group("hccl", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=WORLD)
GLOO = dist.new_group(backend="gloo")


def new_place(ranks: list[int] | None = None, **options: Any) -> DevicePlace | None:
    """This rank's place in a fresh group of these ranks, default all, with windows of its own; all ranks call."""
    group = dist.new_group(ranks, **options)
    if not isinstance(group, dist.ProcessGroup):
        return None
    return DevicePlace(ascend_moe.comm_name(group), group.size(), group.rank(), NPU)


def everyone(**options: Any) -> DevicePlace:
    """The place of `new_place` in a group of all ranks."""
    place = new_place(**options)
    assert place is not None
    return place


def new_group(**options: Any) -> str:
    """Its name."""
    return everyone(**options).group_ep


def sound(place: DevicePlace, *cases: Case) -> None:
    """Runs both operators of the cases and compares them with the reference."""
    for case in cases:
        for result in run_case(place, case):
            assert result.ok, result.text


def end() -> None:
    dist.barrier(GLOO)
    dist.destroy_process_group()
