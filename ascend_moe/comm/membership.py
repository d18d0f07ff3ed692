"""Continue with the remaining ranks of a group after a loss: ``agree`` on them, then ``shrink`` to a smaller group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascend_moe import comm
from ascend_moe.comm import threads
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.peers import PeerRecords
from ascend_moe.comm.place import Place
from ascend_moe.comm.rendezvous import Opening
from ascend_moe.comm.vote import StoreVote
from ascend_moe.errors import ArgumentError, AscendMoeError, CommClosed, PeerLost, need, with_typed_errors
from ascend_moe.native.windows import timeout_s

_SUBGROUP = "~"  # between the name of a process group and the number of its subgroup


def _open_communicator(group_ep: str) -> Communicator:
    """Return this rank's open communicator of a group, failed or not.

    Raises:
        ArgumentError: there is no such group, or it is not open here.
    """
    cluster = threads.find(group_ep)
    if cluster is not None:
        rule = "is {!r}, a LocalCluster's: call it in the thread of a rank"
        need(cluster.rank_here() is not None, "group_ep", rule, group_ep)
    found = comm.communicator_here(group_ep)
    if found is None:
        rule = "is {!r}, which has no open windows here: run an op on the group first, and call this before close"
        raise ArgumentError("group_ep " + rule.format(group_ep), argument="group_ep")
    return found


def _seconds(timeout: float | None) -> float:
    """Return the timeout in seconds, ASCEND_MOE_TIMEOUT_S for None."""
    rule = "is {}; it must be seconds above 0, or None for ASCEND_MOE_TIMEOUT_S"
    whole = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0
    need(timeout is None or whole, "timeout", rule, timeout)
    return timeout_s() if timeout is None else float(timeout)


@with_typed_errors
def agree(group_ep: str, timeout: float | None = None) -> list[int]:
    """Return the remaining ranks of a group, the same list on each of them. Collective among them.

    Call it after PeerLost or CommTimeout, or whenever the ranks decide to. It returns as soon as every rank whose
    process runs with an open communicator has called it, at the latest after ``timeout``. A rank that has not called by
    then, stopped or busy, is left out, and its own later call raises CommTimeout. All ranks that return have the same
    list, whatever fails meanwhile; a rank that died at the last moment may be in it, which ``shrink`` reports. On CPUs
    it needs neither a store nor a particular rank. On NPUs it needs the process group's store, which dies with rank 0
    unless torchrun's agent hosts it, and detects the end of processes on this machine only. May be called again.

    Args:
        group_ep: name of a group with open windows: of a process group, of a LocalCluster (in the function of a rank),
            or of a group made by `shrink`; on NPUs HCCL's communicator name, once an op has run on it. Ops may have
            failed on it.
        timeout: seconds to wait for live ranks; None: ASCEND_MOE_TIMEOUT_S.

    Returns:
        Ranks of this group, ascending.

    Raises:
        CommTimeout: the others have continued without this rank (``.ranks``); or, on NPUs, the store does not respond.
        PeerLost: on NPUs, the store has failed.
        ArgumentError: there is no such group, it has no open windows, or timeout is not above 0.
        AscendMoeError: the group has voted 32 times in ``agree`` and ``shrink``, the limit.
    """
    seconds = _seconds(timeout)
    comm.need_name("group_ep", group_ep)
    if (on_npus := npu_group(group_ep)) is not None:
        return _npu_vote(group_ep, on_npus).agree(seconds)
    here = _open_communicator(group_ep)
    with here.held():
        return here.vote.agree(seconds)


@with_typed_errors
def ended(group_ep: str) -> list[int]:
    """Return the ranks of a group whose process (or function in a LocalCluster) has ended, as seen by this rank now.

    Local; waits for no other rank. Stopped or late ranks, and ranks that have closed their communicator, have not
    ended. On NPUs only processes of this machine are visible.

    Raises:
        ArgumentError: there is no such group, or it has no open windows.
    """
    comm.need_name("group_ep", group_ep)
    if (on_npus := npu_group(group_ep)) is not None:
        return _npu_vote(group_ep, on_npus).gone()
    here = _open_communicator(group_ep)
    with here.held():
        return [rank for rank in range(here.world) if here.peers.ended(rank)]


def closed(group_ep: str) -> list[int]:
    """Return the ranks of a CPU group that have ended or closed their communicator, as seen by this rank now.

    Raises:
        ArgumentError: there is no such group, or it has no open windows.
    """
    here = _open_communicator(group_ep)
    with here.held():
        return here.vote.gone()


@with_typed_errors
def shrink(group_ep: str, alive: Sequence[int], timeout: float | None = None) -> Place:
    """Create a group of the remaining ranks, with its own windows and epochs, and close the old one.

    Collective among ``alive``. The ranks are renumbered in their order; L, the experts per rank, is unchanged, so
    moe_expert_num is L times the new number of ranks (`placement.shrunk` computes the tables). Windows of lost ranks
    are not used. Either all ranks of ``alive`` get their place, or all raise an error and keep the old group, to
    agree again. torch.distributed does not know the new group: its process groups are unchanged, and their
    collectives still wait for the lost rank. On NPUs the new group is a process group of torch.distributed with its
    own HCCL communicator, created on these ranks only; HCCL_CONNECT_TIMEOUT and the store's timeout bound their
    waits, and the caller destroys the old one.

    Args:
        group_ep: as in `agree`.
        alive: ranks of this group as returned by `agree`, including this rank.
        timeout: seconds to wait for live ranks; None: ASCEND_MOE_TIMEOUT_S.

    Returns:
        The place in the new group: ``group_ep``, ``world`` and ``rank``, for ops and dispatchers.

    Raises:
        PeerLost: another of these ranks has died or failed meanwhile. CommTimeout: it did not arrive. Call agree again.
        ConfigMismatch: ranks pass different lists, or their settings differ.
        ArgumentError: ``alive`` or ``timeout`` is invalid, or the group has no open windows.
        AscendMoeError: creating the new group failed on this rank.
    """
    seconds = _seconds(timeout)
    comm.need_name("group_ep", group_ep)
    if (on_npus := npu_group(group_ep)) is not None:
        left = _npu_vote(group_ep, on_npus).members
        ranks = _checked(on_npus.size(), on_npus.rank(), left, alive)
        return _shrink_on_npus(group_ep, on_npus, ranks, seconds)
    here = _open_communicator(group_ep)
    ranks = _checked(here.world, here.rank, here.vote.members, alive)
    cluster = threads.find(group_ep)
    if cluster is not None:
        part, rank = cluster.shrink(here.rank, ranks, here.vote.round, seconds)
        part.communicator(rank)
        cluster.close()
        return Place(part.name, part.world_size, rank)
    first, _, number = group_ep.partition(_SUBGROUP)
    name = f"{first}{_SUBGROUP}{int(number or 0) + 1}"
    records = functools.partial(PeerRecords, here, f"shrink {here.vote.round}", ranks)
    sizes = (here.data_bytes, here.registered_bytes)
    opening = Opening(name, ranks.index(here.rank), len(ranks), *sizes, seconds, records)
    made = _open_together(here, ranks, opening, seconds)
    comm.add_subgroup(made)
    comm.close(group_ep)
    return Place(name, made.world, made.rank)


def _open_together(here: Communicator, ranks: Sequence[int], opening: Opening, seconds: float) -> Communicator:
    """Open the windows of a new group on all of ``ranks`` of the old one, or on none of them.

    Raises:
        The error of the opening on this rank; PeerLost: another rank of ``ranks`` has not opened them.
    """
    made: Communicator | None = None
    failure: Exception | None = None
    try:
        opening.run()
        made = opening.communicator()
    except (AscendMoeError, OSError) as error:
        failure = error
    try:
        with here.held():
            fine = here.vote.all_fine(ranks, made is not None, seconds)
            lost = next((rank for rank in ranks if here.peers.gone(rank)), None)
    except CommClosed as error:
        fine, lost, failure = False, None, failure or error
    if made is not None and fine:
        return made
    if made is not None:
        made.close()
    if isinstance(failure, AscendMoeError):
        raise failure
    if failure is not None:
        raise AscendMoeError(f"{opening.prefix} failed here: {failure}", rank=here.rank) from failure
    who = "another rank" if lost is None else f"rank {lost}"
    text = f"{opening.prefix}: {who} of group {here.name!r} has failed meanwhile: call agree again"
    raise PeerLost(text, rank=lost, phase="open")


def _checked(world: int, rank: int, left: Sequence[int], alive: Sequence[int]) -> list[int]:
    """Return ``alive`` as a list. ``left``: the ranks of the last agreement."""
    ranks = list(alive) if isinstance(alive, (list, tuple, range)) else []
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in ranks)
    fits = bool(ranks) and numbers and ranks == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < world
    rule = "is {!r}; it must be the list of ranks returned by ascend_moe.agree, ascending, of 0..{}"
    need(fits, "alive", rule, alive, world - 1)
    need(rank in ranks, "alive", "is {}; it must contain this rank, which is {}", ranks, rank)
    rule = "is {}; ascend_moe.agree returned {}, and no other rank can rejoin this group: pass that list"
    need(set(ranks) <= set(left), "alive", rule, ranks, left)
    return ranks


# ---- NPUs: votes in the group's store, and a new HCCL communicator


def npu_group(group_ep: str) -> Any:
    """Return the live process group with an HCCL backend of this name, or None if there is none."""
    cluster, group = comm.find(group_ep)
    return group if cluster is None and group is not None and comm.has_hccl(group) else None


def _npu_vote(group_ep: str, group: Any) -> StoreVote:
    """Return the group's votes.

    Raises:
        ArgumentError: no op has run on the group, so its ranks do not know each other.
    """
    vote = comm.npu_vote(group_ep, group)
    rule = "is {!r}, on which no op has run here: run one before agree and shrink"
    need(vote is not None, "group_ep", rule, group_ep)
    assert vote is not None
    return vote


def _shrink_on_npus(group_ep: str, group: Any, ranks: Sequence[int], seconds: float) -> Place:
    """Create a process group of ``ranks`` with its own HCCL communicator, on all of them or on none.

    Raises:
        PeerLost: another of these ranks has not created it. Other errors: creating it failed here.
    """
    made, failure = None, None
    try:
        made = _new_group(group, ranks)
        name = comm.comm_name(made)  # collective among them
    except (RuntimeError, ValueError) as error:  # torch.distributed's and HCCL's
        failure = error
    if _npu_vote(group_ep, group).all_fine(ranks, failure is None, seconds):
        comm.close(group_ep)
        return Place(name, len(ranks), list(ranks).index(group.rank()))
    if made is not None:
        dist.destroy_process_group(made)
    prefix = f"rank {group.rank()}: shrink of group {group_ep!r}"
    if failure is not None:
        raise AscendMoeError(f"{prefix} failed here: {failure}", rank=group.rank()) from failure
    raise PeerLost(f"{prefix}: another rank has failed meanwhile: call agree again", phase="open")


def _new_group(group: Any, ranks: Sequence[int]) -> Any:
    """Create the process group on these ranks only. HCCL_CONNECT_TIMEOUT and the store's timeout bound the wait."""
    backend = dist.distributed_c10d._world.pg_map[group][0]
    options: Any = getattr(group._get_backend(torch.device("npu")), "options", None)
    size = (getattr(options, "hccl_config", None) or {}).get("hccl_buffer_size")
    own: Any = None
    if size:  # keep the window size; torch_npu sets the other options
        own = type(options)()
        own.hccl_config = {"hccl_buffer_size": int(size)}
    world_ranks = [dist.get_global_rank(group, rank) for rank in ranks]
    limit = getattr(options, "_timeout", None)  # timeout of the caller's collectives
    return dist.new_group(world_ranks, limit, backend, own, use_local_synchronization=True)
