"""Lets the ranks of a group on NPUs go on without a lost one: votes in its store, and a new HCCL communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascend_moe import comm
from ascend_moe.comm import servers
from ascend_moe.comm.ballot import StoreBallot
from ascend_moe.comm.place import Place
from ascend_moe.errors import AscendMoeError, PeerLost, need


def group_of(group_ep: str) -> Any:
    """The process group of an HCCL communicator's name; None where the name is no such."""
    cluster, group = comm.find(group_ep)
    return group if cluster is None and group is not None and comm.has_hccl(group) else None


def ballot_of(group_ep: str, group: Any) -> StoreBallot:
    """The group's votes.

    Raises:
        ArgumentError: no op has run on the group, so its ranks do not know each other.
    """
    ballot = servers.ballot(group_ep, group)
    need(ballot is not None, "group_ep", "of {!r}: no op has run on it here, so there is nothing to agree by", group_ep)
    assert ballot is not None
    return ballot


def shrink(group_ep: str, group: Any, ranks: Sequence[int], seconds: float) -> Place:
    """Makes a process group of ``ranks`` with an HCCL communicator of its own, on all of them or on none.

    Raises:
        PeerLost: another of these ranks has not made it. What the making raised here.
    """
    ballot, made, failure = ballot_of(group_ep, group), None, None
    try:
        made = _new_group(group, ranks)
        name = comm.comm_name(made)  # collective among them
    except (RuntimeError, ValueError) as error:  # torch.distributed's and HCCL's
        failure = error
    if ballot.all_fine(ranks, failure is None, seconds):
        comm.close(group_ep)
        return Place(name, len(ranks), list(ranks).index(group.rank()))
    if made is not None:
        dist.destroy_process_group(made)
    prefix = f"rank {group.rank()}: shrink of group {group_ep!r}"
    if failure is not None:
        raise AscendMoeError(f"{prefix} failed here: {failure}", rank=group.rank()) from failure
    raise PeerLost(f"{prefix}: another rank has failed meanwhile: agree again", phase="open")


def _new_group(group: Any, ranks: Sequence[int]) -> Any:
    """Only these ranks call it: the lost one cannot. HCCL_CONNECT_TIMEOUT bounds it, and the store's own timeout."""
    backend = dist.distributed_c10d._world.pg_map[group][0]
    options: Any = getattr(group._get_backend(torch.device("npu")), "options", None)
    size = (getattr(options, "hccl_config", None) or {}).get("hccl_buffer_size")
    own: Any = None
    if size:  # windows of the same size; what else is there torch_npu has put in
        own = type(options)()
        own.hccl_config = {"hccl_buffer_size": int(size)}
    world_ranks = [dist.get_global_rank(group, rank) for rank in ranks]
    limit = getattr(options, "_timeout", None)  # of the caller's collectives
    return dist.new_group(world_ranks, limit, backend, own, use_local_synchronization=True)
