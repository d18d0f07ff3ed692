"""Lets the ranks of a group go on when one of them is lost: ``agree`` who is left, ``shrink`` to a group of these."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_moe import comm
from ascend_moe.comm import device_survivors, regrouped
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.links import LinkBoard
from ascend_moe.comm.place import Place
from ascend_moe.comm.processes import Opening
from ascend_moe.comm.threads import LocalCluster
from ascend_moe.errors import ArgumentError, AscendMoeError, PeerLost, need, with_typed_errors
from ascend_moe.native.windows import timeout_s


@dataclass(frozen=True)
class Standing:
    """Where the calling rank stands in an open group."""

    name: str
    rank: int
    end: Communicator
    cluster: LocalCluster | None  # whose ranks are threads


def standing(group_ep: str) -> Standing:
    """Where this rank stands in a group whose windows are open, failed or not.

    Raises:
        ArgumentError: no such group, or this rank's end is not open.
    """
    comm.need_name("group_ep", group_ep)
    made = regrouped.find(group_ep)
    if made is not None:
        return Standing(group_ep, made.rank, made, None)
    cluster, group = comm.find(group_ep)
    if cluster is not None:
        rank = cluster.rank_here()
        need(rank is not None, "group_ep", "of {!r} is a LocalCluster's: call it in the thread of a rank", group_ep)
        assert rank is not None
        return Standing(group_ep, rank, cluster.end(rank), cluster)
    if group is None:
        raise comm.unknown(group_ep)
    end = comm.end_if_open(group_ep, group)
    rule = "of {!r} has no open windows here: call it before close, and on a group that ops have used"
    if end is None:
        raise ArgumentError("group_ep " + rule.format(group_ep), argument="group_ep")
    return Standing(group_ep, end.rank, end, None)


def seconds_of(timeout: float | None) -> float:
    """The timeout, or ASCEND_MOE_TIMEOUT_S for None."""
    rule = "is {}; it must be seconds above 0, or None for ASCEND_MOE_TIMEOUT_S"
    whole = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0
    need(timeout is None or whole, "timeout", rule, timeout)
    return timeout_s() if timeout is None else float(timeout)


@with_typed_errors
def agree(group_ep: str, timeout: float | None = None) -> list[int]:
    """Returns the ranks of a group that are left, the same list on each of them. Collective among them.

    To call after PeerLost or CommTimeout, or when the ranks decide so. It returns as soon as every rank has called it
    whose process lives and has its end open, and at the latest after ``timeout``: a rank that has not called by then,
    stopped or busy with something else, is left out, and told so when it calls. Whatever dies meanwhile, the ranks that
    return have one list; who died in the last moment may be in it, and ``shrink`` says so. Needs no store and no rank
    in particular; on NPUs it needs the process group's store, which dies with rank 0 unless torchrun's agent keeps it,
    and only of ranks on this machine it sees that they have ended. May be called again.

    Args:
        group_ep: name of a group whose windows are open: of a process group, of a LocalCluster in the function of a
            rank, or one that `shrink` has made; on NPUs the HCCL communicator's, once an op has run on it. That ops
            have failed on it does not matter.
        timeout: seconds to wait for ranks that live; None: ASCEND_MOE_TIMEOUT_S.

    Returns:
        ranks of this group, ascending.

    Raises:
        CommTimeout: the others have gone on without this rank; ``.ranks`` are they. Or, on NPUs, the store does not
            answer. PeerLost: on NPUs, the store has gone.
        ArgumentError: no such group, or no open windows.
    """
    seconds = seconds_of(timeout)
    comm.need_name("group_ep", group_ep)
    if (on_npus := device_survivors.group_of(group_ep)) is not None:
        return device_survivors.ballot_of(group_ep, on_npus).agree(seconds)
    here = standing(group_ep)
    with here.end.end:  # no close, which unmaps the ballots, meanwhile
        _ = here.end.handle
        return here.end.ballot.agree(seconds)


@with_typed_errors
def ended(group_ep: str) -> list[int]:
    """Returns the ranks of a group whose process, or function in a LocalCluster, has ended, as this rank sees it now.

    Local, and waits for no other rank. A rank that is stopped or late has not ended, nor has one that has closed its
    end. On NPUs only processes of this machine are seen.

    Raises:
        ArgumentError: no such group, or no open windows.
    """
    comm.need_name("group_ep", group_ep)
    if (on_npus := device_survivors.group_of(group_ep)) is not None:
        return device_survivors.ballot_of(group_ep, on_npus).gone()
    here = standing(group_ep)
    if here.cluster is not None:
        return [rank for rank in range(here.end.world) if here.cluster.has_ended(rank)]
    with here.end.end:  # no close, which forgets the links, meanwhile
        _ = here.end.handle
        links = here.end.links
        return [] if links is None else [rank for rank in range(here.end.world) if links.ended(rank)]


def closed(group_ep: str) -> list[int]:
    """Returns the ranks of a group on CPUs that have ended or closed their end, as this rank sees it now.

    Raises:
        ArgumentError: no such group, or no open windows.
    """
    here = standing(group_ep)
    with here.end.end:
        _ = here.end.handle
        return here.end.ballot.gone()


@with_typed_errors
def shrink(group_ep: str, alive: Sequence[int], timeout: float | None = None) -> Place:
    """Makes a group of the ranks that are left, with windows and epochs of its own, and closes the old one.

    Collective among ``alive``. The ranks are numbered anew in their order; L, the experts of a rank, stays, so that
    moe_expert_num is L times the new number of ranks (`placement.shrunk` has the tables). Windows of the lost ranks are
    not used. Either all ranks of ``alive`` get their place, or all of them an error and keep the old group, to agree
    again. torch.distributed knows nothing of the new group: its process groups stay as they are, and their collectives
    still wait for the lost rank. On NPUs the new group is a process group of torch.distributed, with an HCCL
    communicator of its own, that only these ranks have; how long they wait for each other in it HCCL_CONNECT_TIMEOUT
    and the store's timeout say. The old one stays until the caller destroys it.

    Args:
        group_ep: as of `agree`.
        alive: ranks of this group, as `agree` has returned them; this rank is one of them.
        timeout: seconds to wait for ranks that live; None: ASCEND_MOE_TIMEOUT_S.

    Returns:
        the place in the new group: ``group_ep``, ``world`` and ``rank``, as ops and dispatchers take them.

    Raises:
        PeerLost: another of these ranks has died or failed meanwhile. CommTimeout: it did not come. Agree again.
        ConfigMismatch: ranks pass different lists, or their settings differ.
        ArgumentError: ``alive`` is no such list.
    """
    seconds = seconds_of(timeout)
    comm.need_name("group_ep", group_ep)
    if (on_npus := device_survivors.group_of(group_ep)) is not None:
        left = device_survivors.ballot_of(group_ep, on_npus).members
        ranks = _checked(on_npus.size(), on_npus.rank(), left, alive)
        return device_survivors.shrink(group_ep, on_npus, ranks, seconds)
    here = standing(group_ep)
    ranks = _checked(here.end.world, here.rank, here.end.ballot.members, alive)
    if here.cluster is not None:
        part, rank = here.cluster.shrink(here.rank, ranks, here.end.ballot.round, seconds)
        part.end(rank)
        here.cluster.close()
        return Place(part.name, part.world_size, rank)
    links = here.end.links
    assert links is not None
    name, topic = regrouped.next_name(group_ep), f"shrink {here.end.ballot.round}"
    opening = Opening(
        name,
        None,
        ranks.index(here.rank),
        len(ranks),
        here.end.data_bytes,
        here.end.lent_bytes,
        seconds,
        board=functools.partial(LinkBoard, links, topic, ranks),
    )
    made = open_together(here, ranks, opening, seconds)
    regrouped.add(made)
    comm.close(group_ep)
    return Place(name, made.world, made.rank)


def open_together(here: Standing, ranks: Sequence[int], opening: Opening, seconds: float) -> Communicator:
    """Opens the windows of a new group on all of ``ranks`` of the old one, or on none of them.

    Raises:
        What the opening raised here; PeerLost: another rank of ``ranks`` has not opened them.
    """
    made: Communicator | None = None
    failure: Exception | None = None
    try:
        opening.run()
        made = opening.communicator()
    except (AscendMoeError, OSError) as error:
        failure = error
    with here.end.end:
        _ = here.end.handle
        fine = here.end.ballot.all_fine(ranks, made is not None, seconds)
    if made is not None and fine:
        return made
    if made is not None:
        made.close()
    if isinstance(failure, AscendMoeError):
        raise failure
    if failure is not None:
        raise AscendMoeError(f"{opening.prefix} failed here: {failure}", rank=here.rank) from failure
    links = here.end.links
    lost = next((rank for rank in ranks if links is not None and links.gone(rank)), None)
    who = "another rank" if lost is None else f"rank {lost}"
    text = f"{opening.prefix}: {who} of group {here.name!r} has failed meanwhile: agree again"
    raise PeerLost(text, rank=lost, phase="open")


def _checked(world: int, rank: int, left: Sequence[int], alive: Sequence[int]) -> list[int]:
    """``alive`` as a list. ``left``: the ranks that were agreed on last."""
    ranks = list(alive) if isinstance(alive, (list, tuple, range)) else []
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in ranks)
    fits = bool(ranks) and numbers and ranks == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < world
    rule = "is {!r}; it must be the list of ranks that ascend_moe.agree has returned, ascending, of 0..{}"
    need(fits, "alive", rule, alive, world - 1)
    need(rank in ranks, "alive", "is {}; it must contain this rank, which is {}", ranks, rank)
    rule = "is {}; ascend_moe.agree has returned {}, and no other rank can come back to this group"
    need(set(ranks) <= set(left), "alive", rule, ranks, left)
    return ranks
