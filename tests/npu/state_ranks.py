"""A rank of an A2 on the virtual NPU: first broadcasts have written over the last MiB of HCCL's window."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
import torch.distributed as dist
from hccl_ranks import windows_of
from npu_rank import GLOO, NPU, RANK, WORLD, end, everyone, sound
from npu_runs import run_checks

from ascend_moe import comm
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace

MIB = 1 << 20
ABORTS, MAGIC, PEER_LOST = 1024, 0x41424F52, 16  # kAbortOffset, kAbortMagic, kPeerLost of protocol/window.h
HEADER = 4096  # of a virtual window; on an A2 the ops' area follows, whose last MiB is the state


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


def check_ops_work_on_a_group_whose_state_was_overwritten() -> None:
    for contract in (1, 2):
        here = corrupted()
        case = Case("corrupted", WORLD, contract=contract, ids="distinct")
        sound(here, case, replace(case, seed=1))  # the second op finds what the first has left
        dist.barrier(GLOO)


if __name__ == "__main__":
    run_checks()
    end()
