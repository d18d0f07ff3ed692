"""One rank of a group on (virtual) NPUs whose ranks take themselves to be on HOSTS: ``server_ranks.py [CHECK...]``."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hccl_ranks import windows_of
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
MIB = 1 << 20
ABORTS, MAGIC, PEER_LOST = 1024, 0x41424F52, 16  # kAbortOffset, kAbortMagic, kPeerLost of protocol/window.h
HEADER = 4096  # of a virtual window; on an A2 the ops' area follows, whose last MiB is the state


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


# ---- by name only: an A2, over the last MiB of whose windows broadcasts have written


def corrupted() -> DevicePlace:
    """This rank in a group whose windows are full of what collectives have carried."""
    here = everyone()
    group = comm.group_of("group", here.group_ep)
    carried = torch.full((4 * MIB,), 0x5AA5C33C, dtype=torch.int32, device=NPU)  # more than a window has
    dist.broadcast(carried, 0, group=group)
    dist.all_reduce(carried, group=group)
    torch.npu.synchronize()
    seen = windows_of(group)
    place = seen.bases[RANK] + HEADER + seen.data_bytes - MIB
    assert ctypes.string_at(place, MIB).count(0) < MIB // 2, "the collectives have not reached the last MiB"
    # What a former group may have left in the same memory: an abort by its last rank.
    block = (ctypes.c_uint32 * 8).from_address(place + ABORTS + 32 * (WORLD - 1))
    block[0], block[1], block[2], block[3], block[7] = MAGIC, 1, PEER_LOST, 0, MAGIC
    dist.barrier(GLOO)
    return here


def ops_work_on_a_group_whose_state_was_overwritten() -> None:
    for contract in (1, 2):
        here = corrupted()
        case = Case("corrupted", WORLD, contract=contract, ids="distinct")
        sound(here, case, replace(case, seed=1))  # the second op finds what the first has left
        dist.barrier(GLOO)


if __name__ == "__main__":
    run_checks(sys.argv[1:])
    end()
