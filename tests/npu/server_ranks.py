"""One rank of a group on (virtual) NPUs whose ranks take themselves to be on HOSTS: ``server_ranks.py``."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from npu_rank import GLOO, NPU, RANK, WORLD, end, everyone, new_place, sound
from npu_runs import raises, run_checks

import ascend_moe
from ascend_moe import comm
from ascend_moe.errors import ArgumentError, ConfigMismatch
from ascend_moe.reference.cases import Case
from ascend_moe.validate.probes import KERNEL_PROBES
from ascend_moe.validate.probes_kernel import Npu
from ascend_moe.validate.run import DevicePlace

HALF = WORLD // 2
SETTING = "ASCEND_MOE_RANKS_PER_SERVER"
OLD_RDMA = "ASCEND_MOE_VNPU_CANN" in os.environ and "HCCL_INTRA_PCIE_ENABLE" not in os.environ  # nothing is mapped
ON_A2 = "910B" in torch.npu.get_device_name()


def share_of(place: DevicePlace) -> int:
    return comm.ranks_per_server(place.group_ep, place.world, place.rank)


def dispatch(place: DevicePlace, **more: Any) -> Any:
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=NPU)
    ids = torch.tensor([[0, place.world]] * 3, dtype=torch.int32, device=NPU)
    arguments = (x, ids, place.group_ep, place.world, place.rank, 2 * place.world)
    out = ascend_moe.npu_moe_distribute_dispatch_v2(*arguments, **more)
    ascend_moe.check()
    return out


def right(place: DevicePlace) -> None:
    """Round trips of both contracts are the reference's."""
    names = {"batches": "unequal", "ids": "distinct"}
    sound(place, *(Case("servers", place.world, contract=contract, seed=contract, **names) for contract in (1, 2)))


def check_the_halves_are_servers_of_an_a2() -> None:
    place = everyone()
    right(place)  # the first op opens the group
    assert share_of(place) == (HALF if ON_A2 else 0)
    assert comm.algorithm_of(place.group_ep) == ("window" if ON_A2 else "direct")
    if ON_A2:
        with raises(f"comm_alg is 'direct', .*; {WORLD} ranks with {HALF} a server", ArgumentError):
            dispatch(place, comm_alg="direct")
    else:
        dispatch(place, comm_alg="direct")
    right(place)
    dist.barrier(GLOO)


def check_groups_of_some_ranks_are_counted_by_their_own() -> None:
    for ranks, share in (([0, HALF], 1), (list(range(HALF)), HALF), (list(range(HALF - 1, HALF + 1)), 1)):
        place = new_place(ranks)
        if place is not None:
            right(place)
            assert share_of(place) == (share if ON_A2 else 0)
        dist.barrier(GLOO)


def check_the_setting_goes_before_host_names_and_is_the_same_on_all() -> None:
    if not ON_A2:
        return
    for share in (1, WORLD):
        os.environ[SETTING] = str(share)
        place = everyone()
        right(place)
        assert share_of(place) == share
        end = Npu(place)._end("batch")  # by RDMA, as the ops before
        assert (end.buffer_mib, end.data_bytes >> 20) == (200, 199)  # the twin's layout is no matter here
        dist.barrier(GLOO)
    os.environ[SETTING] = "4" if RANK == 0 else "2"
    place = everyone()
    with raises(f"{SETTING} differs in group", ConfigMismatch):
        dispatch(place)
    del os.environ[SETTING]
    dist.barrier(GLOO)


def check_probes_are_refused_where_hccl_cannot_map_a_server() -> None:
    if not ON_A2 or not OLD_RDMA:
        return
    store = next(probe for probe in KERNEL_PROBES if probe.name == "peer store and read")
    found = store.on(Npu(everyone()))
    assert "stores within a server" in found.detail and "need CANN 8.3" in found.detail, found
    dist.barrier(GLOO)


if __name__ == "__main__":
    run_checks()
    end()
